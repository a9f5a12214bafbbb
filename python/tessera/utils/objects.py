"""Python objects as bytes, without pickle: `encode`, `decode`, and the same in a file, `save_objects`, `load_objects`.

A value is a tag of one byte and what belongs to it; numbers are little-endian, lengths and counts u64. What is known
here is data only: reading bytes from anywhere can make values, never run code. Damaged bytes raise DataError.
"""

from __future__ import annotations

import os
import re
import struct
import sys
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any, Callable, Dict, List, Union

import numpy as np

from tessera.errors import DataError

MAGIC = b"TESSOBJ1"
_HEADER = struct.Struct("<8sQI")  # magic, bytes that follow, their CRC-32
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_MOST_LEVELS = 200  # below Python's own limit, so that a cycle is told as what it is
_NUMPY_DTYPE = re.compile(r"[<>|=](?:[biufcSU]\d{1,9}|[mM]8(?:\[\d*[a-zA-Zμ]+\])?)")

TORCH_DTYPES = (
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)


def encode(obj: Any) -> bytes:
    """`obj` as bytes: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, OrderedDict, set,
    frozenset, numpy arrays, scalars and dtypes, torch tensors (dense ones, from any device), dtypes, sizes and devices,
    nested at will. Errors: TypeError naming the place of anything else, such as `[2]['model']: Foo`."""
    chunks: List[bytes] = []
    _write(chunks, obj, "", 0)
    return b"".join(chunks)


def decode(data: Union[bytes, bytearray, memoryview]) -> Any:
    """What was encoded. Tensors come on the CPU, without gradients. Errors: DataError."""
    reader = _Reader(data)
    try:
        value = reader.value(0)
    except DataError:
        raise
    except (ValueError, TypeError, OverflowError, MemoryError, RuntimeError) as error:  # such as an unhashable key
        raise DataError(f"damaged object data near byte {reader.at}: {error}") from None
    if reader.at != len(reader.data):
        raise DataError(f"damaged object data: {len(reader.data) - reader.at} bytes too many")
    return value


def to_file(obj: Any) -> bytes:
    """`encode(obj)` behind a mark, its length and its CRC-32: the bytes of a whole file."""
    payload = encode(obj)
    return _HEADER.pack(MAGIC, len(payload), zlib.crc32(payload)) + payload


def from_file(data: Any) -> Any:
    """What to_file wrote. Errors: DataError."""
    data = memoryview(data)
    if len(data) < _HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise DataError("not a file of Python objects written by Tessera")
    _, size, checksum = _HEADER.unpack_from(data)
    payload = data[_HEADER.size :]
    if len(payload) != size:
        raise DataError(f"{len(payload)} bytes of objects where {size} were written; the file was cut or changed")
    if zlib.crc32(payload) != checksum:
        raise DataError("the checksum is wrong; the file was damaged")
    return decode(payload)


def save_objects(path: Union[str, os.PathLike], obj: Any) -> None:
    """Writes to_file(obj) to a file that appears at once and whole. Errors: TypeError, OSError."""
    write_whole(path, to_file(obj))


def load_objects(path: Union[str, os.PathLike]) -> Any:
    """What save_objects wrote. Errors: DataError naming the file; OSError."""
    try:
        return from_file(Path(path).read_bytes())
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def write_whole(path: Union[str, os.PathLike], data: bytes) -> None:
    """Writes a file that appears at once and whole. Errors: IoError."""
    from tessera import _C

    _C.publish_file(path, data)


def array_of(value: Any) -> Any:
    """The numpy array of a torch tensor; anything else as it is."""
    return value.detach().cpu().numpy() if is_torch(value) else value


