"""What `gather_for_metrics` takes of each data rank: a row for each sample of the step, as many as Accelerate keeps."""

from __future__ import annotations

import sys
from typing import Any

from tessera.comm.process_group import meet
from tessera.comm.warnings import warn_once
from tessera.state import PartialState
from tessera.utils.operations import data_group, recursively_apply


def is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def holds_objects(data: Any, loader: Any, asked: bool) -> bool:
    """Whether `data` is gathered as objects: because it is `asked` for or there is anything but tensors in it. Of the last
    batch a data rank may have nothing, and see nothing in its lists, so all agree on it. Collective then."""
    others: list = []
    recursively_apply(others.append, data, test_type=lambda leaf: not is_array(leaf))
    group = data_group()
    if loader is None or not loader.end_of_dataloader or group.size == 1:
        return asked or bool(others)
    told = meet(PartialState()._connected(), "gather_for_metrics()", int(asked or bool(others)))
    return any(values[0] for values in told)


def rows_of_samples(data: Any, loader: Any) -> Any:
    """Tensors computed of the batch that `loader` has just handed out, with no more rows than that has samples here:

    - one number repeated `batch_size` times stands for every sample, however many there are;
    - of the last batch, if it is short, only so many rows are kept as it has samples;
    - a rank without samples gives nothing."""
    samples = None if loader is None else loader.local_samples
    if samples is None:
        return data
    short = loader.is_short_batch
    return recursively_apply(lambda leaf: _rows(leaf, samples, short, loader.repeats), data, test_type=is_array)


def objects_of_samples(data: Any, loader: Any) -> Any:
    """The same for a list of objects; anything else counts as one object."""
    samples = None if loader is None else loader.local_samples
    if samples == 0:
        return []
    one_each = is_array(data) or (isinstance(data, (list, tuple)) and not any(isinstance(item, (list, tuple)) for item in data))
    return data[:samples] if samples is not None and one_each and loader.is_short_batch else data


def _rows(leaf: Any, samples: int, short: bool, repeats: Any) -> Any:
    if len(leaf.shape) == 0:
        return leaf if samples else leaf.reshape(1)[:0]
    rows = leaf.shape[0]
    if rows == samples:
        return leaf
    alike = len(leaf.shape) == 1 and rows > 0 and _alike(leaf)
    if alike and rows == repeats:
        return _repeated(leaf, samples)
    if not short or rows < samples:
        return leaf
    if not alike and samples:
        warn_once(f"gather_for_metrics got {rows} rows for the {samples} samples this rank has of the last batch, and keeps the "
                  f"first {samples}, as Accelerate does. Give it one row per sample, or use gather()")
    return leaf[:samples]


def _alike(leaf: Any) -> bool:
    first = leaf[:1]
    return bool(((leaf == first) | ((leaf != leaf) & (first != first))).all())


def _repeated(leaf: Any, samples: int) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):
        return leaf[:1].repeat(samples)
    return leaf[:1].repeat(samples, axis=0)
