#!/usr/bin/env python3
"""What recomputation costs: the same GPT trained with nothing, the norms' outputs, and whole layers computed again.

All three are there at once and take turns, as in compare_torch.py. What counts is the processor time of a step on one thread:
that of a machine with other work to do, too. Prints medians, the time lost and peak memory; --output writes JSON and a Markdown
table beside it.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Dict, List

from compare_torch import ROOT, BenchError, Contender, environment_for, find_program, machine, write_results

WAYS = ("none", "selective", "full")
LAYERS, HIDDEN, HEADS, VOCAB = 12, 512, 8, 8192
WARMUP = 2


def start(options: argparse.Namespace) -> Dict[str, Contender]:
    program = find_program(options.build, "train_bench")
    if program is None:
        raise BenchError(f"no train_bench in {options.build}: configure with -DTESSERA_BENCH=ON and build")
    keys = {"model.family": "gpt2", "model.num_layers": LAYERS, "model.hidden_size": HIDDEN, "model.num_heads": HEADS,
            "model.vocab_size": VOCAB, "model.max_positions": options.seq, "training.seq_length": options.seq,
            "training.micro_batch_size": options.batch, "training.global_batch_size": options.batch, "device.threads": 1}
    shared = [str(program), str(options.batch), str(options.seq), str(WARMUP), *(f"{key}={value}" for key, value in keys.items())]
    return {way: Contender(way, [*shared, f"training.recompute={way}"], environment_for(1)) for way in WAYS}


def processor_s(contender: Contender) -> float:
    """Seconds of all processors that its process has taken so far."""
    words = Path(f"/proc/{contender.process.pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def figures(running: Dict[str, Contender], rounds: int) -> List[dict]:
    seconds: Dict[str, List[float]] = {way: [] for way in running}
    for contender in running.values():
        contender.wait_until_ready()
    for _ in range(rounds):
        for way, contender in running.items():
            begin = processor_s(contender)
            contender.run(1)
            seconds[way].append(processor_s(contender) - begin)
    medians = {way: statistics.median(each) for way, each in seconds.items()}
    return [{"recompute": way, "step_s": medians[way], "time_lost": medians[way] / medians["none"] - 1,
             "peak_bytes": contender.rss_bytes, "loss": contender.loss} for way, contender in running.items()]


def table(rows: List[dict]) -> str:
    lines = ["| `training.recompute` | step, ms of a processor | time lost | peak memory of the process, MB |", "|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {row['recompute']} | {1e3 * row['step_s']:.0f} | {100 * row['time_lost']:.0f} % | {row['peak_bytes'] / 1e6:.0f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build/tests")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    running: Dict[str, Contender] = {}
    try:
        running = start(options)
        rows = figures(running, options.rounds)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        for contender in running.values():
            contender.close()
    if len({row["loss"] for row in rows}) != 1:
        print(f"error: the losses differ: {rows}", file=sys.stderr)
        return 1
    text = f"{machine()}\n\nGPT, {LAYERS} layers, {HIDDEN} wide, {options.batch} samples of {options.seq} tokens, fp32\n\n{table(rows)}"
    print(text)
    write_results(options.output, rows, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
