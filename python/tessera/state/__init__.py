"""Which process this is, among how many, on which device; and what is known about the training as a whole.

The states are shared by all instances of their class, as in Accelerate. Differences: rank 0 is always the main process,
`wait_for_everyone` is a barrier and `main_process_first` orders the processes on every distributed type."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Callable, Optional

from tessera.comm import process_group
from tessera.comm.agreement import agreed
from tessera.comm.process_group import Device, Turns
from tessera.comm.warnings import warn_once
from tessera.compat.enums import DistributedType
from tessera.compat.refusals import LAYOUT, not_ours
from tessera.data.split import part_of
from tessera.errors import CommunicationError, ConfigError
from tessera.plugin.facts import changed_fields, plugin_facts
from tessera.state.gradient_state import GradientState
from tessera.state.support import StateWithDevice, deadline_of, mesh_of, precision_of, refuse_other_engines, sharding_of
from tessera.utils.dataclasses import DeepSpeedPlugin, MegatronLMPlugin
from tessera.utils.environment import parse_flag_from_env, set_numa_affinity

__all__ = [
    "AcceleratorState",
    "DistributedType",
    "GradientState",
    "Mesh",
    "PartialState",
    "SharedDict",
    "ThreadLocalSharedDict",
    "do_nothing",
    "is_initialized",
]

SharedDict = dict
_BACKENDS = (None, "gloo", "nccl", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo")


def __getattr__(name: str) -> Any:
    if name == "Mesh":  # of the compiled module, which this one does not need to be imported
        return process_group.native().ProcessMesh
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_initialized() -> bool:
    """Whether an Accelerator was made in this process."""
    return AcceleratorState._shared_state != {}


def do_nothing(*args, **kwargs) -> None:
    """What a decorated function becomes on the other processes."""


class ThreadLocalSharedDict(threading.local):
    """Descriptor: in each thread a dict of its own, shared by all instances. For ranks that are threads of one
    process."""

    def __init__(self, thread_local: bool = False):
        self._storage: dict = {}

    def __get__(self, obj, objtype=None):
        return self._storage

    def __set__(self, obj, value):
        self._storage = value


class _Processes(StateWithDevice):
    """What both states say of this process, and do with the others; the connection is PartialState's."""

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.distributed_type != DistributedType.NO and self.num_processes > 1

    @property
    def is_last_process(self) -> bool:
        return self.process_index == self.num_processes - 1

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    def _connected(self) -> Any:
        world = PartialState._shared_state.get("world")
        if world is None:
            raise CommunicationError(
                "the processes have parted: destroy_process_group was called (end_training does it)"
            )
        return world

    def wait_for_everyone(self) -> None:
        """A barrier: returns when all processes have called it. Errors: CommunicationError naming those that did
        not."""
        if self.num_processes > 1:
            process_group.meet(self._connected(), "wait_for_everyone()")

    def destroy_process_group(self, group: Any = None) -> None:
        """Parts from the other processes; nothing happens in a process of notebook_launcher. `group` must be None."""
        if group is not None:
            raise not_ours("destroy_process_group(group)", "groups of torch.distributed", "call it without a group")
        if not self.fork_launched and PartialState._shared_state.get("world") is not None:
            PartialState._shared_state.update(world=None, _turns=None, _local_turns=None)
            process_group.disconnect()

    @contextmanager
    def main_process_first(self):
        """Rank 0 runs the `with` block first, for as long as it takes; then the others run it. An exception there ends
        all processes."""
        yield from self._in_turns("main_process_first", "_turns", lambda world: world.split(0, world.rank, "main_process_first"))

    @contextmanager
    def local_main_process_first(self):
        """The first process of each machine runs the `with` block first, then the others of that machine."""
        yield from self._in_turns(
            "local_main_process_first", "_local_turns", lambda world: process_group.local_group(world, self.local_process_index)
        )

    def _in_turns(self, call: str, name: str, make_group: Callable[[Any], Any]):
        if self.num_processes == 1:
            yield
            return
        shared = PartialState._shared_state
        turns = shared.get(name)
        if turns is None or not turns.taken:
            process_group.meet(self._connected(), f"{call}()")
        if turns is None:
            world = self._connected()
            shared[name] = Turns(make_group(world), world, self._timeout_s)
        with shared[name].first():
            yield

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False):
        """This process's part of a list, tuple, dict of them, array, tensor or Dataset: contiguous, the first ones one
        longer where it does not divide; `apply_padding` repeats the last element so that all have the same length. Once
        there is a mesh, data ranks share the inputs and the other ranks of one (tensor, context, pipeline) get the same. `inputs` is
        not changed."""
        mesh = AcceleratorState._shared_state.get("mesh")
        if mesh is None:
            index, count = self.process_index, self.num_processes
        else:
            index, count = mesh.coordinates["dp"], mesh.dp
        yield inputs if count == 1 else part_of(inputs, index, count, apply_padding)

    def print(self, *args, **kwargs) -> None:
        """print() on the first process of each machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)


class PartialState(_Processes):
    """The process and its device.

    Attributes: `process_index`, `num_processes`, `local_process_index` (on this machine), `device`, `distributed_type`,
    `backend` ("gloo", "nccl", None for one process), `debug` (ACCELERATE_DEBUG_MODE: shapes of collectives are
    compared), `is_main_process` (rank 0), `is_local_main_process`, `is_last_process`.

    The first instance connects this process with the others (collective). `cpu=True` or ACCELERATE_USE_CPU keeps it off
    the GPUs. `kwargs` are those of InitProcessGroupKwargs: `timeout` is the deadline of every wait. Errors:
    ConfigError, CommunicationError naming the processes that do not come."""

    _shared_state = SharedDict()
    _known_attrs = [
        "_cpu",
        "_mixed_precision",
        "_shared_state",
        "backend",
        "debug",
        "device",
        "distributed_type",
        "fork_launched",
        "local_process_index",
        "num_processes",
        "process_index",
        "world",
    ]

    def __init__(self, cpu: bool = False, **kwargs):
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.__dict__.update(self._connect(cpu or parse_flag_from_env("ACCELERATE_USE_CPU"), **kwargs))
            self.set_device()
            if parse_flag_from_env("ACCELERATE_CPU_AFFINITY"):
                set_numa_affinity(self.local_process_index)
        self.fork_launched = parse_flag_from_env("FORK_LAUNCHED", 0)

    @staticmethod
    def _connect(
        cpu: bool,
        backend: Optional[str] = None,
        init_method: Optional[str] = None,
        timeout: Optional[timedelta] = None,
        **others,
    ) -> dict:
        """All attributes at once, so that a failed attempt leaves no half of a state."""
        if others:
            raise ConfigError(
                f"PartialState knows no {', '.join(sorted(others))}; it takes cpu, timeout, backend and init_method. "
                "Where processes meet is told by the launcher's environment variables"
            )
        if backend not in _BACKENDS:
            raise ConfigError(
                f"backend '{backend}' is not here: processes communicate through gloo on CPUs and nccl on GPUs"
            )
        if init_method not in (None, "env://"):
            raise ConfigError(
                f"init_method '{init_method}' is not here: processes meet where MASTER_ADDR and MASTER_PORT say"
            )
        timeout_s = process_group.DEFAULT_TIMEOUT_S if timeout is None else timeout.total_seconds()
        debug = parse_flag_from_env("ACCELERATE_DEBUG_MODE")
        world = process_group.connect(timeout_s)
        local_rank = process_group.native().environment().get("local_rank") or 0
        device = PartialState._choose_device(cpu, local_rank)
        kind = DistributedType.NO
        if world.size > 1:
            kind = DistributedType.MULTI_GPU if device.type == "cuda" else DistributedType.MULTI_CPU
        return {
            "_cpu": cpu,
            "_timeout_s": timeout_s,
            "debug": debug,
            "world": world,
            "num_processes": world.size,
            "process_index": world.rank,
            "local_process_index": local_rank,
            "distributed_type": kind,
            "backend": {DistributedType.MULTI_GPU: "nccl", DistributedType.MULTI_CPU: "gloo"}.get(kind),
            "_device": device,
            "_device_is_set": False,
        }

    @staticmethod
    def _choose_device(cpu: bool, local_rank: int) -> Device:
        asked = os.environ.get("ACCELERATE_TORCH_DEVICE", "cpu" if cpu else "")
        kind, _, index = asked.partition(":")
        if kind not in ("", "cpu", "cuda") or (index and not index.isdigit()):
            raise ConfigError(f"ACCELERATE_TORCH_DEVICE is '{asked}'; Tessera runs on 'cpu', 'cuda' or 'cuda:N'")
        if kind == "cpu":
            return Device("cpu")
        count = len(process_group.native().cuda_devices())
        if not count and kind == "cuda":
            raise ConfigError(
                f"ACCELERATE_TORCH_DEVICE is '{asked}', but this machine (or this build of Tessera) has no GPU"
            )
        if index and int(index) >= count:
            raise ConfigError(f"ACCELERATE_TORCH_DEVICE is '{asked}', but there are only {count} GPUs")
        return Device("cuda", int(index) if index else local_rank % count) if count else Device("cpu")

    def __repr__(self) -> str:
        return (
            "Distributed environment: "
            f"{self.distributed_type}{'  Backend: ' + self.backend if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    @staticmethod
    def _reset_state() -> None:
        """Forgets the state, for tests. The connection to the other processes stays for the next one."""
        PartialState._shared_state.clear()

    @property
    def initialized(self) -> bool:
        return self._shared_state != {}

    @property
    def default_device(self) -> Any:
        """ "cuda" where there is a GPU, otherwise "cpu"."""
        device = Device("cuda" if process_group.native().cuda_devices() else "cpu")
        torch = sys.modules.get("torch")
        return device if torch is None else torch.device(str(device))

    def set_device(self) -> None:
        """Makes this process's GPU the current one of PyTorch, if it is loaded and can use it."""
        torch = sys.modules.get("torch")
        device = self.__dict__["_device"]
        if not self._device_is_set and device.type == "cuda" and torch is not None and torch.cuda.is_available():
            torch.cuda.set_device(device.index)
            self._device_is_set = True

    def on_main_process(self, function: Optional[Callable[..., Any]] = None) -> Callable:
        """Decorator: runs on rank 0 only; None elsewhere."""
        if not self.initialized:
            raise ValueError("make a `PartialState()` or an `Accelerator()` before using `on_main_process`")
        return self._only(self.is_main_process, function)

    def on_local_main_process(self, function: Optional[Callable[..., Any]] = None) -> Callable:
        """Decorator: runs on the first process of each machine only."""
        return self._only(self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable:
        """Decorator: runs on the last process only."""
        return self._only(self.is_last_process, function)

    def on_process(
        self, function: Optional[Callable[..., Any]] = None, process_index: Optional[int] = None
    ) -> Callable:
        """Decorator: runs on that process only."""
        if function is None:
            return partial(self.on_process, process_index=process_index)
        return self._only(self.process_index == process_index, function)

    def on_local_process(
        self, function: Optional[Callable[..., Any]] = None, local_process_index: Optional[int] = None
    ) -> Callable:
        """Decorator: runs on that process of each machine only."""
        if function is None:
            return partial(self.on_local_process, local_process_index=local_process_index)
        return self._only(self.local_process_index == local_process_index, function)

    def _only(self, here: bool, function: Callable) -> Callable:
        return function if here or not self.use_distributed else do_nothing

class AcceleratorState(_Processes):
    """What PartialState has, and the training's `mixed_precision`, plugins and `mesh` (tessera.state.Mesh). Made by
    `Accelerator()`; `distributed_type` is MEGATRON_LM with a MegatronLMPlugin or ACCELERATE_USE_MEGATRON_LM, also for
    one process. Errors: ConfigError; NotImplementedError for other engines; ValueError when it exists with other
    settings."""

    _shared_state = SharedDict()
    _known_attrs = PartialState._known_attrs + [
        "deepspeed_plugin",
        "fsdp_plugin",
        "megatron_lm_plugin",
        "dynamo_plugin",
        "mesh",
    ]

    def __init__(
        self,
        mixed_precision: Optional[str] = None,
        cpu: bool = False,
        dynamo_plugin=None,
        deepspeed_plugin=None,
        fsdp_plugin=None,
        torch_tp_plugin=None,
        megatron_lm_plugin=None,
        parallelism_config=None,
        _from_accelerator: bool = False,
        **kwargs,
    ):
        self.__dict__ = self._shared_state
        if self.initialized:
            self._check_initialized(mixed_precision, cpu, megatron_lm_plugin, kwargs.get("timeout"))
            self._check_same_sharding(deepspeed_plugin or fsdp_plugin)
            return
        if not _from_accelerator:
            raise ValueError("make an `Accelerator()` first: AcceleratorState() only reads what that has set up")
        refuse_other_engines(dynamo_plugin, torch_tp_plugin, parallelism_config)
        sharding = sharding_of(deepspeed_plugin, fsdp_plugin, megatron_lm_plugin)
        precision = precision_of(mixed_precision)
        if isinstance(sharding, DeepSpeedPlugin) and sharding.json is not None:
            precision = sharding.json.precision(precision)
        wanted = deadline_of(megatron_lm_plugin, kwargs)
        partial_state = PartialState(cpu, **kwargs)
        if wanted is not None and wanted != partial_state._timeout_s:
            warn_once(f"distributed_timeout_minutes has no effect: the processes were connected before, with a deadline of "
                      f"{partial_state._timeout_s:g} s; make the Accelerator first")
        if cpu and partial_state._device.type != "cpu":
            raise ValueError("cpu=True comes too late: PartialState was made before, with a GPU; give it cpu=True")
        with agreed(partial_state._connected(), "Accelerator()") as facts:
            if megatron_lm_plugin is None and parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM"):
                megatron_lm_plugin = MegatronLMPlugin()
            if megatron_lm_plugin is not None:
                megatron_lm_plugin.set_mixed_precision(precision)
            facts.update({"device": partial_state._device.type, "mixed_precision": precision})
            facts.update(plugin_facts(megatron_lm_plugin))
            facts.update({} if sharding is None else sharding.facts())
        mesh = mesh_of(partial_state._connected(), megatron_lm_plugin)
        if megatron_lm_plugin is not None:
            PartialState._shared_state["distributed_type"] = DistributedType.MEGATRON_LM
        self.__dict__.update(PartialState._shared_state)
        self.__dict__.update(
            _mixed_precision=precision,
            dynamo_plugin=dynamo_plugin,
            fsdp_plugin=fsdp_plugin,
            sharding_plugin=sharding,
            torch_tp_plugin=None,
            deepspeed_plugins=None,
            megatron_lm_plugin=megatron_lm_plugin,
            parallelism_config=parallelism_config,
            device_mesh=None,
            mesh=mesh,
        )

    @property
    def initialized(self) -> bool:
        return self._shared_state != {}

    def __repr__(self) -> str:
        return PartialState().__repr__() + f"\nMixed precision type: {self.mixed_precision}\n"

    def _check_initialized(
        self,
        mixed_precision: Optional[str] = None,
        cpu: Optional[bool] = None,
        plugin: Any = None,
        timeout: Optional[timedelta] = None,
    ) -> None:
        late = None
        if cpu and self._device.type != "cpu":
            late = "cpu=True"
        elif mixed_precision is not None and mixed_precision != self._mixed_precision:
            late = f"mixed_precision='{mixed_precision}'"
        elif timeout is not None and timeout.total_seconds() != self._timeout_s:
            late = f"InitProcessGroupKwargs(timeout={timeout!r})"
        elif plugin is not None and (changed := changed_fields(self.megatron_lm_plugin, plugin)):
            late = f"megatron_lm_plugin=... ({changed})"
        if late:
            raise ValueError(
                f"there is an AcceleratorState already and it cannot be changed: give `{late}` to the first "
                "`Accelerator()` of this process, and start it again"
            )
        if plugin is not None:  # an equal one: prepare() completes the one that the script holds now
            plugin.set_mixed_precision(self._mixed_precision)
            self.__dict__["megatron_lm_plugin"] = plugin

    def _check_same_sharding(self, plugin: Any) -> None:
        """Errors: ValueError for a plugin that comes after the first Accelerator() and means something else than what that was given."""
        if plugin is None:
            return
        names = ("parallel", "offload", "clip_grad", "recompute", "loss_scaling")
        given, first = ({name: getattr(each, name, None) for name in names} for each in (plugin, self.sharding_plugin))
        if type(plugin) is not type(self.sharding_plugin) or given != first:
            raise ValueError(f"there is an AcceleratorState already and it cannot be changed: give this {type(plugin).__name__} to the "
                             "first `Accelerator()` of this process, and start it again")

    @property
    def mixed_precision(self) -> str:
        return self._mixed_precision

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forgets the state, for tests."""
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def fork_launched(self) -> bool:
        return PartialState().fork_launched

    @property
    def is_fsdp2(self) -> bool:
        return False

    @property
    def deepspeed_plugin(self):
        """The DeepSpeedPlugin that was given, or None: its ZeRO stage is the engine's own."""
        return self.sharding_plugin if isinstance(self.sharding_plugin, DeepSpeedPlugin) else None

    def get_deepspeed_plugin(self, name: str):
        """Errors: NotImplementedError, always."""
        raise not_ours("get_deepspeed_plugin", "DeepSpeed", LAYOUT)

    def select_deepspeed_plugin(self, name: Optional[str] = None):
        """Errors: NotImplementedError, always."""
        raise not_ours("select_deepspeed_plugin", "DeepSpeed", LAYOUT)
