#!/usr/bin/env python3
"""AdamW on the CPU beside PyTorch's fused one and DeepSpeed's CPUAdam (where it is installed), and optimizer state on a disk beside what
the disk does with the same reads and writes.

    ENVIRONMENT/bin/python tests/bench/compare_update.py --build build/tests --folder build

Contenders take turns, each turn is a process of its own; ratios are medians of those of single turns. The floor is the bytes that an
update must read and write over the copy bandwidth that PyTorch reaches. --output writes the figures as JSON, beside it a table."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List

from compare_torch import HERE, ROOT, BenchError, environment_for, find_program, machine, write_results

GOALS = {"torch": 1.3, "deepspeed": 1.0}
PART = 1 << 20  # elements of a parameter


def updates_of(contender: str, weights: str, elements: int, threads: int, repeats: int) -> List[float]:
    """Seconds of updates by another library; bf16: with a bf16 copy of the weights, made anew."""
    import torch
    torch.set_num_threads(threads)
    parameters = [torch.nn.Parameter(torch.randn(PART) * 0.02) for _ in range(elements // PART)]
    copies = [p.detach().bfloat16() for p in parameters] if weights == "bf16" else []
    for parameter in parameters:
        parameter.grad = torch.randn(PART) * 1e-3
    settings = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    if contender == "deepspeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        optimizer = DeepSpeedCPUAdam(parameters, adamw_mode=True, **settings)
    else:
        optimizer = torch.optim.AdamW(parameters, fused=True, **settings)
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        optimizer.step()
        for copy, parameter in zip(copies, parameters):
            copy.copy_(parameter.detach())
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def answer(command: List[str], environment: Dict[str, str]) -> Dict:
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchError(f"{' '.join(command)} ended with exit code {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> Dict:
    program = find_program(options.build, "update_bench")
    if program is None:
        raise BenchError("no update_bench in the build folder; configure with -DTESSERA_BENCH=ON, build, and name it with --build")
    environment = environment_for(options.threads)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, options.path))
    n, threads = str(options.elements), str(options.threads)
    figures: Dict[str, Dict[str, List[float]]] = {weights: {} for weights in options.weights}
    copies, bytes_of, disks = [], {}, []
    for turn in range(options.turns):
        copies.append(answer([sys.executable, str(HERE / "torch_contender.py"), "--copy-bandwidth", "--threads", threads],
                             environment)["bytes_per_s"])
        for weights, seconds in figures.items():
            own = answer([str(program), "adam", weights, n, threads, str(options.repeats)], environment)
            bytes_of[weights] = own["bytes"]
            seconds.setdefault("tessera", []).append(statistics.median(own["seconds"]))
            for name in options.contenders:
                other = answer([sys.executable, __file__, "--contender", name, "--weights", weights, "--elements", n, "--threads", threads,
                                "--repeats", str(options.repeats)], environment)
                seconds.setdefault(name, []).append(statistics.median(other["seconds"]))
            print(f"turn {turn + 1}, {weights}: " + ", ".join(f"{who} {s[-1] * 1e3:.1f} ms" for who, s in seconds.items()),
                  file=sys.stderr, flush=True)
        if options.folder:
            disks.append(answer([str(program), "disk", str(options.folder), n, threads], environment))
    return {"machine": machine(), "threads": options.threads, "elements": options.elements, "seconds": figures, "bytes": bytes_of,
            "copy_bytes_per_s": copies, "disk": disks}


def table(report: Dict) -> str:
    lines = [f"{report['machine']}, {report['threads']} threads, {report['elements'] * 1e-6:.0f} million parameters; copies "
             f"{statistics.median(report['copy_bytes_per_s']) * 1e-9:.1f} GB/s", "",
             "| weights | contender | update | Tessera beside it (goal) |", "|---|---|---|---|"]
    for weights, seconds in report["seconds"].items():
        for name, each in seconds.items():
            ratio = statistics.median(other / own for own, other in zip(seconds["tessera"], each))
            beside = "" if name == "tessera" else f"{ratio:.2f}× ({GOALS[name]})"
            lines.append(f"| {weights} | {name} | {statistics.median(each) * 1e3:.1f} ms | {beside} |")
        floor = statistics.median(report["bytes"][weights] / rate / own
                                  for rate, own in zip(report["copy_bytes_per_s"], seconds["tessera"]))
        lines.append(f"| {weights} | of the floor | | {floor:.2f} (0.85) |")
    if report["disk"]:
        rate = statistics.median(each["bytes"] / each["walk_seconds"] for each in report["disk"])
        share = statistics.median(each["raw_seconds"] / each["walk_seconds"] for each in report["disk"])
        whole = statistics.median(each["raw_seconds"] / each["seconds"] for each in report["disk"])
        lines += ["", f"state on the disk: {rate * 1e-9:.2f} GB/s read and written, {share:.2f} of the same reads and writes alone "
                  f"(goal 0.8); with the update {whole:.2f}"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build/tests", help="CMake build folder (default build/tests)")
    parser.add_argument("--folder", type=Path, help="a folder on the disk that is measured; without it none is")
    parser.add_argument("--path", type=Path, nargs="*", default=[], help="folders of packages, such as DeepSpeed's")
    parser.add_argument("--contenders", nargs="+", default=["torch"], choices=list(GOALS))
    parser.add_argument("--weights", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    for name, value in (("elements", 64 * PART), ("turns", 5), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--output", type=Path, help="JSON file; the table goes beside it with the suffix .md")
    parser.add_argument("--contender", choices=list(GOALS), help="run as this contender and print its seconds")
    options = parser.parse_args()
    if options.contender:
        seconds = updates_of(options.contender, options.weights[0], options.elements, options.threads, options.repeats)
        print(json.dumps({"seconds": seconds}))
        return 0
    try:
        report = measure(options)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    print(text := table(report))
    write_results(options.output, report, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
