"""What needs saying one time."""

from __future__ import annotations

import logging
import os
from typing import Iterable

from tessera.comm import process_group

_told: set = set()


def warn_once(text: str) -> None:
    """Warns once per process and text, on the main process; before it is connected, on the one whose RANK is 0."""
    if text in _told:
        return
    _told.add(text)
    rank = process_group.own_rank()
    if rank == 0 or (rank is None and os.environ.get("RANK", "0") == "0"):
        logging.getLogger("tessera").warning(text)


def name_unread(kind: str, keywords: Iterable[str], where: str) -> None:
    """Warns of keywords that an object keeps, as Accelerate's of that name does, and that nobody reads; `where` they belong."""
    names = sorted(keywords)
    if names:
        warn_once(f"{kind}: nobody reads {', '.join(names)}; it belongs into {where}")
