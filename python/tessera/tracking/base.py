"""What every tracker is: `tessera.tracking.GeneralTracker`."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any, Callable, Optional, Union

from tessera.state import PartialState

Folder = Union[str, os.PathLike]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def on_main_process(function: Callable) -> Callable:
    """Decorator for a tracker's methods: they run on rank 0 only if the tracker's `main_process_only` is true. Looks at
    the state when called, so that trackers can be made before there is one."""

    @wraps(function)
    def wrapper(self, *args, **kwargs):
        if getattr(self, "main_process_only", False) and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return wrapper


class GeneralTracker:
    """Base class of trackers. One of your own defines `name` (text), `requires_logging_directory` (bool) and `tracker`
    (the object behind it, usually a property), and overrides what it needs; `Accelerator(log_with=MyTracker(...))` uses
    it. `main_process_only` (True) says whether the methods decorated with `on_main_process` run on rank 0 alone.
    Errors: NotImplementedError naming what is not defined."""

    main_process_only = True

    def __init__(self, _blank: bool = False):
        names = ("name", "requires_logging_directory", "tracker")
        # `tracker` may be a property that works only after `start`: asking for it with hasattr would run it.
        missing = [name for name in names if name not in dir(self)]
        if missing and not _blank:
            raise NotImplementedError(
                f"{type(self).__name__} is a tracker without {', '.join(f'`{name}`' for name in missing)}: define "
                "them in the class"
            )

    def start(self) -> None:
        """Begins the run; called by `Accelerator.init_trackers`."""

    def store_init_configuration(self, values: dict) -> None:
        """Keeps the run's settings: names to bool, str, float, int or None."""

    def log(self, values: dict, step: Optional[int] = None, **kwargs: Any) -> None:
        """Logs names to str, float or int, at that step."""

    def finish(self) -> None:
        """Ends the run."""


class ServiceTracker(GeneralTracker):
    """Of a package that gives a `writer` when the run starts; `init_kwargs` are its options."""

    requires_logging_directory = False
    writer: Any

    def __init__(self, run_name: str, **kwargs):
        super().__init__()
        self.run_name, self.init_kwargs = run_name, kwargs

    @property
    def tracker(self) -> Any:
        return self.writer
