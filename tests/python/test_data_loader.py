"""Prepared DataLoaders: every layout reads the same samples in the same order."""

import itertools
import random
import subprocess
import sys

import numpy as np
import pytest

from data_loader_support import (LAYOUTS, check_steps, ids, numbers, prepared, shuffled, steps, stream, torch,
                                 zip_equal)
from tessera import data_loader as dl
from tessera.errors import ConfigError, DataError


@pytest.mark.parametrize("ranks, micro", LAYOUTS)
def test_map_style_is_the_serial_order_on_every_layout(torch, numbers, ranks, micro):
    for count, batch_size in itertools.product((0, 1, 2, 3, 7, 24, 25, 31), (1, 2, 3)):
        for drop_last in (False, True):
            datasets = [numbers(count) for _ in range(ranks)]
            loaders = prepared(
                lambda rank: torch.utils.data.DataLoader(datasets[rank], batch_size, drop_last=drop_last), ranks, micro)
            whole = batch_size * ranks * micro
            order = list(range(count - count % whole if drop_last else count))
            found = steps(loaders)
            check_steps(found, order, whole, ranks)
            assert {len(loader) for loader in loaders} == {len(found)}
            assert loaders[0].total_batch_size == whole and loaders[0].batch_size == batch_size * micro
            assert loaders[0].remainder == (0 if drop_last else count % whole)
            assert loaders[0].total_dataset_length == count
            for rank, dataset in enumerate(datasets):  # no rank reads what it does not need, but for a template
                own = [index for step in found for index in step[rank]]
                assert len(dataset.read) - len(own) == sum(not step[rank] for step in found)


def test_an_empty_part_has_the_columns_of_the_others(torch, numbers):
    loaders = prepared(lambda rank: torch.utils.data.DataLoader(numbers(2), 1), 4, 1)
    batches = [list(loader) for loader in loaders]
    assert [len(each) for each in batches] == [1, 1, 1, 1]
    for (batch,) in batches[2:]:
        assert batch["x"].shape == (0, 1) and batch["x"].dtype == torch.int64
        assert batch["label"].shape == (0,) and batch["name"] == []
    assert batches[1][0]["name"] == ["sample 1"]


def test_split_batches_means_global_batches(torch, numbers):
    for count in (24, 29, 2):
        loaders = prepared(lambda rank: torch.utils.data.DataLoader(numbers(count), 12), 3, 2, split_batches=True)
        check_steps(steps(loaders), list(range(count)), 12, 3)
        assert loaders[0].total_batch_size == 12 and loaders[0].batch_size == 4
    with pytest.raises(ConfigError, match="12 is not a multiple of 5 data ranks x 1"):
        prepared(lambda rank: torch.utils.data.DataLoader(numbers(24), 12), 5, 1, split_batches=True)
    with pytest.raises(ConfigError, match="multiple"):
        dl.BatchSamplerShard(torch.utils.data.BatchSampler(range(9), 3, False), 2, 0, split_batches=True)


@pytest.mark.parametrize("ranks, micro, workers",
                         [(*layout, 0) for layout in LAYOUTS] + [(1, 1, 2), (2, 2, 2), (3, 1, 2)])
def test_streams_are_the_serial_order_on_every_layout(torch, stream, ranks, micro, workers):
    for count, drop_last in itertools.product((13,) if workers else (1, 13, 24, 31), (False, True)):
        def make(rank):
            return torch.utils.data.DataLoader(stream(count), 2, num_workers=workers, drop_last=drop_last)

        whole = 2 * ranks * micro
        # With two workers, the serial order is theirs: batches of 2 in turn, short ones in the middle.
        serial = [i for batch in make(0) for i in ids(batch)]
        order = serial[:len(serial) - len(serial) % whole] if drop_last else serial
        check_steps(steps(prepared(make, ranks, micro)), order, whole, ranks)


@pytest.mark.parametrize("ranks, micro", LAYOUTS)
def test_plain_iterables_of_batches_are_cut_along_dim_0(ranks, micro):
    for count in (1, 7, 24):
        batches = [{"x": np.arange(at, min(at + 3, count)), "both": (np.zeros((min(3, count - at), 2)),),
                    "text": [str(i) for i in range(at, min(at + 3, count))]} for at in range(0, count, 3)]
        loaders = prepared(lambda rank: batches, ranks, micro)
        found = [list(loader) for loader in loaders]
        check_steps([[ids(batch) for batch in step] for step in zip_equal(found)], list(range(count)),
                    3 * ranks * micro, ranks)
        assert len(loaders[0]) == len(found[0])
        for batch in itertools.chain.from_iterable(found):
            assert batch["text"] == [str(i) for i in ids(batch)]
            assert batch["both"][0].shape == (len(ids(batch)), 2)
        assert loaders[0].remainder == -1 and loaders[0].total_batch_size is None
    generator = dl.prepare_data_loader(({"x": np.arange(2)} for _ in range(3)), num_micro_batches=2)
    assert [ids(batch) for batch in generator] == [[0, 1, 0, 1], [0, 1]]
    with pytest.raises(TypeError):
        len(generator)


