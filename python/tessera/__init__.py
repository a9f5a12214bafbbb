"""Tessera trains large transformers on any layout, under the names of Hugging Face Accelerate.

Nothing is imported before it is used: `import tessera` needs neither PyTorch nor Transformers."""

from importlib import import_module as _import_module
from importlib import metadata as _metadata
from typing import Any as _Any

from tessera.launch.thread_waits import set_thread_waits as _set_thread_waits

_set_thread_waits()

try:
    __version__ = _metadata.version("tessera")
except _metadata.PackageNotFoundError:  # read from a source tree that is not installed
    __version__ = "0+source"

_HOMES = {
    "accelerator": ("Accelerator",),
    "big_modeling": ("cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model", "infer_auto_device_map",
                     "init_empty_weights", "init_on_device", "load_checkpoint_and_dispatch", "load_checkpoint_in_model"),
    "causal_lm": ("AdamW", "CausalLM"),
    "data_loader": ("skip_first_batches",),
    "errors": ("CheckpointError", "CommunicationError", "CommunicationTimeout", "ConfigError", "DataError", "DeviceError", "Error",
               "InternalError", "InvalidArgument", "IoError", "TrainingError"),
    "inference": ("prepare_pippy",),
    "launchers": ("debug_launcher", "notebook_launcher"),
    "state": ("AcceleratorState", "GradientState", "PartialState"),
    "utils": ("AutocastKwargs", "DDPCommunicationHookType", "DataLoaderConfiguration", "DeepSpeedPlugin",
              "DistributedDataParallelKwargs", "DistributedType", "FullyShardedDataParallelPlugin", "GradScalerKwargs",
              "InitProcessGroupKwargs", "MegatronLMPlugin", "ParallelismConfig", "ProfileKwargs", "find_executable_batch_size",
              "is_rich_available", "synchronize_rng_states"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> _Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tessera' has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(f"tessera.{_HOME_OF[name]}"), name)
    return value


def __dir__() -> list:
    return sorted([*globals(), *_HOME_OF])
