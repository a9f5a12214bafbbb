"""How a test run is added up: scripts/testing.sh runs what failed once more, tests/count_results.py counts."""

import subprocess
import sys
from pathlib import Path

# Stands in for a GoogleTest program: test B.two/1 fails in as many runs as told, and crashes with FAILS=crash.
PROGRAM = """#!/usr/bin/env python3
import json, os, sys
from pathlib import Path
options = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:])
runs = Path(__file__).with_suffix(".runs")
run = len(runs.read_text().splitlines()) if runs.exists() else 0
with runs.open("a") as file:
    file.write(options.get("gtest_filter", "all") + "\\n")
if os.environ["FAILS"] == "crash":
    os.abort()
failing = run < int(os.environ["FAILS"])
tests = [{"name": "two/1", **({"failures": [{"failure": "no"}]} if failing else {})}]
if run == 0:
    tests += [{"name": "one"}, {"name": "other", "result": "SKIPPED"}]
Path(options["gtest_output"].removeprefix("json:")).write_text(json.dumps({"testsuites": [{"name": "In/B", "testsuite": tests}]}))
sys.exit(failing)
"""


def run_program(source_dir: Path, folder: Path, fails: str) -> tuple:
    """What is printed, the exit code, and the filter of each run of the program."""
    program = folder / "test_it"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    script = (f"set -euo pipefail; source scripts/common.sh; source scripts/testing.sh; start_results {folder}/results; "
              f"run_gtest {program} ''; {sys.executable} tests/count_results.py {folder}/results")
    done = subprocess.run(["bash", "-c", script], cwd=source_dir, capture_output=True, text=True, stdin=subprocess.DEVNULL,
                          env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "FAILS": fails})
    return done.stdout, done.returncode, program.with_suffix(".runs").read_text().split()


def test_what_passes_is_run_once(source_dir, tmp_path):
    printed, code, runs = run_program(source_dir, tmp_path, "0")
    assert code == 0 and runs == ["all"]
    assert printed.endswith("2 passed, 0 failed, 1 skipped\n") and "unsteady" not in printed


def test_what_fails_once_is_unsteady(source_dir, tmp_path):
    printed, code, runs = run_program(source_dir, tmp_path, "1")
    assert code == 0 and runs == ["all", "In/B.two/1"]
    assert "unsteady: test_it In/B.two/1" in printed and printed.endswith("2 passed, 0 failed, 1 skipped\n")


def test_what_fails_twice_has_failed(source_dir, tmp_path):
    printed, code, runs = run_program(source_dir, tmp_path, "2")
    assert code == 1 and len(runs) == 2
    assert "failed: test_it In/B.two/1" in printed and printed.endswith("1 passed, 1 failed, 1 skipped\n")


def test_a_crash_has_failed(source_dir, tmp_path):
    printed, code, runs = run_program(source_dir, tmp_path, "crash")
    assert code == 1 and runs == ["all"]
    assert printed.endswith("0 passed, 1 failed, 0 skipped\n")


def test_python_tests_are_counted_the_same_way(source_dir, tmp_path):
    report = '<testsuites><testsuite><testcase classname="t" name="a">{}</testcase>{}</testsuite></testsuites>'
    (tmp_path / "x.junit.xml").write_text(report.format("<failure/>", '<testcase classname="t" name="b"/>'))

    def counted() -> tuple:
        done = subprocess.run([sys.executable, source_dir / "tests/count_results.py", tmp_path], capture_output=True, text=True)
        return done.stdout, done.returncode

    assert counted() == ("failed: x t::a\n1 passed, 1 failed, 0 skipped\n", 1)
    (tmp_path / "x.again.junit.xml").write_text(report.format("", ""))
    assert counted() == ("unsteady: x t::a failed, and passed when it was run once more alone\n2 passed, 0 failed, 0 skipped\n", 0)
    (tmp_path / "x.again.junit.xml").write_text("cut of")
    assert counted()[1] == 1
