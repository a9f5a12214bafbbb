"""Ranks as threads of one test, with the library's communicators for them: what the Python API does with several processes,
without processes. Also ranks as processes of their own."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tessera.comm import process_group
from tessera.errors import CommunicationError
from tessera.state import AcceleratorState, GradientState, PartialState, ThreadLocalSharedDict

ROOT = Path(__file__).resolve().parents[2]
STATES = (PartialState, AcceleratorState, GradientState)


class Ranks:
    """Starts functions on `size` ranks, each a thread with states of its own."""

    def __init__(self, monkeypatch):
        needs_module()
        from tessera import _C

        self.module, self.place = _C, threading.local()
        self.gpus = []
        for state in STATES:
            monkeypatch.setattr(state, "_shared_state", ThreadLocalSharedDict())
        monkeypatch.setattr(process_group, "connect", self.connect)
        monkeypatch.setattr(process_group, "own_rank", lambda: getattr(getattr(self.place, "world", None), "rank", None))
        monkeypatch.setattr(
            process_group,
            "native",
            lambda: SimpleNamespace(
                environment=lambda: {"local_rank": getattr(self.place, "local_rank", None)},
                cuda_devices=lambda: self.gpus,
                ProcessMesh=_C.ProcessMesh,
            ),
        )

    def connect(self, timeout_s):
        world = getattr(self.place, "world", None)
        return world if world is not None else self.module.local_communicators(1, timeout_s)[0]

    def run(self, size: int, function, *args, machines: int = 1, timeout_s: float = 20, failing: bool = False) -> list:
        """function(rank, *args) on each; the results, or with `failing` the exceptions, in the order of ranks."""
        worlds = self.module.local_communicators(size, timeout_s)
        results = [None] * size

        def work(rank: int):
            self.place.world = worlds[rank]
            self.place.local_rank = rank % (size // machines)
            try:
                results[rank] = function(rank, *args)
            except BaseException as error:
                results[rank] = error
                if not failing:
                    worlds[rank].abort(f"rank {rank} failed: {error!r}")

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors and not failing:
            raise next((error for error in errors if not isinstance(error, CommunicationError)), errors[0])
        return results


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def needs_module():
    """Skips where the compiled module was not built."""
    pytest.importorskip("tessera._C", reason="the compiled module tessera._C is not built here", exc_type=ImportError)
    from tessera import _C

    if not hasattr(_C, "connect_world"):
        pytest.skip("the compiled module tessera._C is of an older build")


def clean_environment(**changes) -> dict:
    """Of a process that nobody has launched and that finds the package in this tree."""
    unwanted = (
        "OMPI_",
        "PMI_",
        "PMIX_",
        "SLURM_",
        "TORCHELASTIC_",
        "MASTER_",
        "GROUP_RANK",
        "TESSERA_",
        "ACCELERATE_",
        "MEGATRON_LM_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "FORK_LAUNCHED",
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
    return {
        **env,
        "PYTHONPATH": str(ROOT / "python"),
        "OMP_NUM_THREADS": "1",
        "TESSERA_THREADS": "1",
        "WANDB_MODE": "offline",
        **{key: str(value) for key, value in changes.items()},
    }


def start_process(script: Path, rank: int, size: int, port: int, **changes) -> subprocess.Popen:
    env = clean_environment(
        RANK=rank,
        WORLD_SIZE=size,
        LOCAL_RANK=rank,
        LOCAL_WORLD_SIZE=size,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        TESSERA_JOB_SECRET="of a test",
        **changes,
    )
    return subprocess.Popen(
        [sys.executable, str(script)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_processes(script: Path, size: int, timeout_s: float = 90, **changes) -> list:
    """(exit code, output, errors) of each rank that runs the script."""
    port = free_port()
    processes = [start_process(script, rank, size, port, **changes) for rank in range(size)]
    try:
        ends = [process.communicate(timeout=timeout_s) for process in processes]
        return [(process.returncode, *end) for process, end in zip(processes, ends)]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
