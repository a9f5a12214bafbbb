"""`warn_once`, for what needs saying one time."""

from __future__ import annotations

import logging
import os

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
