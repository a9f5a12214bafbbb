#!/usr/bin/env python3
"""What Python costs: a script's loop over Tessera beside the C++ loop on the same model, and beside the same script in
PyTorch alone.

All contenders are there at once and take turns, as in compare_torch.py. Prints medians and ratios; --output writes the
figures as JSON, beside it a Markdown table. Needs the package and its compiled module to be importable, PyTorch and
Transformers (tests/requirements-oracles.txt).
"""

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Dict, List

from compare_torch import CASES, HERE, ROOT, BenchError, Case, environment_for, find_program, machine, summary, take_turns, write_results

GOAL = 0.98  # of the C++ loop's tokens/s


def commands(case: Case, program: Path, threads: int) -> Dict[str, List[str]]:
    script = [sys.executable, str(HERE / "python_contender.py"), *case.flags(), "--threads", str(threads)]
    return {"C++ loop": [str(program), str(case.batch), str(case.seq), str(case.warmup), *case.overrides(threads)],
            "Python loop": [*script, "--tessera"], "PyTorch": script}


def run_case(case: Case, options: argparse.Namespace, program: Path) -> Dict[str, Dict]:
    environment = environment_for(options.threads) | {"PYTHONPATH": str(options.package)}
    contenders = take_turns(case, options.rounds, commands(case, program, options.threads), environment)
    results = {name: summary(case, contender) for name, contender in contenders.items()}
    # Turn by turn: what else the machine did in that moment is in both.
    results["Python loop"]["of_cpp"] = statistics.median(
        cpp / python for cpp, python in zip(contenders["C++ loop"].seconds, contenders["Python loop"].seconds))
    return results


def table(report: Dict) -> str:
    lines = [f"{report['machine']}, {report['threads']} threads, PyTorch {report['torch']}", "",
             "| case | contender | step (median) | tokens/s | peak RSS |", "|---|---|---|---|---|"]
    for name, results in report["cases"].items():
        for contender, figures in results.items():
            lines.append(f"| {name} | {contender} | {figures['step_s'] * 1e3:.1f} ms | {figures['tokens_per_s']:.1f} | "
                         f"{figures['rss_bytes'] / 2**30:.2f} GiB |")
    lines += ["", f"| case | Python loop of the C++ loop (goal ≥ {GOAL}) | of PyTorch in the same script |", "|---|---|---|"]
    for name, results in report["cases"].items():
        of_torch = results["Python loop"]["tokens_per_s"] / results["PyTorch"]["tokens_per_s"]
        lines.append(f"| {name} | {results['Python loop']['of_cpp']:.3f} | {of_torch:.2f}× |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build/tests", help="CMake build folder (default build/tests)")
    parser.add_argument("--package", type=Path, default=ROOT / "python", help="what goes onto PYTHONPATH (default python)")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="only this one; may be repeated")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, help="turns of each contender (default: by case)")
    parser.add_argument("--output", type=Path, help="JSON file; the table goes beside it with the suffix .md")
    options = parser.parse_args()
    program = find_program(options.build, "train_bench")
    if program is None:
        print(f"error: no train_bench in {options.build}; configure with -DTESSERA_BENCH=ON, build, and name the folder with "
              "--build", file=sys.stderr)
        return 1
    import torch

    report = {"machine": machine(), "threads": options.threads, "torch": torch.__version__, "cases": {}}
    try:
        for case in CASES:
            if options.case and case.name not in options.case:
                continue
            print(f"{case.name} ...", file=sys.stderr, flush=True)
            report["cases"][case.name] = run_case(case, options, program)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(report))
    write_results(options.output, report, table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
