"""Logging of several processes: `get_logger`, and `warn_once` for what needs saying one time."""

from __future__ import annotations

import logging
import os
from typing import Any, Optional

from tessera.comm.warnings import warn_once
from tessera.state import PartialState

__all__ = ["MultiProcessAdapter", "get_logger", "warn_once"]


class MultiProcessAdapter(logging.LoggerAdapter):
    """A logger whose methods take `main_process_only=True` (rank 0 alone logs), or `in_order=True` (all ranks log, one
    after the other; collective). Messages begin with `[RANK n]`. Can be made before there is a state, but not used."""

    @staticmethod
    def _should_log(main_process_only: bool) -> bool:
        return not main_process_only or PartialState().is_main_process

    def process(self, msg: Any, kwargs: dict) -> tuple:
        msg, kwargs = super().process(msg, kwargs)
        kwargs.setdefault("stacklevel", 2)  # the caller's line, not that of `log`
        return f"[RANK {PartialState().process_index}] {msg}", kwargs

    def log(self, level: int, msg: Any, *args, **kwargs) -> None:
        """Errors: RuntimeError before there is a state."""
        if not PartialState._shared_state:
            raise RuntimeError(
                "make a `PartialState()` or an `Accelerator()` before logging: until then it is not known which "
                "process this is"
            )
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        wanted = self.isEnabledFor(level)
        if wanted:
            msg, kwargs = self.process(msg, kwargs)
        if not in_order:
            if wanted and self._should_log(main_process_only):
                self.logger.log(level, msg, *args, **kwargs)
            return
        # All ranks come here, also one that has this level switched off: the others wait for it.
        state = PartialState()
        for rank in range(state.num_processes):
            if rank == state.process_index and wanted:
                self.logger.log(level, msg, *args, **kwargs)
            state.wait_for_everyone()

    def warning_once(self, *args, **kwargs) -> None:
        """warning(), once for the same arguments."""
        key = (args, tuple(sorted(kwargs.items())))
        told = self.__dict__.setdefault("_told", set())
        if key not in told:
            told.add(key)
            self.warning(*args, **kwargs)


def get_logger(name: str, log_level: Optional[str] = None) -> MultiProcessAdapter:
    """The logger of that name for several processes. `log_level`, or else ACCELERATE_LOG_LEVEL, or else
    TESSERA_LOG_LEVEL, sets its level and that of the root logger."""
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL") or os.environ.get("TESSERA_LOG_LEVEL")
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})
