"""Everything that `accelerate.utils` has for scripts of its Megatron-LM integration. Names are looked up when they are first
used, so that importing this costs nothing."""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import Any as _Any

# Accelerate has a function and a module of this name; the function is what `tessera.utils.tqdm` is.
from tessera.utils.tqdm import tqdm

_MODULES = ("dataclasses", "megatron_lm", "operations", "other", "random", "memory", "environment", "imports", "objects",
            "constants", "modeling", "weights", "deepspeed")


def __getattr__(name: str) -> _Any:
    if _find_spec(f"tessera.utils.{name}") is not None:
        return _import_module(f"tessera.utils.{name}")
    if not name.startswith("_"):
        for module in _MODULES:
            found = _import_module(f"tessera.utils.{module}")
            if hasattr(found, name):
                value = globals()[name] = getattr(found, name)
                return value
        refused = _import_module("tessera.compat.foreign_functions").find(name)
        if refused is not None:
            return refused
    raise AttributeError(f"module 'tessera.utils' has no attribute {name!r}")
