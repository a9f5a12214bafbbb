"""A request to make room: SIGTERM or SIGUSR1, from a scheduler, a launcher or a person."""

from __future__ import annotations

import signal
from typing import Any, Dict

from tessera.errors import ConfigError

PREEMPTED = 75  # the exit code: saved and ended, start it again
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """Notes these signals from the first listen() on. A script's own handlers are called as well; signals that it, or who
    started it, ignores stay ignored."""

    def __init__(self) -> None:
        self.requested = False
        self._before: Dict[int, Any] = {}
        self._listening = False

    def listen(self) -> None:
        """Errors: ConfigError outside of the main thread, the first time."""
        if self._listening:
            return
        try:
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN and before is not None:  # None: a handler that only C can call
                    self._before[number] = before
                    signal.signal(number, self._note)
        except ValueError as error:
            raise ConfigError("the first call of preemption_requested() or exit_if_preempted() must be made in the main thread, "
                              "where Python's signal handlers live") from error
        self._listening = True

    def _note(self, number: int, frame: Any) -> None:
        self.requested = True
        if callable(before := self._before[number]):
            before(number, frame)
