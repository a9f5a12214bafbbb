"""Where a prepared loader's batches come from: one class per kind of loader a caller may pass.

A source has `batches(start)`, an iterator over this data rank's parts of the global batches from number `start` on,
`begin(epoch)`, `loader` (whose members the prepared loader shows), `batch_size` (samples per step and data rank) and
`total_batch_size` (per step), None where they are not known, `total_samples` (None likewise) and `len`.
"""

from __future__ import annotations

import base64
import copy
import inspect
import itertools
import sys
import zlib
from dataclasses import dataclass
from typing import Any, Callable, Iterator, List, Optional, Tuple

from tessera.data.batch import move_tensors, part_of_pieces, samples_in, slice_batch
from tessera.data.samplers import (BatchSamplerShard, RankIndices, SeedableRandomSampler, mixed, sample_groups,
                                   set_epoch_of)
from tessera.data.split import bounds
from tessera.errors import ConfigError

_WORKERS = 1000  # first random stream of worker processes; those of samplers count from 0


@dataclass(frozen=True)
class Share:
    """Which part of a global batch is read here. A global batch is `group` batches of the caller's loader."""

    rank: int = 0
    ranks: int = 1
    num_micro_batches: int = 1
    split_batches: bool = False

    @property
    def group(self) -> int:
        return 1 if self.split_batches else self.ranks * self.num_micro_batches


class Generators:
    """The torch generators behind a loader's order: the caller's own, made equal on all ranks and kept, and new ones
    (where the caller gave none) that follow from (seed, epoch)."""

    def __init__(self, seed: int, agree: Callable[[int], int]):
        self.seed = seed
        self.agree = agree
        self._new: List[Tuple[Any, int]] = []
        self._given: List[Any] = []

    def new(self, stream: Optional[int] = None) -> Any:
        import torch

        generator = torch.Generator()
        self._new.append((generator, len(self._new) if stream is None else stream))
        return generator

    def keep(self, generator: Any) -> None:
        """Takes a generator of the caller's. Errors: ConfigError if its state differs from rank 0's for good."""
        if any(generator is each for each in self._given):
            return

        def digest() -> int:
            return zlib.crc32(generator.get_state().numpy().tobytes())

        first, seed = self.agree(digest()), int(generator.initial_seed())
        seed = self.agree(seed >> 32) << 32 | self.agree(seed & 0xFFFFFFFF)
        if digest() != first:
            generator.manual_seed(seed)
        if digest() != first:
            raise ConfigError("the generator of a data loader is in another state than on rank 0, so ranks would read "
                              "different orders; seed it with the same number on every rank, or pass none")
        self._given.append(generator)

    def begin(self, epoch: int) -> None:
        for generator, stream in self._new:
            generator.manual_seed(mixed(self.seed, epoch, stream))

    def state(self) -> List[str]:
        return [base64.b64encode(each.get_state().numpy().tobytes()).decode() for each in self._given]

    def restore(self, states: List[str]) -> None:
        import torch

        for generator, state in zip(self._given, states):
            generator.set_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))


def _check_undivided(sampler: Any) -> None:
    if getattr(sampler, "num_replicas", 1) > 1:
        raise ConfigError(f"a {type(sampler).__name__} already divides the data over {sampler.num_replicas} processes; "
                          "pass the loader without it: prepare() divides over data ranks")


def _agreed(sampler: Any, generators: Generators) -> Any:
    """`sampler`, or a copy of it, whose order is the same on every rank. Errors: ConfigError for one that shards."""
    _check_undivided(sampler)
    changes = {}
    inner = getattr(sampler, "sampler", None)
    if inner is not None:
        agreed = _agreed(inner, generators)
        if agreed is not inner:
            changes["sampler"] = agreed
    if isinstance(sampler, SeedableRandomSampler):
        changes["initial_seed"] = generators.agree(sampler.initial_seed)
    elif hasattr(sampler, "generator"):
        if sampler.generator is None:
            changes["generator"] = generators.new()
        else:
            generators.keep(sampler.generator)
    if not changes:
        return sampler
    result = copy.copy(sampler)  # the caller's loader keeps its own
    for name, value in changes.items():
        setattr(result, name, value)
    return result


