"""Trackers: real TensorBoard files and offline W&B runs, read back; the others by stand-ins of their packages."""

import json
import logging
import os
import sys
import time
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from thread_ranks import Ranks

from tessera import tracking
from tessera.state import PartialState
from tessera.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, filter_trackers, on_main_process
from tessera.utils.dataclasses import LoggerType


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr("tessera.comm.warnings._told", set())
    return Ranks(monkeypatch)


def run(tracker, config, *logged):
    tracker.start()
    tracker.store_init_configuration(config)
    for values, step in logged:
        tracker.log(values, step=step)
    tracker.finish()


def test_jsonl(ranks, tmp_path):
    def work(rank):
        PartialState()
        tracker = tracking.JSONLTracker("run", tmp_path)
        run(
            tracker,
            {"lr": 0.1, "path": tmp_path},
            ({"loss": np.float32(0.5), "bad": float("nan")}, 1),
            ({"note": "ü", "by": {"a": [1]}}, None),
        )

    ranks.run(3, work)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [sorted(line) for line in lines] == [
        ["bad", "loss", "step", "time"],
        ["by", "note", "time"],
    ]  # once, by rank 0
    assert (
        lines[0]["step"] == 1 and lines[0]["loss"] == 0.5 and lines[0]["bad"] == "nan" and lines[1]["by"] == {"a": [1]}
    )
    assert json.loads((tmp_path / "run/config.json").read_text()) == {"lr": 0.1, "path": str(tmp_path)}
    ranks.run(1, work)
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 4


def test_tensorboard(ranks, tmp_path):
    torch = pytest.importorskip("torch")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def work(rank):
        PartialState()
        tracker = LOGGER_TYPE_TO_CLASS["tensorboard"]("demo", tmp_path)
        tracker.start()
        if rank == 0:
            assert tracker.tracker is tracker.writer
        tracker.store_init_configuration({"lr": 0.1, "name": "x"})
        for step in range(3):
            tracker.log(
                {"loss": torch.tensor(1.0 / (step + 1)), "n": step, "text": "hello", "pair": {"a": 1.0, "b": 2.0}},
                step=step,
            )
        tracker.log_images({"image": np.zeros((1, 3, 4, 4))}, step=0)
        tracker.finish()

    ranks.run(2, work)
    events = reader.EventAccumulator(str(tmp_path / "demo"))
    events.Reload()
    assert [(e.step, round(e.value, 4)) for e in events.Scalars("loss")] == [(0, 1.0), (1, 0.5), (2, 0.3333)]
    assert "image" in events.Tags()["images"] and any("text" in tag for tag in events.Tags()["tensors"])
    (settings,) = (tmp_path / "demo").glob("*/hparams.yml")
    assert settings.read_text() == 'lr: 0.1\nname: "x"\n'


def log_records(data: bytes):
    """Records of a .wandb file: LevelDB's log format (blocks of 32 KiB; crc, length, type) after 7 bytes of its own."""
    assert data[:4] == b":W&B"
    at, part = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or last part
            yield part
            part = b""