def test_a_whole_batch_is_handed_on_as_it_is():
    batches = [{"x": np.arange(4)}]
    (batch,) = dl.prepare_data_loader(batches)
    assert batch is batches[0]
    (batch,) = dl.prepare_data_loader(batches, data_rank=1, data_ranks=2, split_batches=True)
    assert np.shares_memory(batch["x"], batches[0]["x"])


@pytest.mark.parametrize("ranks, micro", LAYOUTS)
def test_a_shuffled_order_is_the_same_on_every_rank_and_layout(torch, numbers, ranks, micro):
    serial = dl.prepare_data_loader(shuffled(torch, numbers)(0), data_seed=7)
    epochs = [[i for batch in serial for i in ids(batch)] for _ in range(3)]
    assert all(sorted(order) == list(range(25)) for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    loaders = prepared(shuffled(torch, numbers), ranks, micro, data_seed=7)
    for order in epochs:
        check_steps(steps(loaders), order, 2 * ranks * micro, ranks)
    for loader in loaders:
        loader.set_epoch(1)
    check_steps(steps(loaders), epochs[1], 2 * ranks * micro, ranks)


def test_the_seed_is_rank_zeros_whatever_the_state_of_the_others(torch, numbers):
    def make(rank):
        torch.manual_seed(rank)
        return shuffled(torch, numbers)(rank)

    loaders = prepared(make, 3, 1)
    assert sorted(i for step in steps(loaders) for part in step for i in part) == list(range(25))
    torch.manual_seed(0)
    again = prepared(shuffled(torch, numbers), 1, 3)
    assert {loader.state_dict()["seed"] for loader in loaders + again} == {loaders[0].state_dict()["seed"]}


@pytest.mark.parametrize("kind", ["random", "weighted", "subset", "seedable", "replacement"])
def test_every_random_sampler_is_made_equal(torch, numbers, kind):
    data = torch.utils.data

    def make(rank):
        torch.manual_seed(rank)
        dataset = numbers(20)
        sampler = {"random": lambda: data.RandomSampler(dataset),
                   "weighted": lambda: data.WeightedRandomSampler([1.0] * 20, 20),
                   "subset": lambda: data.SubsetRandomSampler(range(20)),
                   "seedable": lambda: dl.SeedableRandomSampler(dataset),
                   "replacement": lambda: data.RandomSampler(dataset, replacement=True, num_samples=20)}[kind]()
        loader = data.DataLoader(dataset, 4, sampler=sampler)
        make.samplers.append((sampler, getattr(sampler, "generator", None)))
        return loader

    make.samplers = []
    (alone,) = prepared(make, 1, 4)
    loaders = prepared(make, 4, 1)
    serial = [ids(batch) for batch in alone]
    assert [sum(step, []) for step in steps(loaders)] == serial
    assert all(getattr(sampler, "generator", None) is generator for sampler, generator in make.samplers)
    assert [ids(batch) for batch in alone] != serial


def test_a_generator_of_the_callers_keeps_its_order(torch, numbers):
    def make(rank):
        return torch.utils.data.DataLoader(numbers(25), 2, shuffle=True, generator=torch.Generator().manual_seed(5))

    plain = make(0)
    epochs = [[i for batch in plain for i in ids(batch)] for _ in range(2)]
    loaders = prepared(make, 2, 2)
    for order in epochs:
        check_steps(steps(loaders), order, 8, 2)

    def seeded_by_rank(rank):
        generator = torch.Generator().manual_seed(5 + rank)
        return torch.utils.data.DataLoader(numbers(25), 2, shuffle=True, generator=generator)

    check_steps(steps(prepared(seeded_by_rank, 2, 2)), epochs[0], 8, 2)

    def used_on_rank_0(rank):
        generator = torch.Generator().manual_seed(5)
        torch.rand(3 - rank, generator=generator)
        return torch.utils.data.DataLoader(numbers(25), 2, shuffle=True, generator=generator)

    with pytest.raises(ConfigError, match="another state than on rank 0"):
        prepared(used_on_rank_0, 2, 2)


def test_the_callers_settings_are_kept(torch, numbers):
    seen = []

    def collate(samples):
        seen.append(len(samples))
        return {"x": torch.stack([sample["x"] for sample in samples])}

    made = torch.utils.data.DataLoader(numbers(20), 2, num_workers=2, collate_fn=collate, timeout=50, prefetch_factor=3,
                                       persistent_workers=True, worker_init_fn=print)
    loader = dl.prepare_data_loader(made, num_micro_batches=3, data_ranks=2, data_rank=1)
    for name in ("num_workers", "collate_fn", "timeout", "prefetch_factor", "persistent_workers", "worker_init_fn",
                 "pin_memory", "dataset"):
        assert getattr(loader, name) is getattr(made, name)
    assert isinstance(loader, torch.utils.data.DataLoader) and isinstance(loader, dl.DataLoaderShard)
    for _ in range(2):
        assert [ids(batch) for batch in loader] == [[6, 7, 8, 9, 10, 11], [16, 17, 18, 19]]
    assert dl.prepare_data_loader(loader) is loader
    made = torch.utils.data.DataLoader(numbers(20), 2, collate_fn=collate)
    list(dl.prepare_data_loader(made, num_micro_batches=5))
    assert seen == [10, 10]  # a rank's samples are collated together
    with pytest.raises(AttributeError):
        loader.no_such_member


def test_random_numbers_in_workers_repeat(torch):
    class Noise(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return {"x": torch.randint(0, 2**40, (1,)), "y": random.randrange(2**40)}

    def epoch(rank, ranks, passes):
        loader = dl.prepare_data_loader(torch.utils.data.DataLoader(Noise(), 2, num_workers=1), data_rank=rank,
                                        data_ranks=ranks, data_seed=3)
        for _ in range(passes):
            found = [ids(batch) for batch in loader]
        return found

    assert epoch(0, 2, 1) == epoch(0, 2, 1)  # as tensor and pipeline peers read
    assert epoch(0, 2, 1) != epoch(1, 2, 1) and epoch(0, 2, 1) != epoch(0, 2, 2)


def test_batch_samplers_of_any_kind(torch, numbers):
    uneven = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
    loaders = prepared(lambda rank: torch.utils.data.DataLoader(numbers(11), batch_sampler=uneven), 2, 1)
    assert steps(loaders) == [[[0, 1], [2, 3]], [[4, 5, 6], [7, 8, 9]], [[10], []]]
    assert len(loaders[0]) == 3 and loaders[0].remainder == -1

    class Batches(torch.utils.data.Dataset):  # batch_size=None: items are batches
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return {"x": torch.arange(3) + 3 * index}

    loaders = prepared(lambda rank: torch.utils.data.DataLoader(Batches(), None, shuffle=True), 2, 1, data_seed=1)
    found = [sum(step, []) for step in steps(loaders)]
    assert sorted(sum(found, [])) == list(range(15)) and sum(found, []) != list(range(15))

    class Own(torch.utils.data.DataLoader):
        def __iter__(self):
            return ({"x": batch["x"] + 100} for batch in super().__iter__())

    found = steps(prepared(lambda rank: Own(numbers(10), 2, shuffle=True), 2, 1, data_seed=1))
    assert sorted(i for step in found for part in step for i in part) == list(range(100, 110))


def test_dynamic_padding_in_a_stream(torch, stream):
    def pad(samples):
        longest = max(int(sample["x"]) for sample in samples) + 1
        return {"x": torch.stack([sample["x"] for sample in samples]), "mask": torch.ones(len(samples), longest)}

    def make(workers):
        return lambda rank: torch.utils.data.DataLoader(stream(8), 2, collate_fn=pad, num_workers=workers)

    check_steps(steps(prepared(make(0), 2, 2)), list(range(8)), 8, 2)
    with pytest.raises(DataError, match="Pad them to one length"):
        steps(prepared(make(1), 1, 2))


def test_what_is_already_divided_is_refused(torch, numbers):
    dataset = numbers(10)
    sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=2, rank=0)
    with pytest.raises(ConfigError, match="DistributedSampler already divides the data over 2 processes"):
        dl.prepare_data_loader(torch.utils.data.DataLoader(dataset, 2, sampler=sampler))
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    rows = datasets.Dataset.from_dict({"x": list(range(6))}).to_iterable_dataset()
    with pytest.raises(ConfigError, match="already split over 2 nodes"):
        dl.prepare_data_loader(torch.utils.data.DataLoader(split_dataset_by_node(rows, rank=0, world_size=2), 2))


def test_bad_batches_and_loaders_are_refused():
    with pytest.raises(TypeError, match="int is no data loader"):
        dl.prepare_data_loader(3)
    with pytest.raises(ConfigError, match="data rank 2 of 2"):
        dl.prepare_data_loader([], data_rank=2, data_ranks=2)
    with pytest.raises(ConfigError, match="needs dispatch_batches=True"):
        dl.prepare_data_loader([], slice_fn_for_dispatch=print)
    for batch, reason in (({"x": 3}, "no array"), ({"x": np.zeros(2), "y": np.zeros(3)}, r"\[2, 3\] entries")):
        with pytest.raises(DataError, match=reason):
            list(dl.prepare_data_loader([batch], data_ranks=2))
    for second, reason in (({"y": np.zeros(2)}, "keys"), ([np.zeros(2)], "type"), ({"x": np.zeros((2, 2))}, "shapes")):
        with pytest.raises(DataError, match=reason):
            list(dl.prepare_data_loader([{"x": np.zeros(2)}, second], num_micro_batches=2))
    for refused in (lambda: dl.MpDeviceLoaderWrapper([]), lambda: dl.prepare_data_loader([], torch_device_mesh=1)):
        with pytest.raises(NotImplementedError, match="which Tessera does not run"):
            refused()


def test_hugging_face_datasets_and_collator(torch):
    datasets, transformers = pytest.importorskip("datasets"), pytest.importorskip("transformers")
    rows = {"input_ids": [[i, i + 1, i + 2] for i in range(13)], "labels": [[i, -100, i] for i in range(13)]}

    def make(rank, streamed=False):
        dataset = datasets.Dataset.from_dict(rows)
        dataset = dataset.to_iterable_dataset() if streamed else dataset
        return torch.utils.data.DataLoader(dataset, 2, collate_fn=transformers.default_data_collator)

    for streamed in (False, True):
        found = [list(each) for each in prepared(lambda rank: make(rank, streamed), 3, 1)]
        first = [[batch["input_ids"][:, 0].tolist() for batch in step] for step in zip_equal(found)]
        assert first == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]], [[12], [], []]]
        assert found[2][2]["labels"].shape == (0, 3) and found[2][2]["labels"].dtype == torch.int64
    dataset = datasets.Dataset.from_dict({"x": list(range(20))}).to_iterable_dataset().shuffle(seed=1, buffer_size=20)
    loaders = prepared(lambda rank: torch.utils.data.DataLoader(dataset, 2), 2, 2)
    epochs = [[sum(step, []) for step in steps(loaders)] for _ in range(2)]
    assert sorted(sum(epochs[0], [])) == list(range(20)) and epochs[0] != epochs[1]  # set_epoch reaches the dataset


