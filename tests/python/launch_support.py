"""What the launcher's tests share: jobs of small scripts, and looking after processes."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_support import environment

PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "TESSERA_STORE",
         "TESSERA_JOB_SECRET", "TESSERA_RESTART", "OMP_NUM_THREADS", "TESSERA_THREADS")
TELL_PLACE = f"import json, os; print(json.dumps({{name: os.environ.get(name) for name in {PLACE}}}))"
SECRET = "0123456789abcdef0123456789abcdef"
LOST = 5  # exit code of a process that could not reach others


def clean(**more) -> dict:
    # The variables that change what workers get.
    drop = ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    kept = {key: value for key, value in environment(**more).items() if key not in drop or key in more}
    # Not the default launch files of whoever runs the tests.
    return kept | {"XDG_CONFIG_HOME": "/nowhere", "HF_HOME": "/nowhere"} | more


class Job:
    """A running `tessera launch`."""

    def __init__(self, program: Path, *args, env: dict = {}, **options):
        self.process = subprocess.Popen([program, "launch", *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        env=clean(**env), **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def finish(self, code: int = 0, timeout: float = 60) -> "Job":
        # Not text mode, which would change the ends of lines.
        self.out, self.err = (data.decode() for data in self.process.communicate(timeout=timeout))
        assert self.process.returncode == code, f"exit {self.process.returncode}\n{self.out}\n{self.err}"
        return self


def launch(program: Path, *args, code: int = 0, **options) -> Job:
    with Job(program, *args, **options) as job:
        return job.finish(code)


def shell(text: str) -> list:
    return ["bash", "-c", text]


def python(text: str) -> list:
    return [sys.executable, "-S", "-c", text]


def wait_for(condition, what: str, timeout: float = 20):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    pytest.fail(f"not within {timeout} s: {what}")


def numbers_in(folder: Path, count: int) -> list:
    """Process ids that workers have left in files."""
    def read():
        found = [file.read_text() for file in folder.glob("pid-*")]
        return [int(text) for text in found] if len(found) == count and all(text.endswith("\n") for text in found) else None
    return wait_for(read, f"{count} files pid-* in {folder}")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return False
    return state not in "ZX"


def wait_until_gone(*pids: int, timeout: float = 5):
    wait_for(lambda: not any(map(alive, pids)), f"the end of {[pid for pid in pids if alive(pid)]}", timeout)


def children(pid: int) -> list:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def lines_of(text: str, rank: int) -> list:
    return [line.removeprefix(f"[rank {rank}] ") for line in text.splitlines() if line.startswith(f"[rank {rank}] ")]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
