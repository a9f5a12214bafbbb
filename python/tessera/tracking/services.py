"""Trackers for services with interfaces of their own; each package is imported when its run starts."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List, Optional, Union

from tessera.logging import warn_once
from tessera.tracking.base import Folder, GeneralTracker, ServiceTracker, is_number, on_main_process
from tessera.utils.environment import str_to_bool
from tessera.utils.imports import compare_versions


def _left_out(tracker: str, name: str, value: Any) -> None:
    warn_once(f"{tracker} takes numbers only: '{name}' of type {type(value).__name__} is not logged")


class CometMLTracker(ServiceTracker):
    """Comet; `kwargs` go to comet_ml.start (comet_ml.Experiment before 3.41)."""

    name = "comet_ml"

    @on_main_process
    def start(self) -> None:
        import comet_ml

        begin = comet_ml.start if compare_versions("comet_ml", ">=", "3.41.0") else comet_ml.Experiment
        self.writer = begin(project_name=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict) -> None:
        self.writer.log_parameters(values)

    @on_main_process
    def log(self, values: dict, step: Optional[int] = None, **kwargs: Any) -> None:
        if step is not None:
            self.writer.set_step(step)
        for name, value in values.items():
            if is_number(value):
                self.writer.log_metric(name, value, step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.log_metrics(value, step=step, **kwargs)
            else:
                self.writer.log_other(name, value, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.writer.end()


class AimTracker(ServiceTracker):
    """Aim; the logging directory is its repository, `kwargs` go to aim.Run."""

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: Optional[Folder] = ".", **kwargs):
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    @on_main_process
    def start(self) -> None:
        from aim import Run

        self.writer = Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    @on_main_process
    def store_init_configuration(self, values: dict) -> None:
        self.writer["hparams"] = values

    @on_main_process
    def log(self, values: dict, step: Optional[int] = None, **kwargs: Any) -> None:
        for name, value in values.items():
            self.writer.track(value, name=name, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict, step: Optional[int] = None, kwargs: Optional[Dict[str, dict]] = None) -> None:
        """Names to images or (image, caption); `kwargs["aim_image"]` go to aim.Image, `kwargs["track"]` to
        Run.track."""
        import aim

        options = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            self.writer.track(
                aim.Image(image, caption=caption, **options.get("aim_image", {})),
                name=name,
                step=step,
                **options.get("track", {}),
            )

    @on_main_process
    def finish(self) -> None:
        self.writer.close()


class MLflowTracker(GeneralTracker):
    """MLflow. MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, MLFLOW_TAGS and MLFLOW_NESTED_RUN come before the arguments."""

    name = "mlflow"
    requires_logging_directory = False

    def __init__(
        self,
        experiment_name: Optional[str] = None,
        logging_dir: Optional[Folder] = None,
        run_id: Optional[str] = None,
        tags: Optional[Union[Dict[str, Any], str]] = None,
        nested_run: Optional[bool] = False,
        run_name: Optional[str] = None,
        description: Optional[str] = None,
    ):
        super().__init__()
        tags = os.environ.get("MLFLOW_TAGS", tags)
        nested = os.environ.get("MLFLOW_NESTED_RUN", nested_run)
        self.experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.run_id = os.environ.get("MLFLOW_RUN_ID", run_id)
        self.tags = json.loads(tags) if isinstance(tags, str) else tags
        self.nested_run = str_to_bool(nested, to_bool=True) if isinstance(nested, str) else nested
        self.logging_dir, self.run_name, self.description = logging_dir, run_name, description

    @on_main_process
    def start(self) -> None:
        import mlflow

        found = mlflow.search_experiments(filter_string=f"name = '{self.experiment_name}'")
        if found:
            experiment = found[0].experiment_id
        else:
            experiment = mlflow.create_experiment(
                name=self.experiment_name, artifact_location=self.logging_dir, tags=self.tags
            )
        self.active_run = mlflow.start_run(
            run_id=self.run_id,
            experiment_id=experiment,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    @property
    def tracker(self) -> Any:
        return self.active_run

    @on_main_process
    def store_init_configuration(self, values: dict) -> None:
        import mlflow

        limits = mlflow.utils.validation
        short = {name: value for name, value in values.items() if len(str(value)) <= limits.MAX_PARAM_VAL_LENGTH}
        for name in values.keys() - short.keys():
            warn_once(
                f"mlflow takes settings of up to {limits.MAX_PARAM_VAL_LENGTH} characters: '{name}' is not stored"
            )
        names = list(short)
        for i in range(0, len(names), limits.MAX_PARAMS_TAGS_PER_BATCH):
            mlflow.log_params({name: short[name] for name in names[i : i + limits.MAX_PARAMS_TAGS_PER_BATCH]})

    @on_main_process
    def log(self, values: dict, step: Optional[int] = None, **kwargs: Any) -> None:
        import mlflow

        for name, value in values.items():
            if not is_number(value):
                _left_out("mlflow", name, value)
        mlflow.log_metrics({name: value for name, value in values.items() if is_number(value)}, step=step, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        import mlflow

        mlflow.log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: Optional[str] = None) -> None:
        import mlflow

        mlflow.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: Optional[str] = None) -> None:
        import mlflow

        mlflow.log_artifact(local_path=local_path, artifact_path=artifact_path)

    @on_main_process
    def finish(self) -> None:
        import mlflow

        mlflow.end_run()


class ClearMLTracker(GeneralTracker):
    """ClearML; `kwargs` go to Task.init. CLEARML_PROJECT and CLEARML_TASK come before the run's name. A task that runs
    already is used, and not closed."""

    name = "clearml"
    requires_logging_directory = False

    def __init__(self, run_name: Optional[str] = None, **kwargs):
        super().__init__()
        self.user_provided_run_name, self.init_kwargs, self._initialized_externally = run_name, kwargs, False

    @on_main_process
    def start(self) -> None:
        from clearml import Task

        self.task = Task.current_task()
        self._initialized_externally = bool(self.task)
        if not self.task:
            names = {
                "project_name": os.environ.get("CLEARML_PROJECT", self.user_provided_run_name),
                "task_name": os.environ.get("CLEARML_TASK", self.user_provided_run_name),
            }
            self.task = Task.init(**{**names, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        return self.task

    @staticmethod
    def _get_title_series(name: str) -> tuple:
        for prefix in ("eval", "test", "train"):
            if name.startswith(prefix + "_"):
                return name[len(prefix) + 1 :], prefix
        return name, "train"

    @on_main_process
    def store_init_configuration(self, values: dict) -> Any:
        return self.task.connect_configuration(values)

    @on_main_process
    def log(self, values: dict, step: Optional[int] = None, **kwargs: Any) -> None:
        """`eval_loss` is the series "eval" of "loss"; so for `test_` and `train_`. Without a step: single values."""
        reporter = self.task.get_logger()
        for name, value in values.items():
            if not is_number(value):
                _left_out("clearml", name, value)
            elif step is None:
                reporter.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = self._get_title_series(name)
                reporter.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict, step: Optional[int] = None, **kwargs: Any) -> None:
        """Names to images."""
        for name, image in values.items():
            title, series = self._get_title_series(name)
            self.task.get_logger().report_image(title=title, series=series, iteration=step, image=image, **kwargs)

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
        """A table from `columns` and `data`, or from a data frame. Errors: ValueError without either."""
        if dataframe is None and data is None:
            raise ValueError("log_table needs `data` or `dataframe`")
        table = dataframe if dataframe is not None else ([columns] if columns else []) + data
        title, series = self._get_title_series(table_name)
        self.task.get_logger().report_table(title=title, series=series, table_plot=table, iteration=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        if self.task and not self._initialized_externally:
            self.task.close()


class DVCLiveTracker(GeneralTracker):
    """DVCLive; `live`, or a new Live(**kwargs). The run's name has no meaning there."""

    name = "dvclive"
    requires_logging_directory = False

    def __init__(self, run_name: Optional[str] = None, live: Optional[Any] = None, **kwargs):
        super().__init__()
        self.live, self.init_kwargs = live, kwargs

    @on_main_process
    def start(self) -> None:
        from dvclive import Live

        self.live = self.live if self.live is not None else Live(**self.init_kwargs)

    @property
    def tracker(self) -> Any:
        return self.live

    @on_main_process
    def store_init_configuration(self, values: dict) -> None:
        self.live.log_params(values)

    @on_main_process
    def log(self, values: dict, step: Optional[int] = None, **kwargs: Any) -> None:
        from dvclive.plots import Metric

        if step is not None:
            self.live.step = step
        for name, value in values.items():
            if Metric.could_log(value):
                self.live.log_metric(name, value, **kwargs)
            else:
                _left_out("dvclive", name, value)
        self.live.next_step()

    @on_main_process
    def finish(self) -> None:
        self.live.end()
