#!/usr/bin/env python3
"""Runs the layout matrix and writes docs/layouts.md: how far every layout is from the serial run.

    python3 tests/layout_table.py BUILD [OUTPUT]

BUILD is a build folder with tests/test_engine in it.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

ERRORS = ("loss_error", "gradient_error", "weight_error")

INTRODUCTION = """# Layouts

Worst figures of {count} layouts: loss {loss_error:.1e}, gradient {gradient_error:.1e}, weight {weight_error:.1e}.

Any layout trains the same model. Each layout below trained it for five steps in fp32, ranks as threads, dropout on, and
every number was compared with the run of one rank:

- **loss**: of every step, relative (and a tenth of the relative error of every gradient norm). Limit 1e-5.
- **gradient**: of the first step, the worst of all tensors, relative to the norm of the tensor. Limit 1e-5.
- **weight**: after the fifth step of AdamW (eps 1e-5), likewise. Limit 1e-4.

A name says the model (12 heads, `kv` of them for keys and values), tensor ranks (`sp`: with sequence parallelism), pipeline
stages, context ranks (`cp`, with `context_method` where it is asked for), the schedule (`v`: pieces per stage), data ranks, ZeRO stage (`always`, `never`: `zero_reshard`; `group`: `zero_group`),
samples per micro-batch, and what is recomputed.
Models have 5 layers, so stages are uneven, and 211 tokens, so parts of the vocabulary are.

Made by `tests/layout_table.py` from the tests `LayoutMatrix` (`tests/engine/layout_matrix_test.cpp`).

| Layout | Ranks | Loss | Gradient | Weight |
|---|---:|---:|---:|---:|
"""


def run_matrix(build):
    """The results of all layouts, in the order of the test. Ends the program if one of them failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        command = [
            str(build / "tests" / "test_engine"),
            "--gtest_filter=*LayoutMatrix.*",
            f"--gtest_output=json:{report}",
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            sys.exit(done.stdout)
        suites = json.loads(report.read_text())["testsuites"]
    tests = [test for suite in suites for test in suite["testsuite"] if "gradient_error" in test]
    if not tests:
        sys.exit(f"{command[0]} has no layout matrix")
    return tests


def to_markdown(tests):
    worst = {key: max(float(test[key]) for test in tests) for key in ERRORS}
    lines = [INTRODUCTION.format(count=len(tests), **worst)]
    for test in tests:
        name = test["name"].split("/")[-1]
        errors = " | ".join(f"{float(test[key]):.1e}" for key in ERRORS)
        lines.append(f"| `{name}` | {test['ranks']} | {errors} |\n")
    return "".join(lines)


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    root = pathlib.Path(__file__).resolve().parent.parent
    output = pathlib.Path(sys.argv[2]) if len(sys.argv) == 3 else root / "docs" / "layouts.md"
    output.write_text(to_markdown(run_matrix(pathlib.Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
