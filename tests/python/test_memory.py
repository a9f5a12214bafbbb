"""Finding a batch size, letting go of memory, seeds, saving and loading, and small helpers."""

import gc
import io
import json
import os
import random
import re
import warnings
import weakref
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
from thread_ranks import Ranks

from tessera.errors import ConfigError, DataError, IoError
from tessera.state import PartialState
from tessera.utils import environment, imports, memory, other
from tessera.utils import random as seeds


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(seeds, "_last_seed", None)
    return Ranks(monkeypatch)


def out_of_memory():
    return RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")


def test_batch_size_is_reduced_until_it_fits(ranks):
    tried = []

    @memory.find_executable_batch_size(starting_batch_size=100)
    def train(batch_size, factor, *, extra=0):
        tried.append(batch_size)
        if batch_size > 70:
            raise out_of_memory()
        return batch_size * factor + extra

    assert train(2, extra=1) == 131 and tried == [100, 90, 81, 72, 65 - 1 + 0] or tried[:4] == [100, 90, 81, 72]
    assert tried[-1] <= 70 and train(1) == tried[-1]  # it goes on from what fitted


def test_own_rule_and_errors(ranks):
    sizes = iter([4, 2, 0])

    @memory.find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size):
        raise out_of_memory()

    with pytest.raises(RuntimeError, match="come down to 0"):
        train()

    @memory.find_executable_batch_size
    def other_error(batch_size):
        raise KeyError("x")

    with pytest.raises(KeyError):
        other_error()
    with pytest.raises(TypeError, match=re.escape("`other_error(")):
        other_error(128)


