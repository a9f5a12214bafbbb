"""Loggers of several processes, warnings that are told once, and the progress bar."""

import logging
import os

import pytest
from thread_ranks import Ranks

from tessera import logging as ours
from tessera.state import PartialState
from tessera.utils.tqdm import tqdm


@pytest.fixture
def ranks(monkeypatch):
    for name in ("ACCELERATE_LOG_LEVEL", "TESSERA_LOG_LEVEL", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tessera.comm.warnings._told", set())
    root = logging.getLogger().level
    yield Ranks(monkeypatch)
    logging.getLogger().setLevel(root)


def test_made_before_a_state_but_not_used(ranks, caplog):
    logger = ours.get_logger("test.early", log_level="INFO")
    with pytest.raises(RuntimeError, match="PartialState"):
        logger.info("too early")
    PartialState()
    logger.info("in time: %d", 3)
    assert caplog.messages == ["[RANK 0] in time: 3"]
    assert caplog.records[0].filename == "test_logging.py" and caplog.records[0].name == "test.early"


def test_who_logs(ranks, caplog):
    logger = ours.get_logger("test.who", log_level="info")

    def work(rank):
        PartialState()
        logger.info("main")
        logger.info("all", main_process_only=False)
        logger.debug("nobody", main_process_only=False)

    ranks.run(3, work)
    assert sorted(caplog.messages) == ["[RANK 0] all", "[RANK 0] main", "[RANK 1] all", "[RANK 2] all"]


def test_in_order(ranks, caplog):
    def work(rank):
        PartialState()
        # One rank has the level switched off; the others must not wait for it in vain.
        logger = ours.get_logger(f"test.order{rank}", log_level="ERROR" if rank == 1 else "INFO")
        for i in range(5):
            logger.logger.setLevel(logging.ERROR if rank == 1 else logging.INFO)
            logger.info("line %d", i, in_order=True)

    ranks.run(3, work)
    assert caplog.messages == [f"[RANK {rank}] line {i}" for i in range(5) for rank in (0, 2)]


@pytest.mark.parametrize(
    "variables, level",
    [
        ({}, None),
        ({"ACCELERATE_LOG_LEVEL": "error"}, "ERROR"),
        ({"TESSERA_LOG_LEVEL": "debug"}, "DEBUG"),
        ({"ACCELERATE_LOG_LEVEL": "error", "TESSERA_LOG_LEVEL": "debug"}, "ERROR"),
    ],
)
def test_levels_from_the_environment(ranks, monkeypatch, variables, level):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    logger = ours.get_logger(f"test.level{level}{len(variables)}").logger
    assert logging.getLevelName(logger.level) == (level or "NOTSET")
    assert level is None or logging.getLevelName(logging.getLogger().level) == level
    assert logging.getLevelName(ours.get_logger("test.own", log_level="info").logger.level) == "INFO"


def test_warnings_once(ranks, caplog):
    logger = ours.get_logger("test.once", log_level="INFO")
    PartialState()
    for _ in range(3):
        logger.warning_once("again")
        logger.warning_once("other")
        ours.warn_once("told once")
    assert sorted(caplog.messages) == ["[RANK 0] again", "[RANK 0] other", "told once"]


@pytest.mark.parametrize("rank, heard", [("0", ["early"]), ("2", [])])
def test_warn_once_before_a_state(ranks, monkeypatch, caplog, rank, heard):
    monkeypatch.setenv("RANK", rank)
    ours.warn_once("early")
    assert caplog.messages == heard


def test_warn_once_on_the_main_process(ranks, caplog):
    def work(rank):
        PartialState()
        ours.warn_once(f"from {rank}")

    ranks.run(3, work)
    assert caplog.messages == ["from 0"]


def test_progress_bar(ranks, capsys):
    pytest.importorskip("tqdm")
    shown = ranks.run(
        4, lambda rank: [tqdm(range(2)).disable, tqdm(range(2), main_process_only=False).disable], machines=2
    )
    assert shown == [[False, False], [True, False], [False, False], [True, False]]
    assert tqdm(range(1), disable=True).disable
    with pytest.raises(ValueError, match="main_process_only"):
        tqdm(True, range(2))
    assert os.environ.get("RANK") is None
