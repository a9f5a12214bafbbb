"""Accelerate's small configuration classes and what becomes of each field.

takes effect: it changes what Tessera does. warns: it concerns the speed of another engine, so a value that is not the
default is answered by one warning. refused: it would change numbers, or switch on a part that Tessera does not have.

| class | takes effect | warns | refused |
|---|---|---|---|
| ProjectConfiguration | all fields | | |
| GradientAccumulationPlugin | num_steps, adjust_scheduler, sync_with_dataloader | sync_each_batch | |
| DataLoaderConfiguration | split_batches, dispatch_batches, even_batches, use_seedable_sampler, data_seed | non_blocking, use_stateful_dataloader | |
| AutocastKwargs | | cache_enabled | enabled=False |
| GradScalerKwargs | init_scale, growth_interval, enabled | | growth_factor other than 2, backoff_factor other than 0.5 |
| InitProcessGroupKwargs | timeout | backend, init_method | |
| DistributedDataParallelKwargs | | all others | comm_hook, comm_wrapper, comm_state_option |
| ProfileKwargs | schedule_option, on_trace_ready, output_trace_dir, activities | record_shapes, profile_memory, with_stack, with_flops, with_modules | activities but cpu, cuda |
"""

import copy
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Callable, Dict, List, Optional

from tessera.comm.warnings import warn_once
from tessera.compat.enums import DDPCommunicationHookType
from tessera.errors import ConfigError


class KwargsHandler:
    """Base of what `Accelerator(kwargs_handlers=[...])` takes."""

    def to_dict(self) -> Dict[str, Any]:
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> Dict[str, Any]:
        """The fields that differ from the class's defaults (those without any environment variable)."""
        with _bare_environment():
            default = self.__class__().to_dict()
        return {key: value for key, value in self.to_dict().items() if default[key] != value}

    def _warn(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) != self.__dataclass_fields__[name].default:
                warn_once(f"{type(self).__name__}.{name} has no effect in Tessera: it tunes another engine")


@contextmanager
def _bare_environment():
    kept = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.update(kept)


def _at_least(owner: object, name: str, least: int) -> None:
    value = getattr(owner, name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}; it must be an integer of at least {least}")


def _booleans(owner: object, *names: str, none: bool = False) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, bool) and not (none and value is None):
            raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}; it must be True or False")


