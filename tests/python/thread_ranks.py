"""Ranks as threads of one test, with a communicator that moves Python objects: what the Python API does with several
processes, without processes. Also ranks as processes of their own, for the compiled module."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tessera.comm import process_group
from tessera.errors import CommunicationError, InvalidArgument
from tessera.state import AcceleratorState, GradientState, PartialState, ThreadLocalSharedDict

ROOT = Path(__file__).resolve().parents[2]
STATES = (PartialState, AcceleratorState, GradientState)


class Group:
    """What the ranks of one communicator share."""

    def __init__(self, size: int, name: str, timeout_s: float, first: "Group" = None):
        self.size, self.name, self.timeout_s = size, name, timeout_s
        self.first, self.heartbeat = first or self, 0.0  # heartbeat: the last one, of the group that all were split from
        self.changed, self.calls, self.reason, self.children = threading.Condition(), {}, "", []

    def fail(self, reason: str):
        with self.changed:
            self.reason = self.reason or reason
            self.changed.notify_all()
        for child in self.children:
            child.fail(reason)


class Communicator:
    """A rank of a Group; the interface of tessera._C.Communicator."""

    def __init__(self, group: Group, rank: int):
        self.group, self.rank, self.size, self.name = group, rank, group.size, group.name
        self.sequence, self.operations = 0, []

    def exchange(self, operation: str, value) -> list:
        sequence, self.sequence = self.sequence, self.sequence + 1
        self.operations.append(operation)
        group, deadline = self.group, time.monotonic() + self.group.timeout_s
        with group.changed:
            call = group.calls.setdefault(sequence, {})
            call[self.rank] = (operation, value)
            group.changed.notify_all()
            while len(call) < self.size:
                if group.reason:
                    raise CommunicationError(f"{group.reason} [{operation} on {self.name}]")
                if not group.changed.wait(deadline - time.monotonic()):
                    deadline = max(deadline, group.first.heartbeat + group.timeout_s)
                    if time.monotonic() < deadline:
                        continue
                    missing = sorted(set(range(self.size)) - set(call))
                    raise CommunicationError(f"{operation} on group {self.name}: no answer from ranks {missing}")
        assert {name for name, _ in call.values()} == {operation}, call
        return [call[rank][1] for rank in range(self.size)]

    def meet(self, call, values=(), place=None):
        told = self.exchange("meet", (call, [*values, *[0] * (7 - len(values))]))
        if len({name for name, _ in told}) > 1:
            raise InvalidArgument(f"ranks called different things: {[name for name, _ in told]}")
        return [numbers for _, numbers in told]

    def barrier(self):
        self.exchange("barrier", None)

    def all_reduce(self, array, op="sum"):
        assert (
            array.dtype in (np.float32, np.float64, np.int32, np.int64)
            and array.flags.c_contiguous
            and op in ("sum", "max")
        )
        parts = self.exchange("all_reduce", array.copy())
        array[...] = sum(parts) if op == "sum" else np.max(parts, axis=0)

    def all_gather(self, array):
        return np.stack(self.exchange("all_gather", array.copy()))

    def broadcast(self, array, root=0):
        array[...] = self.exchange("broadcast", array.copy())[root]

    def all_gather_bytes(self, data):
        assert type(data) is bytes
        return self.exchange("all_gather_bytes", data)

    def broadcast_bytes(self, data, root=0):
        assert self.rank != root or type(data) is bytes
        return self.exchange("broadcast_bytes", data)[root]

    def split(self, color, key, name):
        places = self.exchange("split", (color, key))
        members = sorted((k, rank) for rank, (c, k) in enumerate(places) if c == color)
        own = None
        if members[0][1] == self.rank:
            own = Group(len(members), name, self.group.timeout_s, self.group.first)
            self.group.children.append(own)
        group = self.exchange("split", own)[members[0][1]]
        return None if color < 0 else Communicator(group, members.index((key, self.rank)))

    def abort(self, reason):
        self.group.fail(reason)

    def heartbeat(self):
        self.group.first.heartbeat = time.monotonic()


class Ranks:
    """Starts functions on `size` ranks, each a thread with states of its own."""

    def __init__(self, monkeypatch):
        self.place = threading.local()
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
            ),
        )

    def connect(self, timeout_s):
        world = getattr(self.place, "world", None)
        return world if world is not None else Communicator(Group(1, "world", timeout_s), 0)

    def run(self, size: int, function, *args, machines: int = 1, timeout_s: float = 20, failing: bool = False) -> list:
        """function(rank, *args) on each; the results, or with `failing` the exceptions, in the order of ranks."""
        group = Group(size, "world", timeout_s)
        results = [None] * size

        def work(rank: int):
            self.place.world = Communicator(group, rank)
            self.place.local_rank = rank % (size // machines)
            try:
                results[rank] = function(rank, *args)
            except BaseException as error:
                results[rank] = error
                if not failing:
                    group.fail(f"rank {rank} failed: {error!r}")

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