def is_torch(value: Any, name: str = "Tensor") -> bool:
    """Whether `value` is an instance of that class of torch; never imports it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, name))


def tensor_to_bytes(tensor: Any) -> bytes:
    """The elements of a dense torch tensor of any dtype in TORCH_DTYPES, row by row."""
    torch = sys.modules["torch"]
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def tensor_from_bytes(dtype: str, shape: Any, data: Any) -> Any:
    """The torch tensor of that dtype (a name in TORCH_DTYPES) and shape. Errors: DataError, ValueError."""
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"{dtype!r} is no dtype of torch")
    torch = _torch()
    kind = getattr(torch, dtype, None)
    if kind is None:
        raise DataError(f"this PyTorch ({torch.__version__}) has no torch.{dtype}")
    if _count(shape) * kind.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes are no tensor of shape {tuple(shape)} and dtype {dtype}")
    if not len(data):
        return torch.empty(tuple(shape), dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).reshape(tuple(shape))


def dtype_name(dtype: Any) -> str:
    """`float32` for torch.float32."""
    return str(dtype).rpartition(".")[2]


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise DataError("the data holds tensors of PyTorch, which is not installed here") from None
    return torch


def _count(shape: Any) -> int:
    count = 1
    for size in shape:
        count *= int(size)
    return count


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return _U64.pack(len(data)) + data


def _shape(shape: Any) -> bytes:
    return _U64.pack(len(shape)) + b"".join(_U64.pack(int(size)) for size in shape)


def _write(out: List[bytes], obj: Any, path: str, level: int) -> None:
    if level > _MOST_LEVELS:
        raise TypeError(f"{_place(path[:200])}nested deeper than {_MOST_LEVELS} levels; does it hold itself?")
    kind = type(obj)
    writer = _WRITERS.get(kind)
    if writer is not None:
        writer(out, obj, path, level)
    elif kind is np.ndarray or isinstance(obj, np.generic):
        _write_numpy(out, obj, path)
    elif isinstance(obj, np.dtype):
        out.append(b"y" + _text(_numpy_dtype(obj, path)))
    elif not _write_torch(out, obj, path):
        raise TypeError(
            f"{_place(path)}{_type_name(kind)} cannot be sent or saved without pickle; turn it into lists, dicts, "
            "numbers, text, arrays or tensors first"
        )


def _place(path: str) -> str:
    return f"{path}: " if path else ""


def _type_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _write_int(out: List[bytes], obj: int, path: str, level: int) -> None:
    if -(1 << 63) <= obj < 1 << 63:
        out.append(b"i" + _I64.pack(obj))
    else:
        data = obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True)
        out.append(b"I" + _U64.pack(len(data)) + data)


def _write_items(tag: bytes) -> Callable:
    def write(out: List[bytes], obj: Any, path: str, level: int) -> None:
        out.append(tag + _U64.pack(len(obj)))
        for i, item in enumerate(obj):
            _write(out, item, f"{path}[{i}]", level + 1)

    return write


def _write_set(tag: bytes) -> Callable:
    def write(out: List[bytes], obj: Any, path: str, level: int) -> None:
        out.append(tag + _U64.pack(len(obj)))
        for item in obj:
            _write(out, item, f"{path}{{{item!r}}}"[:500], level + 1)

    return write


def _write_dict(tag: bytes) -> Callable:
    def write(out: List[bytes], obj: dict, path: str, level: int) -> None:
        out.append(tag + _U64.pack(len(obj)))
        for key, value in obj.items():
            _write(out, key, f"{path} key {key!r}"[:500], level + 1)
            _write(out, value, f"{path}[{key!r}]", level + 1)

    return write


def _write_data(tag: bytes) -> Callable:
    return lambda out, obj, path, level: out.extend((tag + _U64.pack(len(obj)), bytes(obj)))


_WRITERS: Dict[type, Callable] = {
    type(None): lambda out, obj, path, level: out.append(b"N"),
    bool: lambda out, obj, path, level: out.append(b"T" if obj else b"F"),
    int: _write_int,
    float: lambda out, obj, path, level: out.append(b"f" + _F64.pack(obj)),
    complex: lambda out, obj, path, level: out.append(b"c" + _COMPLEX.pack(obj.real, obj.imag)),
    str: lambda out, obj, path, level: out.append(b"s" + _text(obj)),
    bytes: _write_data(b"b"),
    bytearray: _write_data(b"B"),
    list: _write_items(b"l"),
    tuple: _write_items(b"t"),
    dict: _write_dict(b"d"),
    OrderedDict: _write_dict(b"o"),
    set: _write_set(b"S"),
    frozenset: _write_set(b"Z"),
}


def _numpy_dtype(dtype: np.dtype, path: str) -> str:
    if not _NUMPY_DTYPE.fullmatch(dtype.str):
        raise TypeError(f"{_place(path)}numpy data of dtype {dtype} cannot be sent or saved without pickle")
    return dtype.str


def _write_numpy(out: List[bytes], obj: Any, path: str) -> None:
    if isinstance(obj, np.ndarray) and not obj.dtype.itemsize:
        obj = obj.astype(f"{obj.dtype.kind}1")
    header = _text(_numpy_dtype(obj.dtype, path))
    if isinstance(obj, np.generic):
        out.append(b"g" + header + obj.tobytes()[: obj.dtype.itemsize])  # "" has bytes, but no size
    else:
        out.extend((b"a" + header + _shape(obj.shape), obj.tobytes()))


def _write_torch(out: List[bytes], obj: Any, path: str) -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if type(obj) in (torch.Tensor, torch.nn.Parameter):
        name = dtype_name(obj.dtype)
        if (
            obj.layout != torch.strided
            or getattr(obj, "is_quantized", False)
            or obj.device.type == "meta"
            or name not in TORCH_DTYPES
        ):
            raise TypeError(
                f"{_place(path)}a tensor with layout {obj.layout}, dtype {obj.dtype} on {obj.device} cannot be sent "
                "or saved; make it dense, with values, first"
            )
        out.extend((b"A" + _text(name) + _shape(obj.shape), tensor_to_bytes(obj)))
    elif isinstance(obj, torch.dtype):
        out.append(b"D" + _text(dtype_name(obj)))
    elif isinstance(obj, torch.Size):
        out.append(b"z" + _shape(obj))
    elif isinstance(obj, torch.device):
        out.append(b"v" + _text(str(obj)))
    else:
        return False
    return True


class _Reader:
    def __init__(self, data: Any):
        self.data = memoryview(data).cast("B")
        self.at = 0

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.at:
            raise DataError(f"damaged object data: {size} bytes expected at byte {self.at} of {len(self.data)}")
        self.at += size
        return self.data[self.at - size : self.at]

    def unpack(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))

    def length(self) -> int:
        """A number of things that take at least a byte each, so that no damaged one asks for memory."""
        count = self.unpack(_U64)[0]
        if count > len(self.data) - self.at:
            raise DataError(f"damaged object data: {count} items announced at byte {self.at} of {len(self.data)}")
        return count

    def text(self) -> str:
        return str(self.take(self.length()), "utf-8", "surrogatepass")

    def shape(self) -> tuple:
        return tuple(self.unpack(_U64)[0] for _ in range(self.length()))

    def items(self, level: int) -> list:
        return [self.value(level + 1) for _ in range(self.length())]

    def mapping(self, kind: type, level: int) -> Any:
        result = kind()
        for i in range(self.length()):
            key = self.value(level + 1)
            result[key] = self.value(level + 1)
            if len(result) != i + 1:
                raise DataError(f"damaged object data: a key twice before byte {self.at}")
        return result

    def unordered(self, kind: type, level: int) -> Any:
        items = self.items(level)
        result = kind(items)
        if len(result) != len(items):
            raise DataError(f"damaged object data: a member twice before byte {self.at}")
        return result

    def numpy_dtype(self) -> np.dtype:
        text = self.text()
        if not _NUMPY_DTYPE.fullmatch(text):
            raise DataError(f"damaged object data: {text[:40]!r} is no numpy dtype")
        return np.dtype(text)

    def array(self) -> np.ndarray:
        dtype, shape = self.numpy_dtype(), self.shape()
        if not dtype.itemsize:  # numpy makes it 1, so that no bytes would become memory
            raise DataError(f"damaged object data: an array of {dtype}")
        data = self.take(_count(shape) * dtype.itemsize)
        array = np.empty(shape, dtype)
        if len(data):
            array.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
        return array

    def scalar(self) -> Any:
        dtype = self.numpy_dtype()
        if not dtype.itemsize:
            return dtype.type()
        data = self.take(dtype.itemsize)
        array = np.empty(1, dtype)
        array.view(np.uint8)[:] = np.frombuffer(data, np.uint8)
        return array[0]

    def tensor(self) -> Any:
        name, shape = self.text(), self.shape()
        if name not in TORCH_DTYPES:
            raise DataError(f"damaged object data: {name[:40]!r} is no dtype of torch")
        kind = getattr(_torch(), name, None)
        return tensor_from_bytes(name, shape, self.take(_count(shape) * (kind.itemsize if kind is not None else 1)))

    def torch_dtype(self) -> Any:
        name = self.text()
        kind = getattr(_torch(), name, None) if name.isidentifier() else None
        if not isinstance(kind, _torch().dtype):
            raise DataError(f"torch.{name[:40]} is no dtype of this PyTorch")
        return kind

    def torch_device(self) -> Any:
        try:
            return _torch().device(self.text())
        except RuntimeError as error:
            raise DataError(f"damaged object data: {error}") from None

    def value(self, level: int) -> Any:
        if level > _MOST_LEVELS:
            raise DataError(f"damaged object data: nested deeper than {_MOST_LEVELS} levels")
        tag = bytes(self.take(1))
        reader = _READERS.get(tag)
        if reader is None:
            raise DataError(f"damaged object data: unknown tag {tag!r} at byte {self.at - 1}")
        return reader(self, level)


_READERS: Dict[bytes, Callable[[_Reader, int], Any]] = {
    b"N": lambda r, level: None,
    b"T": lambda r, level: True,
    b"F": lambda r, level: False,
    b"i": lambda r, level: r.unpack(_I64)[0],
    b"I": lambda r, level: int.from_bytes(r.take(r.length()), "little", signed=True),
    b"f": lambda r, level: r.unpack(_F64)[0],
    b"c": lambda r, level: complex(*r.unpack(_COMPLEX)),
    b"s": lambda r, level: r.text(),
    b"b": lambda r, level: bytes(r.take(r.length())),
    b"B": lambda r, level: bytearray(r.take(r.length())),
    b"l": lambda r, level: r.items(level),
    b"t": lambda r, level: tuple(r.items(level)),
    b"d": lambda r, level: r.mapping(dict, level),
    b"o": lambda r, level: r.mapping(OrderedDict, level),
    b"S": lambda r, level: r.unordered(set, level),
    b"Z": lambda r, level: r.unordered(frozenset, level),
    b"a": lambda r, level: r.array(),
    b"g": lambda r, level: r.scalar(),
    b"y": lambda r, level: r.numpy_dtype(),
    b"A": lambda r, level: r.tensor(),
    b"D": lambda r, level: r.torch_dtype(),
    b"z": lambda r, level: _torch().Size(r.shape()),
    b"v": lambda r, level: r.torch_device(),
}
