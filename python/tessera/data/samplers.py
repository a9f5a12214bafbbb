"""Which samples a rank reads: samplers in front of torch's DataLoader. torch itself is not needed for them."""

from __future__ import annotations

import collections
import itertools
import sys
from typing import Any, Callable, Deque, Iterable, Iterator, List, Optional

from tessera.data.split import bounds
from tessera.errors import ConfigError

_MASK = (1 << 64) - 1


def mixed(seed: int, epoch: int, stream: int = 0) -> int:
    """63 bits that differ between epochs and streams of one seed (the finaliser of SplitMix64)."""
    value = (seed + 0x9E3779B97F4A7C15 * (epoch + 1) + 0xD1B54A32D192ED03 * stream) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) >> 1


def drawn_seed() -> int:
    """A number from the generator that `set_seed` governs."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.empty((), dtype=torch.int64).random_().item())
    import numpy

    return int(numpy.random.randint(0, 2**63 - 1, dtype=numpy.int64))


class SeedableRandomSampler:
    """Numbers of `data_source` in an order that follows from (seed, epoch): a new one each pass, the same on every
    machine. `data_seed` wins over the seed of `generator`; without both, one is drawn."""

    def __init__(self, data_source: Any, replacement: bool = False, num_samples: Optional[int] = None,
                 generator: Any = None, data_seed: Optional[int] = None):
        self.data_source = data_source
        self.replacement = replacement
        self._num_samples = num_samples
        if data_seed is not None:
            self.initial_seed = int(data_seed)
        else:
            self.initial_seed = int(generator.initial_seed()) if generator is not None else drawn_seed()
        self.epoch = 0

    @property
    def num_samples(self) -> int:
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        import numpy

        seed = mixed(self.initial_seed, self.epoch)
        self.epoch += 1
        # RandomState's streams are frozen for good; those of numpy's newer generators are not.
        random = numpy.random.RandomState([seed & 0xFFFFFFFF, seed >> 32])
        count, left = len(self.data_source), self.num_samples
        while left > 0 and count > 0:
            order = random.randint(0, count, left) if self.replacement else random.permutation(count)
            yield from order[:left].tolist()
            left -= len(order)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class BatchSamplerShard:
    """One data rank's part of a batch sampler's batches.

    A global batch is `num_processes` * `num_micro_batches` batches of `batch_sampler` (one batch if `split_batches`).
    Its samples are cut into `num_processes` runs whose lengths differ by at most one; this yields run number
    `process_index`. Nothing is repeated: of a last global batch with fewer samples than ranks, later ranks get an empty
    list. `even_batches` is accepted and changes nothing."""

    def __init__(self, batch_sampler: Iterable, num_processes: int = 1, process_index: int = 0,
                 split_batches: bool = False, even_batches: bool = True, *, num_micro_batches: int = 1):
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.group = 1 if split_batches else num_processes * num_micro_batches
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        size = getattr(batch_sampler, "batch_size", None)
        if split_batches and size is not None and size % (num_processes * num_micro_batches):
            raise ConfigError(f"split_batches=True: a batch_size of {size} is not a multiple of {num_processes} data "
                              f"ranks x {num_micro_batches} micro-batches; choose one that is, or split_batches=False, "
                              "where batch_size is the micro-batch of one data rank")
        self._size = size

    @property
    def sampler(self) -> Any:
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def total_batch_size(self) -> Optional[int]:
        """Samples of a whole global batch; None when the batch sampler does not tell."""
        return None if self._size is None else self._size * self.group

    @property
    def batch_size(self) -> Optional[int]:
        """Samples per step and data rank."""
        return None if self._size is None else self._size * self.group // self.num_processes

    @property
    def total_length(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        batches = len(self.batch_sampler)  # type: ignore[arg-type]
        return batches // self.group if self.drop_last else -(-batches // self.group)

    def global_batches(self) -> Iterator[List[int]]:
        """The samples of all ranks, step by step."""
        batches = iter(self.batch_sampler)
        while True:
            group = list(itertools.islice(batches, self.group))
            if not group or (len(group) < self.group and self.drop_last):
                return
            yield [index for indices in group for index in indices]

    def part(self, indices: List[int]) -> List[int]:
        begin, end = bounds(len(indices), self.process_index, self.num_processes)
        return indices[begin:end]

    def __iter__(self) -> Iterator[List[int]]:
        return map(self.part, self.global_batches())

    def set_epoch(self, epoch: int) -> None:
        for each in (self.batch_sampler, self.sampler):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)


class RankIndices:
    """What torch's DataLoader is given: a BatchSamplerShard from step `start` on. No collate function takes an empty
    list, so a step without samples reads one, and `sizes` says that it is to be cut off again."""

    def __init__(self, shard: BatchSamplerShard):
        self.shard = shard
        self.start = 0
        self.sizes: Deque[int] = collections.deque()

    def __len__(self) -> int:
        return len(self.shard)

    def __iter__(self) -> Iterator[List[int]]:
        sizes = self.sizes = collections.deque()
        for indices in itertools.islice(self.shard.global_batches(), self.start, None):
            part = self.shard.part(indices)
            sizes.append(len(part))
            yield part or indices[:1]


class SkipBatchSampler:
    """The batches of `batch_sampler` without the first `skip_batches`."""

    def __init__(self, batch_sampler: Iterable, skip_batches: int = 0):
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.sampler = getattr(batch_sampler, "sampler", None)

    def __iter__(self) -> Iterator[List[int]]:
        return itertools.islice(iter(self.batch_sampler), self.skip_batches, None)

    @property
    def total_length(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return max(0, self.total_length - self.skip_batches)


def sample_groups(samples: Iterable, count: int, drop_last: bool) -> Iterator[List[Any]]:
    """Runs of `count` samples; the last may be shorter unless `drop_last`."""
    iterator = iter(samples)
    while True:
        group = list(itertools.islice(iterator, count))
        if not group or (len(group) < count and drop_last):
            return
        yield group


class SampleShard:
    """One data rank's part of a stream of samples that every rank reads: the base of IterableDatasetShard."""

    def __init__(self, dataset: Iterable, batch_size: int = 1, drop_last: bool = False, num_processes: int = 1,
                 process_index: int = 0, split_batches: bool = False):
        if split_batches and batch_size % num_processes:
            raise ConfigError(f"split_batches=True: a batch_size of {batch_size} is not a multiple of {num_processes} "
                              "processes")
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def _whole(self) -> int:
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    def __len__(self) -> int:
        """This rank's samples."""
        total = len(self.dataset)  # type: ignore[arg-type]
        steps, rest = divmod(total, self._whole())
        own = steps * (self._whole() // self.num_processes)
        if rest and not self.drop_last:
            begin, end = bounds(rest, self.process_index, self.num_processes)
            own += end - begin
        return own

    def __iter__(self) -> Iterator[Any]:
        for group in sample_groups(self.dataset, self._whole(), self.drop_last):
            begin, end = bounds(len(group), self.process_index, self.num_processes)
            yield from group[begin:end]


def set_epoch_of(things: Iterable[Any], epoch: int) -> None:
    for each in things:
        method: Optional[Callable] = getattr(each, "set_epoch", None)
        if callable(method):
            method(epoch)
