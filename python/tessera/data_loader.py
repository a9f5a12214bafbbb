"""DataLoaders of a run on many ranks: `prepare_data_loader`, `skip_first_batches`.

What the caller passes (a torch DataLoader, or any iterable of batches) is divided over data ranks only: tensor and
pipeline peers read the same. Its `batch_size` is the micro-batch of one data rank, so with

    G = batch_size * num_micro_batches * data_ranks        (split_batches=True: G = batch_size)

step k of the prepared loader is samples [k * G, (k + 1) * G) of the caller's order on every layout, and data rank r
gets the r-th run of them. Nothing is repeated or left out: the last step (kept unless drop_last) is cut into runs whose
lengths differ by at most one, and a rank that gets none is handed an EMPTY batch, tensors of shape [0, ...], because
every rank takes part in every step. So `even_batches` has nothing to do.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any, Callable, Dict, Iterator, Optional, Sequence

from tessera.comm.process_group import meet
from tessera.compat.refusals import not_ours
from tessera.data.batch import move_tensors, part_of_pieces, plain, samples_in
from tessera.data.samplers import BatchSamplerShard, SampleShard, SeedableRandomSampler, SkipBatchSampler, drawn_seed
from tessera.data.sources import Share, rebuilt, source_for
from tessera.data.split import bounds
from tessera.errors import ConfigError, DataError
from tessera.utils.objects import decode, encode
from tessera.utils.random import synchronize_rng_states

_END = object()


class DataLoaderBase:
    """A prepared loader. Iterating gives this data rank's part of one step's samples at a time; every pass is an epoch
    of its own, with an order of its own if the caller's loader shuffles. Members it does not have are those of the
    caller's loader.

    `len`: optimizer steps of an epoch. `batch_size`: samples a step and data rank. `end_of_dataloader`: whether the
    batch just handed out is the epoch's last. `remainder`: samples of a short last step (0: none is short, -1: not
    known)."""

    def __init__(self, source: Any, *, gradient_state: Any = None, device: Any = None, non_blocking: bool = False,
                 rng_types: Optional[Sequence] = None, use_stateful_dataloader: bool = False):
        self._source = source
        self.repeats: Optional[int] = None  # the caller's batch_size, which scripts repeat a loss by
        self.gradient_state = gradient_state
        self.device = device
        self.non_blocking = non_blocking
        self.rng_types = rng_types
        self.use_stateful_dataloader = use_stateful_dataloader
        self.end_of_dataloader = False
        self._next = (0, 0)  # epoch and first step of the next pass
        self._at = (0, 0)  # epoch and steps handed out of the pass that runs or was left
        self._orders: Optional[list] = None  # states of the caller's generators where the epoch of _at began
        self._pending_orders: Optional[list] = None
        self._handed: Any = None  # the batch just handed out

    @property
    def __class__(self) -> type:
        """A prepared torch DataLoader passes for one: isinstance() asks the type first, then this."""
        loader = self._source.loader
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(loader, torch.utils.data.DataLoader):
            return torch.utils.data.DataLoader
        return type(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # nothing of Python's own protocols, nor of a half-made object
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._source.loader, name)

    @property
    def batch_size(self) -> Optional[int]:
        return self._source.batch_size

    @property
    def sampler(self) -> Any:
        return self._source.sampler

    @property
    def batch_sampler(self) -> Any:
        return self._source.batch_sampler

    @property
    def drop_last(self) -> bool:
        return self._source.drop_last

    @property
    def total_batch_size(self) -> Optional[int]:
        """Samples of a whole step over all data ranks; None when the caller's loader does not tell its batch_size."""
        return self._source.total_batch_size

    @property
    def total_dataset_length(self) -> int:
        dataset = self._source.loader.dataset
        return dataset.total_length if hasattr(dataset, "total_length") else len(dataset)

    @property
    def remainder(self) -> int:
        total, whole = self._source.total_samples, self._source.total_batch_size
        if total is None or whole is None:
            return -1
        return 0 if self._source.drop_last else total % whole

    @property
    def local_samples(self) -> Optional[int]:
        """Samples of the batch just handed out, on this data rank; None if that is not known."""
        try:
            return None if self._handed is None else samples_in(self._handed)
        except DataError:
            return None

    @property
    def is_short_batch(self) -> bool:
        """Whether the batch just handed out is the epoch's last and has fewer samples than others, over all ranks."""
        if not self.end_of_dataloader or self.remainder == 0:
            return False
        return self.remainder > 0 or (self.batch_size is not None and (self.local_samples or 0) < self.batch_size)

    @property
    def epoch(self) -> int:
        """The epoch that runs, or the one the next pass begins."""
        return self._at[0]

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        return self.run()

    def set_epoch(self, epoch: int) -> None:
        """The next pass is epoch `epoch`, from where load_state_dict() put it if that is the same epoch."""
        if self._next[0] != epoch:
            self._place(epoch, 0, None)

    def _place(self, epoch: int, step: int, orders: Optional[list]) -> None:
        self._next = self._at = (epoch, step)
        self._pending_orders = orders
        self.end_of_dataloader = False

    def _own_batches(self, start: int) -> Iterator[Any]:
        return self._source.batches(start)

    def run(self, start: Optional[int] = None) -> Iterator[Any]:
        """One pass, from step `start` of the epoch on (none: from the beginning, or the place loaded)."""
        epoch, step = self._next
        step = step if start is None else start
        self._at, self._next = (epoch, step), (epoch + 1, 0)
        self.end_of_dataloader = False
        self._begin(epoch)
        if self.gradient_state is not None:
            self.gradient_state._add_dataloader(self)
        try:
            batches = self._own_batches(step)
            batch = next(batches, _END)
            while batch is not _END:
                following = next(batches, _END)  # read ahead by one: whether this is the last must be known with it
                self.end_of_dataloader = following is _END
                self._at = (epoch, self._at[1] + 1)
                self._handed = batch
                yield batch if self.device is None else move_tensors(batch, self.device, self.non_blocking)
                batch = following
            self.end_of_dataloader = True
        finally:
            self._handed = None
            if self.gradient_state is not None:
                self.gradient_state._remove_dataloader(self)

    def _begin(self, epoch: int) -> None:
        kinds = [kind for kind in self.rng_types or () if str(getattr(kind, "value", kind)) != "generator"]
        if kinds:  # the loader's own generators are equal on all ranks anyway
            synchronize_rng_states(kinds)
        generators = self._source.generators
        if generators is not None:
            if self._pending_orders is not None:
                generators.restore(self._pending_orders)
                self._pending_orders = None
            self._orders = generators.state()
        self._source.begin(epoch)

    def state_dict(self) -> Dict[str, Any]:
        """Where the loader is: {"epoch", "batches" handed out of it, "total_batch_size", "seed", "generators"}, fit for
        JSON. After the last batch of an epoch, the beginning of the next."""
        generators = self._source.generators
        (epoch, step), orders = self._at, self._orders
        if self.end_of_dataloader:
            (epoch, step), orders = (epoch + 1, 0), None
        elif self._at == self._next:  # no pass has begun
            orders = self._pending_orders
        if orders is None and generators is not None:
            orders = generators.state()
        return {"epoch": epoch, "batches": step, "total_batch_size": self.total_batch_size,
                "seed": None if generators is None else generators.seed, "generators": orders or []}

    def load_state_dict(self, state: Dict[str, Any], position: bool = True) -> None:
        """The next pass goes on from there; with position=False it is the same epoch from its beginning, for scripts
        that skip by themselves. The layout may differ. Errors: ConfigError when the place lies within one of this
        layout's global batches."""
        step = self._resumed_step(state, position)
        generators = self._source.generators
        if generators is not None and state.get("seed") is not None:
            generators.seed = int(state["seed"])
        self._place(int(state["epoch"]), step if position else 0, list(state.get("generators") or []) or None)

    def check_state_dict(self, state: Dict[str, Any]) -> None:
        """Whether accelerator.load_state() can use it here. Errors: ConfigError."""
        self._resumed_step(state, self.use_stateful_dataloader)

    def _resumed_step(self, state: Dict[str, Any], position: bool) -> int:
        step, was, now = int(state["batches"]), state.get("total_batch_size"), self.total_batch_size
        if position and step and was is not None and now is not None and was != now:
            step, rest = divmod(step * was, now)
            if rest:
                raise ConfigError(f"the data loader was stopped after {state['batches']} global batches of {was} "
                                  f"samples, which is not a whole number of global batches of {now}; resume with a "
                                  f"global batch size that divides {int(state['batches']) * was}")
        return step


