"""Memory: letting go of it, and finding a batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from typing import Callable, List, Optional

from tessera.comm.process_group import meet
from tessera.state import PartialState

# What PyTorch, its backends and Tessera say; Tessera's own errors begin with "out of memory".
_OUT_OF_MEMORY = (
    " out of memory.",
    "out of memory on ",
    "out of memory: ",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Gives PyTorch's unused GPU memory back, after a garbage collection if asked (slow)."""
    if garbage_collection:
        gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def release_memory(*objects) -> list:
    """As many None as there were objects, to be assigned to their names: `a, b = release_memory(a, b)`."""
    released = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return released


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether it says that memory did not suffice (host or GPU), or that cuDNN cannot do it in this size."""
    if isinstance(exception, MemoryError):
        return True
    return (
        isinstance(exception, RuntimeError)
        and len(exception.args) == 1
        and any(text in str(exception.args[0]) for text in _OUT_OF_MEMORY)
    )


def _somewhere(happened: bool) -> bool:
    """Whether it happened on any process; collective."""
    state = PartialState._shared_state
    if state.get("num_processes", 1) == 1 or state.get("world") is None:
        return happened
    return any(values[0] for values in meet(state["world"], "a function of find_executable_batch_size", int(happened)))


def find_executable_batch_size(
    function: Optional[Callable] = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Optional[Callable[[], int]] = None,
) -> Callable:
    """Decorator for a function whose first parameter is the batch size, which its callers leave out: when memory does
    not suffice it is called again with 0.9 times that size, or with what `reduce_batch_size_fn()` returns.

    Several processes decide together: when one of them fails, all call again. Errors: RuntimeError when it reaches 0;
    TypeError when a caller gives the batch size."""
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    batch_size = starting_batch_size

    def decorator(*args, **kwargs):
        nonlocal batch_size
        names: List[str] = list(inspect.signature(function).parameters)
        if len(names) < len(args) + 1:
            given = ", ".join(f"{name}={value}" for name, value in zip(names[1:], args[1:]))
            raise TypeError(
                f"the batch size is given to `{function.__name__}` by its decorator; call it without: "
                f"`{function.__name__}({given})`"
            )
        clear_device_cache(garbage_collection=True)
        while batch_size > 0:
            result, failed = None, False
            try:
                result = function(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
                failed = True
            # Outside of the except clause, where the traceback would keep the function's tensors alive.
            if not _somewhere(failed):
                return result
            clear_device_cache(garbage_collection=True)
            batch_size = int(batch_size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise RuntimeError("no batch size fits into memory: it has come down to 0")

    return decorator
