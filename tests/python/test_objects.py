"""Python objects as bytes: what goes in comes out, nothing else goes in, and no bytes do harm."""

import math
import os
import random
from collections import OrderedDict, defaultdict, namedtuple
from enum import IntEnum

import numpy as np
import pytest

from tessera.errors import DataError
from tessera.utils import objects
from tessera.utils.objects import decode, encode, load_objects, save_objects


class Colour(IntEnum):
    RED = 1


class Foo:
    def __reduce__(self):
        return (os.system, ("true",))


Pair = namedtuple("Pair", "a b")

VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**63,
    -(2**63) - 1,
    10**300,
    -(10**300),
    0.0,
    -0.0,
    1e-320,
    math.inf,
    3.5,
    1 - 2j,
    "",
    "ünï\U0001f600",
    "\ud800",
    b"",
    b"\x00\xff",
    bytearray(b"xy"),
    [],
    (),
    {},
    set(),
    frozenset(),
    [[], [[]]],
    (1, (2, "3")),
    {1: "a", "b": [2], (3, 4): {5: 6}, None: 0, 2.5: True, b"k": b"v", frozenset({1}): 1},
    {1, "a", (2, 3)},
    frozenset({b"x"}),
    OrderedDict([("z", 1), ("a", 2)]),
    {"z": 1, "a": 2},
]
ARRAYS = [np.arange(6, dtype=kind).reshape(2, 3) for kind in "bBhHiIlLefd"] + [
    np.array(3.0),
    np.zeros((0, 5)),
    np.array([True, False]),
    np.array([1 + 2j]),
    np.array(["a", "bcd"]),
    np.array([b"ab"]),
    np.array([""]),
    np.array([], "U"),
    np.arange(6, dtype=">i4"),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(["2024-01-01"], "M8[D]"),
    np.array([5], "m8[25s]"),
    np.arange(10)[::-2],
]


def same(left, right) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))  # the order too
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and np.array_equal(left, right)
    if isinstance(left, float):
        return math.copysign(1, left) == math.copysign(1, right) and left == right
    return left == right


# A set of several things is printed in an order of the process.
@pytest.mark.parametrize("value", VALUES, ids=lambda value: "a set" if isinstance(value, set) else repr(value)[:30])
def test_round_trip(value):
    assert same(decode(encode(value)), value)


@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: f"{value.dtype}{value.shape}")
def test_arrays(value):
    copy = decode(encode({"x": value}))["x"]
    assert copy.shape == value.shape and copy.dtype.kind == value.dtype.kind and np.array_equal(copy, value)
    assert copy.dtype == value.dtype or not value.dtype.itemsize
    copy[...] = copy  # writable


def test_numpy_scalars_and_dtypes():
    for value in [
        np.float32(1.5),
        np.int8(-3),
        np.bool_(True),
        np.float16(2),
        np.str_("ab"),
        np.str_(""),
        np.datetime64("2024-01-01"),
    ]:
        copy = decode(encode(value))
        assert type(copy) is type(value) and copy == value
    assert math.isnan(decode(encode(math.nan))) and math.isnan(decode(encode(np.float32("nan"))))
    assert decode(encode(np.dtype("<f2"))) == np.dtype("float16")


@pytest.mark.parametrize(
    "value, place",
    [
        ([1, 2, {"model": Foo()}], r"^\[2\]\['model'\]: .*Foo"),
        ((Colour.RED,), r"^\[0\]: .*Colour"),
        (Pair(1, 2), "Pair"),
        (defaultdict(list), "defaultdict"),
        ({"a": (0, {Foo(): 1})}, r"^\['a'\]\[1\] key .*Foo"),
        (len, "builtin"),
        (Foo, "type"),
        ([np.array([Foo()])], r"^\[0\]: .*object"),
        ({"r": np.zeros(2, "i4,f4")}, r"^\['r'\]: "),
        (range(3), "range"),
    ],
)
def test_anything_else_is_refused_by_place(value, place):
    with pytest.raises(TypeError, match=place):
        encode(value)


def test_a_list_in_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(TypeError, match="itself"):
        encode(value)


