"""Operations on nested lists, tuples and dicts of tensors, and the same over processes.

Leaves are torch tensors, numpy arrays and numbers. `gather`, `gather_object`, `reduce` and `pad_across_processes` work
over the data ranks once there is an `Accelerator` (its `state.mesh.data`), so that what tensor and pipeline ranks hold
alike counts once; before, and `broadcast` always, over all processes. All of them are collective."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from functools import update_wrapper, wraps
from typing import Any, Callable, List, Optional

import numpy as np

from tessera.comm import exchange
from tessera.comm.exchange import is_leaf
from tessera.comm.process_group import meet
from tessera.errors import DistributedOperationException
from tessera.state import AcceleratorState, PartialState
from tessera.utils.dataclasses import TensorInformation
from tessera.utils.objects import is_torch

__all__ = [
    "CannotPadNestedTensorWarning",
    "ConvertOutputsToFp32",
    "DistributedOperationException",
    "GatheredParameters",
    "broadcast",
    "broadcast_object_list",
    "chained_operation",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "data_group",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
    "verify_operation",
]


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor (torch.nested) was left as it is."""


def is_torch_tensor(tensor: Any) -> bool:
    return is_torch(tensor)


def is_tensor_information(tensor_info: Any) -> bool:
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Any) -> Any:
    """The generator's values in a list, tuple or namedtuple like `obj`."""
    return type(obj)(*list(generator)) if is_namedtuple(obj) else type(obj)(generator)