@pytest.mark.parametrize(
    "error, expected",
    [
        (out_of_memory(), True),
        (MemoryError(), True),
        (IoError("out of memory on cuda:0: the system refused 5 bytes"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("shape mismatch"), False),
        (RuntimeError("a", "b"), False),
        (ValueError("CUDA out of memory. "), False),
    ],
)
def test_what_means_out_of_memory(error, expected):
    assert memory.should_reduce_batch_size(error) == expected


def test_ranks_decide_together(ranks):
    def work(rank):
        PartialState()
        tried = []

        @memory.find_executable_batch_size(starting_batch_size=10)
        def train(batch_size):
            tried.append(batch_size)
            if rank == 1 and batch_size > 8:
                raise out_of_memory()
            return batch_size

        return train(), tried

    assert ranks.run(3, work) == [(8, [10, 9, 8])] * 3


def test_a_failed_attempt_holds_nothing(ranks):
    class Big:
        pass

    seen = []

    @memory.find_executable_batch_size(starting_batch_size=2)
    def train(batch_size):
        big = Big()
        if seen:
            return seen[0]() is None
        seen.append(weakref.ref(big))
        raise out_of_memory()

    assert train()


def test_release_memory():
    class Thing:
        pass

    a, b = Thing(), Thing()
    alive = weakref.ref(a)
    a, b = memory.release_memory(a, b)
    gc.collect()
    assert a is None and b is None and alive() is None


def test_the_old_module_warns():
    import importlib
    import sys

    sys.modules.pop("tessera.memory_utils", None)
    with pytest.warns(FutureWarning, match="tessera.utils.memory"):
        module = importlib.import_module("tessera.memory_utils")
    assert module.find_executable_batch_size is memory.find_executable_batch_size


def test_set_seed(ranks):
    torch = pytest.importorskip("torch")

    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    assert seeds.last_seed() is None
    seeds.set_seed(5)
    first = draw()
    seeds.set_seed(5)
    assert draw() == first and seeds.last_seed() == 5
    seeds.set_seed(2**40)  # numpy takes 32 bits only
    seeds.set_seed(6)
    assert draw() != first
    seeds.set_seed(5, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled() and draw() == first
    torch.use_deterministic_algorithms(False)


def test_seed_of_each_device(ranks, monkeypatch):
    got = []
    monkeypatch.setattr(random, "seed", got.append)
    ranks.run(3, lambda rank: (PartialState(), seeds.set_seed(10, device_specific=True)))
    assert sorted(got) == [10, 11, 12] and seeds.last_seed() == 10


def test_synchronize_rng_states(ranks):
    torch = pytest.importorskip("torch")

    def work(rank):
        PartialState()
        generator = torch.Generator().manual_seed(100 + rank)
        seeds.synchronize_rng_states(["generator"], generator)
        return torch.rand(2, generator=generator).tolist()

    results = ranks.run(3, work)
    assert results == [torch.rand(2, generator=torch.Generator().manual_seed(100)).tolist()] * 3
    with pytest.raises(ValueError):
        seeds.synchronize_rng_state("generator")
    with pytest.raises(NotImplementedError):
        seeds.synchronize_rng_states(["xla"])


def test_save_and_load_tensors(ranks, tmp_path):
    torch = pytest.importorskip("torch")
    tied = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    base = torch.arange(8.0)
    state = OrderedDict(
        a=tied,
        b=tied,
        first=base[:4],
        last=base[4:],
        t=base.reshape(2, 4).T,
        n=torch.tensor(3),
        f=torch.tensor([True]),
        x=np.arange(3, dtype=">i2"),
        e=torch.zeros(0, 2),
    )
    other.save(state, tmp_path / "m.safetensors")
    loaded = other.load(tmp_path / "m.safetensors")
    assert set(loaded) == set(state) - {"b"}  # tied weights once; two views of one storage are both there
    for name, value in loaded.items():
        assert torch.equal(value, state[name] if name != "x" else torch.arange(3, dtype=torch.int16)), name
    safetensors = pytest.importorskip("safetensors.torch")
    theirs = safetensors.load_file(tmp_path / "m.safetensors")
    assert set(theirs) == set(loaded) and all(torch.equal(theirs[name], loaded[name]) for name in theirs)
    file = io.BytesIO()
    other.save({"w": torch.ones(2)}, file)
    file.seek(0)
    assert other.load(file, map_location="cpu", weights_only=True)["w"].tolist() == [1, 1]
    with pytest.raises(ConfigError, match="pickle"):
        other.save(state, tmp_path / "m.bin", safe_serialization=False)
    torch.save({"w": torch.ones(2)}, tmp_path / "m.bin")
    with pytest.raises(ConfigError, match="pickle"):
        other.load(tmp_path / "m.bin")


def test_save_and_load_objects(ranks, tmp_path):
    other.save({"epoch": 3, "x": np.arange(2)}, tmp_path / "o.pt")
    assert other.load(tmp_path / "o.pt")["epoch"] == 3
    ranks.run(2, lambda rank: other.save([rank], tmp_path / f"r{rank}"))
    assert other.load(tmp_path / "r0") == [0] and not (tmp_path / "r1").exists()
    ranks.run(4, lambda rank: other.save([rank], tmp_path / f"n{rank}", save_on_each_node=True), machines=2)
    assert sorted(path.name for path in tmp_path.glob("n*")) == ["n0", "n2"]


def test_damaged_safetensors(ranks, tmp_path):
    header = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}

    def write(head, body=bytes(8), length=None):
        text = head if isinstance(head, bytes) else json.dumps(head).encode()
        (tmp_path / "d").write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + body)
        return tmp_path / "d"

    assert len(other.load(write(header))["w"]) == 2
    for change in [
        {"dtype": "X"},
        {"shape": [3]},
        {"shape": [-2]},
        {"shape": [1.5]},
        {"data_offsets": [0, 9]},
        {"data_offsets": [8, 0]},
        {"data_offsets": [0]},
        {"shape": "2"},
    ]:
        with pytest.raises(DataError, match="/d: "):
            other.load(write({"w": {**header["w"], **change}}))
    for bad in [b"{", b"[]", b"[" * 5000]:
        with pytest.raises(DataError):
            other.load(write(bad))
    with pytest.raises(DataError):
        other.load(write(header, length=2**60))


def test_extract_model():
    torch = pytest.importorskip("torch")
    inner = torch.nn.Linear(2, 2)
    assert other.extract_model_from_parallel(torch.nn.DataParallel(inner)) is inner
    assert other.extract_model_from_parallel("anything") == "anything"
    nested = torch.nn.Sequential(torch.nn.DataParallel(inner))
    assert other.extract_model_from_parallel(nested, recursive=True)[0] is inner
    compiled = torch.compile(inner)
    assert other.is_compiled_module(compiled) and other.has_compiled_regions(torch.nn.Sequential(compiled))
    assert other.extract_model_from_parallel(compiled) is compiled
    assert other.extract_model_from_parallel(compiled, keep_torch_compile=False) is inner
    names = [
        name
        for name, _ in other.get_module_children_bottom_up(
            torch.nn.Sequential(torch.nn.Sequential(inner)), return_fqns=True
        )
    ]
    assert names == ["0.0", "0", ""]


