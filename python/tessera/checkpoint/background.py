"""States that are written while training goes on."""

from __future__ import annotations

import threading
from typing import Any, Callable, List, Optional


class PendingSave:
    """Waits in a thread until the engines' checkpoints are written, then calls `publish` (on rank 0), then `close`. The thread is
    no daemon: a script that ends without waiting ends when its state is in place."""

    def __init__(self, saves: List[Any], publish: Callable[[], None], close: Callable[[], None]):
        self._saves, self._publish, self._close = saves, publish, close
        self._error: Optional[BaseException] = None
        self._thread = threading.Thread(target=self._run, name="tessera-save")
        self._thread.start()

    def _run(self) -> None:
        try:
            for save in self._saves:
                save.wait_here()
            self._publish()
        except Exception as error:
            self._error = error
        finally:
            self._saves = []
            self._close()

    def wait_here(self) -> None:
        """Errors: what went wrong on this rank; on rank 0, on any."""
        self._thread.join()
        if self._error is not None:
            raise self._error
