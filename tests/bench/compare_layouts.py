#!/usr/bin/env python3
"""What parallel layouts cost: two processes with one thread each beside one process with two threads, the same model
and global batch (the ZeRO stages have a larger one), and PyTorch alone and under DistributedDataParallel over Gloo.

All contenders are there at once and take turns, as in compare_torch.py. Prints medians and ratios; --output writes JSON
and a Markdown table beside it. Needs PyTorch and Transformers (tests/requirements-oracles.txt).
"""

import argparse
import secrets
import socket
import statistics
import sys
from pathlib import Path
from typing import Dict, List

from compare_torch import HERE, ROOT, BenchError, Contender, environment_for, find_program, machine, write_results

LAYERS, HIDDEN, HEADS, VOCAB, SEQ, BATCH = 12, 512, 8, 8192, 256, 8
WARMUP = 2
MODEL = {"model.family": "gpt2", "model.num_layers": LAYERS, "model.hidden_size": HIDDEN, "model.num_heads": HEADS,
         "model.vocab_size": VOCAB, "model.max_positions": SEQ, "training.seq_length": SEQ, "training.global_batch_size": BATCH}
PIPELINE = {"parallel.pipeline": 2, "training.micro_batch_size": 1}
# name: (processes, keys, share of the single process's tokens/s to be reached)
LAYOUTS = {
    "one process": (1, {"training.micro_batch_size": BATCH}, None),
    "dp2": (2, {"parallel.data": 2, "training.micro_batch_size": BATCH // 2}, 0.97),
    "tp2 sp": (2, {"parallel.tensor": 2, "parallel.sequence": "true", "training.micro_batch_size": BATCH}, 0.85),
    "pp2 gpipe": (2, {**PIPELINE, "parallel.schedule": "gpipe"}, 0.80),
    "pp2 1f1b": (2, {**PIPELINE, "parallel.schedule": "1f1b"}, 0.80),
    "pp2 interleaved": (2, {**PIPELINE, "parallel.schedule": "interleaved", "parallel.virtual_stages": 2}, 0.80),
    "pp2 zb-h1": (2, {**PIPELINE, "parallel.schedule": "zb-h1"}, 0.80),
    "pp2 zb-v": (2, {**PIPELINE, "parallel.schedule": "zb-v"}, 0.80),
    # Four micro-batches of 1024 tokens on each rank: gradients and weights that are shares are sent for each of them.
    **{f"dp2 zero {stage}": (2, {"parallel.data": 2, "parallel.zero_stage": stage, "training.micro_batch_size": 4,
                                 "training.global_batch_size": 32}, None) for stage in (1, 2, 3)},
}
TORCH = {"torch": 1, "torch ddp2": 2}


class Job:
    """The processes of one contender: they step together."""

    def __init__(self, name: str, command: List[str], processes: int, batch: int):
        self.name = name
        self.batch = batch
        self.ranks: List[Contender] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        secret = secrets.token_hex(16)
        for rank in range(processes):
            environment = environment_for(2 // processes)
            if processes > 1:
                environment |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank),
                                "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                                "TESSERA_JOB_SECRET": secret}
            self.ranks.append(Contender(f"{name} rank {rank}", command, environment))

    def wait_until_ready(self) -> None:
        for rank in self.ranks:
            rank.wait_until_ready()

    def run(self, steps: int) -> None:
        for rank in self.ranks:
            rank.start(steps)
        for rank in self.ranks:
            rank.finish()

    def tokens_per_s(self) -> float:
        return self.batch * SEQ / statistics.median(self.ranks[0].seconds)

    def close(self) -> None:
        for rank in self.ranks:
            rank.process.stdin.close()
        for rank in self.ranks:
            rank.close()


def jobs(options: argparse.Namespace) -> Dict[str, Job]:
    program = find_program(options.build, "train_bench")
    if program is None:
        raise BenchError(f"no train_bench in {options.build}: configure with -DTESSERA_BENCH=ON and build")
    found = {}
    for name, (processes, keys, _) in LAYOUTS.items():
        settings = {**MODEL, **keys, "device.threads": 2 // processes}
        batch = settings["training.global_batch_size"]
        found[name] = ([str(program), str(batch), str(SEQ), str(WARMUP), *(f"{k}={v}" for k, v in settings.items())], processes, batch)
    for name, processes in TORCH.items():
        flags = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "vocab": VOCAB, "seq": SEQ, "batch": BATCH // processes,
                 "threads": 2 // processes, "warmup": WARMUP}
        found[name] = ([sys.executable, str(HERE / "torch_contender.py"),
                        *(text for k, v in flags.items() for text in (f"--{k}", str(v)))], processes, BATCH)
    wanted = options.only.split(",") if options.only else list(found)
    return {name: Job(name, *found[name]) for name in wanted}


def table(results: Dict[str, float]) -> str:
    lines = ["| contender | processes × threads | tokens/s | of one process (goal) |", "|---|---|---|---|"]
    for name, rate in results.items():
        processes, goal = (LAYOUTS[name][0], LAYOUTS[name][2]) if name in LAYOUTS else (TORCH[name], None)
        single = results.get("one process" if name in LAYOUTS else "torch")
        share = "-" if single is None else f"{rate / single:.2f}" + (f" ({goal})" if goal else "")
        lines.append(f"| {name} | {processes} × {2 // processes} | {rate:.0f} | {share} |")
    if "dp2" in results and "torch ddp2" in results:
        lines += ["", f"dp2 against PyTorch DDP: {results['dp2'] / results['torch ddp2']:.2f}×"]
    for stage in (2, 3):
        if "dp2 zero 1" in results and f"dp2 zero {stage}" in results:
            lines += ["", f"zero_stage {stage} against 1: {results[f'dp2 zero {stage}'] / results['dp2 zero 1']:.2f}× (0.85)"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build/tests")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", help="comma-separated contenders")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    running: Dict[str, Job] = {}
    try:
        running = jobs(options)
        for job in running.values():
            job.wait_until_ready()
        for _ in range(options.rounds):
            for job in running.values():
                job.run(1)
        results = {name: job.tokens_per_s() for name, job in running.items()}
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        for job in running.values():
            job.close()
    text = f"{machine()}\n\n{table(results)}"
    print(text)
    write_results(options.output, results, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
