"""notebook_launcher and debug_launcher: what they refuse, what they start, how a failure is told, and that nothing is
left."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from thread_ranks import Ranks, clean_environment, free_port, needs_module

from tessera import launchers
from tessera.comm import process_group
from tessera.errors import ConfigError, ProcessFailed
from tessera.state import AcceleratorState, PartialState
from tessera.utils.environment import patch_environment


@pytest.fixture
def alone(monkeypatch):
    """A process without a state and without connections."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TESSERA_JOB_SECRET"):
        monkeypatch.delenv(name, raising=False)
    ranks = Ranks(monkeypatch)
    monkeypatch.setattr(launchers, "_GRACE_S", 1.0)
    monkeypatch.setattr(launchers, "get_gpu_info", lambda: ([], 0))
    return ranks


def write_place(folder):
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "FORK_LAUNCHED",
        "TESSERA_RESTART",
        "ACCELERATE_USE_CPU",
        "ACCELERATE_MIXED_PRECISION",
        "GROUP_RANK",
    )
    text = " ".join(f"{name}={os.environ.get(name)}" for name in names)
    (folder / os.environ["RANK"]).write_text(
        f"{text} secret={len(os.environ['TESSERA_JOB_SECRET'])} {bool(PartialState._shared_state)}"
    )


def test_what_the_processes_get(alone, tmp_path):
    PartialState()  # of one process: each child starts without it
    before = dict(os.environ)
    launchers.debug_launcher(write_place, (tmp_path,), num_processes=3)
    texts = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    port = texts[0].partition("MASTER_PORT=")[2].split()[0]
    for rank, text in enumerate(texts):
        assert text == (
            f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=3 LOCAL_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT={port} "
            "FORK_LAUNCHED=1 TESSERA_RESTART=None ACCELERATE_USE_CPU=yes ACCELERATE_MIXED_PRECISION=no GROUP_RANK=0 "
            "secret=64 False"
        )
    assert dict(os.environ) == before


def test_a_function_that_pickle_cannot_take(alone, tmp_path, capfd):
    seen = []
    launchers.notebook_launcher(
        lambda folder: (folder / os.environ["RANK"]).touch() or seen.append(1),
        (tmp_path,),
        num_processes=2,
        mixed_precision="BF16",
        use_port=str(free_port()),
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"] and not seen  # in other processes
    assert "Launching training on 2 CPU processes." in capfd.readouterr().out


def test_one_process_runs_here(alone, capsys):
    seen = []
    launchers.notebook_launcher(
        lambda x: seen.append((x, os.environ["ACCELERATE_MIXED_PRECISION"])),
        (5,),
        num_processes=1,
        mixed_precision="bf16",
    )
    assert seen == [(5, "bf16")] and "ACCELERATE_MIXED_PRECISION" not in os.environ
    assert "one CPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"num_processes": None}, ValueError, "num_processes"),
        ({"mixed_precision": "fp7"}, ValueError, "fp7.*bf16"),
        ({"node_rank": 2, "num_nodes": 2}, ValueError, "node_rank 2"),
        ({"rdzv_backend": "etcd"}, ConfigError, "etcd"),
        ({"rdzv_endpoint": "here"}, ValueError, "HOST:PORT"),
        ({"use_port": "x"}, ValueError, "use_port"),
        ({"num_nodes": 2, "node_rank": 0}, ConfigError, "TESSERA_JOB_SECRET"),
    ],
)
def test_bad_arguments(alone, arguments, error, message):
    with pytest.raises(error, match=message):
        launchers.notebook_launcher(print, **{"num_processes": 2, **arguments})


def test_a_port_for_several_machines(alone):
    with patch_environment(TESSERA_JOB_SECRET="abc"), pytest.raises(ConfigError, match="use_port"):
        launchers.notebook_launcher(print, num_processes=2, num_nodes=2, use_port="0")


def test_what_may_not_be_forked(alone, monkeypatch):
    for launch in (launchers.debug_launcher, lambda function: launchers.notebook_launcher(function, num_processes=2)):
        AcceleratorState(_from_accelerator=True)
        with pytest.raises(RuntimeError, match="Accelerator in this process"):
            launch(print)
        AcceleratorState._reset_state(True)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True)))
        with pytest.raises(RuntimeError, match="PyTorch uses a GPU"):
            launch(print)
        monkeypatch.delitem(sys.modules, "torch")
        monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace())
        with pytest.raises(RuntimeError, match="bitsandbytes"):
            launch(print)
        monkeypatch.delitem(sys.modules, "bitsandbytes")
        alone.gpus = ["A"]
        PartialState()
        with pytest.raises(RuntimeError, match="taken a GPU"):
            launch(print)
        PartialState._reset_state()
        alone.gpus = []


