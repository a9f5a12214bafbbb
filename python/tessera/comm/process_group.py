"""The processes of a job as Python sees them: the world's communicator, the mesh, turns, and a rank's last words."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import re
import socket
import struct
import sys
import threading
import time
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, List, Optional

from tessera.errors import CommunicationError, CommunicationTimeout, ConfigError
from tessera.utils import objects

DEFAULT_TIMEOUT_S = 600.0
_HEARTBEAT_S = 5.0
_TOLD = re.compile(r"rank \d+ failed: ")  # how the reasons given to abort begin
_DONE = b"done"
_LOST_PEER, _NO_ANSWER = 5, 7  # exit codes: include/tessera/base/exit_codes.hpp


def native() -> Any:
    """The C++ module."""
    try:
        from tessera import _C
    except ImportError as error:
        raise ImportError(
            f"Tessera's compiled module tessera._C cannot be loaded ({error}); install the package with `pip install "
            ".` at the root of its source tree"
        ) from error
    return _C


class _Connection:
    """The world of this process: kept when states are reset, as its peers keep theirs."""

    world: Any = None
    rank: Optional[int] = None  # also when they have parted
    watchdog: Any = None
    pid = 0
    users: Any = weakref.WeakSet()
    ends_in = 0  # the process whose end is awaited


def close_at_exit(user: Any) -> None:
    """When the interpreter ends, `user.close()` is called if it still lives, and then this process parts from the others.

    Objects that a reference cycle or a global name keeps are not destroyed then, and the C++ threads behind them would run on
    while the libraries they use are taken down."""
    _Connection.users.add(user)
    _await_the_end()


def _await_the_end() -> None:
    if _Connection.ends_in != os.getpid():
        if multiprocessing.parent_process() is None:
            atexit.register(_close_all, os.getpid())
        else:  # such a process calls what atexit has from Python 3.13 on only
            multiprocessing.util.Finalize(None, _close_all, args=(os.getpid(),), exitpriority=0)
        _Connection.ends_in = os.getpid()


def _close_all(pid: int) -> None:
    if os.getpid() != pid:  # a forked child has none of the threads
        return
    try:
        for user in list(_Connection.users):
            user.close()
    finally:
        disconnect()


def connect(timeout_s: float) -> Any:
    """The communicator of all processes of the job; collective the first time. Later calls return the same one."""
    if _Connection.world is None or _Connection.pid != os.getpid():  # a forked child has none
        warning = native().warning_of_open_world()
        _Connection.world = native().connect_world(timeout_s)
        _Connection.rank, _Connection.pid = _Connection.world.rank, os.getpid()
        _Connection.watchdog = native().Watchdog(_Connection.world, timeout_s, "flight")
        native().dump_on_signal()
        if warning and _Connection.world.rank == 0:
            logging.getLogger("tessera").warning(warning)
        _await_the_end()
        if _Connection.world.size > 1:
            tell_others_at_the_end(_Connection.world)
    return _Connection.world


def write_dumps_to(folder: Any) -> None:
    """Where this rank's watchdog writes what it was doing when it hung, when others were lost, or on SIGUSR2."""
    if connected_ranks() > 0 and _Connection.watchdog is not None:
        _Connection.watchdog.set_folder(os.path.join(os.fspath(folder), "flight"))


def connected_ranks() -> int:
    """How many processes this one is connected with, itself included; 0 before it is connected."""
    return 0 if _Connection.world is None or _Connection.pid != os.getpid() else _Connection.world.size


def own_rank() -> Optional[int]:
    """This process's rank; None before it was connected."""
    return _Connection.rank if _Connection.pid == os.getpid() else None


def disconnect() -> None:
    """Parts from the other processes: calls on any of their groups fail from now on."""
    if connected_ranks() > 0 and _Connection.watchdog is not None:
        _Connection.watchdog.close()
    if connected_ranks() > 1:
        _Connection.world.leave()
    _Connection.world = _Connection.watchdog = None


def abort(reason: str) -> None:
    """Ends the waits of all ranks with that reason, if there are others."""
    if connected_ranks() > 1:
        _Connection.world.abort(f"rank {_Connection.world.rank} failed: {reason}")


def script_place() -> str:
    """`train.py:31`: where the caller's script stands, outside of this package and PyTorch."""
    libraries = tuple(os.path.dirname(module.__file__) + os.sep for module in map(sys.modules.get, ("tessera", "torch"))
                      if module is not None)
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((*libraries, "<frozen")):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return "a thread of its own"


def meet(world: Any, call: str, *values: int) -> list:
    """The first message of everything that all ranks of `world` do together: returns what each rank gave, at most 7 numbers of
    64 bits, padded with zeros. Collective. Errors: InvalidArgument on every rank where ranks called different things, naming
    calls, places in the scripts and ranks."""
    return [list(values)] if world is None or world.size == 1 else world.meet(call, list(values), script_place)


