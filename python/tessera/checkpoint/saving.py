"""What all saving in Python goes through: folders that appear whole, and work of several ranks that fails on all or on none."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, List, Optional, TypeVar

from tessera import errors
from tessera.comm.process_group import describe, native
from tessera.utils.objects import decode, encode

T = TypeVar("T")


class DamagedState(errors.CheckpointError):
    """A folder that holds no whole state, so that another one may be taken in its place."""


def on_every_rank(world: Any, work: Callable[[], T]) -> T:
    """work() here, after which every rank knows how it went everywhere. Collective. Errors: this rank's own; else that of the
    first rank that failed, with its number."""
    error: Optional[BaseException] = None
    result: Any = None
    try:
        result = work()
    except Exception as problem:
        error = problem
    if world is None or world.size == 1:
        told: List[Any] = []
    else:
        told = [decode(data) for data in world.all_gather_bytes(encode(None if error is None else (_kind(error), describe(error))))]
    if error is not None:
        raise error
    for rank, failure in enumerate(told):
        if failure is not None:
            raise _KINDS[failure[0]](f"rank {rank}: {failure[1]}")
    return result


def on_main_rank(world: Any, work: Callable[[], T]) -> T:
    """work() on rank 0, whose result, which encode() must know, all return. Collective. Errors: on every rank, rank 0's."""
    if world is None or world.size == 1:
        return work()
    result: Any = None

    def first() -> None:
        nonlocal result
        if world.rank == 0:
            result = work()

    on_every_rank(world, first)
    return decode(world.broadcast_bytes(encode(result) if world.rank == 0 else None))


_KINDS = {"damaged": DamagedState, "checkpoint": errors.CheckpointError, "data": errors.DataError, "config": errors.ConfigError,
          "io": errors.IoError, "other": errors.Error}


def _kind(error: BaseException) -> str:
    for name, kinds in (("damaged", DamagedState), ("checkpoint", errors.CheckpointError), ("data", errors.DataError),
                        ("config", errors.ConfigError), ("io", OSError)):
        if isinstance(error, kinds):
            return name
    return "other"


class StagedFolder:
    """A folder that all ranks write into and rank 0 puts in place: `with StagedFolder(world, target) as staged:` write to
    `staged.path`, then staged.publish(). Left without that, it is removed and `target` is as it was. Collective."""

    def __init__(self, world: Any, target: Path, existing: str = "replace"):
        self._world, self._target, self._existing = world, target, existing
        self._folder: Any = None
        self.path = Path()

    def __enter__(self) -> "StagedFolder":
        self.path = Path(on_main_rank(self._world, self._begin))
        return self

    def _begin(self) -> str:
        module = native()
        self._folder = module.StagedDirectory(self._target, getattr(module.Existing, self._existing))
        return str(self._folder.path)

    def publish(self, check: Callable[[], None] = lambda: None) -> None:
        """`check` on rank 0 before. Errors: on every rank; what was there before then stays."""
        on_main_rank(self._world, lambda: self.publish_here(check))

    def publish_here(self, check: Callable[[], None] = lambda: None) -> None:
        """On rank 0 alone, in any thread."""
        check()
        self._folder.publish()

    def __exit__(self, *_: Any) -> None:
        self._folder = None  # which removes it, if it was not published