class DataLoaderShard(DataLoaderBase):
    """A prepared loader that reads its data rank's part by itself."""


class DataLoaderDispatcher(DataLoaderBase):
    """A prepared loader that only rank 0 reads, for streams that differ from process to process: each step's samples go
    to all ranks, and every rank keeps its part. Iterating it is collective.

    `share(object or None) -> object` hands rank 0's object to every rank."""

    def __init__(self, source: Any, *, share: Callable[[Any], Any], reads: bool, data_rank: int, data_ranks: int,
                 slice_fn: Optional[Callable] = None, **options: Any):
        super().__init__(source, **options)
        self._share, self._reads = share, reads
        self._rank, self._ranks, self._slice_fn = data_rank, data_ranks, slice_fn

    @property
    def batch_size(self) -> Optional[int]:
        whole = self._source.total_batch_size
        return None if whole is None else whole // self._ranks

    def _own_batches(self, start: int) -> Iterator[Any]:
        batches = self._source.batches(start) if self._reads else iter(())
        while True:
            message, failure = None, None
            if self._reads:
                try:
                    batch = next(batches, _END)
                    message = {} if batch is _END else {"batch": plain(batch)}
                except Exception as error:  # the other ranks wait: they must hear of it before it is raised here
                    message, failure = {"error": f"{type(error).__name__}: {error}"}, error
            message = self._share(message)
            if failure is not None:
                raise failure
            if "error" in message:
                raise DataError(f"rank 0 could not read the next batch: {message['error']}")
            if not message:
                return
            yield self._part(message["batch"])

    def _part(self, batch: Any) -> Any:
        if self._slice_fn is None:
            return part_of_pieces([batch], self._rank, self._ranks)
        part = slice(*bounds(samples_in(batch), self._rank, self._ranks))
        return self._slice_fn(batch, part, process_index=self._rank, num_processes=self._ranks)