@dataclass
class AutocastKwargs(KwargsHandler):
    """What torch.autocast would get. Tessera's precision is that of the whole model."""

    enabled: bool = True
    cache_enabled: Optional[bool] = None

    def __post_init__(self):
        _booleans(self, "enabled")
        if not self.enabled:
            raise ConfigError("AutocastKwargs(enabled=False): one part of a model cannot have another precision in "
                              "Tessera; give mixed_precision='no' for all of it")
        self._warn("cache_enabled")


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """What PyTorch's DDP would get. Tessera reduces gradients in buckets of its own."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict = field(default_factory=dict)

    def __post_init__(self):
        for name in ("comm_hook", "comm_wrapper"):
            if DDPCommunicationHookType(getattr(self, name)) is not DDPCommunicationHookType.NO:
                raise ConfigError(f"DistributedDataParallelKwargs.{name}: Tessera does not compress gradients; "
                                  "it reduces them in fp32. Remove it")
        if self.comm_state_option:
            raise ConfigError("DistributedDataParallelKwargs.comm_state_option belongs to comm_hook, which Tessera "
                              "does not have; remove it")
        self._warn("dim", "broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "check_reduction",
                   "gradient_as_bucket_view", "static_graph")

    def to_dict(self, ignore_keys=("comm_hook", "comm_wrapper", "comm_state_option")) -> Dict[str, Any]:
        return {key: value for key, value in super().to_dict().items() if key not in ignore_keys}


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Loss scaling of fp16: `init_scale` is the first factor, `growth_interval` the finite steps before it doubles; as
    with torch's scaler each non-finite step halves it. enabled=False leaves the factor at 1."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self):
        _booleans(self, "enabled")
        _at_least(self, "growth_interval", 1)
        if not 1.0 <= self.init_scale <= 1e18:
            raise ConfigError(f"GradScalerKwargs.init_scale is {self.init_scale!r}; it must be from 1 to 1e18")
        for name, fixed in (("growth_factor", 2.0), ("backoff_factor", 0.5)):
            if getattr(self, name) != fixed:
                raise ConfigError(f"GradScalerKwargs.{name} is {getattr(self, name)!r}; Tessera doubles and halves the "
                                  f"loss scale, so it must be {fixed}")


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """`timeout` is the deadline of every wait for other ranks (600 s when not given)."""

    backend: Optional[str] = "nccl"
    init_method: Optional[str] = None
    timeout: Optional[timedelta] = None

    def __post_init__(self):
        if self.timeout is None:
            self.timeout = timedelta(seconds=600 if self.backend == "nccl" else 1800)
        if not isinstance(self.timeout, timedelta) or self.timeout <= timedelta(0):
            raise ConfigError(f"InitProcessGroupKwargs.timeout is {self.timeout!r}; it must be a datetime.timedelta above 0")
        # Gloo and NCCL are what there is, each on its device; naming either says nothing new.
        if self.backend not in (None, "nccl", "gloo", "cpu:gloo,cuda:nccl"):
            warn_once(f"InitProcessGroupKwargs.backend '{self.backend}' has no effect: Tessera communicates through NCCL "
                      "on GPUs and Gloo on CPUs")
        self._warn("init_method")


_PROFILED = ("cpu", "cuda")


@dataclass
class ProfileKwargs(KwargsHandler):
    """For `accelerator.profile()`: `schedule_option` (wait, warmup, active, repeat, skip_first) says which steps are
    recorded, `on_trace_ready` is called with the profile, `output_trace_dir` gets Chrome traces."""

    activities: Optional[List[str]] = None
    schedule_option: Optional[Dict[str, int]] = None
    on_trace_ready: Optional[Callable] = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: Optional[str] = None

    def __post_init__(self):
        for activity in self.activities or ():
            if activity not in _PROFILED:
                raise ConfigError(f"ProfileKwargs.activities: '{activity}' is not one of {', '.join(_PROFILED)}")
        for key, value in (self.schedule_option or {}).items():
            if key not in ("wait", "warmup", "active", "repeat", "skip_first") or not isinstance(value, int) or value < 0:
                raise ConfigError(f"ProfileKwargs.schedule_option: {key}={value!r} is no number of steps; the keys are "
                                  "wait, warmup, active, repeat, skip_first")
        self._warn("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")

    def build(self):
        """A torch.profiler.profile of the same settings, for the script's own torch work. Needs PyTorch."""
        import torch

        kinds = {"cpu": torch.profiler.ProfilerActivity.CPU, "cuda": torch.profiler.ProfilerActivity.CUDA}
        return torch.profiler.profile(
            activities=[kinds[name] for name in self.activities] if self.activities else None,
            schedule=torch.profiler.schedule(**self.schedule_option) if self.schedule_option else None,
            on_trace_ready=self.on_trace_ready, record_shapes=self.record_shapes, profile_memory=self.profile_memory,
            with_stack=self.with_stack, with_flops=self.with_flops, with_modules=self.with_modules)


@dataclass
class DataLoaderConfiguration:
    """How prepared loaders behave. `split_batches`: batch_size counts the samples of one optimizer step over all data
    ranks. `dispatch_batches`: only the main process reads. `even_batches`: the tail is filled by repeating samples in
    loaders that have no exact tail. `use_seedable_sampler`, `data_seed`: the order of shuffled loaders."""

    split_batches: bool = False
    dispatch_batches: Optional[bool] = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: Optional[int] = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self):
        _booleans(self, "split_batches", "even_batches", "use_seedable_sampler", "non_blocking", "use_stateful_dataloader")
        _booleans(self, "dispatch_batches", none=True)
        _at_least(self, "data_seed", 0)
        for name, why in (("non_blocking", "batches are handed to the engine in host memory"),
                          ("use_stateful_dataloader", "every prepared loader is resumable already")):
            if getattr(self, name):
                warn_once(f"DataLoaderConfiguration.{name} has no effect: {why}")


@dataclass
class ProjectConfiguration:
    """Where a project's files go. `logging_dir` is `project_dir` unless given; with `automatic_checkpoint_naming`
    states are saved as checkpoints/checkpoint_{iteration}, of which the newest `total_limit` are kept."""

    project_dir: Optional[str] = None
    logging_dir: Optional[str] = None
    automatic_checkpoint_naming: bool = False
    total_limit: Optional[int] = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self):
        _booleans(self, "automatic_checkpoint_naming", "save_on_each_node")
        _at_least(self, "total_limit", 1)
        _at_least(self, "iteration", 0)
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: Optional[str] = None) -> None:
        """Sets the project's folder, and the one for logs if there is none yet."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Accumulation over calls of the model: an update every `num_steps` (and at the end of the loader with
    `sync_with_dataloader`). `adjust_scheduler`: a scheduler's step counts only when an update is made."""

    num_steps: Optional[int] = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self):
        _at_least(self, "num_steps", 1)
        _booleans(self, "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")
        if self.sync_each_batch:
            warn_once("GradientAccumulationPlugin.sync_each_batch has no effect: Tessera reduces gradients at the end of "
                      "every call anyway")


@dataclass
class TensorInformation:
    """Shape and type of a tensor, for messages between processes."""

    shape: Any
    dtype: Any
