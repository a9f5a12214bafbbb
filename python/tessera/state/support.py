"""What the states in tessera.state stand on: their device, and which settings they refuse."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any, Dict, Optional

from tessera.comm.process_group import Device, native
from tessera.comm.warnings import warn_once
from tessera.compat.refusals import LAYOUT, not_ours
from tessera.compat.sharding import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ShardingPlugin
from tessera.errors import ConfigError
from tessera.plugin.config_map import native_value
from tessera.plugin.fields import data_ranks, degrees
from tessera.utils.environment import parse_choice_from_env, parse_flag_from_env


class StateWithDevice:
    """What PartialState and AcceleratorState have in common: the device, which is a torch.device once torch is
    loaded."""

    @property
    def device(self) -> Any:
        """Where tensors go that the caller hands over or gets: "cpu", or the GPU of this process."""
        if "_device" not in self.__dict__:
            raise AttributeError(self._missing("device"))
        device, torch = self.__dict__["_device"], sys.modules.get("torch")
        if torch is None:
            return device
        if device.type == "cuda" and not torch.cuda.is_available():
            warn_once("this PyTorch cannot use the GPU that Tessera trains on; its tensors stay on the CPU")
            return torch.device("cpu")
        return torch.device(str(device))

    @device.setter
    def device(self, value: Any) -> None:
        kind, _, index = str(value).partition(":")
        self.__dict__["_device"] = Device(kind, int(index) if index else None)

    def _missing(self, name: str) -> str:
        kind = type(self).__name__
        if name in self._known_attrs:
            return (
                f"`{kind}` has no `{name}` now: its state was reset and neither `Accelerator()` nor `PartialState()` "
                "was made since"
            )
        return f"'{kind}' object has no attribute '{name}'"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(self._missing(name))


def mesh_of(world: Any, plugin: Any) -> Any:
    """The mesh of all ranks. Collective over `world`. Errors: ConfigError when the plugin's degrees do not divide them."""
    data, axes = data_ranks(plugin, world.size), degrees(plugin)
    experts = 1 if plugin is None else plugin.expert_model_parallel_size
    if data * axes["cp"] % experts != 0:
        raise ConfigError(f"expert_model_parallel_size {experts} does not divide the {data * axes['cp']} data and context ranks, among which "
                          "experts are shared out; start more processes, or give another one")
    return native().ProcessMesh(world, dp=data, ep=experts, **axes)


def precision_of(asked: Optional[str]) -> str:
    name = "mixed_precision" if asked is not None else "ACCELERATE_MIXED_PRECISION"
    precision = str(asked if asked is not None else parse_choice_from_env("ACCELERATE_MIXED_PRECISION", "no")).lower()
    if precision == "fp8":
        raise ConfigError(f"{name}='fp8' is not in this build yet; use 'bf16'")
    if precision not in ("no", "fp16", "bf16"):
        raise ConfigError(f"{name}='{precision}' is unknown; say 'no', 'fp16' or 'bf16'")
    return precision


def deadline_of(plugin: Any, kwargs: Dict[str, Any]) -> Optional[float]:
    """Seconds that Megatron's distributed_timeout_minutes allows every wait, which becomes PartialState's `timeout` in `kwargs`; None
    without it. Errors: ConfigError where InitProcessGroupKwargs say otherwise."""
    minutes = None if plugin is None else plugin.given_arguments.get("distributed_timeout_minutes")
    if minutes is None:
        return None
    seconds = native_value("distributed_timeout_minutes", minutes)
    given = kwargs.get("timeout")
    if given is not None and given.total_seconds() != seconds:
        raise ConfigError(f"distributed_timeout_minutes is {minutes} and InitProcessGroupKwargs say timeout={given!r}; give one")
    kwargs["timeout"] = timedelta(seconds=seconds)
    return seconds


def sharding_of(deepspeed: Any, fsdp: Any, megatron: Any) -> Optional[ShardingPlugin]:
    """The one of these plugins that says what data ranks share out, that of ACCELERATE_USE_DEEPSPEED, or None. Errors: ConfigError for
    two, NotImplementedError for objects of another library, and for the environment of FSDP's launcher."""
    for name, plugin, kind in (("deepspeed_plugin", deepspeed, DeepSpeedPlugin), ("fsdp_plugin", fsdp, FullyShardedDataParallelPlugin)):
        if plugin is not None and not isinstance(plugin, kind):
            raise not_ours(f"{name}={type(plugin).__name__}", "another library", f"give a tessera.utils.{kind.__name__}")
    given = [plugin for plugin in (deepspeed, fsdp) if plugin is not None]
    if len(given) + (megatron is not None) > 1:
        raise ConfigError("give one of deepspeed_plugin, fsdp_plugin and megatron_lm_plugin; beside tensor ranks and stages "
                          "MegatronLMPlugin(use_distributed_optimizer=True) shares out the optimizer's state")
    if given:
        return given[0]
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):  # `accelerate launch --use_deepspeed` says the rest in variables as well
        if megatron is not None:
            raise ConfigError("ACCELERATE_USE_DEEPSPEED is set and the Accelerator has a megatron_lm_plugin; one of the two")
        return DeepSpeedPlugin()
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise not_ours("ACCELERATE_USE_FSDP", "PyTorch's FSDP", "give the Accelerator a FullyShardedDataParallelPlugin")
    return None


def refuse_other_engines(dynamo: Any, torch_tp: Any, parallelism: Any) -> None:
    if torch_tp is not None:
        raise not_ours("torch_tp_plugin", "PyTorch's tensor parallelism", LAYOUT)
    if parallelism is not None:
        raise not_ours("parallelism_config", "PyTorch's device meshes", LAYOUT)
    if dynamo is not None and str(getattr(dynamo, "backend", "NO")).upper() != "NO":
        warn_once("torch.compile is not used: Tessera's kernels are compiled already; dynamo_plugin has no effect")
