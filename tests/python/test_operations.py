"""Nested data over ranks: every operation against what one process would compute from all ranks' data."""

import os
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
from thread_ranks import Ranks

from tessera.errors import DistributedOperationException
from tessera.state import AcceleratorState, PartialState
from tessera.utils import operations as ops
from tessera.utils.dataclasses import MegatronLMPlugin, TensorInformation

Point = namedtuple("Point", "x y")


@pytest.fixture
def ranks(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "MEGATRON_LM_")):
            monkeypatch.delenv(name)
    return Ranks(monkeypatch)


def values(tree):
    """Nested data as lists and numbers, so that it can be compared."""
    return ops.listify(tree)


def both(shape, fill, kind="float32"):
    """The same array for numpy and, where it is installed, torch."""
    arrays = [np.full(shape, fill, kind)]
    try:
        import torch
    except ImportError:
        return arrays
    return arrays + [torch.full(shape, fill, dtype=getattr(torch, kind))]


def test_gather_nested(ranks):
    def work(rank):
        tree = {
            "a": both((2, 3), rank),
            "p": Point(np.array(rank), (rank + 0.5, [np.int8([rank])])),
            "o": OrderedDict(n=rank),
        }
        return ops.gather(tree)

    for tree in ranks.run(3, work):
        rows = [[float(rank)] * 3 for rank in range(3) for _ in range(2)]
        assert all(values(array) == rows for array in tree["a"])
        assert isinstance(tree["p"], Point) and values(tree["p"]) == Point([0, 1, 2], ([0.5, 1.5, 2.5], [[0, 1, 2]]))
        assert type(tree["o"]) is OrderedDict and tree["o"]["n"].tolist() == [0, 1, 2]
        assert tree["p"].y[1][0].dtype == np.int8


def test_gather_is_a_meeting_and_one_exchange_and_takes_uneven_lengths(ranks, monkeypatch):
    calls = []
    for name in ("meet", "all_gather_bytes", "all_gather", "all_reduce", "broadcast", "broadcast_bytes", "barrier"):
        own = getattr(ranks.module.Communicator, name)
        monkeypatch.setattr(ranks.module.Communicator, name, lambda *given, own=own, name=name: calls.append(name) or own(*given))

    def work(rank):
        PartialState()
        return values(ops.gather([np.arange(rank), np.ones((rank, 2))]))

    assert ranks.run(4, work) == [[[0, 0, 1, 0, 1, 2], [[1.0, 1.0]] * 6]] * 4
    assert calls[:4] == ["meet"] * 4 and calls[4:] == ["all_gather_bytes"] * 4


@pytest.mark.parametrize(
    "left, right",
    [
        (np.ones((1, 2)), np.ones((1, 3))),
        (np.ones(2, "f4"), np.ones(2, "f8")),
        ([np.ones(1)], [np.ones(1), np.ones(1)]),
    ],
)
def test_gather_of_what_does_not_fit(ranks, left, right):
    results = ranks.run(2, lambda rank: ops.gather((left, right)[rank]), failing=True)
    assert all(isinstance(result, DistributedOperationException) for result in results)


def test_gather_of_torch(ranks):
    torch = pytest.importorskip("torch")

    def work(rank):
        half = torch.tensor([rank + 0.5], dtype=torch.bfloat16, requires_grad=True)
        return ops.gather(
            [half, torch.tensor(rank), torch.arange(6).reshape(2, 3).T[rank : rank + 1], torch.tensor([rank > 0])]
        )

    for half, scalar, row, flag in ranks.run(2, work):
        assert half.dtype == torch.bfloat16 and half.tolist() == [0.5, 1.5] and not half.requires_grad
        assert scalar.tolist() == [0, 1] and row.tolist() == [[0, 3], [1, 4]] and flag.tolist() == [False, True]


def test_other_leaves_are_refused(ranks):
    for operation in (ops.gather, ops.reduce, ops.broadcast):
        with pytest.raises(TypeError, match="str"):
            operation(["text"])


def test_one_process_gives_back_what_it_got(ranks):
    tree = {"a": np.array(3.0), "b": [1]}
    assert ops.gather(tree) is tree and ops.broadcast(tree) is tree and ops.gather_object("x") == "x"
    copy = ops.reduce(tree, "sum")
    assert copy["a"] == 3 and copy["a"] is not tree["a"]


