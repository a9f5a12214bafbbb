"""Training with several processes from a notebook or a script: `notebook_launcher` and `debug_launcher`.

Processes are forked, as a function typed into a notebook can travel to a new interpreter by pickle only. So what may
not be forked must not have begun: a GPU in use, or a connected world."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import secrets
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Callable, Dict, List, Optional

from tessera.comm import process_group
from tessera.comm.warnings import warn_once
from tessera.compat.enums import PrecisionType
from tessera.errors import CommunicationError, ConfigError, ProcessFailed
from tessera.launch.preemption import PREEMPTED
from tessera.state import AcceleratorState, GradientState, PartialState
from tessera.utils import objects
from tessera.utils.environment import are_libraries_initialized, check_cuda_p2p_ib_support, get_gpu_info
from tessera.utils.other import get_free_port, is_port_in_use

_GRACE_S = 2.0  # for the other processes, once one has failed, to say why they end
_STOP_S = 3.0  # for a process that was told to end, before it is killed
_PR_SET_PDEATHSIG = 1


@dataclass
class _Job:
    """One start of `size` processes on this machine; `variables` are those that all have in common."""

    function: Callable
    args: tuple
    size: int
    first_rank: int
    variables: Dict[str, str]
    interval_s: float


@dataclass
class _Report:
    """How a process ended: `error` and `trace` are texts, empty when it did well; `told` = by another's failure; `preempted` =
    it saved and left because it was asked to."""

    rank: int
    at: float
    error: str = ""
    trace: str = ""
    told: bool = False
    preempted: bool = False


class _Channel:
    """What a process has to say at its end. The words are in a file, which takes any number of them at once, whoever reads or
    does not; the pipe only says that they are whole."""

    def __init__(self, context: Any) -> None:
        self.words = os.memfd_create("tessera-report")
        self.whole, self._send = context.Pipe(duplex=False)

    def say(self, *values: Any) -> None:
        data = memoryview(objects.encode(values))
        while data:
            data = data[os.write(self.words, data) :]
        self._send.send_bytes(b"1")

    def parted(self) -> None:
        """In the parent, once the process has its own end."""
        self._send.close()

    def hear(self) -> Optional[tuple]:
        """What was said, if it is whole."""
        try:
            if self.whole.closed or not self.whole.poll(0):
                return None
            self.whole.recv_bytes()
        except (EOFError, OSError):
            self.whole.close()
            return None  # it ended without a word
        return tuple(objects.decode(os.pread(self.words, os.fstat(self.words).st_size, 0)))

    def close(self) -> None:
        self.whole.close()
        os.close(self.words)


def notebook_launcher(
    function: Callable,
    args: tuple = (),
    num_processes: Optional[int] = None,
    mixed_precision: str = "no",
    use_port: str = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Optional[dict] = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: Optional[str] = None,
) -> None:
    """Runs function(*args) in `num_processes` processes of this machine (one: in this one) and waits for them.

    The function makes its own `Accelerator()`. With several machines, call it on each with its `node_rank`, one
    `master_addr` and TESSERA_JOB_SECRET in the environment. `use_port` "0" takes a free port, and so does a port that
    is taken where there is one machine. Errors: ProcessFailed with the traceback of the process that failed first, when
    all have ended; SystemExit(75) when they left by exit_if_preempted(); ValueError; RuntimeError when a GPU is in use
    already or there is an Accelerator."""
    if mixed_precision.lower() not in PrecisionType:
        raise ValueError(
            f"mixed_precision='{mixed_precision}' is unknown; say one of {', '.join(PrecisionType.list())}"
        )
    if num_processes is None:
        raise ValueError("say how many processes: notebook_launcher(function, num_processes=...)")
    if not 0 <= node_rank < num_nodes:
        raise ValueError(f"node_rank {node_rank} must be one of the {num_nodes} machines, counted from 0")
    if rdzv_backend not in ("static", "c10d"):
        raise ConfigError(
            f"rdzv_backend '{rdzv_backend}' is not here; processes meet at master_addr and use_port (static)"
        )
    if rdzv_conf or rdzv_id != "none" or log_line_prefix_template is not None:
        warn_once(
            "rdzv_conf, rdzv_id and log_line_prefix_template of notebook_launcher have no effect: processes meet at "
            "master_addr and use_port, and print as they are"
        )
    variables = {"ACCELERATE_MIXED_PRECISION": mixed_precision.lower()}
    if num_processes * num_nodes <= 1:
        print("Launching training on one GPU." if get_gpu_info()[1] else "Launching training on one CPU.")
        _with_environment(variables, function, args)
        return
    _refuse_what_cannot_be_forked()
    if rdzv_endpoint:
        master_addr, _, port = rdzv_endpoint.rpartition(":")
        if not master_addr or not port.isdigit():
            raise ValueError(f"rdzv_endpoint must be HOST:PORT, not '{rdzv_endpoint}'")
        use_port = port
    if not check_cuda_p2p_ib_support():
        variables.update(NCCL_P2P_DISABLE="1", NCCL_IB_DISABLE="1")
    variables.update(_meeting(master_addr, str(use_port), num_nodes, num_processes))
    variables.update(
        WORLD_SIZE=str(num_processes * num_nodes), LOCAL_WORLD_SIZE=str(num_processes), GROUP_RANK=str(node_rank)
    )
    print(f"Launching training on {num_processes} {'GPUs' if get_gpu_info()[1] else 'CPU processes'}.")
    job = _Job(function, tuple(args), num_processes, node_rank * num_processes, variables, monitor_interval)
    for attempt in range(max_restarts + 1):
        try:
            _run({**variables, "TESSERA_RESTART": str(attempt)}, job)
            return
        except ProcessFailed as failure:
            if attempt == max_restarts:
                raise
            print(f"{failure}\nStarting again, {max_restarts - attempt} times left.", file=sys.stderr)


def debug_launcher(function: Callable, args: tuple = (), num_processes: int = 2) -> None:
    """Runs function(*args) in `num_processes` processes on the CPU and waits for them; for tests. Errors as
    notebook_launcher's."""
    _refuse_what_cannot_be_forked()
    variables = {
        **_meeting("127.0.0.1", "0", 1, num_processes),
        "WORLD_SIZE": str(num_processes),
        "ACCELERATE_USE_CPU": "yes",
        "LOCAL_WORLD_SIZE": str(num_processes),
        "ACCELERATE_MIXED_PRECISION": "no",
        "GROUP_RANK": "0",
    }
    _run(variables, _Job(function, tuple(args), num_processes, 0, variables, 0.1))


