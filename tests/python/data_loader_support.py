"""What the tests of prepared DataLoaders share: one prepared loader per rank, and the order they must have."""

import numpy as np
import pytest

from tessera import data_loader as dl

LAYOUTS = [(ranks, micro) for ranks in (1, 2, 3, 4) for micro in (1, 2, 3)]


class Agreement:
    """Rank 0's numbers, played back on the others: ranks are prepared one after another."""

    def __init__(self):
        self.numbers = []

    def rank(self, rank):
        played = iter(list(self.numbers)) if rank else None

        def agree(number):
            if rank:
                return next(played)
            self.numbers.append(number)
            return number

        return agree


def prepared(make, ranks, micro, **options):
    """One prepared loader per rank; `make(rank)` is the caller's."""
    agreement = Agreement()
    return [dl.prepare_data_loader(make(rank), num_micro_batches=micro, data_rank=rank, data_ranks=ranks,
                                   agree=agreement.rank(rank), **options) for rank in range(ranks)]


def ids(batch):
    return np.asarray(batch["x"]).reshape(-1).tolist()


def steps(loaders):
    """[[samples of rank 0, of rank 1, ...] per step] of one pass."""
    return [[ids(batch) for batch in batches] for batches in zip_equal([list(loader) for loader in loaders])]


def zip_equal(lists):
    assert len({len(each) for each in lists}) == 1, [len(each) for each in lists]
    return zip(*lists)


def check_steps(found, order, whole, ranks):
    """Step k is order[k * whole : (k + 1) * whole] in runs whose lengths differ by at most one, longer ones first."""
    assert [sum(step, []) for step in found] == [order[at:at + whole] for at in range(0, len(order), whole)]
    for step in found:
        lengths = [len(part) for part in step]
        assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def numbers(torch):
    class Numbers(torch.utils.data.Dataset):
        def __init__(self, count):
            self.count = count
            self.read = []

        def __len__(self):
            return self.count

        def __getitem__(self, index):
            self.read.append(index)
            return {"x": torch.tensor([index]), "label": index % 2, "name": f"sample {index}"}

    return Numbers


@pytest.fixture
def stream(torch):
    class Stream(torch.utils.data.IterableDataset):
        def __init__(self, count, sized=False):
            self.count = count
            if sized:
                self.total_length = count

        def __iter__(self):
            info = torch.utils.data.get_worker_info()
            worker, workers = (info.id, info.num_workers) if info else (0, 1)
            for i in range(worker, self.count, workers):
                yield {"x": torch.tensor([i])}

    return Stream


def shuffled(torch, numbers, count=25, **options):
    return lambda rank: torch.utils.data.DataLoader(numbers(count), 2, shuffle=True, **options)