def wandb_records(folder) -> list:
    """All records of the one offline run in there. Its service may still be writing the last ones when it has ended."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 30
    while True:
        records = []
        for data in log_records(path.read_bytes()):
            records.append(wandb_internal_pb2.Record())
            records[-1].ParseFromString(data)
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < deadline, "the run was not written to its end"
        time.sleep(0.1)


def test_wandb_offline(ranks, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    PartialState()
    tracker = LOGGER_TYPE_TO_CLASS["wandb"]("demo", dir=str(tmp_path), name="first")
    tracker.start()
    assert tracker.tracker is tracker.run and tracker.run.name == "first"
    tracker.store_init_configuration({"lr": 0.1})
    for step in range(3):
        tracker.log({"loss": 0.5**step}, step=step)
    tracker.finish()
    records = wandb_records(tmp_path)
    history = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    settings = [
        item.key for record in records for update in (record.config, record.run.config) for item in update.update
    ]
    assert [(line["_step"], line["loss"]) for line in history] == [(0, 1.0), (1, 0.5), (2, 0.25)] and "lr" in settings
    assert wandb.run is None


class Recorder:
    """Any package: remembers which of its functions were called with what."""

    def __init__(self):
        self.calls = []

    def module(self, name, **members):
        module = ModuleType(name)
        module.__dict__.update(members)
        module.__getattr__ = lambda key: self.function(f"{name}.{key}")
        return module

    def function(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self.thing(name)

        return call

    def thing(self, name):
        recorder = self

        class Thing:
            def __getattr__(self, key):
                if key.startswith("__"):
                    raise AttributeError(key)
                return recorder.function(key)

            def __setitem__(self, key, value):
                recorder.calls.append(("set", (key, value), {}))

        return Thing()

    def named(self, name):
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


def test_run_services(ranks, monkeypatch):
    for name in ("trackio", "swanlab"):
        recorder = Recorder()
        config = SimpleNamespace(update=recorder.function("config"))
        monkeypatch.setitem(sys.modules, name, recorder.module(name, config=config))
        run(LOGGER_TYPE_TO_CLASS[name]("demo", key=1), {"lr": 1}, ({"loss": 2.0}, 3))
        assert recorder.named(f"{name}.init") == [((), {"project": "demo", "key": 1})]
        assert recorder.named("config") == [(({"lr": 1},), {"allow_val_change": True})]
        assert recorder.named("log") == [(({"loss": 2.0},), {"step": 3})] and recorder.named("finish")


def test_comet(ranks, monkeypatch):
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "comet_ml", recorder.module("comet_ml"))
    monkeypatch.setattr("tessera.tracking.services.compare_versions", lambda *args: True)
    run(LOGGER_TYPE_TO_CLASS["comet_ml"]("demo"), {"lr": 1}, ({"loss": 2.0, "note": "x", "many": {"a": 1}}, 3))
    assert recorder.named("comet_ml.start") == [((), {"project_name": "demo"})] and recorder.named(
        "log_parameters"
    ) == [(({"lr": 1},), {})]
    assert recorder.named("log_metric") == [(("loss", 2.0), {"step": 3})] and recorder.named("log_other") == [
        (("note", "x"), {})
    ]
    assert (
        recorder.named("log_metrics") == [(({"a": 1},), {"step": 3})]
        and recorder.named("set_step")
        and recorder.named("end")
    )


def test_aim(ranks, monkeypatch):
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "aim", recorder.module("aim"))
    tracker = LOGGER_TYPE_TO_CLASS["aim"]("demo", "somewhere")
    run(tracker, {"lr": 1}, ({"loss": 2.0}, 3))
    assert recorder.named("aim.Run") == [((), {"repo": "somewhere"})] and tracker.writer.name == "demo"
    assert recorder.named("set") == [(("hparams", {"lr": 1}), {})] and recorder.named("track") == [
        ((2.0,), {"name": "loss", "step": 3})
    ]


def test_mlflow(ranks, monkeypatch, caplog):
    recorder = Recorder()
    limits = SimpleNamespace(validation=SimpleNamespace(MAX_PARAM_VAL_LENGTH=10, MAX_PARAMS_TAGS_PER_BATCH=2))
    monkeypatch.setitem(
        sys.modules, "mlflow", recorder.module("mlflow", utils=limits, search_experiments=lambda filter_string: [])
    )
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "a"}')
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "1")
    run(
        LOGGER_TYPE_TO_CLASS["mlflow"]("demo"),
        {"a": 1, "b": 2, "c": 3, "long": "x" * 20},
        ({"loss": 2.0, "note": "x"}, 3),
    )
    assert recorder.named("mlflow.create_experiment")[0][1]["tags"] == {"team": "a"}
    assert recorder.named("mlflow.start_run")[0][1]["nested"] is True
    assert recorder.named("mlflow.log_params") == [(({"a": 1, "b": 2},), {}), (({"c": 3},), {})]
    assert recorder.named("mlflow.log_metrics") == [(({"loss": 2.0},), {"step": 3})] and recorder.named(
        "mlflow.end_run"
    )
    assert "'long'" in caplog.text and "'note'" in caplog.text


def test_clearml(ranks, monkeypatch):
    recorder = Recorder()
    task = SimpleNamespace(current_task=lambda: None, init=recorder.function("init"))
    monkeypatch.setitem(sys.modules, "clearml", recorder.module("clearml", Task=task))
    run(
        LOGGER_TYPE_TO_CLASS["clearml"]("demo"),
        {"lr": 1},
        ({"eval_loss": 2.0, "acc": 1, "note": "x"}, 3),
        ({"final": 5}, None),
    )
    assert recorder.named("init") == [((), {"project_name": "demo", "task_name": "demo"})] and recorder.named("close")
    task.current_task = lambda: recorder.thing("other")
    recorder.calls.clear()
    run(LOGGER_TYPE_TO_CLASS["clearml"]("demo"), {})
    assert not recorder.named("init") and not recorder.named("close")  # somebody else's task


def test_dvclive(ranks, monkeypatch):
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "dvclive", recorder.module("dvclive"))
    metric = SimpleNamespace(could_log=lambda value: not isinstance(value, str))
    monkeypatch.setitem(sys.modules, "dvclive.plots", recorder.module("dvclive.plots", Metric=metric))
    tracker = LOGGER_TYPE_TO_CLASS["dvclive"]("demo", dir="d")
    run(tracker, {"lr": 1}, ({"loss": 2.0, "note": "x"}, 3))
    assert recorder.named("dvclive.Live") == [((), {"dir": "d"})] and recorder.named("log_metric") == [
        (("loss", 2.0), {})
    ]
    assert tracker.live.step == 3 and recorder.named("next_step") and recorder.named("end")


def test_own_trackers(ranks):
    class Incomplete(GeneralTracker):
        name = "incomplete"

    with pytest.raises(NotImplementedError, match="`requires_logging_directory`, `tracker`"):
        Incomplete()
    Incomplete(_blank=True)

    class Mine(GeneralTracker):
        name, requires_logging_directory, lines = "mine", False, []

        @property
        def tracker(self):
            raise RuntimeError("only after start")

        @on_main_process
        def log(self, values, step=None):
            self.lines.append(PartialState().process_index)

    class Everywhere(Mine):
        main_process_only, lines = False, []

    for kind, expected in ((Mine, [0]), (Everywhere, [0, 1, 2])):
        ranks.run(3, lambda rank: kind().log({}))
        assert sorted(kind.lines) == expected


def test_register(ranks, monkeypatch):
    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", dict(LOGGER_TYPE_TO_CLASS))

    class Mine(GeneralTracker):
        name, requires_logging_directory, tracker = "mine", True, None

    tracking.register_tracker_class(Mine)
    assert filter_trackers("mine", "folder") == ["mine"]
    with pytest.raises(ValueError, match="mine.*project_dir"):
        filter_trackers(["mine"])
    with pytest.warns(UserWarning, match="replaced"):
        tracking.register_tracker_class(Mine)
    for bad in (int, GeneralTracker, "mine"):
        with pytest.raises(ValueError):
            tracking.register_tracker_class(bad)


def test_filter(ranks, monkeypatch, caplog):
    here = {LoggerType.WANDB, LoggerType.TENSORBOARD, LoggerType.JSONL}
    monkeypatch.setattr(
        tracking, "_AVAILABLE", {kind: (lambda kind=kind: kind in here) for kind in tracking._AVAILABLE}
    )
    caplog.set_level(logging.WARNING)

    class Mine(GeneralTracker):
        name, requires_logging_directory, tracker = "own", False, None

    mine = Mine()
    assert filter_trackers(None) == [] and filter_trackers([]) == []
    assert filter_trackers(["wandb", LoggerType.WANDB, mine, "jsonl"], "d") == [
        LoggerType.WANDB,
        mine,
        LoggerType.JSONL,
    ]
    assert filter_trackers("aim", "d") == [] and filter_trackers("aim", "d") == []
    assert [line for line in caplog.messages] == [
        "the tracker 'aim' is not used: its package is not installed (pip " "install aim)"
    ]
    assert set(filter_trackers(["all", mine, "wandb"], "d")) == here | {mine}
    assert filter_trackers("all") == [LoggerType.WANDB]  # the others write to a folder
    with pytest.raises(ValueError, match="tensorboard.*project_dir"):
        filter_trackers("tensorboard")
    with pytest.raises(ValueError, match="tensorbord.*unknown"):
        filter_trackers("tensorbord", "d")
    assert os.environ.get("RANK") is None