@pytest.mark.parametrize(
    "kind", ["float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "bool", "complex64"]
)
@pytest.mark.parametrize("reduction", ["sum", "mean", "max", "none"])
def test_reduce(ranks, kind, reduction):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, kind)
    own = [torch.tensor([[1, 0], [rank, 3]]).to(dtype) for rank in range(3)]
    exact = dtype.is_floating_point or dtype.is_complex
    if (reduction == "mean" and not exact) or (reduction == "max" and dtype.is_complex):
        with pytest.raises(TypeError):
            ranks.run(3, lambda rank: ops.reduce(own[rank], reduction))
        return
    wide = torch.stack(own).to(torch.complex128 if dtype.is_complex else torch.float64)
    results = ranks.run(3, lambda rank: ops.reduce([own[rank]], reduction)[0])
    for rank, result in enumerate(results):
        expected = {
            "sum": lambda: wide.sum(0),
            "mean": lambda: wide.mean(0),
            "max": lambda: wide.amax(0),
            "none": lambda: wide[rank],
        }
        assert result.dtype == dtype and torch.allclose(
            result.to(wide.dtype), expected[reduction]().to(dtype).to(wide.dtype)
        )
        assert result is not own[rank]


def test_reduce_of_numbers_and_arrays(ranks):
    def work(rank):
        tree = {
            "n": rank + 1,
            "f": float(rank),
            "a": np.array([rank, 2], np.float16),
            "s": np.float32(rank),
            "u": np.uint8([rank]),
        }
        return ops.reduce(tree, "sum", scale=2.0)

    for result in ranks.run(3, work):
        assert (
            result["n"] == 12
            and result["f"] == 6.0
            and result["a"].tolist() == [6.0, 12.0]
            and result["a"].dtype == np.float16
        )
        assert result["s"] == 6 and isinstance(result["s"], np.float32) and result["u"].tolist() == [6]
    # A sum that float16 cannot hold, whose mean it can.
    means = ranks.run(3, lambda rank: ops.reduce(np.array([60000.0], np.float16), "mean"))
    assert [mean.tolist() for mean in means] == [[60000.0]] * 3
    with pytest.raises(ValueError, match="median"):
        ops.reduce(1.0, "median")


def test_broadcast(ranks):
    torch = pytest.importorskip("torch")

    def work(rank):
        tensor, array = torch.full((2,), float(rank), requires_grad=True), np.full(2, rank)
        result = ops.broadcast({"t": tensor, "a": [array, rank]}, from_process=1)
        assert result["t"] is tensor and result["a"][0] is array  # in place
        return values(result)

    assert ranks.run(3, work) == [{"t": [1.0, 1.0], "a": [[1, 1], 1]}] * 3
    results = ranks.run(2, lambda rank: ops.broadcast(np.ones(2 + rank)), failing=True)
    assert isinstance(results[1], DistributedOperationException) and "[3]" in str(results[1])


def test_objects(ranks):
    def work(rank):
        gathered = ops.gather_object([{"rank": rank}]), ops.gather_object({"rank": rank}), ops.gather_object(f"r{rank}")
        mine = [rank, {"x": np.arange(rank)}, None]
        same = ops.broadcast_object_list(mine, from_process=2)
        assert same is mine
        return gathered, values(mine)

    for gathered, mine in ranks.run(3, work):
        assert gathered[0] == gathered[1] == [{"rank": rank} for rank in range(3)] and gathered[2] == ["r0", "r1", "r2"]
        assert mine == [2, {"x": [0, 1]}, None]
    results = ranks.run(2, lambda rank: ops.broadcast_object_list([0] * (1 + rank)), failing=True)
    assert isinstance(results[1], DistributedOperationException)
    with pytest.raises(TypeError, match=r"^\[0\]\['f'\]"):
        ranks.run(2, lambda rank: ops.gather_object([{"f": work}]))


def test_only_data_ranks_count_under_a_mesh(ranks):
    def work(rank):
        plugin = MegatronLMPlugin(tp_degree=2, pp_degree=2)
        AcceleratorState(megatron_lm_plugin=plugin, _from_accelerator=True)
        dp = AcceleratorState().mesh.coordinates["dp"]
        padded = ops.pad_across_processes(np.ones(1 + dp))
        return (
            ops.gather(np.array([dp])).tolist(),
            ops.reduce(float(dp), "mean"),
            ops.gather_object([dp]),
            padded.tolist(),
            ops.broadcast(np.array([rank]), from_process=7).tolist(),
        )

    assert ranks.run(8, work) == [([0, 1], 0.5, [0, 1], [1.0, [0.0, 1.0][dp]], [7]) for dp in (0, 0, 1, 1, 0, 0, 1, 1)]


