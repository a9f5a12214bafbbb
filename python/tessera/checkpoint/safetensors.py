"""safetensors files from torch tensors or numpy arrays, without the package: a JSON header, then the tensors' bytes. Headers are
read by the C++ reader alone."""

from __future__ import annotations

import json
from typing import Any, Dict, Optional

import numpy as np

from tessera.errors import CheckpointError, DataError
from tessera.utils.objects import dtype_name, is_torch, tensor_from_bytes, tensor_to_bytes

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_SIZES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}


def is_tensor(value: Any) -> bool:
    return is_torch(value) or isinstance(value, np.ndarray)


def same_memory(tensor: Any) -> tuple:
    """Equal for tensors that are one and the same in memory (tied weights), not for two views of one storage."""
    if is_torch(tensor):
        return (
            "torch",
            str(tensor.device),
            tensor.data_ptr() or id(tensor),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
        )
    return ("numpy", tensor.__array_interface__["data"][0], tensor.shape, tensor.strides, tensor.dtype.str)


def to_bytes(tensors: Dict[str, Any], metadata: Optional[Dict[str, str]] = None) -> bytes:
    """A whole file. Errors: TypeError naming the tensor whose dtype the format lacks."""
    header: Dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    chunks, at = [], 0
    for name in sorted(
        tensors, key=lambda key: (-_SIZES.get(_type_of(tensors[key]), 0), key)
    ):  # keeps all of them aligned
        tensor = tensors[name]
        kind = _type_of(tensor)
        if kind not in _SIZES:
            raise TypeError(f"'{name}': safetensors files hold no {tensor.dtype}")
        data = (
            tensor_to_bytes(tensor)
            if is_torch(tensor)
            else np.ascontiguousarray(tensor).astype(tensor.dtype.newbyteorder("<"), copy=False).tobytes()
        )
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at + len(data)]}
        chunks.append(data)
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text] + chunks)


def from_bytes(data: Any, torch: bool, origin: str) -> Dict[str, Any]:
    """The tensors of a whole file, which messages call `origin`, in torch or numpy (bfloat16 and 8-bit floats need torch).
    Errors: DataError."""
    from tessera import _C

    try:
        entries = _C.safetensors_entries(data, origin)
    except CheckpointError as error:
        raise DataError(str(error)) from None
    body = memoryview(data)
    try:
        return {name: _tensor(name, kind, shape, body[begin:end], torch) for name, kind, shape, begin, end in entries}
    except DataError as error:
        raise DataError(f"{origin}: {error}") from None


def _tensor(name: str, kind: str, shape: tuple, data: memoryview, torch: bool) -> Any:
    if torch:
        return tensor_from_bytes(_DTYPES[kind], shape, data)
    if kind in ("BF16", "F8_E4M3", "F8_E5M2"):
        raise DataError(f"tensor '{name[:80]}' has dtype {_DTYPES[kind]}, which numpy lacks; install PyTorch to read it")
    return np.frombuffer(bytearray(data), np.dtype(_DTYPES[kind]).newbyteorder("<")).reshape(shape)


def _type_of(tensor: Any) -> str:
    return _NAMES.get(dtype_name(tensor.dtype) if is_torch(tensor) else tensor.dtype.newbyteorder("=").name, "")
