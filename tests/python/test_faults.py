"""Jobs of several processes whose workers, or whose launcher, are killed, stopped, interrupted or fail."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_support import metrics
from process_support import (FOREVER, FOUR_RANKS, Job, assert_closed, figures, last_step, listening, make_config, shared_files, train,
                             wait_for)

ENDLESS = {"training__steps": FOREVER, "lr_schedule__decay_steps": 100, "checkpoint__every": 0}
DP4 = ("parallel.data=4",)
ROOT = Path(__file__).resolve().parents[2]
SOON = 5  # seconds in which the others of a dead process end


def start(program, config, *words, **options) -> Job:
    return Job(program, "train", config, *words, **options)


@pytest.mark.parametrize("layout,victim", [(FOUR_RANKS, 3), (DP4, 0)])
def test_a_killed_worker_ends_the_job(tessera_program, tmp_path, layout, victim):
    before = shared_files()
    with start(tessera_program, make_config(tmp_path, **ENDLESS), *layout, env={"TMPDIR": str(tmp_path)}) as job:
        job.wait_for_step(tmp_path / "run", 3)
        pid, ports = job.worker(victim), listening(job.processes())
        assert ports
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        job.finish(128 + signal.SIGKILL)
        assert time.monotonic() - killed < SOON
        report = job.report()
        assert re.match(rf"error: rank {victim} \(host {os.uname().nodename}, pid {pid}\) was killed by signal 9", report), report
        # Who waited for it says for whom, in what, with whom.
        said = report[report.index("which waited for others, said:"):]
        assert re.search(rf"connection to rank {victim} \(.*process {pid}\)", said), report
        assert re.search(r"(all_reduce|reduce_scatter|all_gather|exchange|broadcast|barrier) \d+ on group \w+ \(ranks ", said), report
        assert_closed(ports)
    assert shared_files() <= before


@pytest.mark.parametrize("layout,victim", [(FOUR_RANKS, 1), (DP4, 2)])
def test_a_stopped_worker_is_named_after_the_deadline(tessera_program, tmp_path, long_run, layout, victim):
    if not long_run:
        pytest.skip("the test on a busy machine is enough: runs with --long")
    deadline = 4
    config = make_config(tmp_path, parallel__timeout_s=deadline, **ENDLESS)
    with start(tessera_program, config, *layout) as job:
        job.wait_for_step(tmp_path / "run", 3)
        os.kill(job.worker(victim), signal.SIGSTOP)
        stopped = time.monotonic()
        out, err = job.process.communicate(timeout=60)
        assert deadline - 1 < time.monotonic() - stopped < deadline + 10
        assert job.process.returncode == 7
        job.err = err.decode()
        assert re.match(rf"error: rank {victim} \(host \S+, pid \d+\) gave no answer \(stopped\)", job.report()), job.report()
        assert re.search(rf"\w+ \d+ on group \w+ \(ranks .*did not finish within {deadline} s.*rank {victim} \(.*does not answer",
                         job.report()), job.report()
        job.gone()


def test_a_slow_store_is_not_a_lost_one(tessera_program, tmp_path, long_run):
    """Rank 1 stops, and the launcher, which serves the store, has no time when that is noticed."""
    if not long_run:
        pytest.skip("waits for a deadline: runs with --long")
    deadline = 4
    config = make_config(tmp_path, parallel__timeout_s=deadline, **ENDLESS | {"training__global_batch_size": 2})
    with start(tessera_program, config, "parallel.data=2") as job:
        job.wait_for_step(tmp_path / "run", 1)
        for pid in (job.worker(1), job.process.pid):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(deadline + 3.5)
        job.process.send_signal(signal.SIGCONT)
        job.err = job.process.communicate(timeout=60)[1].decode()
        assert job.process.returncode == 7
        assert re.search(rf"did not finish within {deadline} s.*rank 1 \(.*does not answer", job.report()), job.report()
        assert "store does not answer" not in job.err


BUSY = "import time; end = time.monotonic() + 300\nwhile time.monotonic() < end: pass"
HANGS = """
import sys, time
from datetime import timedelta
from pathlib import Path
from tessera import Accelerator
from tessera.utils import InitProcessGroupKwargs
accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=float(sys.argv[1])))])
accelerator.wait_for_everyone()
if accelerator.process_index == 1:
    Path(__file__).with_name("hangs").touch()
    while True:
        time.sleep(1)
