"""What does not belong anywhere else: unwrapping models, saving and loading files, small helpers."""

from __future__ import annotations

import platform
import re
import socket
import sys
from functools import reduce
from pathlib import Path
from typing import Any, Dict, List, Optional

from tessera.checkpoint import safetensors
from tessera.commands import config_file
from tessera.compat.refusals import not_ours
from tessera.errors import ConfigError, DataError
from tessera.logging import get_logger
from tessera.state import PartialState
from tessera.utils import objects
from tessera.utils.imports import is_torch_available
from tessera.utils.operations import send_to_device

logger = get_logger(__name__)

_NO_PICKLE = "Tessera writes and reads no pickle, which can run code when it is read: "


def is_compiled_module(module: Any) -> bool:
    """Whether it was made by torch.compile."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(module, dynamo.eval_frame.OptimizedModule)


def has_compiled_regions(module: Any) -> bool:
    """Whether a part of it was made by torch.compile."""
    return any(is_compiled_module(part) for part in module.modules())


def compile_regions(module: Any, **compile_kwargs) -> Any:
    """Errors: NotImplementedError, always."""
    raise not_ours("compile_regions", "torch.compile", "`prepare` the model: its kernels are compiled already")


def compile_regions_deepspeed(module: Any, **compile_kwargs) -> Any:
    """Errors: NotImplementedError, always."""
    raise not_ours("compile_regions_deepspeed", "DeepSpeed", "`prepare` the model: its kernels are compiled already")


def compile_regions_fsdp2(module: Any, **compile_kwargs) -> Any:
    """Errors: NotImplementedError, always."""
    raise not_ours("compile_regions_fsdp2", "PyTorch's FSDP", "`prepare` the model: its kernels are compiled already")


def model_has_dtensor(model: Any) -> bool:
    """Whether a parameter is a DTensor of torch.distributed."""
    return any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())


def get_model_tp_size(model: Any) -> Optional[int]:
    """The tensor-parallel degree that Transformers has sharded the model with; None if it has not."""
    size = getattr(model, "tp_size", None)
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    if size is not None or config is None:
        return size
    return config.get("tp_size") if isinstance(config, dict) else getattr(config, "tp_size", None)


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """The model inside DistributedDataParallel or DataParallel (with `recursive`, inside every `module` attribute), and
    inside torch.compile unless `keep_torch_compile`. `keep_fp32_wrapper=False` takes convert_outputs_to_fp32 off its
    forward. A model that `prepare` returned is not wrapped in this sense and comes back as it is."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        return model
    compiled = model if is_compiled_module(model) else None
    if compiled is not None:
        model = compiled._orig_mod
    while isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
        model = model.module
    if recursive:
        model = _unwrapped(model)
    if not keep_fp32_wrapper:
        original = model.__dict__.pop("_original_forward", None)
        if original is not None:
            model.forward = original
    if compiled is not None and keep_torch_compile:
        compiled._orig_mod = model
        return compiled
    return model


def _unwrapped(module: Any) -> Any:
    while hasattr(module, "module"):
        module = module.module
    for name, child in list(module.named_children()):
        setattr(module, name, _unwrapped(child))
    return module


def wait_for_everyone() -> None:
    """A barrier over all processes. Errors: CommunicationError naming those that did not come in time."""
    PartialState().wait_for_everyone()


