"""save_state and load_state: a run that was interrupted goes on as if it had not been, also on another layout."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

SCRIPT = Path(__file__).parent / "scripts" / "save_and_resume.py"


def run(python_build, processes: int, *arguments) -> dict:
    done = python_build.run(SCRIPT, *arguments, launcher=python_build.launcher("--num_processes", processes))
    line = next(line for line in done.stdout.splitlines() if "LOSSES " in line)
    return json.loads(line.split("LOSSES ", 1)[1])


def test_resume(python_build, tmp_path):
    whole = run(python_build, 2, tmp_path / "whole", 2, 1, "whole")
    run(python_build, 2, tmp_path / "run", 2, 1, "first")
    kept = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert kept == ["checkpoint_1", "checkpoint_2"]  # total_limit
    again = run(python_build, 2, tmp_path / "run", 2, 1, "second")
    assert [row[0] for row in again["losses"]] == [9, 10, 11, 12]
    # The same layout: bit for bit, the random numbers of Python and torch included.
    assert again["losses"] == whole["losses"][8:]
    assert again["history"] == whole["history"]
    other = run(python_build, 2, tmp_path / "run", 1, 2, "second")
    alone = run(python_build, 1, tmp_path / "run", 1, 1, "second")
    for resumed in (other, alone):
        for mine, expected in zip(resumed["losses"], whole["losses"][8:]):
            assert mine[:1] == expected[:1] and mine[1:3] == pytest.approx(expected[1:3], rel=1e-5)


def test_nothing_is_pickled(python_build, tmp_path):
    run(python_build, 1, tmp_path / "run", 1, 1, "first")
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            assert path.suffix not in (".pkl", ".bin", ".pt")
            assert not path.read_bytes().startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")), path