accelerator.wait_for_everyone()
"""


@pytest.mark.parametrize("how", ["stopped", "elsewhere"])
def test_a_hung_worker_is_named_in_time_on_a_busy_machine(tessera_program, tmp_path, long_run, how):
    """Three processes a core that want all of it. The worker is stopped, or does something else in a script."""
    if how == "elsewhere" and not long_run:
        pytest.skip("waits for a deadline: runs with --long")
    deadline, load = (6, 3 * len(os.sched_getaffinity(0)))
    (tmp_path / "script.py").write_text(HANGS)
    config = make_config(tmp_path, parallel__timeout_s=deadline, **ENDLESS | {"training__global_batch_size": 2})
    words = {"stopped": ("train", config, "parallel.data=2"),
             "elsewhere": ("launch", "--num_processes", 3, tmp_path / "script.py", 20)}[how]
    python = {"PYTHONPATH": str(ROOT / "python"), "TESSERA_PYTHON": sys.executable}
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(load)]
    try:
        with Job(tessera_program, *words, env=python) as job:
            if how == "elsewhere":
                deadline = 20  # the ranks must meet first, on the same machine
                wait_for((tmp_path / "hangs").exists, "all ranks at work", 120)
            else:
                job.wait_for_step(tmp_path / "run", 1)
                os.kill(job.worker(1), signal.SIGSTOP)
            hung = time.monotonic()
            job.err = job.process.communicate(timeout=120)[1].decode()
            assert time.monotonic() - hung < deadline + 10
            assert job.process.returncode == 7
            blamed = {"stopped": r"error: rank 1 .* gave no answer \(stopped\)",
                      "elsewhere": r"did not finish within 20 s.*: rank 1 \(.*has not called it"}[how]
            assert re.search(blamed, job.report()), job.report()
            assert re.search(rf"\w+ \d+ on group \w+ \(ranks .*did not finish within {deadline} s", job.report()), job.report()
            job.gone(10)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_worker_that_cannot_begin_tells_why(tessera_program, tmp_path):
    """One process looks for its data in another folder, and they are not there."""
    config = make_config(tmp_path)
    script = '[ $RANK != 2 ] || cd /; exec "$0" train "$@" data.path=corpus'
    with Job(tessera_program, "launch", "--num_processes", 4, "bash", "-c", script, tessera_program, config, *FOUR_RANKS, cwd=tmp_path) as job:
        report = job.finish(4).report()
        assert re.match(r"error: rank 2 \(host \S+, pid \d+\) exited with code 4", report), report
        assert report.splitlines()[1].startswith("[rank 2] error: corpus.idx"), report


@pytest.mark.parametrize("victim", [0, 3])
def test_a_worker_that_cannot_save_tells_why(tessera_program, tmp_path, victim):
    """One process may write files of 20 KB at most; its part of the checkpoint is larger."""
    config = make_config(tmp_path, training__steps=4, checkpoint__every=2)
    script = f"[ $RANK != {victim} ] || {{ trap '' XFSZ; ulimit -f 20; }}; exec \"$0\" train \"$@\""
    with Job(tessera_program, "launch", "--num_processes", 4, "bash", "-c", script, tessera_program, config, *FOUR_RANKS) as job:
        report = job.finish(3).report()
        assert re.match(rf"error: rank {victim} \(host \S+, pid \d+\) exited with code 3", report), report
        assert re.search(rf"\n\[rank {victim}\] error: .*_tp_{victim % 2}_pp_{victim // 2}.*File too large", report), report
    # What was half saved is in nobody's way.
    assert last_step(tmp_path / "run") == 2
    train(tessera_program, config, *FOUR_RANKS)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_killed_launcher_leaves_nothing(tessera_program, tmp_path):
    before = shared_files()
    with start(tessera_program, make_config(tmp_path, **ENDLESS), *FOUR_RANKS) as job:
        job.wait_for_step(tmp_path / "run", 2)
        ports = listening(job.processes())
        assert len(job.processes()) >= 5 and ports
        job.process.kill()
        job.gone(SOON)
        assert_closed(ports)
    assert shared_files() <= before


# Restarts and resumes


@pytest.mark.parametrize("layout,on_disk", [(FOUR_RANKS, False), (("parallel.data=2", "parallel.pipeline=2", "parallel.zero_stage=3"), True)])
def test_restarts_go_on_with_the_same_losses(tessera_program, tmp_path, layout, on_disk):
    """`on_disk`: with weights' shares and moments in files, of which nothing is left; the run that nothing happens to has them in memory."""
    settings, disk = {"training__steps": 15, "checkpoint__every": 4}, tmp_path / "disk"
    disk.mkdir()
    train(tessera_program, make_config(tmp_path, "straight", **settings), *layout)
    away = ("offload.optimizer=nvme", f"offload.path={disk}") if on_disk else ()
    with start(tessera_program, make_config(tmp_path, **settings), *layout, *away, "--max_restarts", 2) as job:
        for step, victim in ((5, 2), (10, 0)):
            pid = job.worker(victim)
            job.wait_for_step(tmp_path / "run", step)
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: job.worker(victim) != pid, f"the restart after step {step}")
        job.finish()
    assert "restart 1 of 2" in job.err and "restart 2 of 2" in job.err and "error: rank" not in job.err
    assert job.err.count("resuming from") == 2
    assert figures(tmp_path / "run") == figures(tmp_path / "straight")
    assert not list(disk.iterdir())


