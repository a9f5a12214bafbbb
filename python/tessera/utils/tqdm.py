"""A progress bar on one process per machine."""

from __future__ import annotations

from typing import Any


def tqdm(*args, main_process_only: bool = True, **kwargs) -> Any:
    """tqdm.auto.tqdm, shown on the first process of each machine only unless `main_process_only=False`.
    Errors: ImportError without tqdm; ValueError for a bool as first argument, as older versions took it."""
    from tessera.state import PartialState  # here, as importing tessera.utils costs nothing

    try:
        from tqdm.auto import tqdm as bar
    except ImportError:
        raise ImportError("tessera.utils.tqdm needs the package tqdm: pip install tqdm") from None
    if args and isinstance(args[0], bool):
        raise ValueError("the first argument of tqdm is what to iterate over; give main_process_only by name")
    disable = kwargs.pop("disable", False) or (main_process_only and PartialState().local_process_index != 0)
    return bar(*args, **kwargs, disable=disable)