def fail_in(rank: str, how: str, folder: Path):
    (folder / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    if os.environ["RANK"] != rank:
        time.sleep(60)
    while len(list(folder.glob("pid*"))) < 3:
        time.sleep(0.01)
    if how == "exception":
        raise KeyError("the cause")
    if how == "exit":
        sys.exit(3)
    if how == "_exit":
        os._exit(7)
    os.kill(os.getpid(), 9)


@pytest.mark.parametrize(
    "how, message",
    [
        ("exception", "KeyError: 'the cause'\n\nTraceback"),
        ("exit", "SystemExit: 3"),
        ("_exit", "exit code 7"),
        ("kill", "killed by SIGKILL"),
    ],
)
def test_a_failure_ends_all(alone, tmp_path, how, message):
    begin = time.monotonic()
    with pytest.raises(ProcessFailed) as failure:
        launchers.debug_launcher(fail_in, ("1", how, tmp_path), num_processes=3)
    assert time.monotonic() - begin < 30
    assert failure.value.rank == 1 and str(failure.value).startswith(f"rank 1 failed: {message}")
    assert ("in fail_in" in failure.value.traceback) == (how in ("exception", "exit"))
    for path in tmp_path.glob("pid*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_restarts(alone, tmp_path, capfd):
    def work():
        (tmp_path / f"{os.environ['TESSERA_RESTART']}.{os.environ['RANK']}").touch()
        if os.environ["TESSERA_RESTART"] == "0":
            raise ValueError("at first")

    launchers.notebook_launcher(work, num_processes=2, max_restarts=1, use_port="0")
    assert {"1.0", "1.1"} <= {path.name for path in tmp_path.iterdir()} and "at first" in capfd.readouterr().err
    with pytest.raises(ProcessFailed, match="always"):
        launchers.notebook_launcher(
            lambda: 1 / 0 if False else (_ for _ in ()).throw(ValueError("always")),
            num_processes=2,
            max_restarts=1,
            use_port="0",
        )


def test_sys_exit_without_a_code_is_no_failure(alone):
    launchers.debug_launcher(lambda: sys.exit(0))


SCRIPT = """
import os, sys, time
import numpy as np
from tessera.launchers import debug_launcher, notebook_launcher

def train(how):
    from tessera.state import PartialState
    from tessera.utils.operations import gather
    state = PartialState()
    assert gather(np.array([state.process_index])).tolist() == [0, 1, 2], state
    if how == "fail" and state.process_index == 2:
        raise ValueError("boom")
    state.wait_for_everyone()
    if how == "leave" and state.process_index != 1:
        time.sleep(1)
        gather(np.array([0]))
    if how == "wait":
        os.write(1, f"waiting {os.getpid()}\\n".encode())  # in one piece: print() may take several writes
        time.sleep(60)
    state.print("done", state.device)

if __name__ == "__main__":
    launch = debug_launcher if sys.argv[1] == "debug" else notebook_launcher
    launch(train, (sys.argv[2],), num_processes=3)
"""


@pytest.mark.parametrize("launch", ["debug", "notebook"])
def test_real_processes(tmp_path, launch):
    needs_module()
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(how):
        return subprocess.run(
            [sys.executable, tmp_path / "script.py", launch, how],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=90,
        )

    good = run("good")
    assert good.returncode == 0 and "done" in good.stdout, good.stderr
    bad = run("fail")
    assert bad.returncode == 1 and "rank 2 failed: ValueError: boom\n\nTraceback" in bad.stderr
    assert 'raise ValueError("boom")' in bad.stderr
    assert "Then ended: ranks 0, 1." in bad.stderr
    # Whoever is done takes its leave: nobody takes that for a lost connection, as one that it still waits for would be.
    left = run("leave")
    assert left.returncode == 1 and "has ended its part in the job" in left.stderr and "lost" not in left.stderr, left.stderr


class Long(Exception):
    """Far more than a pipe holds, and not all of it can be said in UTF-8."""

    def __str__(self):
        return "x" * 5_000_000 + "\udc80 the end"


class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")


def fail_with(kind, folder):
    """Rank 1 fails; rank 0 waits for one that will never come; rank 2 works on."""
    (folder / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    if os.environ["RANK"] == "1":
        raise kind()
    if os.environ["RANK"] == "0":
        process_group.connect(600.0)
    time.sleep(600)


@pytest.mark.parametrize("kind,said", [(Long, "\\udc80 the end"), (Mute, "its text cannot be had: ValueError")])
def test_an_error_of_any_length_is_told_at_once(alone, tmp_path, kind, said):
    needs_module()
    begin = time.monotonic()
    with pytest.raises(ProcessFailed) as failure:
        launchers.debug_launcher(fail_with, (kind, tmp_path), num_processes=3)
    assert time.monotonic() - begin < 60
    text = str(failure.value)
    assert text.startswith("rank 1 failed: ") and said in text
    assert kind is Mute or len(text) > 5_000_000
    for path in tmp_path.glob("pid*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def fail_and_hang(folder):
    """What a process does at its end may take for ever."""
    if os.environ["RANK"] == "0":
        sys.stdout = SimpleNamespace(flush=lambda: time.sleep(600))
        raise KeyError("the cause")
    time.sleep(600)


def test_a_failed_process_that_does_not_end_is_ended(alone, tmp_path):
    begin = time.monotonic()
    with pytest.raises(ProcessFailed, match="the cause"):
        launchers.debug_launcher(fail_and_hang, (tmp_path,), num_processes=2)
    assert time.monotonic() - begin < 60


def test_a_preempted_job_is_no_failure(alone):
    with pytest.raises(SystemExit) as end:
        launchers.notebook_launcher(lambda: sys.exit(75), num_processes=2, max_restarts=3, use_port="0")
    assert end.value.code == 75


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it ended before or while it was read
        return False


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path):
    needs_module()
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py", "debug", "wait"],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "stderr").open("w"),
        text=True,
    )
    lines = [process.stdout.readline() for _ in range(3)]
    assert all(line.startswith("waiting ") for line in lines), (lines, (tmp_path / "stderr").read_text())
    pids = [int(line.split()[1]) for line in lines]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.stdout.close()