class MpDeviceLoaderWrapper:
    """accelerate's loader for TPUs."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise not_ours("MpDeviceLoaderWrapper", "XLA devices", "use prepare_data_loader")


class SkipDataLoader:
    """`dataloader` without the first `skip_batches` batches of each pass; otherwise it is like it."""

    def __init__(self, dataloader: Any, skip_batches: int = 0):
        self._dataloader = dataloader
        self.skip_batches = skip_batches

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"SkipDataLoader has no attribute {name!r}")
        return getattr(self._dataloader, name)

    def __len__(self) -> int:
        return max(0, len(self._dataloader) - self.skip_batches)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._dataloader, DataLoaderBase):
            return self._dataloader.run(self.skip_batches)
        return itertools.islice(iter(self._dataloader), self.skip_batches, None)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """The rest of an epoch: a loader like `dataloader` that begins at batch number `num_batches`. For a prepared loader
    it is a number of optimizer steps, counted from the beginning of the epoch even if load_state_dict() has put the
    loader elsewhere. What map-style data would give is not read."""
    if num_batches < 0:
        raise ValueError(f"num_batches is {num_batches}, not a number of batches")
    if isinstance(dataloader, SkipDataLoader):
        return SkipDataLoader(dataloader._dataloader, dataloader.skip_batches + num_batches)
    torch = sys.modules.get("torch")
    if isinstance(dataloader, DataLoaderBase) or torch is None:
        return SkipDataLoader(dataloader, num_batches)
    data = torch.utils.data
    if (not isinstance(dataloader, data.DataLoader) or type(dataloader).__iter__ is not data.DataLoader.__iter__
            or isinstance(dataloader.dataset, data.IterableDataset) or dataloader.batch_sampler is None):
        return SkipDataLoader(dataloader, num_batches)
    return rebuilt(dataloader, batch_sampler=SkipBatchSampler(dataloader.batch_sampler, num_batches),
                   generator=dataloader.generator)


def get_sampler(dataloader: Any) -> Any:
    """The sampler that decides the order, below any batch sampler."""
    sampler = getattr(dataloader, "batch_sampler", None) or getattr(dataloader, "sampler", None)
    while getattr(sampler, "sampler", None) is not None:
        sampler = sampler.sampler
    return sampler


def _agree_over(world: Any) -> Callable[[int], int]:
    def agree(number: int) -> int:
        import numpy

        array = numpy.array([number], dtype=numpy.int64)
        meet(world, "iterating over a prepared loader")
        world.broadcast(array)
        return int(array[0])

    return agree


def _share_over(world: Any) -> Callable[[Any], Any]:
    def share(value: Any) -> Any:
        meet(world, "iterating over a loader with dispatch_batches=True")
        return decode(world.broadcast_bytes(encode(value) if world.rank == 0 else None))

    return share


def prepare_data_loader(dataloader: Any, device: Any = None, num_processes: Optional[int] = None,
                        process_index: Optional[int] = None, split_batches: bool = False, put_on_device: bool = False,
                        rng_types: Optional[Sequence] = None, dispatch_batches: Optional[bool] = None,
                        even_batches: bool = True, slice_fn_for_dispatch: Optional[Callable] = None,
                        use_seedable_sampler: bool = True, data_seed: Optional[int] = None, non_blocking: bool = False,
                        use_stateful_dataloader: bool = False, torch_device_mesh: Any = None, *,
                        num_micro_batches: int = 1, data_rank: Optional[int] = None, data_ranks: Optional[int] = None,
                        gradient_state: Any = None, world: Any = None,
                        agree: Optional[Callable[[int], int]] = None) -> Any:
    """The loader that gives this data rank its part of every optimizer step; see the module's text. Collective.

    `data_rank` of `data_ranks` (also as process_index and num_processes; 0 of 1 if not given), `world`: the
    Communicator of all ranks, `agree`: gives rank 0's int64 on every rank (by default over `world`). A loader that
    shuffles without a generator gets the order of (seed, epoch), the seed drawn on rank 0 or `data_seed`; one with a
    generator keeps that order, and the generator must be seeded alike on all ranks. `dispatch_batches=True`: rank 0
    reads and sends (otherwise every rank reads a stream and keeps its part), cut by `slice_fn_for_dispatch(batch,
    slice, process_index=, num_processes=)` if given. `put_on_device`: torch tensors move to `device`. `rng_types`:
    global random states made equal at each epoch's beginning. `use_stateful_dataloader`: load_state goes on within
    the epoch. `even_batches` and `use_seedable_sampler` are accepted: orders are always reproducible and nothing is
    ever repeated.
    Errors: TypeError for what cannot be iterated over, ConfigError for a loader or dataset that is already divided."""
    if isinstance(dataloader, (DataLoaderBase, SkipDataLoader)):
        return dataloader
    if torch_device_mesh is not None:
        raise not_ours("torch_device_mesh", "PyTorch's own parallelism", "set degrees in MegatronLMPlugin")
    rank = data_rank if data_rank is not None else process_index or 0
    ranks = data_ranks if data_ranks is not None else num_processes or 1
    if not 0 <= rank < ranks or num_micro_batches < 1:
        raise ConfigError(f"data rank {rank} of {ranks} with {num_micro_batches} micro-batches cannot be")
    if slice_fn_for_dispatch is not None and not dispatch_batches:
        raise ConfigError("slice_fn_for_dispatch needs dispatch_batches=True: otherwise ranks read their own parts")
    alone = world is None or world.size == 1
    if agree is None:
        agree = (lambda number: number) if alone else _agree_over(world)
    options = {"gradient_state": gradient_state, "device": device if put_on_device else None,
               "non_blocking": non_blocking, "rng_types": rng_types,
               "use_stateful_dataloader": use_stateful_dataloader}
    if dispatch_batches:
        if alone and ranks > 1:
            raise ConfigError(f"dispatch_batches=True with {ranks} data ranks needs `world`, to send batches over")
        whole = Share(0, 1, num_micro_batches * ranks, split_batches)
        prepared: DataLoaderBase = DataLoaderDispatcher(
            source_for(dataloader, whole, data_seed, agree, drawn_seed),
            share=(lambda value: value) if alone else _share_over(world), reads=alone or world.rank == 0, data_rank=rank,
            data_ranks=ranks, slice_fn=slice_fn_for_dispatch, **options)
    else:
        share = Share(rank, ranks, num_micro_batches, split_batches)
        prepared = DataLoaderShard(source_for(dataloader, share, data_seed, agree, drawn_seed), **options)
    prepared.repeats = None if split_batches else getattr(dataloader, "batch_size", None)
    return prepared


def _iterable_dataset_shard() -> type:
    torch = sys.modules.get("torch")
    bases = (SampleShard,) if torch is None else (SampleShard, torch.utils.data.IterableDataset)
    return type("IterableDatasetShard", bases, {"__module__": __name__, "__doc__": SampleShard.__doc__})


def __getattr__(name: str) -> Any:
    if name != "IterableDatasetShard":
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    # torch's DataLoader knows a stream by its base class, and torch may not be there, or not yet.
    made = _iterable_dataset_shard()
    if "torch" in sys.modules:
        globals()[name] = made
    return made


__all__ = ["BatchSamplerShard", "DataLoaderBase", "DataLoaderDispatcher", "DataLoaderShard", "IterableDatasetShard",
           "MpDeviceLoaderWrapper", "SeedableRandomSampler", "SkipBatchSampler", "SkipDataLoader", "get_sampler",
           "prepare_data_loader", "skip_first_batches"]