def bits_of(number: float) -> int:
    """The bits of a float64, for meet()."""
    return struct.unpack("<q", struct.pack("<d", number))[0]


def float_of(bits: int) -> float:
    """The number of bits_of()."""
    return struct.unpack("<d", struct.pack("<q", bits))[0]


def describe(error: BaseException) -> str:
    """`ValueError: text`, as the last line of a traceback has it."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def tell_others_at_the_end(world: Any) -> None:
    """From now on an exception that nobody catches ends all ranks: its traceback first, then a line from each rank that
    was waiting for this one. These end with the exit codes of processes that lost others, as the program does."""
    before, pid = sys.excepthook, os.getpid()

    def hook(kind: type, error: BaseException, traceback: Any) -> None:
        if os.getpid() != pid:  # a forked helper of this process is no rank
            before(kind, error, traceback)
        elif not isinstance(error, CommunicationError):
            before(kind, error, traceback)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            world.abort(f"rank {world.rank} failed: {describe(error)}")
        elif _TOLD.match(str(error)):
            # Another rank's traceback is the one to read, and it is in another pipe to the launcher, which may look into
            # this one first. The launcher knows by the type's name that this is no cause.
            time.sleep(0.2)
            sys.stderr.write(f"rank {world.rank} ends: CommunicationError: {error}\n")
            sys.stderr.flush()
        else:
            before(kind, error, traceback)
        if os.getpid() == pid and isinstance(error, CommunicationError):
            raise SystemExit(_NO_ANSWER if isinstance(error, CommunicationTimeout) else _LOST_PEER)

    sys.excepthook = hook


class Turns:
    """One rank of a group goes first, however long it takes, while the others wait for it.

    A thread of the first rank renews the deadline of that wait every few seconds, as what the caller's code does cannot be
    seen. A process that was stopped or has died renews nothing, and the deadline ends the wait."""

    def __init__(self, group: Any, world: Any, timeout_s: float):
        self.group, self.world = group, world
        self.period_s = min(_HEARTBEAT_S, timeout_s / 4)
        self.taken = False

    @contextmanager
    def first(self):
        """The body of the `with` statement runs on rank 0 of the group, then on the others. Errors: an exception there
        ends the others' wait with a CommunicationError that begins with it."""
        if self.group.size == 1 or self.taken:  # inside of another one's block the order is settled already
            yield
            return
        if self.group.rank != 0:
            self.group.broadcast_bytes(None, 0)
        self.taken = True
        try:
            if self.group.rank == 0:
                with self._heartbeat():
                    yield
                self.group.broadcast_bytes(_DONE, 0)
            else:
                yield
        finally:
            self.taken = False

    @contextmanager
    def _heartbeat(self):
        ended = threading.Event()

        def tell() -> None:
            while not ended.wait(self.period_s):
                self.world.heartbeat()

        teller = threading.Thread(target=tell, name="tessera-heartbeat", daemon=True)
        teller.start()
        try:
            yield
        except BaseException as error:
            self.world.abort(f"rank {self.world.rank} failed: {describe(error)}")
            raise
        finally:
            ended.set()
            teller.join()


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def machine_numbers(places: List[List[Any]]) -> List[int]:
    """For each rank the number of its machine, from all ranks' [machine, local rank]. Where local ranks come twice on
    one machine (several launchers on one host), each run of local ranks that begins with 0 counts as a machine."""
    names: Dict[Any, int] = {}
    local_ranks: Dict[str, List[int]] = {}
    for machine, local_rank in places:
        local_ranks.setdefault(machine, []).append(local_rank)
    numbers, runs = [], {machine: 0 for machine in local_ranks}
    for machine, local_rank in places:
        seen = local_ranks[machine]
        if len(set(seen)) != len(seen) and local_rank == 0:
            runs[machine] += 1
        numbers.append(names.setdefault((machine, runs[machine]), len(names)))
    return numbers


def local_group(world: Any, local_rank: int) -> Any:
    """The ranks of this machine, in the order of their local ranks. Collective."""
    places = [objects.decode(data) for data in world.all_gather_bytes(objects.encode([_machine(), local_rank]))]
    return world.split(machine_numbers(places)[world.rank], local_rank, "local_main_process_first")


class Device(str):
    """A device where PyTorch is not loaded yet: a text that torch functions take, with `type` ("cpu" or "cuda") and
    `index` (a number or None)."""

    def __new__(cls, type: str, index: Optional[int] = None):
        device = super().__new__(cls, type if index is None else f"{type}:{index}")
        device.type, device.index = type, index
        return device

    def __repr__(self) -> str:
        return f"device(type={self.type!r}" + (f", index={self.index})" if self.index is not None else ")")

    def __eq__(self, other: Any) -> bool:
        return str.__eq__(self, str(other)) if hasattr(other, "type") else str.__eq__(self, other)

    def __ne__(self, other: Any) -> bool:
        return not self == other

    __hash__ = str.__hash__