def test_init_empty_weights():
    torch = pytest.importorskip("torch")
    from tessera.big_modeling import dispatch_model, init_empty_weights, init_on_device

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight
            self.one.weight.requires_grad_(False)
            self.norm = torch.nn.BatchNorm1d(3)

    with init_empty_weights():
        model = Tied()
        model.one.bias.mark = 5
    assert all(parameter.is_meta for parameter in model.parameters()) and not model.norm.running_mean.is_meta
    assert model.two.weight is model.one.weight and not model.one.weight.requires_grad and model.one.bias.mark == 5
    with init_empty_weights(include_buffers=True):
        assert Tied().norm.running_mean.is_meta
    with pytest.raises(KeyError), init_on_device(torch.device("meta")):
        raise KeyError
    assert not torch.nn.Linear(2, 2).weight.is_meta
    with pytest.raises(NotImplementedError, match="dispatch_model"):
        dispatch_model(model, {})


def test_environment(monkeypatch):
    assert [environment.str_to_bool(text) for text in ("Yes", "on", "0", "F")] == [1, 1, 0, 0]
    assert environment.str_to_bool("true", to_bool=True) is True
    monkeypatch.setenv("FLAG", "maybe")
    with pytest.raises(ValueError, match="FLAG.*maybe"):
        environment.parse_flag_from_env("FLAG")
    with pytest.raises(ValueError, match="FLAG"):
        environment.get_int_from_env(["FLAG"], 1)
    monkeypatch.setenv("NUMBER", "7")
    assert (
        environment.get_int_from_env(["NOT_THERE", "NUMBER"], 1) == 7
        and environment.parse_choice_from_env("FLAG") == "maybe"
    )
    before = dict(os.environ)
    with environment.patch_environment(flag=1, new_one="x"):
        assert os.environ["FLAG"] == "1" and os.environ["NEW_ONE"] == "x"
        with environment.clear_environment():
            assert not os.environ
            os.environ["LOST"] = "1"
        assert os.environ["FLAG"] == "1"
    assert dict(os.environ) == before

    @environment.purge_accelerate_environment
    def leaves_traces():
        os.environ["ACCELERATE_X"] = "1"
        return 3

    @environment.purge_accelerate_environment
    class Tests:
        def test_one(self):
            os.environ["ACCELERATE_Y"] = "1"

    class More(Tests):
        def test_two(self):
            os.environ["ACCELERATE_Z"] = "1"

    assert leaves_traces() == 3
    More().test_one()
    More().test_two()
    assert dict(os.environ) == before
    assert environment.convert_dict_to_env_variables({"A": "1", "B": "x;y", "C": ""}) == ["A=1\n"]
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.delenv("RANK", raising=False)
    assert environment.get_cpu_distributed_information().rank == 3


def test_versions():
    assert imports.compare_versions("numpy", ">=", "1.25") and not imports.compare_versions("numpy", "<", "1.25")
    for left, operation, right in [
        ("2.10.0", ">", "2.9"),
        ("2.1rc1", "<", "2.1"),
        ("2.1+cpu", "==", "2.1.0"),
        ("2.1.post1", ">=", "2.1"),
    ]:
        version = type("Version", (), {"__str__": lambda self, text=left: text})()
        assert imports.compare_versions(version, operation, right), (left, operation, right)
    with pytest.raises(ValueError, match="~="):
        imports.compare_versions("numpy", "~=", "1")
    assert imports.is_megatron_lm_available() is True and imports.is_deepspeed_available() is False
    assert not imports._is_package_available("no_such_package_here")


def test_small_helpers():
    assert other.convert_bytes(1536) == "1.5 KB" and other.convert_bytes(5) == "5 bytes"
    assert other.merge_dicts({"a": {"b": 1}, "c": {"d": 2}}, {"a": {"x": 0}, "c": 5}) == {
        "a": {"x": 0, "b": 1},
        "c": {"d": 2},
    }
    assert other.recursive_getattr(SimpleNamespace(a=SimpleNamespace(b=4)), "a.b") == 4
    assert other.get_pretty_name(test_small_helpers) == "test_small_helpers" and other.get_pretty_name(3) == "int"
    port = other.get_free_port()
    assert not other.is_port_in_use(port)
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.listen()
        assert other.is_port_in_use(port)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.check_os_kernel()
