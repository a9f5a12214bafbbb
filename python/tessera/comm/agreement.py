"""What ranks share is compared over them: `agreed` raises on every rank where they differ, naming ranks, place and values."""

from __future__ import annotations

import hashlib
import struct
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Dict, Iterator, List

from tessera.comm.process_group import meet
from tessera.errors import CommunicationError, ConfigError
from tessera.utils import objects

CALL = "prepare(), or the first use of a model"  # as ranks tell each other
_ERROR = "error"
_MOST = 8  # differences that a message lists
_LEVELS = 6


@contextmanager
def agreed(world: Any, what: str) -> Iterator[Dict[str, Any]]:
    """The body fills the dict with what must be equal on all ranks (place: value), without communicating. Afterwards it
    is compared: one message of a few bytes, and texts only where something differs. Collective over `world` (None: one
    rank), also where the body fails, so that an error of one rank ends all of them. Errors: ConfigError."""
    facts: Dict[str, Any] = {}
    if world is None or world.size == 1:
        yield facts
        return
    try:
        yield facts
    except CommunicationError:
        raise
    except Exception as error:
        _compare(world, what, {_ERROR: f"{type(error).__name__}: {error}"}, failed=True)
        raise
    _compare(world, what, {place: text_of(value) for place, value in facts.items()}, failed=False)


def _compare(world: Any, what: str, facts: Dict[str, str], failed: bool) -> None:
    encoded = objects.encode({"what": what, **facts})
    digest = struct.unpack("<qq", hashlib.blake2b(encoded, digest_size=16).digest())
    told = meet(world, CALL, *digest)
    if all(values == told[0] for values in told):
        return
    first = objects.decode(world.broadcast_bytes(encoded if world.rank == 0 else None))
    mine: Dict[str, str] = {"what": what, **facts}
    places = [place for place in {**first, **mine} if first.get(place) != mine.get(place)]
    differing = {place: mine.get(place) for place in places if place in ("what", _ERROR)} or \
        {place: mine.get(place) for place in places[:_MOST]}
    everyone = [objects.decode(data) for data in world.all_gather_bytes(objects.encode(differing))]
    if not failed:
        raise ConfigError(_message(what, first, everyone))


def _message(what: str, first: Dict[str, str], everyone: List[Dict[str, Any]]) -> str:
    others = [found for found in everyone if found]
    if _ERROR in first or any(found.get(_ERROR) for found in others):
        rank = 0 if _ERROR in first else next(i for i, found in enumerate(everyone) if found.get(_ERROR))
        return f"{what} failed on rank {rank}: {first[_ERROR] if rank == 0 else everyone[rank][_ERROR]}"
    lines = []
    for place in dict.fromkeys(place for found in others for place in found):
        values: Dict[Any, List[int]] = {first.get(place): [0]}
        for rank, found in enumerate(everyone[1:], start=1):
            if place in found:
                values.setdefault(found[place], []).append(rank)
        name = "the call" if place == "what" else place
        lines.append(f"  {name}: " + ", ".join(f"{_short(value)} on {_ranks(ranks)}" for value, ranks in values.items()))
    more = f"\n  and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
    return (f"{what}: ranks do not agree:\n" + "\n".join(lines[:_MOST]) + more
            + "\nMake these the same on every rank; only seeds and initial weights may differ: those of rank 0 count")


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    return value if len(value) <= 200 else f"{value[:200]}..."


def _ranks(ranks: List[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def text_of(value: Any, level: int = 0) -> str:
    """A text that is equal for equal values in all processes: it holds no address, and of devices no number."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if level > _LEVELS:
        return _kind(value)
    if isinstance(value, dict):
        items = sorted((text_of(key, level + 1), text_of(each, level + 1)) for key, each in value.items())
        return "{" + ", ".join(f"{key}: {each}" for key, each in items) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(text_of(each, level + 1) for each in value)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(text_of(each, level + 1) for each in value) + "]"
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        return _numbers(value)
    if isinstance(value, partial):
        return f"partial({text_of(value.func, level + 1)}, {text_of(value.args, level + 1)}, {text_of(value.keywords, level + 1)})"
    if isinstance(value, MethodType):
        return value.__qualname__
    if isinstance(value, FunctionType):
        return _function(value, level)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return _kind(value)


def _numbers(value: Any) -> str:
    if objects.is_torch(value):
        value = value.detach().float().cpu() if value.is_floating_point() else value.detach().cpu()
    if value.size == 1 if isinstance(getattr(value, "size", None), int) else value.numel() == 1:
        return repr(value.item())
    data = repr(value.tolist()).encode()
    return f"{list(value.shape)} numbers {hashlib.blake2b(data, digest_size=8).hexdigest()}"


def _function(function: FunctionType, level: int) -> str:
    """Its code and what it keeps, so that two lambdas of one line that hold other numbers differ."""
    code = function.__code__
    consts = [each for each in code.co_consts if not hasattr(each, "co_code")]
    kept = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    body = hashlib.blake2b(code.co_code, digest_size=4).hexdigest()
    return f"{function.__module__}.{function.__qualname__}({body}, {text_of([consts, function.__defaults__, kept], level + 1)})"


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