def test_named_tuples_and_encodings_keep_their_type(torch):
    transformers = pytest.importorskip("transformers")
    batches = [transformers.BatchEncoding({"x": torch.arange(2) + 2 * i, "weight": 0.5}) for i in range(2)]
    (batch,) = dl.prepare_data_loader(batches, data_rank=0, data_ranks=2)
    assert type(batch) is transformers.BatchEncoding and batch["x"].tolist() == [0, 1] and batch["weight"] == 0.5
    (batch,) = dl.prepare_data_loader(batches, num_micro_batches=2)
    assert type(batch) is transformers.BatchEncoding and batch["x"].tolist() == [0, 1, 2, 3]


def test_shards_as_scripts_use_them(torch, stream):
    shards = [dl.IterableDatasetShard(stream(11), 2, num_processes=2, process_index=rank) for rank in range(2)]
    assert all(isinstance(shard, torch.utils.data.IterableDataset) for shard in shards)
    found = [[int(sample["x"]) for sample in shard] for shard in shards]
    assert found == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10]]
    assert [ids(batch) for batch in torch.utils.data.DataLoader(shards[1], 3)] == [[2, 3, 6], [7, 10]]
    inner = torch.utils.data.BatchSampler(range(7), 2, False)
    assert [list(dl.BatchSamplerShard(inner, 2, rank)) for rank in range(2)] == [[[0, 1], [4, 5]], [[2, 3], [6]]]
    assert list(dl.SkipBatchSampler(inner, 2)) == [[4, 5], [6]] and len(dl.SkipBatchSampler(inner, 2)) == 2
    sampler = dl.SeedableRandomSampler(range(6), data_seed=1)
    first, second = list(sampler), list(sampler)
    sampler.set_epoch(0)
    assert first == [2, 0, 5, 1, 4, 3] == list(sampler)  # written down: checkpoints count on it
    assert first != second and sorted(second) == list(range(6))
    loader = dl.prepare_data_loader(torch.utils.data.DataLoader(range(6), 2, sampler=sampler))
    assert isinstance(dl.get_sampler(loader), dl.SeedableRandomSampler)


def test_without_torch():
    """numpy batches and the samplers need no torch, and nothing imports it."""
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "datasets"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import numpy as np
from tessera import data_loader as dl
found = [[b["x"].tolist() for b in dl.prepare_data_loader([{"x": np.arange(5)}] * 2, data_rank=r, data_ranks=2,
                                                          split_batches=True)] for r in range(2)]
assert found == [[[0, 1, 2]] * 2, [[3, 4]] * 2], found
assert sorted(dl.SeedableRandomSampler(range(5))) == list(range(5))
assert list(dl.skip_first_batches([1, 2], 1)) == [2]
assert list(dl.IterableDatasetShard(range(5), 1, num_processes=2, process_index=1)) == [1, 3]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