def kill_at_random(job: Job, run, chance: random.Random, target: str) -> str:
    """Kills one process of a job that is starting or running. Returns what it did."""
    begin = last_step(run)
    if "start" in target:
        time.sleep(chance.uniform(0, 1.5))
    else:
        job.wait_for_step(run, begin + chance.randint(1, 3))
        time.sleep(chance.uniform(0, 0.1))
    if "save" in target:
        wait_for(lambda: any(run.glob("checkpoints/.incomplete-*")), "a save", 30, 0.0005)
        time.sleep(chance.uniform(0, 0.01))
    rank = chance.randrange(4)
    pid = job.process.pid if "launcher" in target else job.worker(rank)
    assert job.process.poll() is None, job.process.communicate()
    os.kill(pid, signal.SIGKILL)
    return f"{target} (rank {rank}) at step {last_step(run)}, begun at {begin}"


def test_random_kills(tessera_program, tmp_path, long_run):
    """Workers and launchers, at any time; the run goes on as if nothing had been."""
    kills, seed = (50, 20261122) if long_run else (5, 7)
    settings = {"training__steps": 8 * kills, "checkpoint__every": 1, "checkpoint__keep": 3}
    train(tessera_program, make_config(tmp_path, "straight", **settings | {"checkpoint__every": 0}), *FOUR_RANKS)
    config, run = make_config(tmp_path, **settings), tmp_path / "run"
    chance = random.Random(seed)
    targets = ["worker", "launcher", "worker in a save", "launcher in a save", "worker at the start", "launcher at the start"]
    targets = [targets[i % len(targets)] for i in range(kills)]
    done = []
    for target in targets:
        with start(tessera_program, config, *FOUR_RANKS) as job:
            done.append(kill_at_random(job, run, chance, target))
            print(done[-1])
            killed = time.monotonic()
            job.process.wait(timeout=60)
            assert job.process.returncode not in (0, None), done
            job.gone(2 * SOON)
            assert time.monotonic() - killed < 2 * SOON, done
    train(tessera_program, config, *FOUR_RANKS)
    assert figures(run) == figures(tmp_path / "straight"), done
    assert not list(run.glob("checkpoints/.incomplete-*"))


# Interruptions


@pytest.mark.parametrize("saves", [True, False])
def test_ctrl_c_ends_after_the_step(tessera_program, tmp_path, saves):
    sent = signal.SIGINT
    config = make_config(tmp_path, checkpoint__on_interrupt=saves, **ENDLESS)
    with start(tessera_program, config, *FOUR_RANKS) as job:
        job.wait_for_step(tmp_path / "run", 3)
        job.signal(sent)
        job.finish(128 + sent)
    last = last_step(tmp_path / "run")
    saved = tmp_path / f"run/checkpoints/step-{last:08d}"
    assert saved.is_dir() == saves
    assert f"interrupted after step {last}" in job.err and (str(saved) in job.err) == saves, job.err
    assert not [line for line in job.err.splitlines() if line.startswith("error: rank")], job.err
    # The run goes on from there, or from its beginning.
    train(tessera_program, config, *FOUR_RANKS, f"training.steps={last + 1}")
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, last + 2))


def test_ctrl_c_while_the_processes_start(tessera_program, tmp_path):
    """Some have ended by it, others wait for them."""
    config = make_config(tmp_path, **ENDLESS)
    for delay in (0, 0.01, 0.02, 0.04):
        with start(tessera_program, config, *FOUR_RANKS) as job:
            job.worker(0)
            time.sleep(delay)
            job.signal(signal.SIGINT)
            asked = time.monotonic()
            job.finish(128 + signal.SIGINT)
            assert time.monotonic() - asked < SOON


def test_two_ctrl_c_end_at_once(tessera_program, tmp_path):
    """Steps of minutes, whose end nobody waits for."""
    config = make_config(tmp_path, checkpoint__on_interrupt=True, **ENDLESS | {"training__steps": 2, "training__global_batch_size": 8192})
    with start(tessera_program, config, *FOUR_RANKS) as job:
        wait_for((tmp_path / "run/metrics.jsonl").exists, "the beginning")
        time.sleep(1)
        job.signal(signal.SIGINT)
        time.sleep(1)
        assert job.process.poll() is None
        job.signal(signal.SIGINT)
        asked = time.monotonic()
        job.finish(128 + signal.SIGINT)
        assert time.monotonic() - asked < 2
    assert last_step(tmp_path / "run") == 0 and not list(tmp_path.glob("run/checkpoints/step-*"))
