#!/usr/bin/env python3
"""How fast texts grow on a GPU: 256 tokens after 128, one and eight texts at once, beside the bound of reading the weights
once per token, which LLaMA-7B is to reach to 80 % with one text; of GPT-2 124M, in which what lies between two kernels counts
most, the figures are told. Every pass of both but the first ones is to be a graph that was launched again.

    generation.py GENERATE_BENCH cuda|cpu SECONDS FOLDER

On the CPU, in a rehearsal, models are tiny, and nothing is asked of them. Prints a line for each figure as parts.sh does.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List

GOAL = 0.8
TINY = ["model.num_layers=2", "model.hidden_size=64", "model.num_heads=2", "model.vocab_size=257", "model.ffn_hidden_size=64"]
CASES = [("gpt2_124m_fp32", 0.0, ["configs/gpt2_124m.yaml", "training.precision=fp32"]),
         ("gpt2_124m_bf16", 0.0, ["configs/gpt2_124m.yaml", "training.precision=bf16"]),
         ("llama_7b_bf16", GOAL, ["configs/llama_7b.yaml", "training.precision=bf16"])]


def judged(row: Dict, goal: float, device: str) -> bool:
    """Whether a line of the bench is as it should be."""
    if device == "cpu":
        return True
    passes = row["passes_plain"] + row["passes_recorded"] + row["passes_replayed"]
    return row["passes_replayed"] > 0.9 * passes and (row["batch"] > 1 or row["of_bound"] >= goal)


def line(name: str, row: Dict, goal: float, device: str) -> str:
    outcome = "ok      " if judged(row, goal, device) else "FAILED  "
    wanted = f" (goal {goal})" if goal > 0 and row["batch"] == 1 else ""
    return (f"{outcome} {name}, {row['batch']} at once: {row['tokens_per_s']:.1f} tokens/s, {row['of_bound']:.2f} of the bound{wanted}; "
            f"{row['passes_replayed']} passes replayed, {row['passes_recorded']} recorded, {row['passes_plain']} launched piece by piece")


def run(name: str, command: List[str], log: Path, seconds: float) -> List[Dict]:
    """Errors: subprocess.TimeoutExpired, CalledProcessError."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=max(1.0, seconds))
    (log / f"{name}.txt").write_text(done.stdout)
    if done.returncode != 0:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
    return [json.loads(each) for each in done.stdout.splitlines() if each.startswith("{")]


def main() -> int:
    bench, device, seconds, folder = sys.argv[1:]
    if not Path(bench).exists():
        print(f"FAILED   no program {bench}")
        return 1
    deadline, failed = time.monotonic() + float(seconds), False
    for name, goal, (config, *settings) in CASES:
        lengths = ["128", "256"] if device == "cuda" else ["8", "12"]
        command = [bench, config, *lengths, "1,8", f"device.type={device}", *settings, *(TINY if device == "cpu" else [])]
        try:
            for row in run(name, command, Path(folder), deadline - time.monotonic()):
                print(line(name, row, goal, device), flush=True)
                failed = failed or not judged(row, goal, device)
        except subprocess.TimeoutExpired:
            print(f"partly   {name}: out of time")
        except subprocess.CalledProcessError as error:
            print(error.output)
            print(f"FAILED   {name} (exit code {error.returncode})")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