def clean_state_dict_for_safetensors(state_dict: Dict[str, Any]) -> Dict[str, Any]:
    """The state dict with every tensor once: of tied ones the first name stays, and the others are told."""
    kept: Dict[str, Any] = {}
    seen: set = set()
    dropped: List[str] = []
    for name, tensor in state_dict.items():
        memory = safetensors.same_memory(tensor) if safetensors.is_tensor(tensor) else None
        if memory is not None and memory in seen:
            dropped.append(name)
            continue
        seen.add(memory)
        kept[name] = tensor.contiguous() if objects.is_torch(tensor) else tensor
    if dropped:
        logger.warning("not saved, as each is tied to a tensor that is: %s", ", ".join(dropped))
    return kept


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = True) -> None:
    """Writes on rank 0 (with `save_on_each_node`, on the first process of each machine), to a path or a binary file.

    A dict of tensors or arrays becomes a safetensors file; anything else that tessera.utils.objects knows becomes a
    file of objects. `load` reads both. Errors: ConfigError for safe_serialization=False; TypeError."""
    if not safe_serialization:
        raise ConfigError(f"{_NO_PICKLE}leave out safe_serialization=False; tensors become safetensors files")
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    flat = (
        isinstance(obj, dict)
        and obj
        and all(isinstance(name, str) and safetensors.is_tensor(value) for name, value in obj.items())
    )
    data = (
        safetensors.to_bytes(clean_state_dict_for_safetensors(obj), {"format": "pt"}) if flat else objects.to_file(obj)
    )
    if hasattr(f, "write"):
        f.write(data)
    else:
        objects.write_whole(f, data)


def load(f: Any, map_location: Any = None, **kwargs) -> Any:
    """What `save` wrote, from a path or a binary file: tensors of torch, or arrays where it is not installed.
    `map_location` is the device they go to. Errors: DataError; ConfigError for files of torch.save."""
    kwargs.pop("weights_only", None)  # always so
    if kwargs:
        raise ConfigError(f"load knows no {', '.join(sorted(kwargs))}; it takes map_location")
    if hasattr(f, "read"):
        name, data = str(getattr(f, "name", "the file")), f.read()
    else:
        name, data = str(f), Path(f).read_bytes()
    if data[:2] == b"PK" or data[:1] == b"\x80":
        raise ConfigError(f"{name} was written by torch.save or pickle. {_NO_PICKLE}convert it to safetensors first")
    if data.startswith(objects.MAGIC):
        try:
            value = objects.from_file(data)
        except DataError as error:
            raise DataError(f"{name}: {error}") from None
    else:
        value = safetensors.from_bytes(data, torch=_has_torch(), origin=name)
    return value if map_location is None else send_to_device(value, map_location)


def _has_torch() -> bool:
    return is_torch_available()


def get_pretty_name(obj: Any) -> str:
    """The name of a class or function, of an object's class otherwise."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return getattr(named, "__qualname__", None) or getattr(named, "__name__", str(obj))


def merge_dicts(source: dict, destination: dict) -> dict:
    """`destination`, changed: values of `source` replace its own, dicts are merged."""
    for key, value in source.items():
        if isinstance(value, dict) and isinstance(destination.get(key, {}), dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def is_port_in_use(port: Optional[int] = None) -> bool:
    """Whether somebody listens on that port of this machine (29500 when None)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", int(29500 if port is None else port))) == 0


def get_free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def convert_bytes(size: float) -> str:
    """`1.5 KB` for 1536."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PB"


def check_os_kernel() -> None:
    """Warns on a Linux kernel before 5.5, where many processes with shared memory can hang."""
    system = platform.uname()
    version = re.match(r"(\d+)\.(\d+)", system.release)
    if system.system == "Linux" and version and tuple(map(int, version.groups())) < (5, 5):
        logger.warning("the Linux kernel is %s; before 5.5, processes can hang: update it if they do", system.release)


def recursive_getattr(obj: Any, attr: str) -> Any:
    """`obj.a.b` for "a.b"."""
    return reduce(getattr, attr.split("."), obj)


def get_module_children_bottom_up(model: Any, return_fqns: bool = False) -> list:
    """All modules, children before their parents and `model` last; as (name, module) with `return_fqns`."""
    ordered, stack = [], [("", model)]
    while stack:
        name, module = stack.pop()
        ordered.append((name, module) if return_fqns else module)
        stack.extend(
            (f"{name}.{child_name}" if name else child_name, child) for child_name, child in module.named_children()
        )
    return ordered[::-1]


def write_basic_config(*args, **kwargs) -> Any:
    """Writes a launch file with default answers; see `tessera config --default`."""
    return config_file.write_basic_config(*args, **kwargs)