_KEPT = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
         "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order")


def rebuilt(loader: Any, **changed: Any) -> Any:
    """A torch DataLoader like `loader` with other keywords."""
    from torch.utils.data import DataLoader

    known = inspect.signature(DataLoader.__init__).parameters
    kept = {name: getattr(loader, name) for name in _KEPT if name in known and hasattr(loader, name)}
    if not loader.num_workers:
        kept.pop("prefetch_factor", None)
    if not kept.get("pin_memory_device"):
        kept.pop("pin_memory_device", None)
    return DataLoader(loader.dataset, **{**kept, **changed})


class MapSource:
    """A torch DataLoader over numbered samples: only this rank's are read, and collated together."""

    def __init__(self, loader: Any, share: Share, generators: Generators):
        self.generators = generators
        self.shard = BatchSamplerShard(_agreed(loader.batch_sampler, generators), share.ranks, share.rank,
                                       share.split_batches, num_micro_batches=share.num_micro_batches)
        self._indices = RankIndices(self.shard)
        if loader.generator is None:
            generator = generators.new(_WORKERS + share.rank)
        else:
            generators.keep(loader.generator)
            generator = loader.generator
        self.loader = rebuilt(loader, batch_sampler=self._indices, generator=generator)
        self.batch_size, self.total_batch_size = self.shard.batch_size, self.shard.total_batch_size
        self.sampler, self.batch_sampler = self.shard.sampler, self.shard

    @property
    def total_samples(self) -> Optional[int]:
        sampler = self.shard.sampler
        return len(sampler) if self.total_batch_size is not None and hasattr(sampler, "__len__") else None

    @property
    def drop_last(self) -> bool:
        return self.shard.drop_last

    def __len__(self) -> int:
        return len(self.shard)

    def begin(self, epoch: int) -> None:
        self.generators.begin(epoch)
        set_epoch_of((self.shard, self.loader.dataset), epoch)

    def batches(self, start: int) -> Iterator[Any]:
        self._indices.start = start
        sizes = None
        for batch in self.loader:
            sizes = self._indices.sizes if sizes is None else sizes
            yield batch if sizes.popleft() else slice_batch(batch, 0, 0)


class _StreamSource:
    """What the sources share that read a whole stream on every rank and keep a part."""

    loader: Any
    batch_sampler = None

    def __init__(self, loader: Any, share: Share, generators: Optional[Generators]):
        self.loader, self.share, self.generators = loader, share, generators
        self.sampler = getattr(loader, "sampler", None)
        self.drop_last = bool(getattr(loader, "drop_last", False))
        size = getattr(loader, "batch_size", None)
        size = size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None
        self.total_batch_size = None if size is None else size * share.group
        self.batch_size = None if size is None else self.total_batch_size // share.ranks
        if share.split_batches and size is not None and size % (share.ranks * share.num_micro_batches):
            raise ConfigError(f"split_batches=True: a batch_size of {size} is not a multiple of {share.ranks} data "
                              f"ranks x {share.num_micro_batches} micro-batches")

    @property
    def total_samples(self) -> Optional[int]:
        if self.total_batch_size is None:
            return None
        try:
            return len(self.loader.dataset)
        except (AttributeError, TypeError):
            return None

    def __len__(self) -> int:
        total = self.total_samples
        count, whole = (len(self.loader), self.share.group) if total is None else (total, self.total_batch_size)
        return count // whole if self.drop_last else -(-count // whole)

    def pinned(self, batch: Any) -> Any:
        """`batch` in pinned memory where the caller's loader would have it there."""
        torch = sys.modules.get("torch")
        wanted = torch is not None and getattr(self.loader, "pin_memory", False) is True and torch.cuda.is_available()
        return move_tensors(batch, pin=True) if wanted else batch

    def begin(self, epoch: int) -> None:
        if self.generators is not None:
            self.generators.begin(epoch)
        set_epoch_of((getattr(self.loader, "dataset", None), self.sampler, self.loader), epoch)


