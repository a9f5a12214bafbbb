"""A run's folder belongs to one job and knows its run, and its metrics tell what they lack."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_support import environment, metrics, run, text_documents, write_config, write_corpus
from launch_support import free_port


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus", text_documents())


@pytest.fixture(scope="module")
def trained(tessera_program, corpus, tmp_path_factory):
    """Four steps, each with a checkpoint; tests copy it."""
    folder = tmp_path_factory.mktemp("trained")
    run(tessera_program, "train", write_config(folder, corpus, training__steps=4, checkpoint__every=1,
                                               lr_schedule__decay_steps=100))
    return folder / "run"


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_job_is_refused_until_the_first_is_gone(tessera_program, tmp_path, corpus):
    config = write_config(tmp_path, corpus, training__steps=100000, checkpoint__every=0, lr_schedule__decay_steps=100)
    first = subprocess.Popen([tessera_program, "train", config], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                             env=environment())
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run/metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        second = run(tessera_program, "train", config, code=2).stderr
        assert str(tmp_path / "run") in second and f"process {first.pid} on " in second
        # Nor may another run use its checkpoints meanwhile.
        run(tessera_program, "train", config, f"logging.dir={tmp_path}/other", f"checkpoint.dir={tmp_path}/run/checkpoints",
            code=2)
        assert not (tmp_path / "other").exists()
        # Nor one of several processes, whoever starts them: each job says so, and ends.
        launchers = [[tessera_program, "launch", "--num_processes", "2"]]
        if importlib.util.find_spec("torch"):
            launchers.append([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}",
                              "--no-python"])
        for launcher in launchers:
            command = [*launcher, tessera_program, "train", config, "parallel.data=2"]
            job = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, env=environment())
            assert job.returncode != 0 and f"process {first.pid} on " in job.stderr, job.stderr
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert json.loads((tmp_path / "run/run.lock").read_text())["pid"] == first.pid
    again = run(tessera_program, "train", config, "training.steps=2").stderr
    assert f"process {first.pid}" in again and "is gone" in again
    for folder in ("run", "run/checkpoints"):
        lease = json.loads((tmp_path / folder / "run.lock").read_text())
        assert lease["released"] and lease["generation"] == 2
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]


def first_child(pid: int) -> int:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            return int(children[0])
        time.sleep(0.05)
    raise AssertionError(f"process {pid} starts no other")


def test_a_job_elsewhere_that_was_stopped_and_goes_on_publishes_nothing(tessera_program, tmp_path, corpus, long_run):
    """Its namespaces are its own, as in a container or on another machine: nobody here sees whether it lives."""
    if not long_run:
        pytest.skip("watches a lease for a minute: runs with --long")
    away = ["unshare", "--user", "--map-root-user", "--pid", "--net", "--uts", "--fork", "--kill-child"]
    if subprocess.run([*away, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine allows no namespaces")
    config = write_config(tmp_path, corpus, training__steps=1000000, checkpoint__every=50, checkpoint__keep=3,
                          lr_schedule__decay_steps=100)
    checkpoints = tmp_path / "run/checkpoints"
    with subprocess.Popen([*away, tessera_program, "train", config], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          env=environment()) as first:
        try:
            deadline = time.monotonic() + 60
            while not list(checkpoints.glob("step-*")) and time.monotonic() < deadline:
                time.sleep(0.05)
            begun = time.monotonic()
            assert "is in use" in run(tessera_program, "train", config, code=2).stderr
            assert time.monotonic() - begun < 45, "it renews its lease every 20 s"
            trainer = first_child(first.pid)
            os.kill(trainer, signal.SIGSTOP)
            newest = max(int(path.name[5:]) for path in checkpoints.glob("step-*"))
            begun = time.monotonic()
            run(tessera_program, "train", config, f"training.steps={newest + 5}")
            assert time.monotonic() - begun > 55
            left = files(tmp_path / "run")
            os.kill(trainer, signal.SIGCONT)
            error = first.communicate(timeout=60)[1]
            assert first.returncode == 2 and "is this job's no more" in error, error
            assert files(tmp_path / "run") == left
            assert metrics(tmp_path / "run")[-1]["step"] == newest + 5
        finally:
            first.kill()


def test_a_copied_run_goes_on_in_its_own_folder(tessera_program, tmp_path, trained):
    before = files(trained)
    shutil.copytree(trained, tmp_path / "copy")
    done = run(tessera_program, "train", tmp_path / "copy/config.yaml", "training.steps=6", "checkpoint.keep=1")
    assert "the run was moved or copied" in done.stderr
    assert files(trained) == before
    assert [line["step"] for line in metrics(tmp_path / "copy")] == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in (tmp_path / "copy/checkpoints").glob("step-*")] == ["step-00000006"]


def test_checkpoints_of_another_run_are_refused(tessera_program, tmp_path, corpus, trained):
    before = files(trained)
    config = write_config(tmp_path, corpus)
    error = run(tessera_program, "train", config, f"checkpoint.dir={trained}/checkpoints", code=2).stderr
    assert f"{trained}/checkpoints are another run's (that in {trained})" in error
    assert f"checkpoint.resume={trained}/checkpoints" in error
    assert files(trained) == before


def test_metrics_that_do_not_fit_the_checkpoint_are_told(tessera_program, tmp_path, trained):
    whole = (trained / "metrics.jsonl").read_text().splitlines(keepends=True)
    shutil.copytree(trained, tmp_path / "cut")
    log = tmp_path / "cut/metrics.jsonl"
    log.write_text("".join(whole[:3]) + whole[3][:20])
    said = run(tessera_program, "train", tmp_path / "cut/config.yaml", "training.steps=5").stderr
    assert f"{log} has no line for step 4, though the checkpoint is of step 4 (line 4 is cut off)" in said
    assert [line["step"] for line in metrics(tmp_path / "cut")] == [1, 2, 3, 5]

    # Without its checkpoints the run begins anew; what it had logged is kept.
    shutil.rmtree(tmp_path / "cut/checkpoints")
    old = log.read_text()
    said = run(tessera_program, "train", tmp_path / "cut/config.yaml", "training.steps=2").stderr
    assert "the run starts with step 1" in said and "holds no checkpoint" in said
    assert (tmp_path / "cut/metrics.1.jsonl").read_text() == old
    assert [line["step"] for line in metrics(tmp_path / "cut")] == [1, 2]


def test_several_processes_start_the_program_that_was_called(tessera_program, source_dir, tmp_path, corpus):
    """Whatever it is named, and with no `tessera` in PATH: a file, and `python3 -m tessera`."""
    shutil.copy(tessera_program, tmp_path / "mine")
    nowhere = {"PATH": "/usr/bin:/bin"}
    settings = {"parallel__data": 2, "training__steps": 1, "lr_schedule__warmup_steps": 0}
    run(tmp_path / "mine", "train", write_config(tmp_path, corpus, "file", **settings), env=nowhere)
    run(sys.executable, "-m", "tessera", "train", write_config(tmp_path, corpus, "module", **settings),
        env=nowhere | {"PYTHONPATH": str(source_dir / "python")})
    for name in ("file", "module"):
        assert metrics(tmp_path / name)[0]["step"] == 1


def test_peak_memory_is_the_runs_own(tessera_program, tmp_path, corpus):
    """Not that of the process which started it: ru_maxrss outlives fork and exec."""
    config = write_config(tmp_path, corpus, training__steps=1, lr_schedule__warmup_steps=0)
    starter = "import os, sys; keep = b'x' * 600_000_000; os.execv(sys.argv[1], sys.argv[1:])"
    run(sys.executable, "-c", starter, tessera_program, "train", config)
    assert metrics(tmp_path / "run")[0]["peak_mem_bytes"] < 400_000_000
