"""How leaves of nested data travel: torch tensors, numpy arrays and plain numbers over a communicator."""

from __future__ import annotations

import numbers
import sys
from typing import Any, List, Tuple

import numpy as np

from tessera.errors import DistributedOperationException
from tessera.utils import objects
from tessera.utils.objects import dtype_name, is_torch, tensor_from_bytes, tensor_to_bytes

_REDUCED = (np.float32, np.float64, np.int32, np.int64)  # what communicators add up themselves


def is_leaf(value: Any) -> bool:
    """A torch tensor, numpy array or scalar, or a Python number."""
    return is_torch(value) or isinstance(value, (np.ndarray, np.generic, numbers.Number))


def pack(leaf: Any) -> Tuple[str, tuple, bytes]:
    """(dtype, shape, elements) of a leaf."""
    if is_torch(leaf):
        return dtype_name(leaf.dtype), tuple(leaf.shape), tensor_to_bytes(leaf)
    array = np.asarray(leaf)
    return array.dtype.str, array.shape, array.tobytes()


def joined(like: Any, parts: List[Tuple[str, tuple, bytes]], what: str) -> Any:
    """The ranks' parts one after the other along dimension 0, of the kind and on the device of `like`. Numbers and
    tensors without dimensions become length 1. Errors: DistributedOperationException unless dtypes and the other
    dimensions agree."""
    shapes = [shape or (1,) for _, shape, _ in parts]
    if len({(dtype, shape[1:]) for (dtype, _, _), shape in zip(parts, shapes)}) > 1:
        listed = "; ".join(f"rank {rank}: {dtype} {list(shape)}" for rank, (dtype, shape, _) in enumerate(parts))
        raise DistributedOperationException(
            f"{what}: tensors may differ in length along dimension 0 only, but are {listed}; pad_across_processes "
            "makes them alike"
        )
    shape = (sum(shape[0] for shape in shapes),) + tuple(shapes[0][1:])
    return _unpack(like, parts[0][0], shape, b"".join(data for _, _, data in parts))


def _unpack(like: Any, dtype: str, shape: tuple, data: bytes) -> Any:
    if is_torch(like):
        return tensor_from_bytes(dtype, shape, data).to(like.device)
    return np.frombuffer(bytearray(data), np.dtype(dtype)).reshape(shape)


def reduced(leaf: Any, group: Any, op: str, mean: bool, scale: float) -> Any:
    """The sum ("sum") or maximum ("max") over the group, divided by its size for a mean, times `scale`; of the kind,
    dtype and device of `leaf`. 16-bit floats are added in float32. Errors: TypeError for the mean of whole numbers."""
    torch = sys.modules.get("torch")
    if is_torch(leaf):
        exact = leaf.is_floating_point() or leaf.is_complex()
        wide = leaf.detach().cpu()
        if leaf.is_floating_point() and leaf.element_size() < 4:
            wide = wide.float()
        array = wide.resolve_conj().resolve_neg().contiguous().numpy().copy()
    else:
        array = np.array(leaf)
        exact = array.dtype.kind in "fc"
    if mean and not exact:
        raise TypeError(f"the mean of {array.dtype} tensors is not one; turn them into floats, or reduce with 'sum'")
    array = _all_reduced(array, group, op)
    factor = scale / group.size if mean else scale
    if factor != 1:
        array = array * factor
    if is_torch(leaf):
        return torch.from_numpy(np.ascontiguousarray(array)).reshape(leaf.shape).to(leaf.dtype).to(leaf.device)
    if isinstance(leaf, np.ndarray):
        return array.astype(leaf.dtype).reshape(leaf.shape)
    return leaf.dtype.type(array) if isinstance(leaf, np.generic) else array.item()


def _all_reduced(array: np.ndarray, group: Any, op: str) -> np.ndarray:
    if group.size == 1:
        return array
    kind = array.dtype
    if kind.kind == "c":
        if op != "sum":
            raise TypeError("complex numbers have no maximum")
        parts = np.ascontiguousarray(array, np.complex128 if kind.itemsize > 8 else np.complex64)
        plain = parts.reshape(-1).view(parts.real.dtype)
        group.all_reduce(plain, op)
        return plain.view(parts.dtype).reshape(array.shape)
    wide = kind.type
    if wide not in _REDUCED:
        wide = np.float32 if kind == np.float16 else np.float64 if kind.kind == "f" else np.int64
    if kind == np.uint64 or kind.kind not in "fiub":
        raise TypeError(f"arrays of {kind} cannot be added up over processes")
    values = np.array(array, wide, order="C").reshape(-1)
    group.all_reduce(values, op)
    return values.reshape(array.shape)  # wide still: a sum of halves may need to be divided before it fits


def received(leaf: Any, dtype: str, shape: tuple, data: bytes) -> Any:
    """What the root sent, written into `leaf` where that is a tensor or array. Errors: DistributedOperationException
    unless it has the same dtype and shape."""
    mine = (dtype_name(leaf.dtype) if is_torch(leaf) else np.asarray(leaf).dtype.str, tuple(np.shape(leaf)))
    if mine != (dtype, tuple(shape)):
        raise DistributedOperationException(
            f"broadcast: this process has {mine[0]} {list(mine[1])} where {dtype} {list(shape)} comes"
        )
    value = _unpack(leaf, dtype, tuple(shape), data)
    if is_torch(leaf):
        with sys.modules["torch"].no_grad():
            leaf.copy_(value)
        return leaf
    if isinstance(leaf, np.ndarray):
        leaf[...] = value
        return leaf
    return value[()] if isinstance(leaf, np.generic) else value.item()


def padded(leaf: Any, dim: int, size: int, value: Any, first: bool) -> Any:
    """`leaf` with `size` elements along `dim`, the new ones `value`, before (`first`) or after the old ones."""
    shape = list(leaf.shape)
    old, shape[dim] = shape[dim], size
    begin = size - old if first else 0
    place = (slice(None),) * dim + (slice(begin, begin + old),)
    result = leaf.new_zeros(shape) + value if is_torch(leaf) else np.zeros(shape, leaf.dtype) + value
    result = result.to(leaf.dtype) if is_torch(leaf) else result.astype(leaf.dtype)
    result[place] = leaf
    return result


def gathered_objects(obj: Any, group: Any) -> list:
    """Every rank's object, in the order of ranks."""
    if group.size == 1:
        return [obj]
    return [objects.decode(data) for data in group.all_gather_bytes(objects.encode(obj))]


def broadcast_object(obj: Any, group: Any, root: int) -> Any:
    """The root's object."""
    if group.size == 1:
        return obj
    return objects.decode(group.broadcast_bytes(objects.encode(obj) if group.rank == root else None, root))
