"""Facts about PyTorch modules that scripts ask Accelerate for."""

from __future__ import annotations

import sys
from typing import Any, Iterator, List, Tuple, Union

from tessera.engine.export import shard_bytes

__all__ = ["convert_file_size_to_int", "dtype_byte_size", "find_tied_parameters", "is_peft_model", "named_module_tensors"]


def convert_file_size_to_int(size: Union[int, str]) -> int:
    """Bytes of "5GB", "200MiB" or a number. Errors: ConfigError."""
    return shard_bytes(size)


def dtype_byte_size(dtype: Any) -> float:
    """Bytes of one element of a torch dtype; 1/8 for bool, which packs into bits."""
    import torch

    return 1 / 8 if dtype == torch.bool else float(dtype.itemsize)


def named_module_tensors(module: Any, include_buffers: bool = True, recurse: bool = False,
                         remove_non_persistent: bool = False) -> Iterator[Tuple[str, Any]]:
    """Parameters, then buffers, of a module; `remove_non_persistent` leaves out buffers that state_dict() has not."""
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    kept = set(module.state_dict()) if remove_non_persistent else None
    yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if kept is None or name in kept)


def find_tied_parameters(model: Any, **kwargs: Any) -> List[List[str]]:
    """Groups of names under which a model has one and the same parameter, sorted."""
    names: dict = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def is_peft_model(model: Any) -> bool:
    """Whether it is a PeftModel."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)