def test_torch():
    torch = pytest.importorskip("torch")
    for name in objects.TORCH_DTYPES:
        dtype = getattr(torch, name, None)
        if dtype is None:
            continue
        tensor = torch.arange(6).to(torch.uint8).view(torch.uint8).repeat(16)[:96].view(dtype)
        copy = decode(encode([tensor, dtype]))
        assert copy[1] is dtype and copy[0].dtype is dtype and copy[0].shape == tensor.shape
        assert torch.equal(copy[0].view(torch.uint8), tensor.view(torch.uint8)), name
    for tensor in [
        torch.tensor(2.5),
        torch.zeros(0, 3, dtype=torch.bfloat16),
        torch.arange(6.0).reshape(2, 3).T,
        torch.arange(6.0)[::2],
        torch.tensor([1 + 2j]).conj(),
        torch.nn.Parameter(torch.ones(2)),
    ]:
        copy = decode(encode(tensor))
        assert type(copy) is torch.Tensor and torch.equal(copy, tensor.detach()) and not copy.requires_grad
    size, device = decode(encode((torch.Size([2, 3]), torch.device("cuda:1"))))
    assert size == torch.Size([2, 3]) and type(size) is torch.Size and device == torch.device("cuda:1")
    state = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.1).state_dict()
    assert decode(encode(state)) == state
    for bad in [torch.ones(2).to_sparse(), torch.ones(2, device="meta")]:
        with pytest.raises(TypeError, match=r"^\['t'\]: a tensor"):
            encode({"t": bad})


def test_files(tmp_path):
    path = tmp_path / "state.bin"
    save_objects(path, {"step": 3, "x": np.arange(4)})
    save_objects(path, {"step": 4, "x": np.arange(5)})
    assert same(load_objects(path), {"step": 4, "x": np.arange(5)})
    assert [p.name for p in tmp_path.iterdir()] == ["state.bin"]
    with pytest.raises(TypeError):
        save_objects(path, {"step": Foo()})
    assert load_objects(path)["step"] == 4  # a failed save leaves the old file
    whole = path.read_bytes()
    for data in [b"", b"PK\x03\x04", whole[:-1], whole + b"x", whole[:10]]:
        path.write_bytes(data)
        with pytest.raises(DataError, match="state.bin"):
            load_objects(path)


def test_every_flipped_bit_of_a_file_is_found(tmp_path):
    path = tmp_path / "state.bin"
    save_objects(path, {"a": [1, 2.5, "text"], "b": np.arange(3)})
    whole = path.read_bytes()
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :])
        with pytest.raises(DataError):
            load_objects(path)


def random_value(rng: random.Random, depth: int = 0):
    if depth < 4 and rng.random() < 0.5:
        items = [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        kind = rng.randrange(4)
        if kind == 0:
            return items
        if kind == 1:
            return tuple(items)
        if kind == 2:
            return {f"k{i}": item for i, item in enumerate(items)}
        return {rng.randrange(100) for _ in items}
    return rng.choice(
        [
            None,
            True,
            rng.randrange(-(10**30), 10**30),
            rng.random(),
            "text" * rng.randrange(3),
            rng.randbytes(5),
            np.arange(rng.randrange(5)),
            np.float32(rng.random()),
            np.array("ab"),
        ]
    )


@pytest.mark.parametrize("with_torch", [False, True])
def test_damaged_bytes_never_do_more_than_raise(with_torch, long_run):
    rng = random.Random(7)
    for _ in range(20000 if long_run else 1500):
        value = [random_value(rng)]
        if with_torch:
            torch = pytest.importorskip("torch")
            value += [
                torch.arange(rng.randrange(4)).to(rng.choice([torch.float32, torch.bfloat16])),
                torch.Size([2]),
                torch.int8,
                torch.device("cpu"),
            ]
        data = bytearray(encode(value))
        for _ in range(rng.randrange(1, 4)):
            kind, at = rng.randrange(4), rng.randrange(len(data))
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at : at + rng.randrange(1, 9)]
            elif kind == 2:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            else:
                data[at : at + 8] = rng.choice([b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\0" * 8])
            data = data or bytearray(b"N")
        try:
            decode(bytes(data))
        except DataError:
            pass


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"?",
        b"l" + b"\xff" * 8,
        b"s" + (10**15).to_bytes(8, "little"),
        b"NN",
        b"l" * 100000,
        b"d" + (2).to_bytes(8, "little") + b"NNNN",
        b"d" + (1).to_bytes(8, "little") + b"l" + bytes(8) + b"N",
        b"S" + (2).to_bytes(8, "little") + b"TT",
        b"s\x01" + bytes(7) + b"\xff",
        b"a\x03" + bytes(7) + b"|O8" + bytes(8),
        b"a\x03" + bytes(7) + b"<U0\x01" + bytes(7) + (2**40).to_bytes(8, "little"),
        b"g\x0b" + bytes(7) + b"|S999999999",
        b"a\x03" + bytes(7) + b"<f4\x02" + bytes(7) + bytes(8) + (2**62).to_bytes(8, "little"),
    ],
    ids=range(14),
)
def test_known_attacks(data):
    with pytest.raises(DataError):
        decode(data)