class SampleSource(_StreamSource):
    """A torch DataLoader over an iterable dataset, without workers: this rank's samples are collated together."""

    def batches(self, start: int) -> Iterator[Any]:
        groups = sample_groups(self.loader.dataset, self.total_batch_size, self.drop_last)
        for group in itertools.islice(groups, start, None):
            begin, end = bounds(len(group), self.share.rank, self.share.ranks)
            batch = self.loader.collate_fn(group[begin:end] or group[:1])
            yield self.pinned(batch if begin < end else slice_batch(batch, 0, 0))


class BatchSource(_StreamSource):
    """Any iterable of batches, cut along dim 0. Where its `batch_size` is known, global batches have exactly that many
    samples even if batches within the stream are short; otherwise they are runs of so many batches."""

    def batches(self, start: int) -> Iterator[Any]:
        for pieces in itertools.islice(self._groups(), start, None):
            yield self.pinned(part_of_pieces(pieces, self.share.rank, self.share.ranks))

    def _groups(self) -> Iterator[List[Any]]:
        if self.total_batch_size is None:
            yield from sample_groups(self.loader, self.share.group, self.drop_last)
            return
        pieces: List[Any] = []
        have = 0
        for batch in self.loader:
            size = samples_in(batch)
            at = 0
            while have + size - at >= self.total_batch_size:
                end = at + self.total_batch_size - have
                pieces.append(batch if (at, end) == (0, size) else slice_batch(batch, at, end))
                yield pieces
                pieces, have, at = [], 0, end
            if at < size:
                pieces.append(batch if at == 0 else slice_batch(batch, at, size))
                have += size - at
        if pieces and not self.drop_last:
            yield pieces


def _agree_in_place(loader: Any, generators: Generators) -> None:
    """For a loader of the caller's own class, which cannot be made anew."""
    for each in (loader.sampler, loader.batch_sampler, loader):
        _check_undivided(each)
        if getattr(each, "generator", loader) is None:
            each.generator = generators.new()


def _stream_generator(loader: Any, generators: Generators) -> Any:
    """Every rank reads the whole stream, so all seed their workers alike."""
    if loader.generator is None:
        return generators.new(_WORKERS)
    generators.keep(loader.generator)
    return loader.generator


def _torch_source(loader: Any, share: Share, generators: Generators) -> Any:
    from torch.utils.data import DataLoader, IterableDataset

    split = getattr(getattr(loader.dataset, "_distributed", None), "world_size", 1)
    if split > 1:
        raise ConfigError(f"the dataset is already split over {split} nodes (split_dataset_by_node); pass it "
                          "undivided: prepare() divides over data ranks")
    if type(loader).__iter__ is not DataLoader.__iter__:
        _agree_in_place(loader, generators)
        return BatchSource(loader, share, generators)
    if not isinstance(loader.dataset, IterableDataset):
        if loader.batch_sampler is not None:
            return MapSource(loader, share, generators)
        sampler = _agreed(loader.sampler, generators)  # batch_size=None: every item of the dataset is a batch
        return BatchSource(rebuilt(loader, batch_size=None, sampler=sampler,
                                   generator=_stream_generator(loader, generators)), share, generators)
    piped = any(base.__name__ == "IterDataPipe" for base in type(loader.dataset).__mro__)
    if loader.num_workers == 0 and loader.batch_size is not None and not piped:
        return SampleSource(loader, share, generators)
    return BatchSource(rebuilt(loader, batch_size=loader.batch_size, drop_last=loader.drop_last,
                               generator=_stream_generator(loader, generators)), share, generators)


def source_for(loader: Any, share: Share, seed: Optional[int], agree: Callable[[int], int],
               draw: Callable[[], int]) -> Any:
    """The source for what the caller passed. Collective over all ranks for torch loaders (`agree`)."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(loader, torch.utils.data.DataLoader):
        return _torch_source(loader, share, Generators(agree(draw()) if seed is None else seed, agree))
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"a {type(loader).__name__} is no data loader: it cannot be iterated over")
    return BatchSource(loader, share, None)
