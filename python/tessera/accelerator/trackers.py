"""The Accelerator's members about experiment trackers."""

from __future__ import annotations

from typing import Any, Optional

from tessera.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, filter_trackers


class Trackers:
    trackers: list
    logging_dir: Any

    def _choose_trackers(self, log_with: Any) -> None:
        self.log_with = filter_trackers(log_with, self.logging_dir)

    def init_trackers(self, project_name: str, config: Optional[dict] = None, init_kwargs: Optional[dict] = None) -> None:
        """Starts the trackers of `log_with`; `init_kwargs`: their names to arguments for them."""
        for tracker in self.log_with:
            if not isinstance(tracker, GeneralTracker):
                kind = LOGGER_TYPE_TO_CLASS[str(tracker)]
                if kind.main_process_only and not self.is_main_process:
                    continue
                given = (init_kwargs or {}).get(str(tracker), {})
                where = (self.logging_dir,) if kind.requires_logging_directory else ()
                tracker = kind(project_name, *where, **given)
            self.trackers.append(tracker)
        for tracker in self.trackers:
            tracker.start()
            if config is not None:
                tracker.store_init_configuration(config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of that name (what is behind it with `unwrap`); one that does nothing on processes without it.
        Errors: ValueError for a name that was not given to log_with."""
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if any(name in (str(asked), getattr(asked, "name", None)) for asked in self.log_with):
            return GeneralTracker(_blank=True)
        raise ValueError(f"there is no tracker '{name}'; there are {[tracker.name for tracker in self.trackers]}")

    def log(self, values: dict, step: Optional[int] = None, log_kwargs: Optional[dict] = None) -> None:
        """To all trackers; `log_kwargs`: their names to further arguments."""
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def end_training(self) -> None:
        """Finishes the trackers and parts from the other processes."""
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []
        self.wait_for_saves()
        self.wait_for_everyone()
        self.free_memory()
        self.state.destroy_process_group()
