"""Trackers that write files here (jsonl, tensorboard), and services made like Weights & Biases. Their packages are
imported when a run starts."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any, List, Optional

from tessera.logging import warn_once
from tessera.tracking.base import Folder, GeneralTracker, ServiceTracker, is_number, on_main_process
from tessera.utils.operations import listify


class JSONLTracker(GeneralTracker):
    """One JSON object per `log` call, in LOGGING_DIR/RUN_NAME/metrics.jsonl, with `step` and `time` (seconds since
    1970); the run's settings in config.json beside it. A run that is started again goes on in the same file. Numbers
    that JSON lacks are the texts "nan", "inf" and "-inf"."""

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: Folder, **kwargs):
        super().__init__()
        if kwargs:
            raise TypeError(f"the jsonl tracker takes no {', '.join(sorted(kwargs))}")
        self.folder = Path(logging_dir) / run_name
        self.file: Any = None

    @on_main_process
    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = open(self.folder / "metrics.jsonl", "a", encoding="utf-8")

    @property
    def tracker(self) -> Any:
        return self.file

    @staticmethod
    def _plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): JSONLTracker._plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [JSONLTracker._plain(item) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)

    @on_main_process
    def store_init_configuration(self, values: dict) -> None:
        (self.folder / "config.json").write_text(
            json.dumps(self._plain(listify(values)), indent=2) + "\n", encoding="utf-8"
        )

    @on_main_process
    def log(self, values: dict, step: Optional[int] = None, **kwargs: Any) -> None:
        line = {
            **({} if step is None else {"step": int(step)}),
            "time": round(time.time(), 3),
            **self._plain(listify(values)),
        }
        self.file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.file.flush()

    @on_main_process
    def finish(self) -> None:
        self.file.close()


class TensorBoardTracker(ServiceTracker):
    """Event files in LOGGING_DIR/RUN_NAME; `kwargs` go to SummaryWriter."""

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: Folder, **kwargs):
        super().__init__(run_name, **kwargs)
        self.logging_dir_param = logging_dir

    @on_main_process
    def start(self) -> None:
        try:
            from torch.utils import tensorboard
        except ImportError:
            import tensorboardX as tensorboard
        self.logging_dir = os.path.join(self.logging_dir_param, self.run_name)
        self.writer = tensorboard.SummaryWriter(self.logging_dir, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict) -> None:
        """As hyperparameters, and in TIME/hparams.yml (YAML, of which JSON is a part)."""
        self.writer.add_hparams(values, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir) / str(time.time())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hparams.yml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items()))

    @on_main_process
    def log(self, values: dict, step: Optional[int] = None, **kwargs: Any) -> None:
        for name, value in listify(values).items():
            if is_number(value):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
            else:
                warn_once(f"tensorboard takes numbers, text and dicts of numbers: '{name}' is not logged")
        self.writer.flush()

    @on_main_process
    def log_images(self, values: dict, step: Optional[int] = None, **kwargs: Any) -> None:
        """Names to arrays [n, channels, height, width], or as `dataformats` says."""
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.writer.close()


class _RunTracker(ServiceTracker):
    """Services with init(project=...), a config and a run."""

    def _package(self) -> Any:
        raise NotImplementedError

    @on_main_process
    def start(self) -> None:
        self.run = self._package().init(project=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict) -> None:
        self._package().config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict, step: Optional[int] = None, **kwargs: Any) -> None:
        self.run.log(values, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()


class WandBTracker(_RunTracker):
    """Weights & Biases; `kwargs` go to wandb.init."""

    name = "wandb"

    def _package(self) -> Any:
        import wandb

        return wandb

    @on_main_process
    def log_images(self, values: dict, step: Optional[int] = None, **kwargs: Any) -> None:
        """Names to lists of images."""
        import wandb

        for name, images in values.items():
            self.log({name: [wandb.Image(image) for image in images]}, step=step, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: Optional[List[str]] = None,
        data: Optional[List[List[Any]]] = None,
        dataframe: Any = None,
        step: Optional[int] = None,
        **kwargs: Any,
    ) -> None:
        """A table from `columns` and `data`, or from a data frame."""
        import wandb

        self.log({table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step=step, **kwargs)


class TrackioTracker(_RunTracker):
    """trackio; `kwargs` go to trackio.init."""

    name = "trackio"

    def _package(self) -> Any:
        import trackio

        return trackio


class SwanLabTracker(_RunTracker):
    """SwanLab; `kwargs` go to swanlab.init."""

    name = "swanlab"

    def _package(self) -> Any:
        import swanlab

        return swanlab

    @on_main_process
    def log_images(self, values: dict, step: Optional[int] = None, **kwargs: Any) -> None:
        """Names to lists of images."""
        import swanlab

        for name, images in values.items():
            self.log({name: [swanlab.Image(image) for image in images]}, step=step, **kwargs)
