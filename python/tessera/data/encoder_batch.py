"""Labels and types of tokens as encoders' batches have them: checked here, where the caller's names are known. No torch."""

from __future__ import annotations

from typing import Any, Optional

from tessera.data.documents import IGNORED
from tessera.data.ids import ids_of
from tessera.errors import InvalidArgument


def counted_labels(labels: Any, loss_mask: Any) -> Any:
    """Megatron's labels as Hugging Face has them: -100 where there is no loss. Errors: InvalidArgument for a label that counts and
    is none."""
    import numpy as np

    if labels is None:
        return None
    labels = ids_of("labels", labels)
    counts = labels >= 0 if loss_mask is None else np.asarray(loss_mask) != 0
    if counts.shape != labels.shape:
        raise InvalidArgument(f"loss_mask has the shape {list(counts.shape)}, labels {list(labels.shape)}; they must be the same")
    wrong = np.argwhere(counts & (labels < 0))
    if len(wrong):
        row, column = wrong[0]
        raise InvalidArgument(f"loss_mask counts position {column} of sample {row}, whose label is {labels[row, column]}")
    return np.where(counts, labels, IGNORED)


def token_types_of(token_types: Any, shape: Any) -> Optional[Any]:
    """int64 [batch, seq]; one row is that of all samples. Errors: InvalidArgument."""
    import numpy as np

    types = ids_of("token_type_ids", token_types)
    if types is None or types.shape == shape:
        return types
    if types.shape in ((1, shape[1]), (shape[1],)):
        return np.broadcast_to(types, shape)
    raise InvalidArgument(f"token_type_ids have the shape {list(types.shape)}, input_ids {list(shape)}; they must be the same "
                          "[batch, sequence]")


CLASS, CLASSES, NUMBERS = "single_label_classification", "multi_label_classification", "regression"


def problem_of(named: Optional[str], count: int, labels: Any) -> str:
    """What a head with `count` outputs is trained on: what its config names, otherwise Transformers' rule, by the type of labels."""
    import numpy as np

    if named is not None:
        return named
    if count == 1:
        return NUMBERS
    return CLASS if labels is None or np.asarray(labels).dtype.kind in "iub" else CLASSES


def sample_targets_of(name: str, labels: Any, samples: int, count: int) -> Any:
    """fp32 [batch, count] of a regression's numbers, or of ones for the classes that a sample has. Errors: InvalidArgument."""
    import numpy as np

    array = np.asarray(labels)
    if array.shape != (samples, count) and not (count == 1 and array.shape == (samples,)):
        raise InvalidArgument(f"{name} have the shape {list(array.shape)}; they must be [{samples}, {count}]: {count} for each sample")
    array = array.astype(np.float32).reshape(samples, count)
    if not np.isfinite(array).all():
        raise InvalidArgument(f"{name} of sample {int(np.argwhere(~np.isfinite(array))[0][0])} are not finite")
    return array


def sample_labels_of(name: str, labels: Any, samples: int) -> Optional[Any]:
    """int64 [batch] of labels [batch] or [batch, 1]. Errors: InvalidArgument."""
    import numpy as np

    if labels is None:
        return None
    array = np.asarray(labels)
    if array.dtype.kind == "f":
        raise InvalidArgument(f"{name} are of type {array.dtype}, and this model's loss is the cross-entropy of one class for each sample; "
                              "give integers")
    if array.dtype.kind == "b":
        array = array.astype(np.int64)
    array = ids_of(name, array)
    if array.shape not in ((samples,), (samples, 1)):
        raise InvalidArgument(f"{name} have the shape {list(array.shape)}; they must be one class for each of the {samples} samples")
    return array.reshape(samples)