@pytest.mark.parametrize("dim, first", [(0, False), (1, False), (-1, True), (5, False)])
def test_pad_across_processes(ranks, dim, first):
    def work(rank):
        tree = [array for array in both((1 + rank, 2 - rank), rank, "int64")]
        return [array.tolist() for array in ops.pad_across_processes(tree, dim=dim, pad_index=-1, pad_first=first)]

    expected = {
        0: [[[0, 0], [-1, -1]], [[1], [1]]],
        1: [[[0, 0]], [[1, -1], [1, -1]]],
        -1: [[[0, 0]], [[-1, 1], [-1, 1]]],
        5: [[[0, 0]], [[1], [1]]],
    }[dim]
    for rank, arrays in enumerate(ranks.run(2, work)):
        assert all(array == expected[rank] for array in arrays)


def test_pad_of_different_ranks_of_tensors(ranks):
    results = ranks.run(2, lambda rank: ops.pad_across_processes(np.ones((2,) * (rank + 1))), failing=True)
    assert all(
        isinstance(result, DistributedOperationException) and "pad_across_processes" in str(result)
        for result in results
    )


def test_debug_mode_compares_shapes(ranks, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    results = ranks.run(2, lambda rank: ops.gather({"x": np.ones((1 + rank, 2))}), failing=True)
    assert all("Process 1: {'x': [2, 2]}" in str(result) and "gather" in str(result) for result in results)
    assert ranks.run(2, lambda rank: ops.gather([np.ones(1)])[0].tolist()) == [[1.0, 1.0]] * 2


def test_copy_tensor_to_devices(ranks):
    torch = pytest.importorskip("torch")
    results = ranks.run(3, lambda rank: ops.copy_tensor_to_devices(torch.arange(3) if rank == 1 else None))
    assert all(result.tolist() == [0, 1, 2] for result in results)
    with pytest.raises(ValueError, match="2 do"):
        ranks.run(2, lambda rank: ops.copy_tensor_to_devices(torch.ones(1)))


def test_nested_data_without_processes():
    torch = pytest.importorskip("torch")
    tree = {"a": [torch.ones(4, 2)], "b": (np.zeros((4, 1)), "text"), "p": Point(torch.ones(4), 3)}
    assert ops.find_batch_size(tree) == 4 and ops.ignorant_find_batch_size({}) is None
    with pytest.raises(TypeError):
        ops.find_batch_size(["text"])
    with pytest.raises(ValueError):
        ops.find_batch_size([])
    part = ops.slice_tensors(tree, slice(0, 2))
    assert (
        part["a"][0].shape == (2, 2)
        and part["b"][0].shape == (2, 1)
        and part["b"][1] == "text"
        and type(part["p"]) is Point
    )
    whole = ops.concatenate([{"a": [torch.ones(1)], "b": (np.ones(1),)}, {"a": [torch.zeros(2)], "b": (np.zeros(1),)}])
    assert values(whole) == {"a": [[1, 0, 0]], "b": ([1, 0],)}
    with pytest.raises(TypeError):
        ops.concatenate(["a", "b"])
    assert ops.get_data_structure(tree)["a"][0] == TensorInformation(shape=torch.Size([4, 2]), dtype=torch.float32)
    assert ops.initialize_tensors(ops.get_data_structure([torch.ones(2, 3)]))[0].shape == (2, 3)
    assert (
        ops.get_shape([np.ones((2, 3))]) == [[2, 3]]
        and ops.find_device(tree).type == "cpu"
        and ops.find_device([1]) is None
    )
    single = ops.convert_to_fp32([torch.ones(1, dtype=torch.bfloat16), np.ones(1, np.float16), torch.ones(1).int(), 5])
    assert [str(getattr(x, "dtype", x)) for x in single] == ["torch.float32", "float32", "torch.int32", "5"]
    assert ops.convert_outputs_to_fp32(lambda: torch.ones(1).half())().dtype == torch.float32
    with pytest.raises(TypeError, match="int"):
        ops.recursively_apply(lambda x: x, [1], error_on_other_type=True)
    padded = ops.pad_input_tensors(torch.tensor([[1], [2], [3]]), 3, 2)
    assert padded.tolist() == [[1], [2], [3], [3]]


def test_send_to_device():
    torch = pytest.importorskip("torch")

    class Odd:
        def to(self, device):
            return f"on {device}"

    moved = ops.send_to_device({"a": torch.ones(2), "b": [Odd(), 3], "c": torch.ones(1)}, "meta", skip_keys="c")
    assert moved["a"].is_meta and moved["b"] == ["on meta", 3] and not moved["c"].is_meta
