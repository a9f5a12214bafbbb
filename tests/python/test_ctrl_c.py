"""Ctrl-C reaches a script whose main thread waits in C++ for other ranks, and the others end as after any error."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from process_support import Job, wait_for

ROOT = Path(__file__).resolve().parents[2]
PYTHON = {"PYTHONPATH": str(ROOT / "python"), "TESSERA_PYTHON": sys.executable}
SOON = 30  # seconds; the deadline of a wait is 600

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests may ignore it
how, folder = sys.argv[1], Path(sys.argv[2])
rank = os.environ["RANK"]
def ready():
    (folder / f"pid-{rank}").write_text(f"{os.getpid()}\\n")
    if rank == "1":  # the others wait for it
        time.sleep(600)
if how == "connect":
    ready()
from tessera import Accelerator
from tessera.utils.operations import gather
accelerator = Accelerator(cpu=True)
ready()
try:
    gather(np.ones(2))
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise
"""


def pid_of(folder: Path, rank: int) -> int:
    path = folder / f"pid-{rank}"
    wait_for(lambda: path.exists() and path.read_text().endswith("\n"), f"rank {rank}", 120)
    return int(path.read_text())


@pytest.mark.parametrize("how", ["collective", "connect"])
def test_it_ends_the_wait(tessera_program, tmp_path, long_run, how):
    if how == "connect" and not long_run:
        pytest.skip("the other one is enough: runs with --long")
    (tmp_path / "script.py").write_text(SCRIPT)
    with Job(tessera_program, "launch", "--num_processes", 3, tmp_path / "script.py", how, tmp_path, env=PYTHON) as job:
        pids = [pid_of(tmp_path, rank) for rank in range(3)]
        time.sleep(2)  # it waits now
        begin = time.monotonic()
        os.kill(pids[0], signal.SIGINT)
        out, err = (data.decode() for data in job.process.communicate(timeout=120))
        assert time.monotonic() - begin < SOON
    assert job.process.returncode == 128 + signal.SIGINT, err
    report = err[err.index("error: "):]
    assert report.startswith("error: rank 0 ") and "KeyboardInterrupt" in report, err
    if how == "collective":
        assert "interrupted" in out and "rank 2 ends: CommunicationError: rank 0 failed: KeyboardInterrupt" in err, out + err
