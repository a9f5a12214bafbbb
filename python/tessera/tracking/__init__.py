"""Trackers by name: which there are, which were asked for and can be used."""

from __future__ import annotations

import warnings
from typing import Any, Dict, List, Type

from tessera.compat.enums import LoggerType
from tessera.logging import warn_once
from tessera.tracking.adapters import JSONLTracker, SwanLabTracker, TensorBoardTracker, TrackioTracker, WandBTracker
from tessera.tracking.base import GeneralTracker, on_main_process
from tessera.tracking.services import AimTracker, ClearMLTracker, CometMLTracker, DVCLiveTracker, MLflowTracker
from tessera.utils import imports

__all__ = [
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "JSONLTracker",
    "LOGGER_TYPE_TO_CLASS",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]

LOGGER_TYPE_TO_CLASS: Dict[str, Type[GeneralTracker]] = {
    tracker.name: tracker
    for tracker in (
        AimTracker,
        CometMLTracker,
        MLflowTracker,
        TensorBoardTracker,
        WandBTracker,
        ClearMLTracker,
        DVCLiveTracker,
        SwanLabTracker,
        TrackioTracker,
        JSONLTracker,
    )
}

_AVAILABLE = {
    LoggerType.TENSORBOARD: imports.is_tensorboard_available,
    LoggerType.WANDB: imports.is_wandb_available,
    LoggerType.COMETML: imports.is_comet_ml_available,
    LoggerType.AIM: imports.is_aim_available,
    LoggerType.MLFLOW: imports.is_mlflow_available,
    LoggerType.CLEARML: imports.is_clearml_available,
    LoggerType.DVCLIVE: imports.is_dvclive_available,
    LoggerType.SWANLAB: imports.is_swanlab_available,
    LoggerType.TRACKIO: imports.is_trackio_available,
    LoggerType.JSONL: lambda: True,
}


def get_available_trackers() -> List[LoggerType]:
    """The built-in trackers whose packages are installed; jsonl always."""
    return [kind for kind, available in _AVAILABLE.items() if available()]


def register_tracker_class(tracker_class: Type[GeneralTracker]) -> None:
    """Makes `log_with="NAME"` find a tracker class of your own, by its `name`. It is made with the project's name, then
    the logging directory if it requires one. Errors: ValueError."""
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ValueError(f"a tracker class must be a subclass of GeneralTracker, not {tracker_class}")
    if not getattr(tracker_class, "name", None):
        raise ValueError(f"{tracker_class.__name__} must define a `name` that is not empty")
    if not hasattr(tracker_class, "requires_logging_directory"):
        raise ValueError(
            f"{tracker_class.__name__} must define `requires_logging_directory`: True if it is made with one"
        )
    if tracker_class.name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(f"the tracker '{tracker_class.name}' is replaced by {tracker_class}", stacklevel=2)
    LOGGER_TYPE_TO_CLASS[tracker_class.name] = tracker_class


def filter_trackers(log_with: Any, logging_dir: Any = None) -> list:
    """The trackers to use, each once: of names, LoggerTypes and GeneralTracker instances, or a list of them; "all" =
    all that are installed. One whose package is missing is left out with a warning. Errors: ValueError for an unknown
    name, or when a tracker that was named needs a logging directory and there is none."""
    if log_with is None:
        return []
    asked = list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
    chosen: list = []
    for tracker in asked:
        if isinstance(tracker, GeneralTracker):
            chosen.append(tracker)
        elif str(tracker) == "all":
            chosen += [
                kind for kind in get_available_trackers() if kind not in chosen and _has_place(kind, logging_dir)
            ]
        elif str(tracker) not in LOGGER_TYPE_TO_CLASS:
            raise ValueError(
                f"the tracker '{tracker}' is unknown; say one of all, {', '.join(LOGGER_TYPE_TO_CLASS)}, or give an "
                "instance of a GeneralTracker"
            )
        else:
            kind = LoggerType(str(tracker)) if str(tracker) in LoggerType else str(tracker)
            if kind in chosen:
                continue
            if kind in _AVAILABLE and not _AVAILABLE[kind]() and LOGGER_TYPE_TO_CLASS[str(kind)] in _BUILT_IN:
                warn_once(f"the tracker '{kind}' is not used: its package is not installed (pip install {kind})")
            elif LOGGER_TYPE_TO_CLASS[str(kind)].requires_logging_directory and logging_dir is None:
                raise ValueError(f"the tracker '{kind}' writes to a folder: give `project_dir` to the Accelerator")
            else:
                chosen.append(kind)
    return chosen


_BUILT_IN = frozenset(LOGGER_TYPE_TO_CLASS.values())


def _has_place(kind: LoggerType, logging_dir: Any) -> bool:
    if logging_dir is not None or not LOGGER_TYPE_TO_CLASS[str(kind)].requires_logging_directory:
        return True
    warn_once(f"the tracker '{kind}' is not used: it writes to a folder, and there is no `project_dir`")
    return False
