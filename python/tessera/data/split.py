"""Sharing out inputs: what `split_between_processes` gives each process."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tessera.utils.objects import is_torch


def bounds(length: int, index: int, count: int) -> tuple:
    """Begin and end of part `index` of `count`: contiguous, the first ones longer by one where it does not divide."""
    each, extra = divmod(length, count)
    begin = index * each + min(index, extra)
    return begin, begin + each + (index < extra)


def part_of(inputs: Any, index: int, count: int, apply_padding: bool = False) -> Any:
    """Part `index` of `count` of a list, tuple, array, tensor, Dataset, or of every value of a dict (all of one
    length). With `apply_padding`, shorter parts repeat the last element of the whole. Anything else is returned as it
    is. Errors: ValueError for a dict whose values differ in length, or for padding from nothing."""
    if isinstance(inputs, dict):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"all values of a dict that is split between processes must have one length, not {lengths}"
            )
        return {key: part_of(value, index, count, apply_padding) for key, value in inputs.items()}
    if not (isinstance(inputs, (list, tuple, np.ndarray)) or is_torch(inputs) or _is_dataset(inputs)):
        return inputs
    begin, end = bounds(len(inputs), index, count)
    missing = -(-len(inputs) // count) - (end - begin) if apply_padding else 0
    if _is_dataset(inputs):
        return inputs.select(list(range(begin, end)) + [len(inputs) - 1] * missing)
    part = inputs[begin:end]
    if missing == 0:
        return part
    if isinstance(inputs, np.ndarray):
        return np.concatenate([part, np.repeat(inputs[-1:], missing, axis=0)])
    if is_torch(inputs):
        return sys.modules["torch"].cat([part, inputs[-1:].expand(missing, *inputs.shape[1:])])
    return part + type(inputs)([inputs[-1]]) * missing


def _is_dataset(value: Any) -> bool:
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(value, datasets.Dataset)
