"""Whatever is killed while it saves, and whatever of it the disk refuses, the newest whole state is there and training goes on as
if nothing had been. Kills come at counted operations on files (tests/support/fault_shim), so a failure can be repeated. With
--long there are 200 of them; what was killed how often is printed at the end."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from cli_support import environment, metrics, shards, text_documents, write_config, write_corpus
from process_support import Job

SCRIPT = Path(__file__).parent / "scripts" / "kill_matrix.py"
SEED = 20261124
EXCHANGES = pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "no exchange"])


@pytest.fixture(scope="module")
def shim(build_dir) -> Path:
    path = build_dir / "tests/libfault_shim.so"
    assert path.is_file(), f"{path} was not built"
    return path


@pytest.fixture(scope="module", autouse=True)
def matrix(request) -> Counter:
    """What was killed, or failed, how often."""
    counts = Counter()
    yield counts
    lines = ["", *(f"{count:5} {what}" for what, count in counts.items()),
             f"{sum(count for what, count in counts.items() if what.startswith('kill')):5} kills in all"]
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("\n".join(lines))


def forked(python_build, shim, timeout: float, *arguments) -> dict:
    """What a job of scripts/kill_matrix.py has done."""
    done = python_build.run(SCRIPT, *arguments, plain=True, timeout=timeout, LD_PRELOAD=str(shim))
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT ")).split(" ", 1)[1])


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


@pytest.mark.parametrize("what,few,many", [("states", 2, 88), ("models", 2, 48)])
def test_kills_in_python(python_build, shim, tmp_path, matrix, long_run, what, few, many):
    """save_state() of four ranks, save_pretrained() over another model."""
    kills = many if long_run else few
    counts = forked(python_build, shim, 3000, tmp_path / "jobs", what, kills, SEED)
    assert sum(counts.values()) == kills
    matrix.update({f"kills of {what}, {kind}": count for kind, count in counts.items()})


def test_each_failure_in_python(python_build, shim, tmp_path, matrix):
    counts = forked(python_build, shim, 600, tmp_path / "jobs", "errors")
    assert min(counts.values()) >= 3 and counts["save_state, numbered"] > 20
    matrix.update({f"failures in {kind}": 2 * count for kind, count in counts.items()})


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


def test_kills_in_convert(tessera_program, shim, trained, tmp_path, matrix, long_run):
    chance, target, work = random.Random(SEED), tmp_path / "work" / "out", tmp_path / "work"
    work.mkdir()
    convert = ("convert", "--from", "tessera", trained, "--to", "hf", target)
    count = run(tessera_program, shim, work, *convert).count
    whole = {path.name: path.read_bytes() for path in target.iterdir()}
    assert count > 10 and "model.safetensors" in whole
    for at in [chance.randint(1, count) for _ in range(16 if long_run else 1)]:
        matrix["kills of convert"] += 1
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
def test_kills_in_the_trainer(tessera_program, shim, corpus, tmp_path, matrix, long_run, exchange):
    """A save at every step, one checkpoint kept; each job goes on from what the one before has left. With exchange in the
    background."""
    kills, chance = 10 if long_run else 1, random.Random(SEED + exchange)
    changes = {"training__steps": 4 + kills, "checkpoint__every": 1, "checkpoint__keep": 1, "lr_schedule__decay_steps": 20,
               "checkpoint__async": exchange}
    straight = tiny(tmp_path, corpus, "straight", **changes)
    total = run(tessera_program, shim, tmp_path / "straight", "train", straight).count
    config, folder = tiny(tmp_path, corpus, **changes), tmp_path / "run"
    for _ in range(kills):
        done = run(tessera_program, shim, folder, "train", config, at=chance.randint(2, total // (4 + kills) * 2), exchange=exchange)
        assert done.returncode == -signal.SIGKILL, done.stderr
        matrix["kills of the trainer" + ("" if exchange else ", no exchange")] += 1
    done = run(tessera_program, shim, folder, "train", config, exchange=exchange)
    assert done.returncode == 0, done.stderr
    assert_whole(folder, tmp_path / "straight")


def assert_whole(folder: Path, straight: Path):
    """The run has come to its end with the losses of one that nothing has happened to, bit for bit."""
    assert losses(folder) == losses(straight)
    assert not list(folder.rglob("*incomplete*")) and len(list(folder.glob("checkpoints/step-*"))) == 1


def point_of(folder: Path) -> str:
    """How far the save of a run that is or was alive has come, by what lies on the disk: the incomplete folder is there before the
    copy is made, the file of weights from the first byte on, the manifest last; then names change and the old checkpoint goes."""
    checkpoints = folder / "checkpoints"
    try:
        names = [path.name for path in checkpoints.iterdir()]
        incomplete = [name for name in names if name.startswith(".incomplete-step-")]
        inside = [path.name for name in incomplete for path in (checkpoints / name).iterdir()]
        latest = (checkpoints / "latest").read_text().strip()
    except FileNotFoundError:  # changed its name while it was read
        return "between"
    if incomplete:
        if any(name.endswith("manifest.json") for name in inside):
            return "publish"
        return "write" if inside else "copy"
    saved = [name for name in names if name.startswith("step-")]
    return "publish" if saved != [latest] else "between"


# Seconds into each point at which a kill comes, at most.
POINTS = {"copy": 0.004, "write": 0.02, "publish": 0.002}


def test_kills_beside_a_save(tessera_program, corpus, tmp_path, matrix, long_run):
    """While a copy is made, written or put in place, 26 MB at every step, in the background. Where a kill has hit is told by what
    it left."""
    kills, chance = 100 if long_run else 3, random.Random(SEED)
    sizes = {"model__num_layers": 2, "model__hidden_size": 256, "model__num_heads": 4, "training__eval_interval": 0, "device__threads": 1}
    changes = sizes | {"training__steps": 5 * kills, "checkpoint__every": 1, "checkpoint__keep": 1, "checkpoint__async": True,
                       "lr_schedule__decay_steps": 500}
    straight = write_config(tmp_path, corpus, "straight", **changes | {"checkpoint__every": 0})
    subprocess.run([tessera_program, "train", straight], env=environment(), check=True, capture_output=True, timeout=600)
    config, folder = write_config(tmp_path, corpus, "run", **changes), tmp_path / "run"
    hit = Counter()
    for _ in range(kills):
        point = min(POINTS, key=lambda name: hit[name])
        job = subprocess.Popen([tessera_program, "train", config], env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        saved, deadline = newest(folder), time.monotonic() + 60
        while (newest(folder) == saved or point_of(folder) != point) and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.0003)
        time.sleep(chance.uniform(0, POINTS[point]))
        job.kill()
        _, said = job.communicate(timeout=60)
        assert job.returncode == -signal.SIGKILL, said
        hit[point_of(folder)] += 1
    matrix.update({f"kills beside a save, point {name}": hit[name] for name in (*POINTS, "between")})
    assert not long_run or min(hit[point] for point in POINTS) >= 20, hit
    subprocess.run([tessera_program, "train", config], env=environment(), check=True, capture_output=True, timeout=600)
    assert_whole(folder, tmp_path / "straight")
    assert shards(folder) == shards(tmp_path / "straight")


def newest(folder: Path) -> str:
    return max((path.name for path in folder.glob("checkpoints/step-*")), default="")


TWO, FOUR = ("parallel.data=2",), ("parallel.tensor=2", "parallel.data=2")


def train(program, shim, config: Path, *layout, rank: int = -1, at: int = 0, kind: str = "kill") -> Job:
    """`tessera train` on one rank (-1) or several, one of which meets its fate; `count`: how many operations each has made."""
    folder, count = config.with_suffix(""), config.with_suffix(".count")
    more = {"LD_PRELOAD": shim, "FAULTS_FOLDER": folder, "FAULTS_AT": at, "FAULTS_KIND": kind, "FAULTS_COUNT": count}
    if rank >= 0:
        more["FAULTS_RANK"] = rank
    with Job(program, "train", config, *layout, env={key: str(value) for key, value in more.items()}) as job:
        job.out, job.err = (text.decode() for text in job.process.communicate(timeout=200))
        job.gone(60)
    files = {-1: count} if not layout else {int(path.suffix[1:]): path for path in config.parent.glob(f"{count.name}.*")}
    job.count = {rank: int(path.read_text()) for rank, path in sorted(files.items()) if path.exists()}
    return job


@pytest.mark.parametrize("layout,kind", [(FOUR, "kill"), (TWO, "kill-parent")], ids=["a rank of four", "the launcher of two"])
def test_kills_in_the_trainer_of_several_ranks(tessera_program, shim, corpus, tmp_path, matrix, long_run, layout, kind):
    """One rank is killed, or the launcher when a rank comes to that point: the others end, and the next job goes on. Four ranks
    save in the background."""
    kills, chance = (14 if long_run else 1), random.Random(SEED)
    steps, ranks = 4 + 2 * kills, 2 * len(layout)
    changes = {"training__steps": steps, "checkpoint__every": 1, "checkpoint__keep": 1, "lr_schedule__decay_steps": 40,
               "checkpoint__async": layout == FOUR}
    straight = train(tessera_program, shim, tiny(tmp_path, corpus, "straight", **changes), *layout)
    assert straight.process.returncode == 0 and len(straight.count) == ranks, straight.err
    config = tiny(tmp_path, corpus, **changes)
    for _ in range(kills):
        rank = chance.choice((0, *range(ranks)))
        job = train(tessera_program, shim, config, *layout, rank=rank, at=chance.randint(1, max(1, straight.count[rank] // steps * 2)), kind=kind)
        if kind == "kill":
            assert job.process.returncode == 128 + signal.SIGKILL and f"error: rank {rank} (" in job.err, job.err
        else:
            assert job.process.returncode == -signal.SIGKILL, job.err
        matrix["kills of " + ("a rank of the trainer's four" if kind == "kill" else "the launcher of the trainer's two")] += 1
    done = train(tessera_program, shim, config, *layout)
    assert done.process.returncode == 0, done.err
    assert_whole(tmp_path / "run", tmp_path / "straight")


@pytest.mark.parametrize("kind", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("layout", [(), TWO], ids=["one", "two"])
def test_each_failure_in_the_trainer(tessera_program, shim, corpus, tmp_path, matrix, long_run, layout, kind):
    """A run with a checkpoint goes on, and one of its operations fails: it says so, the checkpoint is there, the next job goes on.
    With EIO it is saved in the background."""
    if layout and kind == "EIO" and not long_run:
        pytest.skip("one kind is enough: runs with --long")
    folder, before = tmp_path / "run", tmp_path / "before"

    def go_on(steps: int, **fault) -> Job:
        config = tiny(tmp_path, corpus, checkpoint__every=1, checkpoint__keep=1, lr_schedule__decay_steps=20, training__steps=steps,
                      checkpoint__async=kind == "EIO")
        return train(tessera_program, shim, config, *layout, **fault)

    assert go_on(2).process.returncode == 0
    folder.rename(before)
    shutil.copytree(before, folder)
    counts = go_on(4).count
    assert go_on(5).process.returncode == 0
    folder.rename(tmp_path / "straight")
    assert min(counts.values()) > 10, counts
    stride = 1 if long_run and not layout else 3 if long_run else 23
    for rank, at in [(rank, at) for rank, count in counts.items() for at in range(1, count + 1, stride)]:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)
        done = go_on(4, rank=rank, at=at, kind=kind)
        if done.process.returncode != 0:
            assert done.process.returncode == 3 and os.strerror(getattr(errno, kind)) in done.err, (rank, at, done.err)
            assert list(folder.glob("checkpoints/step-*")), (rank, at)
            matrix[f"failures of the trainer{'s two ranks' if layout else ''}, {kind}"] += 1
        done = go_on(5)  # a step more: who has nothing to do removes nothing of what a failure left
        assert done.process.returncode == 0, (rank, at, done.err)
        assert_whole(folder, tmp_path / "straight")


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
