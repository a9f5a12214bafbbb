"""Token ids, labels and positions as scripts have them: any integer type, from numpy, torch or lists."""

from typing import Any

from tessera.errors import InvalidArgument


def ids_of(name: str, ids: Any) -> Any:
    """`ids` as an int64 array, which holds -100 beside every id; None of None. Errors: InvalidArgument for what holds no
    integers, or one beyond int64."""
    import numpy as np

    if ids is None:
        return None
    array = np.asarray(ids)
    if array.dtype.kind not in "iu" and array.size:
        raise InvalidArgument(f"{name} are of type {array.dtype}; they must be integers, of any width")
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise InvalidArgument(f"{name} hold {int(array.max())}, which is no id of any vocabulary")
    return array.astype(np.int64, copy=False)
