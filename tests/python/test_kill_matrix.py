"""Whatever is killed while it saves, and whatever of it the disk refuses, the newest whole state is there and training goes on as
if nothing had been. Kills come at counted operations on files (tests/support/fault_shim), so a failure can be repeated."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import environment, metrics, text_documents, write_config, write_corpus

SCRIPT = Path(__file__).parent / "scripts" / "kill_matrix.py"
SEED = 20261124
EXCHANGES = pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "no exchange"])


@pytest.fixture(scope="module")
def shim(build_dir) -> Path:
    path = build_dir / "tests/libfault_shim.so"
    assert path.is_file(), f"{path} was not built"
    return path


def forked(python_build, shim, *arguments) -> dict:
    """What a job of scripts/kill_matrix.py has done."""
    done = python_build.run(SCRIPT, *arguments, plain=True, LD_PRELOAD=str(shim))
    counts = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT ")).split(" ", 1)[1])
    print(counts)
    return counts


def run(program, shim, folder, *command, at: int = 0, kind: str = "kill", exchange: bool = True) -> subprocess.CompletedProcess:
    """A command of the program that meets its fate at operation `at` below `folder`; `done.count`: how many it made."""
    count = folder.parent / "count"
    count.unlink(missing_ok=True)
    more = {"LD_PRELOAD": shim, "FAULTS_FOLDER": folder, "FAULTS_AT": at, "FAULTS_KIND": kind, "FAULTS_COUNT": count}
    env = environment(**{key: str(value) for key, value in more.items()}) | ({} if exchange else {"FAULTS_NO_EXCHANGE": "1"})
    done = subprocess.run([program, *map(str, command)], env=env, capture_output=True, text=True, timeout=120)
    done.count = int(count.read_text()) if count.exists() else None
    return done


# Python


def test_kills_in_save_state(python_build, shim, tmp_path, long_run):
    kills = 100 if long_run else 2
    assert sum(forked(python_build, shim, tmp_path / "jobs", "states", kills, SEED).values()) == kills


def test_kills_in_save_pretrained(python_build, shim, tmp_path, long_run):
    kills = 60 if long_run else 2
    assert sum(forked(python_build, shim, tmp_path / "jobs", "models", kills, SEED).values()) == kills


def test_each_failure_in_python(python_build, shim, tmp_path):
    counts = forked(python_build, shim, tmp_path / "jobs", "errors")
    assert min(counts.values()) >= 3 and counts["save_state, numbered"] > 20


# The program


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus", text_documents(12))


def tiny(folder: Path, corpus: Path, name: str = "run", **changes) -> Path:
    small = {"model__num_layers": 1, "model__hidden_size": 16, "model__num_heads": 2, "training__eval_interval": 0, "device__threads": 1}
    return write_config(folder, corpus, name, **small | changes)


@pytest.fixture(scope="module")
def trained(tessera_program, corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    subprocess.run([tessera_program, "train", tiny(folder, corpus, training__steps=4)], env=environment(), check=True,
                   capture_output=True, timeout=120)
    return folder / "run"


def test_kills_in_convert(tessera_program, shim, trained, tmp_path, long_run):
    chance, target, work = random.Random(SEED), tmp_path / "work" / "out", tmp_path / "work"
    work.mkdir()
    convert = ("convert", "--from", "tessera", trained, "--to", "hf", target)
    count = run(tessera_program, shim, work, *convert).count
    whole = {path.name: path.read_bytes() for path in target.iterdir()}
    assert count > 10 and "model.safetensors" in whole
    for at in chance.sample(range(1, count + 1), min(count, 20 if long_run else 1)):
        shutil.rmtree(target, ignore_errors=True)
        assert run(tessera_program, shim, work, *convert, at=at).returncode == -signal.SIGKILL
        if target.exists():  # killed after it had its name
            assert {path.name: path.read_bytes() for path in target.iterdir()} == whole
            shutil.rmtree(target)
        assert run(tessera_program, shim, work, *convert).returncode == 0
        assert {path.name: path.read_bytes() for path in target.iterdir()} == whole
        assert [path.name for path in work.iterdir()] == ["out"]  # nothing is left of the one that was killed


def losses(run_folder: Path) -> list:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in metrics(run_folder)]


@EXCHANGES
def test_kills_in_the_trainer(tessera_program, shim, corpus, tmp_path, long_run, exchange):
    """A save at every step, one checkpoint kept; each job goes on from what the one before has left."""
    kills, chance = 10 if long_run else 1, random.Random(SEED + exchange)
    changes = {"training__steps": 4 + kills, "checkpoint__every": 1, "checkpoint__keep": 1, "lr_schedule__decay_steps": 20}
    straight = tiny(tmp_path, corpus, "straight", **changes)
    total = run(tessera_program, shim, tmp_path / "straight", "train", straight).count
    config, folder = tiny(tmp_path, corpus, **changes), tmp_path / "run"
    for _ in range(kills):
        done = run(tessera_program, shim, folder, "train", config, at=chance.randint(2, total // (4 + kills) * 2), exchange=exchange)
        assert done.returncode == -signal.SIGKILL, done.stderr
    done = run(tessera_program, shim, folder, "train", config, exchange=exchange)
    assert done.returncode == 0, done.stderr
    assert losses(folder) == losses(tmp_path / "straight")
    assert not list(folder.rglob("*incomplete*")) and len(list(folder.glob("checkpoints/step-*"))) == 1


@pytest.mark.parametrize("kind", ["ENOSPC", "EIO"])
def test_each_failure_in_convert(tessera_program, shim, trained, tmp_path, long_run, kind):
    work, target = tmp_path / "work", tmp_path / "work/out"
    work.mkdir()
    convert = ("convert", "--from", "tessera", trained, "--to", "hf", target)
    at, step = 1, 1 if long_run else 4
    while True:
        done = run(tessera_program, shim, work, *convert, at=at, kind=kind)
        if done.returncode == 0:
            break
        assert done.returncode == 3 and os.strerror(getattr(errno, kind)) in done.stderr, done.stderr
        assert not list(work.iterdir()), at
        at += step
    assert at > 10 and done.count < at and sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
