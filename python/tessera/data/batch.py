"""Batches as trees: how many samples one has, a slice of them, several joined.

A batch is a mapping, tuple or list of columns, nested at will. A column has one entry per sample: an array or tensor
(along dim 0), or a list of strings, numbers, lists of numbers or mappings. Arrays without dims, numbers and strings
outside such lists belong to no sample and stay as they are.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Callable, List, Sequence

from tessera.data.split import bounds
from tessera.errors import DataError


def is_array(value: Any) -> bool:
    """Whether `value` is a torch tensor, numpy array or alike."""
    return hasattr(value, "shape") and hasattr(value, "ndim") and hasattr(value, "dtype")


def _is_column(value: Any) -> bool:
    return is_array(value) and value.ndim > 0


def _is_structure(value: Any) -> bool:
    """Whether a list or tuple holds columns (such as (inputs, targets)) and is not one itself."""
    if isinstance(value, tuple) and any(isinstance(each, Mapping) for each in value):
        return True
    return any(_is_column(each) or (isinstance(each, (list, tuple)) and _is_structure(each)) for each in value)


def _same_kind(like: Any, values: Sequence[Any]) -> Any:
    if hasattr(like, "_fields"):  # a named tuple
        return type(like)(*values)
    return tuple(values) if isinstance(like, tuple) else list(values)


def _same_mapping(like: Mapping, values: dict) -> Mapping:
    if type(like) is dict or not isinstance(like, MutableMapping):
        return values
    result = copy.copy(like)
    for key, value in values.items():
        result[key] = value
    return result


def map_columns(batch: Any, column: Callable[[Any], Any], other: Callable[[Any], Any] = lambda value: value) -> Any:
    """`batch` with `column` applied to every column, `other` to what belongs to no sample."""
    if isinstance(batch, Mapping):
        return _same_mapping(batch, {key: map_columns(value, column, other) for key, value in batch.items()})
    if isinstance(batch, (list, tuple)):
        if not _is_structure(batch):
            return column(batch)
        return _same_kind(batch, [map_columns(each, column, other) for each in batch])
    return column(batch) if _is_column(batch) else other(batch)


def columns_of(batch: Any) -> List[Any]:
    found: List[Any] = []
    map_columns(batch, lambda value: found.append(value))
    return found


def _length(column: Any) -> int:
    return int(column.shape[0]) if is_array(column) else len(column)


def samples_in(batch: Any) -> int:
    """How many samples `batch` holds. Errors: DataError without a column, or when columns differ in length."""
    lengths = {_length(column) for column in columns_of(batch)}
    if len(lengths) == 1:
        return lengths.pop()
    if not lengths:
        raise DataError(f"a batch of type {type(batch).__name__} holds no array, tensor or list, so it cannot be "
                        "divided over ranks; let the loader yield mappings or tuples of columns with one entry per "
                        "sample")
    raise DataError(f"the columns of a batch have {sorted(lengths)} entries, so it is not known which belong to one "
                    "sample; every column needs one entry per sample along dim 0 (a list of arrays counts as a list of "
                    "columns)")


def slice_batch(batch: Any, begin: int, end: int) -> Any:
    """Samples [begin, end); arrays are views."""
    return map_columns(batch, lambda column: column[begin:end])


def _join_columns(columns: List[Any]) -> Any:
    first = columns[0]
    if not is_array(first):
        return _same_kind(first, [each for column in columns for each in column])
    shapes = {tuple(column.shape[1:]) for column in columns}
    if len(shapes) > 1:
        raise DataError(f"samples of one step come in batches of different shapes {sorted(shapes)} (without dim 0) and "
                        "cannot be joined. Pad them to one length where batches are made, or use a map-style dataset "
                        "or num_workers=0: then a rank's samples are collated together")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(first, torch.Tensor):
        return torch.cat(columns)
    import numpy

    return numpy.concatenate(columns)


def _join_others(values: List[Any]) -> Any:
    first = values[0]
    for value in values[1:]:
        if type(value) is not type(first) or bool(value != first):
            raise DataError(f"batches of one step disagree in a value that belongs to no sample: {first!r} and "
                            f"{value!r}; give it one entry per sample")
    return first


def join_batches(batches: List[Any]) -> Any:
    """The samples of all `batches`, in order, in one. Errors: DataError when they do not fit together."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if any(type(batch) is not type(first) for batch in batches):
        raise DataError(f"batches of one step differ in type: {sorted({type(batch).__name__ for batch in batches})}")
    if isinstance(first, Mapping):
        if any(batch.keys() != first.keys() for batch in batches):
            raise DataError("batches of one step differ in their keys: "
                            f"{sorted({str(sorted(map(str, batch.keys()))) for batch in batches})}")
        return _same_mapping(first, {key: join_batches([batch[key] for batch in batches]) for key in first})
    if isinstance(first, (list, tuple)):
        if not any(_is_structure(batch) for batch in batches):
            return _join_columns(batches)
        if any(len(batch) != len(first) for batch in batches):
            raise DataError("batches of one step differ in their number of columns")
        return _same_kind(first, [join_batches(list(values)) for values in zip(*batches)])
    return _join_columns(batches) if _is_column(first) else _join_others(batches)


def part_of_pieces(pieces: List[Any], part: int, parts: int) -> Any:
    """Part number `part` of the samples that `pieces` hold together; a batch of 0 samples where it has none."""
    sizes = [samples_in(piece) for piece in pieces]
    begin, end = bounds(sum(sizes), part, parts)
    if begin == end:
        return slice_batch(pieces[0], 0, 0)
    kept, at = [], 0
    for piece, size in zip(pieces, sizes):
        first, last = max(begin - at, 0), min(end - at, size)
        if first < last:
            kept.append(piece if last - first == size else slice_batch(piece, first, last))
        at += size
    return join_batches(kept)


def plain(batch: Any) -> Any:
    """`batch` with every mapping a dict and every named tuple a tuple."""
    if isinstance(batch, Mapping):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        values = [plain(each) for each in batch]
        return tuple(values) if isinstance(batch, tuple) else values
    return batch


def move_tensors(batch: Any, device: Any = None, non_blocking: bool = False, pin: bool = False) -> Any:
    """`batch` with its torch tensors in pinned memory (`pin`) and on `device` (None = where they are)."""
    torch = sys.modules.get("torch")
    if torch is None:
        return batch

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if pin:
            value = value.pin_memory()
        return value if device is None else value.to(device, non_blocking=non_blocking)

    return map_columns(batch, move, move)
