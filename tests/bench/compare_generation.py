#!/usr/bin/env python3
"""How fast Tessera writes texts, beside Transformers' generate() and CTranslate2 (where it is installed), with a GPT-2 124M of
random weights.

Every contender is a process of its own, and they take turns: whatever else happens on the machine hits all of them alike.
Ratios are medians of those of single rounds. The bound is the time to read the weights once per token, at the bandwidth that
read_bandwidth measures in each round. --output writes the figures as JSON, beside it a Markdown table. Needs PyTorch and
Transformers (tests/requirements-oracles.txt), and the package with its compiled module.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Optional

from compare_torch import HERE, ROOT, BenchError, Contender, environment_for, find_program, machine, write_results

GOALS = {"decode 1": 1.5, "decode 8": 1.5, "prefill 512": 1.3}
UNEQUAL = [128, 16, 96, 32, 112, 48, 80, 64]


def tasks(new: int) -> Dict[str, Dict]:
    """By name. What a text costs before its second token is measured alone, and taken off."""
    def task(lengths: List[int], tokens: int = new, beams: int = 1) -> Dict:
        return {"lengths": lengths, "new": tokens, "beams": beams}

    return {"prefill 512": task([512], 1), "decode 1": task([128]), "decode 8": task([128] * 8), "unequal 8": task(UNEQUAL),
            "decode 4": task([128] * 4), "beams 4": task([128], beams=4)}


class Writer(Contender):
    """A process that writes texts when told to."""

    def write(self, task: Dict) -> Dict:
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        return json.loads(self.read())


def tokens_per_s(contender: Writer, task: Dict, clock: str) -> float:
    """Of the prompt where one token is written, else of the new tokens behind the first."""
    if task["new"] == 1:
        return sum(task["lengths"]) / contender.write(task)[clock]
    first = contender.write({**task, "new": 1})[clock]
    whole = contender.write(task)
    assert all(len(text) == task["new"] for text in whole["tokens"]), "a text has another length"
    return len(task["lengths"]) * (task["new"] - 1) / (whole[clock] - first)


def read_bandwidth(program: Optional[Path], threads: int) -> float:
    if program is None:
        raise BenchError("no read_bandwidth in the build folder; configure with -DTESSERA_BENCH=ON, build, and name it with --build")
    done = subprocess.run([str(program), str(threads)], env=environment_for(threads), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["bytes_per_s"]


def weight_bytes(options: argparse.Namespace) -> int:
    """What a token reads: all matrices, the head included, which is the table."""
    values = options.layers * 12 * options.hidden ** 2 + 50257 * options.hidden
    return values * (4 if options.precision == "fp32" else 2)


def measure(options: argparse.Namespace) -> Dict:
    program = find_program(options.build, "read_bandwidth")
    environment = environment_for(options.threads)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [options.package, *options.path]))
    flags = [f"--{name}={getattr(options, name)}" for name in ("layers", "hidden", "heads", "threads", "precision", "cache")]
    chosen = {name: task for name, task in tasks(options.new).items() if not options.task or name in options.task}
    figures: Dict[str, Dict[str, List[float]]] = {name: {} for name in chosen}
    bandwidth: List[float] = []
    contenders = []
    try:
        for name in options.contenders:
            contenders.append(Writer(name, [sys.executable, str(HERE / "generation_contender.py"), name, *flags], environment))
        for contender in contenders:
            contender.wait_until_ready()
            contender.write({"lengths": [8, 4], "new": 4, "beams": 1})
        for round_number in range(options.rounds):
            bandwidth.append(read_bandwidth(program, options.threads))
            for name, task in chosen.items():
                for contender in contenders:
                    figures[name].setdefault(contender.name, []).append(tokens_per_s(contender, task, options.clock))
                print(f"round {round_number + 1}, {name}: " + ", ".join(
                    f"{who} {rates[-1]:.1f}" for who, rates in figures[name].items()), file=sys.stderr, flush=True)
    finally:
        for contender in contenders:
            contender.close()
    return {"machine": machine(), "threads": options.threads, "precision": options.precision, "tokens_per_s": figures,
            "bytes_per_s": bandwidth, "weight_bytes": weight_bytes(options)}


def of(ours: List[float], others: List[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, others))


def table(report: Dict) -> str:
    figures = report["tokens_per_s"]
    names = list(next(iter(figures.values())))
    others = [name for name in names if name != "tessera"]
    lines = [f"{report['machine']}, {report['threads']} threads, {report['precision']}; reads "
             f"{statistics.median(report['bytes_per_s']) * 1e-9:.1f} GB/s", "",
             "| tokens/s | " + " | ".join([*names, *(f"of {name}" for name in others)]) + " |", "|---" * (1 + len(names) + len(others)) + "|"]
    for task, rates in figures.items():
        ratios = [f"{of(rates['tessera'], rates[name]):.2f}×" if "tessera" in rates else "" for name in others]
        if task in GOALS and "transformers" in others:
            ratios[others.index("transformers")] += f" (goal {GOALS[task]})"
        lines.append(f"| {task} | " + " | ".join([*(f"{statistics.median(rates[name]):.1f}" for name in names), *ratios]) + " |")
    own = {task: rates["tessera"] for task, rates in figures.items() if "tessera" in rates}
    if "decode 1" in own:
        bound = [rate / report["weight_bytes"] for rate in report["bytes_per_s"]]
        lines += ["", f"decode 1 of the bound of reading the weights once per token: {of(own['decode 1'], bound):.2f} (goal 0.8)"]
    for task, beside, goal in (("unequal 8", "decode 1", 4.0), ("beams 4", "decode 4", 0.8)):
        if task in own and beside in own:
            factor = 4 if task == "beams 4" else 1  # one text of four rows
            lines.append(f"{task} beside {beside}: {factor * of(own[task], own[beside]):.2f} (goal {goal})")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build/tests", help="CMake build folder (default build/tests)")
    parser.add_argument("--package", type=Path, default=ROOT / "python", help="what goes onto PYTHONPATH (default python)")
    parser.add_argument("--path", type=Path, nargs="*", default=[], help="further folders of packages, such as CTranslate2's")
    parser.add_argument("--contenders", nargs="+", default=["tessera", "transformers"],
                        choices=["tessera", "transformers", "ctranslate2"])
    parser.add_argument("--task", action="append", choices=list(tasks(1)), help="only this one; may be repeated")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--cache", choices=["dynamic", "static"], default="dynamic", help="Transformers'")
    for name, value in (("layers", 12), ("hidden", 768), ("heads", 12), ("rounds", 3), ("new", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--clock", choices=["seconds", "cpu_seconds"], default="seconds",
                        help="cpu_seconds, with --threads 1: what others do to the machine counts less")
    parser.add_argument("--output", type=Path, help="JSON file; the table goes beside it with the suffix .md")
    options = parser.parse_args()
    try:
        report = measure(options)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(report))
    write_results(options.output, report, table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