def _refuse_what_cannot_be_forked() -> None:
    if AcceleratorState._shared_state or process_group.connected_ranks() > 1:
        raise RuntimeError(
            "there is an Accelerator in this process already, and its connections and threads cannot be shared with "
            "new processes: restart the notebook, and make the Accelerator inside of the function"
        )
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError(
            "PyTorch uses a GPU in this process already, and new processes could not: restart the notebook, and "
            "touch the GPU inside of the function only"
        )
    if PartialState._shared_state and PartialState._shared_state["_device"].type == "cuda":
        raise RuntimeError(
            "a PartialState in this process has taken a GPU already: restart the notebook, and make it inside of the "
            "function"
        )
    problematic = are_libraries_initialized("bitsandbytes")
    if problematic:
        raise RuntimeError(
            f"{', '.join(problematic)} uses the GPU from its import on: restart the notebook, and import it inside of "
            "the function"
        )


def _meeting(address: str, port: str, machines: int, processes: int) -> Dict[str, str]:
    """Where the processes find each other, the secret by which they know each other, and their share of the cores."""
    if not port.isdigit():
        raise ValueError(f"use_port must be a number, not '{port}'")
    secret = os.environ.get("TESSERA_JOB_SECRET")
    if machines > 1:
        if not secret:
            raise ConfigError(
                "several machines need a common secret: set TESSERA_JOB_SECRET to one random text on all of them"
            )
        if port == "0":
            raise ConfigError("several machines need to know the port: give use_port a number other than 0")
    elif port == "0" or is_port_in_use(int(port)):
        port = str(get_free_port())
    share = str(max(1, len(os.sched_getaffinity(0)) // processes))
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TESSERA_JOB_SECRET": secret or secrets.token_hex(32),
        "FORK_LAUNCHED": "1",
        **{name: os.environ.get(name, share) for name in ("OMP_NUM_THREADS", "TESSERA_THREADS")},
    }


def _with_environment(variables: Dict[str, str], function: Callable, args: tuple) -> None:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        function(*args)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _run(variables: Dict[str, str], job: _Job) -> None:
    """Starts the processes, waits until all have ended; ends the others when one fails. Errors: ProcessFailed."""
    context = multiprocessing.get_context("fork")
    processes: List[Any] = []
    channels: List[_Channel] = []
    reports: Dict[int, _Report] = {}
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for local_rank in range(job.size):
            channels.append(_Channel(context))
            process = context.Process(target=_child, args=(job, variables, local_rank, channels[-1], parent), daemon=False)
            process.start()
            channels[-1].parted()
            processes.append(process)
        deadline = None
        while len(reports) < job.size and (deadline is None or time.monotonic() < deadline):
            left = [i for i in range(job.size) if i not in reports]
            pipes = [channels[i].whole for i in left if not channels[i].whole.closed]
            wait([processes[i].sentinel for i in left] + pipes, timeout=max(0.01, job.interval_s))
            for i in left:
                report = _report_of(processes[i], channels[i], job.first_rank + i)
                if report is not None:
                    reports[i] = report
            if deadline is None and any(report.error for report in reports.values()):
                deadline = time.monotonic() + _GRACE_S
    finally:
        _end(processes)
        for channel in channels:
            channel.close()
    _raise_failure(list(reports.values()), range(job.first_rank, job.first_rank + job.size))


def _raise_failure(reports: List[_Report], ranks: range) -> None:
    """Errors: ProcessFailed where one failed; SystemExit where all is well but for a preemption."""
    failed = [report for report in reports if report.error]
    if failed:
        # The cause: an exception of its own, before an end without a word, before what another's failure made fail.
        first = min(failed, key=lambda report: (report.told, not report.trace, report.at))
        well = {report.rank for report in reports if not report.error}
        others = [rank for rank in ranks if rank != first.rank and rank not in well]  # by themselves, or stopped here
        text = f"rank {first.rank} failed: {first.error}" + (f"\n\n{first.trace}" if first.trace else "")
        if others:
            text += f"\nThen ended: rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}."
        raise ProcessFailed(text, first.rank, first.trace)
    if any(report.preempted for report in reports):
        raise SystemExit(PREEMPTED)


def _report_of(process: Any, channel: _Channel, rank: int) -> Optional[_Report]:
    """What a process has said about its failure, or what its end says; None while it runs."""
    ended = not process.is_alive()
    said = channel.hear()
    if said is not None:
        return _Report(rank, *said)
    if not ended:
        return None
    if process.exitcode in (0, PREEMPTED):
        return _Report(rank, time.monotonic(), preempted=process.exitcode == PREEMPTED)
    how = f"exit code {process.exitcode}"
    if process.exitcode < 0:
        how = f"killed by {signal.Signals(-process.exitcode).name}"
    return _Report(rank, time.monotonic(), how)


def _end(processes: List[Any]) -> None:
    """Nothing that was started is left: first asked, then killed."""
    for stop in ("terminate", "kill"):
        alive = [process for process in processes if process.is_alive()]
        for process in alive:
            getattr(process, stop)()
        deadline = time.monotonic() + _STOP_S
        for process in alive:
            process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.join()
        process.close()


def _child(job: _Job, variables: Dict[str, str], local_rank: int, channel: _Channel, parent: int) -> None:
    """A process of its own from here on."""
    # If the launcher is killed, nobody would end this process.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    for name in ("TESSERA_STORE", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    os.environ.update(variables, RANK=str(job.first_rank + local_rank), LOCAL_RANK=str(local_rank))
    try:
        job.function(*job.args)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return
        if isinstance(error, SystemExit) and error.code == PREEMPTED:
            raise  # its own end, with that exit code
        told = isinstance(error, CommunicationError)
        text = _text(process_group.describe, error)
        channel.say(time.monotonic(), text, _text(_traceback, error), told)
        if not told:
            process_group.abort(text)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def _text(describe: Callable[[BaseException], str], error: BaseException) -> str:
    """What can be said of an error in UTF-8, also of one whose own words cannot be had."""
    try:
        return describe(error).encode("utf-8", "backslashreplace").decode()
    except Exception as other:
        return f"{type(error).__name__} (its text cannot be had: {type(other).__name__})"
