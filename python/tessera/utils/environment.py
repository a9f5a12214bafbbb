"""Environment variables, and what can be learned about the machine without touching its devices."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, wraps
from pathlib import Path
from shutil import which
from typing import Any, Dict, List, Optional, Tuple, Union

from tessera.comm.warnings import warn_once
from tessera.compat.refusals import NO, YES, boolean

logger = logging.getLogger(__name__)


def str_to_bool(value: str, to_bool: bool = False) -> Union[int, bool]:
    """1 for y, yes, t, true, on, 1; 0 for n, no, f, false, off, 0, in any case (True and False with `to_bool`).
    Errors: ValueError for anything else."""
    truth = boolean(value)
    if truth is None:
        raise ValueError(f"invalid truth value '{value}'; say one of {', '.join(YES + NO)}")
    return truth if to_bool else int(truth)


def get_int_from_env(env_keys: List[str], default: int) -> int:
    """The first of these variables that is a number from 0 on, or the default. Errors: ValueError naming the
    variable."""
    for key in env_keys:
        text = os.environ.get(key, "-1")
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{key} must be a whole number, not '{text}'") from None
        if value >= 0:
            return value
    return default


def parse_flag_from_env(key: str, default: Any = False) -> bool:
    """The truth of a variable. Errors: ValueError naming it."""
    value = os.environ.get(key, str(default))
    try:
        return bool(str_to_bool(value))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def parse_choice_from_env(key: str, default: Any = "no") -> str:
    return os.environ.get(key, str(default))


def convert_dict_to_env_variables(current_env: Dict[str, str]) -> List[str]:
    """`KEY=value` lines of the entries that can stand in an environment file; the others are told and left out."""
    lines = []
    for key, value in current_env.items():
        if key and value and not any(char in key + value for char in ";\n<> "):
            lines.append(f"{key}={value}\n")
        else:
            logger.warning(
                "left out of the environment, as it is empty or has one of ; < > space or a line end: %s=%s", key, value
            )
    return lines


def are_libraries_initialized(*library_names: str) -> List[str]:
    """Those of the names that were imported."""
    return [name for name in library_names if name in sys.modules]


def get_current_device_type() -> Tuple[str, str]:
    """(device type, distributed type) of several processes here, without touching a device."""
    return ("cuda", "MULTI_GPU") if get_gpu_info()[1] else ("cpu", "MULTI_CPU")


def _ask_nvidia_smi(field: str) -> List[str]:
    """One value per GPU; none where there is no driver."""
    if which("nvidia-smi") is None:
        return []
    try:
        text = subprocess.check_output(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"],
            text=True,
            stderr=subprocess.DEVNULL,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]


def get_gpu_info() -> Tuple[List[str], int]:
    """Names and number of the GPUs that the driver reports; ([], 0) without one."""
    names = _ask_nvidia_smi("name")
    return names, len(names)


def get_driver_version() -> str:
    """Of the first GPU; empty without one."""
    return (_ask_nvidia_smi("driver_version") or [""])[0]


def check_cuda_p2p_ib_support() -> bool:
    """False where several GPUs of the RTX 40 series have a driver older than 550.40.07, which promises peer-to-peer
    copies that do not work."""
    names, count = get_gpu_info()
    if count < 2 or not any("RTX 40" in name for name in names):
        return True
    version = [int(part) for part in get_driver_version().split(".") if part.isdigit()]
    return version >= [550, 40, 7]


@lru_cache(None)
def check_cuda_fp8_capability() -> bool:
    """Whether the first GPU has matrix units for fp8 (compute capability 8.9 or above)."""
    first = (_ask_nvidia_smi("compute_cap") or ["0.0"])[0]
    return tuple(int(part) for part in first.split(".") if part.isdigit()) >= (8, 9)


@dataclass
class CPUInformation:
    """The place of a process: its rank, how many there are, and both on its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """From the variables of torchrun, Intel MPI, Open MPI or MVAPICH."""

    def first(*keys: str, default: int) -> int:
        return get_int_from_env(list(keys), default)

    return CPUInformation(
        rank=first("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", default=0),
        world_size=first("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", default=1),
        local_rank=first(
            "LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", default=0
        ),
        local_world_size=first(
            "LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", default=1
        ),
    )


def _cores_near_gpu(index: int) -> List[int]:
    """From the GPU's place on the PCI bus; empty when the system does not say."""
    places = _ask_nvidia_smi("pci.bus_id")
    if index >= len(places):
        return []
    domain, _, rest = places[index].lower().partition(":")
    try:
        text = Path(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/local_cpulist").read_text().strip()
    except OSError:
        return []
    cores: List[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def override_numa_affinity(local_process_index: int, verbose: Optional[bool] = None) -> None:
    """Keeps this process on the cores near its GPU. Without a GPU, or where the system does not say which cores those
    are, it says so and leaves the process alone."""
    cores = set(_cores_near_gpu(local_process_index)) & os.sched_getaffinity(0)
    if not cores:
        warn_once(
            "CPU affinity was asked for, but this machine does not tell which cores are near which GPU; processes "
            "stay where the system puts them"
        )
        return
    os.sched_setaffinity(0, cores)
    if parse_flag_from_env("ACCELERATE_DEBUG_MODE") if verbose is None else verbose:
        logger.info("process %d runs on %d cores: %s", local_process_index, len(cores), sorted(cores))


@lru_cache(None)
def set_numa_affinity(local_process_index: int, verbose: Optional[bool] = None) -> None:
    """As override_numa_affinity, once."""
    override_numa_affinity(local_process_index, verbose)


@contextmanager
def clear_environment():
    """An empty environment inside the `with` block; what was there comes back."""
    before = os.environ.copy()
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def patch_environment(**kwargs: Any):
    """These variables (names in upper case, values as text) inside the `with` block; what was there comes back."""
    names = [key.upper() for key in kwargs]
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.update({key.upper(): str(value) for key, value in kwargs.items()})
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorator: ACCELERATE_* variables that the function (or the test methods of the class) sets, changes or removes
    are as before when it has returned."""

    def wrap(function: Any) -> Any:
        if getattr(function, "_keeps_environment", False):
            return function

        @wraps(function)
        def wrapper(*args, **kwargs):
            before = {key: value for key, value in os.environ.items() if key.startswith("ACCELERATE_")}
            try:
                return function(*args, **kwargs)
            finally:
                for key in [key for key in os.environ if key.startswith("ACCELERATE_")]:
                    del os.environ[key]
                os.environ.update(before)

        wrapper._keeps_environment = True
        return wrapper

    def wrap_methods(cls: type) -> None:
        for name, method in list(vars(cls).items()):
            if name.startswith("test") and callable(method):
                setattr(cls, name, wrap(method))

    if not isinstance(func_or_cls, type):
        return wrap(func_or_cls)
    for base in reversed(func_or_cls.__mro__[:-1]):
        for name in vars(base):
            if name.startswith("test") and name not in vars(func_or_cls) and callable(getattr(func_or_cls, name)):
                setattr(func_or_cls, name, getattr(func_or_cls, name))
    wrap_methods(func_or_cls)
    func_or_cls.__init_subclass__ = classmethod(lambda cls, **kwargs: wrap_methods(cls))
    return func_or_cls
