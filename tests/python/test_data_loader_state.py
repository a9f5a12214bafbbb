"""Prepared DataLoaders: going on from any place, the end of an epoch, and batches that rank 0 sends."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from data_loader_support import (Agreement, check_steps, ids, numbers, prepared, shuffled, steps, stream, torch,
                                 zip_equal)
from tessera import data_loader as dl
from tessera.errors import ConfigError, DataError


def restart(make, ranks, micro, states, **options):
    loaders = prepared(make, ranks, micro)
    for loader, state in zip(loaders, states):
        loader.load_state_dict(json.loads(json.dumps(state)), **options)
    return loaders


@pytest.mark.parametrize("kind", ["map", "shuffle", "generator", "stream", "plain", "workers"])
def test_resuming_at_every_place_equals_going_on(torch, numbers, stream, kind):
    data = torch.utils.data

    def make(rank):
        return {"map": lambda: data.DataLoader(numbers(23), 2),
                "shuffle": lambda: data.DataLoader(numbers(23), 2, shuffle=True),
                "generator": lambda: data.DataLoader(numbers(23), 2, shuffle=True,
                                                     generator=torch.Generator().manual_seed(3)),
                "stream": lambda: data.DataLoader(stream(23), 2),
                "plain": lambda: [{"x": np.arange(at, min(at + 2, 23))} for at in range(0, 23, 2)],
                "workers": lambda: data.DataLoader(numbers(23), 2, shuffle=True, num_workers=1)}[kind]()

    loaders = prepared(make, 2, 2)
    epochs, states = [], []
    for epoch in range(2):
        states += [[loader.state_dict() for loader in loaders]]
        epochs.append([])
        for batches in zip(*loaders):
            epochs[-1].append([ids(batch) for batch in batches])
            states.append([loader.state_dict() for loader in loaders])
        states.pop()  # the state after the last batch is that of the next epoch, which is recorded above
    assert [len(epoch) for epoch in epochs] == [3, 3] and len(states) == 6
    for at, state in enumerate(states):
        assert [(each["epoch"], each["batches"]) for each in state] == [divmod(at, 3)] * 2
        again = restart(make, 2, 2, state)
        rest = epochs[at // 3][at % 3:]
        assert steps(again) == rest
        if at < 3:
            assert steps(again) == epochs[1]
        for loader in again:
            loader.load_state_dict(state[0])
            loader.set_epoch(at // 3)  # as loops over epochs do: the place within it is kept
        assert steps(again) == rest
        # Scripts that skip by themselves: the epoch from its beginning, or absolutely by number.
        assert steps(restart(make, 2, 2, state, position=False)) == epochs[at // 3]
        assert steps([dl.skip_first_batches(each, 2) for each in restart(make, 2, 2, state)]) == epochs[at // 3][2:]


def test_a_loader_left_within_an_epoch_can_go_on_elsewhere_on_another_layout(torch, numbers):
    make = shuffled(torch, numbers, 47)
    loaders = prepared(make, 2, 2)
    whole = [sum(step, []) for step in steps(loaders)]
    for loader in loaders:
        loader.set_epoch(0)
    for _, batch in zip(range(2), loaders[0]):
        del batch
    state = loaders[0].state_dict()
    assert (state["epoch"], state["batches"], state["total_batch_size"]) == (0, 2, 8)
    on_four = restart(make, 4, 1, [state] * 4)
    assert [sum(step, []) for step in steps(on_four)] == whole[2:]
    on_one = restart(make, 1, 1, [state])  # global batches of 2 instead of 8
    assert [i for step in steps(on_one) for i in step[0]] == sum(whole[2:], [])
    with pytest.raises(ConfigError, match="2 global batches of 8 samples"):
        restart(make, 3, 1, [{**state, "total_batch_size": 8, "batches": 2}] * 3)


def test_skip_first_batches(torch, numbers, stream):
    data = torch.utils.data
    dataset = numbers(10)
    plain = dl.skip_first_batches(data.DataLoader(dataset, 3), 2)
    assert isinstance(plain, data.DataLoader) and len(plain) == 2
    assert [ids(batch) for batch in plain] == [[6, 7, 8], [9]] and dataset.read == [6, 7, 8, 9]
    assert [ids(batch) for batch in dl.skip_first_batches(data.DataLoader(stream(7), 3), 1)] == [[3, 4, 5], [6]]
    assert list(dl.skip_first_batches([1, 2, 3], 2)) == [3]
    dataset = numbers(10)
    loader = dl.prepare_data_loader(data.DataLoader(dataset, 3))
    skipped = dl.skip_first_batches(dl.skip_first_batches(loader, 1), 1)
    assert len(skipped) == 2 and skipped.total_batch_size == 3
    assert [ids(batch) for batch in skipped] == [[6, 7, 8], [9]] and dataset.read == [6, 7, 8, 9]
    assert loader.state_dict()["epoch"] == 1  # it was a pass of the loader
    assert list(dl.skip_first_batches(loader, 9)) == [] and len(dl.skip_first_batches(loader, 9)) == 0
    with pytest.raises(ValueError, match="-1"):
        dl.skip_first_batches(loader, -1)


class Gradients:
    def __init__(self):
        self.loaders = []

    def _add_dataloader(self, loader):
        self.loaders.append(loader)

    def _remove_dataloader(self, loader):
        self.loaders.remove(loader)


def test_the_end_of_an_epoch_is_known_with_its_last_batch():
    state = Gradients()
    loader = dl.prepare_data_loader([{"x": np.arange(2)}] * 3, gradient_state=state)
    for _ in range(2):
        ends = []
        for batch in loader:
            assert state.loaders == [loader]
            ends.append(loader.end_of_dataloader)
        assert ends == [False, False, True] and state.loaders == []
    for batch in loader:
        break
    del batch
    assert state.loaders == [] and not loader.end_of_dataloader
    assert list(dl.prepare_data_loader([], gradient_state=state)) == []


class World:
    """Ranks as threads, as far as a dispatcher needs."""

    def __init__(self, size):
        self.size, self.sent, self.lock = size, {}, threading.Condition()
        self.meeting = threading.Barrier(size, timeout=30)

    def rank_view(self, rank):
        world = self

        class View:
            size = world.size

            def __init__(self):
                self.rank, self.calls = rank, 0

            def meet(self, call, values, place):
                world.meeting.wait()

            def broadcast_bytes(self, data, root=0):
                self.calls += 1
                with world.lock:
                    if self.rank == root:
                        world.sent[self.calls] = data
                        world.lock.notify_all()
                    assert world.lock.wait_for(lambda: self.calls in world.sent, timeout=30)
                    return world.sent[self.calls]

        return View()


def dispatched(make, ranks, micro, **options):
    world, agreement = World(ranks), Agreement()
    loaders = [dl.prepare_data_loader(make(rank), num_micro_batches=micro, data_rank=rank, data_ranks=ranks,
                                      dispatch_batches=True, world=world.rank_view(rank), agree=agreement.rank(rank),
                                      **options) for rank in range(ranks)]
    assert all(isinstance(loader, dl.DataLoaderDispatcher) for loader in loaders)
    with ThreadPoolExecutor(ranks) as pool:
        return loaders, [future.exception() or future.result() for future in
                         [pool.submit(lambda loader=loader: list(loader)) for loader in loaders]]


def test_dispatched_batches_come_from_rank_0(torch, numbers):
    def make(rank):  # other ranks' streams differ, and are not read
        return [{"x": np.arange(at, min(at + 2, 11)) + 100 * rank} for at in range(0, 11, 2)]

    loaders, found = dispatched(make, 3, 1)
    check_steps([[ids(batch) for batch in step] for step in zip_equal(found)], list(range(11)), 6, 3)
    assert len(loaders[2]) == 2
    loaders, found = dispatched(shuffled(torch, numbers), 2, 2, data_seed=5)
    serial = [i for batch in dl.prepare_data_loader(shuffled(torch, numbers)(0), data_seed=5) for i in ids(batch)]
    check_steps([[ids(batch) for batch in step] for step in zip_equal(found)], serial, 8, 2)
    assert loaders[1].batch_size == 4 and loaders[1].total_batch_size == 8

    def broken(rank):
        yield {"x": np.arange(4)}
        raise OSError("the disk is gone")

    _, found = dispatched(broken, 2, 1, split_batches=True)
    assert isinstance(found[0], OSError)
    assert isinstance(found[1], DataError) and "OSError: the disk is gone" in str(found[1])

    def halves(batch, part, process_index, num_processes):
        return {"x": batch["x"][process_index::num_processes]}

    _, found = dispatched(lambda rank: [{"x": np.arange(4)}], 2, 1, slice_fn_for_dispatch=halves)
    assert [ids(batch) for (batch,) in found] == [[0, 2], [1, 3]]
    with pytest.raises(ConfigError, match="needs `world`"):
        dl.prepare_data_loader([], data_ranks=2, dispatch_batches=True)