def recursively_apply(
    func: Callable,
    data: Any,
    *args,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs,
) -> Any:
    """`data` with func(leaf, *args, **kwargs) in place of every leaf for which `test_type` holds; the others stay, or
    raise TypeError with `error_on_other_type`."""

    def apply(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return honor_type(value, (apply(item) for item in value))
        if isinstance(value, Mapping):
            return type(value)({key: apply(item) for key, item in value.items()})
        if test_type(value):
            return func(value, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"{getattr(func, '__name__', func)}: takes nested lists, tuples and dicts of tensors, arrays and "
                f"numbers, not {type(value)}"
            )
        return value

    return apply(data)


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
    """Nested data with everything that has a `to` method on that device, except under the dict keys `skip_keys`."""
    skipped = [skip_keys] if isinstance(skip_keys, str) else list(skip_keys or ())
    if hasattr(tensor, "to") and not isinstance(tensor, type):
        try:
            return tensor.to(device, non_blocking=non_blocking)
        except TypeError:  # a `to` without non_blocking
            return tensor.to(device)
    if isinstance(tensor, (tuple, list)):
        return honor_type(tensor, (send_to_device(item, device, non_blocking, skipped) for item in tensor))
    if isinstance(tensor, Mapping):
        return type(tensor)(
            {
                key: item if key in skipped else send_to_device(item, device, non_blocking, skipped)
                for key, item in tensor.items()
            }
        )
    return tensor


def get_data_structure(data: Any) -> Any:
    """Nested data with TensorInformation(shape, dtype) in place of tensors."""
    return recursively_apply(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Nested data with lists of sizes in place of tensors and arrays."""
    return recursively_apply(lambda tensor: list(tensor.shape), data, test_type=_has_shape)


def initialize_tensors(data_structure: Any) -> Any:
    """Uninitialised torch tensors in place of TensorInformation."""
    import torch

    return recursively_apply(
        lambda info: torch.empty(*info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def find_batch_size(data: Any) -> int:
    """The size along dimension 0 of the first tensor or array. Errors: ValueError if there is nothing, TypeError if it
    is none or has no dimensions."""
    if isinstance(data, (tuple, list, Mapping)):
        if len(data) == 0:
            raise ValueError(f"an empty {type(data).__name__} has no batch size")
        return find_batch_size(next(iter(data.values())) if isinstance(data, Mapping) else data[0])
    if not _has_shape(data) or len(data.shape) == 0:
        raise TypeError(f"the batch size is the first dimension of a tensor; there is none in {type(data)}")
    return data.shape[0]


def ignorant_find_batch_size(data: Any) -> Optional[int]:
    """find_batch_size, or None."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def listify(data: Any) -> Any:
    """Nested data with lists of numbers in place of tensors and arrays (numbers, for those without dimensions)."""

    def to_list(tensor: Any) -> Any:
        if is_torch(tensor):
            tensor = tensor.detach().cpu()
        return tensor.tolist()

    return recursively_apply(to_list, data, test_type=_has_shape)


def slice_tensors(
    data: Any, tensor_slice: Any, process_index: Optional[int] = None, num_processes: Optional[int] = None
) -> Any:
    """Nested data with tensor[tensor_slice] in place of tensors and arrays; the last two parameters have no meaning."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data, test_type=_has_shape)


def concatenate(data: Any, dim: int = 0) -> Any:
    """A list of alike nested data as one, its tensors or arrays concatenated along `dim`. Errors: TypeError."""
    first = data[0]
    if isinstance(first, (tuple, list)):
        return honor_type(first, (concatenate([item[i] for item in data], dim) for i in range(len(first))))
    if isinstance(first, Mapping):
        return type(first)({key: concatenate([item[key] for item in data], dim) for key in first})
    if is_torch(first):
        return sys.modules["torch"].cat(data, dim=dim)
    if isinstance(first, np.ndarray):
        return np.concatenate(data, axis=dim)
    if isinstance(data, (tuple, list)) and len(data) == 1:
        return first
    raise TypeError(f"only tensors and arrays can be concatenated, not {type(first)}")


def find_device(data: Any) -> Any:
    """The device of the first torch tensor; None if there is none."""
    items = data.values() if isinstance(data, Mapping) else data if isinstance(data, (tuple, list)) else ()
    for item in items:
        device = find_device(item)
        if device is not None:
            return device
    return data.device if is_torch(data) else None


def convert_to_fp32(tensor: Any) -> Any:
    """Nested data with float16 and bfloat16 tensors and arrays in float32."""

    def convert(value: Any) -> Any:
        return value.float() if hasattr(value, "float") else value.astype(np.float32)

    return recursively_apply(
        convert, tensor, test_type=lambda value: str(getattr(value, "dtype", "")).endswith("float16")
    )


class ConvertOutputsToFp32:
    """Wraps a function: its outputs in half precision come in float32."""

    def __init__(self, model_forward: Callable):
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args, **kwargs):
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self):
        raise TypeError("a prepared model cannot be pickled; take it out with `Accelerator.unwrap_model(model)`")


def convert_outputs_to_fp32(model_forward: Callable) -> Callable:
    """ConvertOutputsToFp32 as a plain function."""
    converted = ConvertOutputsToFp32(model_forward)

    def forward(*args, **kwargs):
        return converted(*args, **kwargs)

    forward.__wrapped__ = converted
    return forward


@contextmanager
def GatheredParameters(params: Any, modifier_rank: Optional[int] = None, fwd_module: Any = None, enabled: bool = True):
    """Nothing to do: it gathers what DeepSpeed's ZeRO-3 has shared out, which does not run here."""
    yield


def data_group() -> Any:
    """The communicator over which `gather` and `reduce` work."""
    mesh = AcceleratorState._shared_state.get("mesh")
    state = PartialState()
    world = state._connected()
    return world if mesh is None else mesh.data


def _meet(call: str) -> None:
    """Before a call of several ranks: see tessera.comm.process_group.meet."""
    meet(PartialState()._connected(), call)


def verify_operation(function: Callable) -> Callable:
    """Decorator: with ACCELERATE_DEBUG_MODE, compares the shapes on all ranks first. Errors:
    DistributedOperationException."""

    @wraps(function)
    def wrapper(*args, **kwargs):
        state = PartialState()
        if not state.debug or state.num_processes == 1:
            return function(*args, **kwargs)
        operation = f"{function.__module__}.{function.__name__}"
        tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
        device = find_device(tensor)
        if device is not None and device.type != state.device.type:
            raise DistributedOperationException(
                f"{operation}: a tensor is on {device}, while this process runs on {state.device}; move it there first"
            )
        group = state._connected() if function.__name__ == "broadcast" else data_group()
        shapes = exchange.gathered_objects(_plain(get_shape(tensor)), group)
        if any(shape != shapes[0] for shape in shapes):
            lines = "".join(f"\n  - Process {rank}: {shape}" for rank, shape in enumerate(shapes))
            raise DistributedOperationException(f"{operation}: the shapes differ between processes:{lines}")
        return function(*args, **kwargs)

    return wrapper


def chained_operation(function: Callable) -> Callable:
    """Decorator: a DistributedOperationException inside says which operation was being done."""

    @wraps(function)
    def wrapper(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            raise DistributedOperationException(f"in {function.__module__}.{function.__name__}: {error}") from error

    return wrapper


@verify_operation
def gather(tensor: Any) -> Any:
    """All data ranks' tensors one after the other along dimension 0, on every rank, in nested data of the same
    structure.

    [n, ...] becomes [sum of all n, ...]; lengths may differ. Tensors without dimensions and numbers become length 1
    (arrays, for numbers). With one data rank the data comes back as it is. Errors: DistributedOperationException naming
    the shapes that do not fit; TypeError for other leaves."""
    group = data_group()
    leaves = _leaves(tensor, "gather")
    if group.size == 1:
        return tensor
    _meet("gather()")
    ranks = exchange.gathered_objects([exchange.pack(leaf) for leaf in leaves], group)
    if len({len(parts) for parts in ranks}) > 1:
        raise DistributedOperationException(f"gather: the ranks gave {[len(parts) for parts in ranks]} tensors")
    results = iter([exchange.joined(leaf, [parts[i] for parts in ranks], "gather") for i, leaf in enumerate(leaves)])
    return recursively_apply(lambda leaf: next(results), tensor, test_type=is_leaf)


def gather_object(object: Any) -> Any:
    """All data ranks' lists as one list, on every rank; what is no list, tuple or set counts as a list of one. With one
    data rank the object itself. Errors: TypeError naming what cannot travel (see tessera.utils.objects)."""
    group = data_group()
    if group.size == 1:
        return object
    _meet("gather_object()")
    gathered: List[Any] = []
    for item in exchange.gathered_objects(object, group):
        gathered.extend(item if isinstance(item, (list, tuple, set, frozenset)) else [item])
    return gathered


@verify_operation
def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """The "mean", "sum" or "max" over data ranks, times `scale`, on every rank, as new nested data; "none" copies.
    Errors: ValueError, TypeError."""
    if reduction not in ("mean", "sum", "max", "none"):
        raise ValueError(f"reduction '{reduction}' is unknown; say 'mean', 'sum', 'max' or 'none'")
    group = data_group()
    _leaves(tensor, "reduce")
    if group.size > 1 and reduction != "none":
        _meet("reduce()")

    def reduce_leaf(leaf: Any) -> Any:
        if reduction == "none":
            return leaf.clone() if is_torch(leaf) else np.array(leaf) if isinstance(leaf, np.ndarray) else leaf
        return exchange.reduced(leaf, group, "max" if reduction == "max" else "sum", reduction == "mean", scale)

    return recursively_apply(reduce_leaf, tensor, test_type=is_leaf)


@verify_operation
def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """What that process has, on every process: tensors and arrays are overwritten and returned. Shapes and dtypes must
    be the same everywhere. Errors: DistributedOperationException, TypeError."""
    state = PartialState()
    leaves = _leaves(tensor, "broadcast")
    if state.num_processes == 1:
        return tensor
    _meet("broadcast()")
    mine = [exchange.pack(leaf) for leaf in leaves] if state.process_index == from_process else None
    parts = exchange.broadcast_object(mine, state._connected(), from_process)
    if len(parts) != len(leaves):
        raise DistributedOperationException(f"broadcast: {len(parts)} tensors come, this process has {len(leaves)}")
    if state.process_index == from_process:
        return tensor
    results = iter([exchange.received(leaf, *part) for leaf, part in zip(leaves, parts)])
    return recursively_apply(lambda leaf: next(results), tensor, test_type=is_leaf)


def broadcast_object_list(object_list: list, from_process: int = 0) -> list:
    """The list of that process, in place of this one's items (and returned). Errors: TypeError naming what cannot
    travel; DistributedOperationException if the lengths differ."""
    state = PartialState()
    if state.num_processes > 1:
        _meet("broadcast_object_list()")
        items = exchange.broadcast_object(list(object_list), state._connected(), from_process)
        if len(items) != len(object_list):
            raise DistributedOperationException(
                f"broadcast_object_list: {len(items)} objects come, this process has room for {len(object_list)}"
            )
        object_list[:] = items
    return object_list


def copy_tensor_to_devices(tensor: Any = None) -> Any:
    """The tensor that exactly one process has (the others give None), on every process. Errors: ValueError."""
    state = PartialState()
    _meet("copy_tensor_to_devices()")
    found = [item for item in exchange.gathered_objects(tensor, state._connected()) if item is not None]
    if len(found) != 1:
        raise ValueError(f"copy_tensor_to_devices: one process must have the tensor, but {len(found)} do")
    return tensor if tensor is not None else send_to_device(found[0], state.device)


@chained_operation
def pad_across_processes(tensor: Any, dim: int = 0, pad_index: Any = 0, pad_first: bool = False) -> Any:
    """Nested data whose tensors have, along `dim`, the greatest length of any data rank; `pad_index` fills the end, or
    with `pad_first` the beginning. Tensors without that dimension stay. Errors: DistributedOperationException,
    TypeError."""
    group = data_group()
    leaves = _leaves(tensor, "pad_across_processes", _has_shape)
    nested = [getattr(leaf, "is_nested", False) for leaf in leaves]
    if any(nested):
        warnings.warn("nested tensors are not padded", CannotPadNestedTensorWarning)
    shapes = [None if skip else [int(size) for size in leaf.shape] for leaf, skip in zip(leaves, nested)]
    if group.size > 1:
        _meet("pad_across_processes()")
    ranks = exchange.gathered_objects(shapes, group)
    if any([shape and len(shape) for shape in rank] != [shape and len(shape) for shape in shapes] for rank in ranks):
        raise DistributedOperationException(f"the ranks' tensors have different numbers of dimensions: {ranks}")

    def pad(i: int, leaf: Any) -> Any:
        if shapes[i] is None or not -len(shapes[i]) <= dim < len(shapes[i]):
            return leaf
        axis = dim % len(shapes[i])
        longest = max(rank[i][axis] for rank in ranks)
        return leaf if longest == shapes[i][axis] else exchange.padded(leaf, axis, longest, pad_index, pad_first)

    results = iter([pad(i, leaf) for i, leaf in enumerate(leaves)])
    return recursively_apply(lambda leaf: next(results), tensor, test_type=_has_shape)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Nested data whose tensors have along `dim` the next multiple of `num_processes` from `batch_size` on; the last
    row repeats."""
    missing = -batch_size % num_processes

    def pad(leaf: Any) -> Any:
        if missing == 0:
            return leaf
        last = leaf[(slice(None),) * dim + (slice(-1, None),)]
        return concatenate([leaf] + [last] * missing, dim)

    return recursively_apply(pad, tensor, test_type=_has_shape, error_on_other_type=True)


def _has_shape(value: Any) -> bool:
    return is_torch(value) or isinstance(value, (np.ndarray, np.generic))


def _leaves(data: Any, operation: str, test_type: Callable[[Any], bool] = is_leaf) -> list:
    found: list = []

    def collect(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    collect.__name__ = operation
    recursively_apply(collect, data, test_type=test_type, error_on_other_type=True)
    return found


def _plain(data: Any) -> Any:
    """Nested shapes as lists and dicts that any process can read."""
    if isinstance(data, (list, tuple)):
        return [_plain(item) for item in data]
    if isinstance(data, Mapping):
        return {key: _plain(item) for key, item in data.items()}
    return data if isinstance(data, (int, str)) else None
