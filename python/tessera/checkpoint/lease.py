"""The lease of a project's folder: of two jobs that number states in one folder, the second is refused by name."""

from __future__ import annotations

import os
from typing import Any, Dict

from tessera.comm.process_group import close_at_exit, native


class _Held:
    """By folder, of this process: kept until it ends, as Accelerators come and go in it."""

    leases: Dict[str, Any] = {}
    pid = 0


def _leases() -> Dict[str, Any]:
    if _Held.pid != os.getpid():  # a forked child has none
        _Held.leases, _Held.pid = {}, os.getpid()
    return _Held.leases


def hold(folder: Any, world: Any) -> None:
    """Takes the lease of a folder that is there, and looks whether it is still this process's. Errors: ConfigError naming the
    job that works there, or has taken over."""
    key = os.path.realpath(folder)
    leases = _leases()
    if key not in leases:
        leases[key] = native().Lease(key, world)
        close_at_exit(leases[key])
    leases[key].check()


def holder(folder: Any) -> str:
    """Which other process of this machine works in a folder, in words; empty: none."""
    return "" if os.path.realpath(folder) in _leases() else native().holder_of(folder)
