"""Jobs that are asked to make room: they finish the step, save, and end with exit code 75, whoever asks whom. And restarts
that come to nothing."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from cli_support import metrics
from process_support import FOREVER, Job, figures, last_step, make_config, train, wait_for

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/python/6_save_when_preempted.py"
SMALL = {"training__micro_batch_size": 1, "training__global_batch_size": 2}
ENDLESS = SMALL | {"training__steps": FOREVER, "lr_schedule__decay_steps": 100, "checkpoint__every": 0}
TWO_RANKS = ("parallel.data=2",)
PREEMPTED = 75
PYTHON = {"PYTHONPATH": str(ROOT / "python"), "TESSERA_PYTHON": sys.executable}


def saved_steps(run: Path) -> list:
    return sorted(int(path.name.partition("-")[2]) for path in run.glob("checkpoints/step-*"))


@pytest.mark.parametrize("whom,sent,layout", [("launcher", signal.SIGTERM, TWO_RANKS), ("rank 1", signal.SIGUSR1, TWO_RANKS),
                                              ("itself", signal.SIGUSR1, ())])
def test_training_saves_and_goes_on(tessera_program, tmp_path, whom, sent, layout):
    settings = ENDLESS | {"training__steps": 150}  # the order of the data depends on it
    config, run = make_config(tmp_path, **settings), tmp_path / "run"
    with Job(tessera_program, "train", config, *layout, "--max_restarts", 3) as job:
        job.wait_for_step(run, 2)
        os.kill(job.worker(1) if whom == "rank 1" else job.process.pid, sent)
        job.finish(PREEMPTED)
    last = last_step(run)
    assert saved_steps(run) == [last] and f"preempted after step {last}" in job.err, job.err
    assert "error" not in job.err and "restart" not in job.err, job.err  # neither a failure nor one to be repeated
    if whom != "rank 1":
        return
    train(tessera_program, config, *layout)
    train(tessera_program, make_config(tmp_path, "straight", **settings), *layout)
    assert figures(run) == figures(tmp_path / "straight")


def test_a_scheduler_may_ask_everybody_and_repeat_itself(tessera_program, tmp_path):
    """As one does that signals the whole process group; only Ctrl-C ends a save."""
    config, run = make_config(tmp_path, **ENDLESS), tmp_path / "run"
    with Job(tessera_program, "train", config, *TWO_RANKS) as job:
        job.wait_for_step(run, 2)
        everybody = [job.process.pid, job.worker(0), job.worker(1)]
        for sent in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            for pid in everybody:
                try:
                    os.kill(pid, sent)
                except ProcessLookupError:  # done already
                    pass
        job.finish(PREEMPTED)
    assert saved_steps(run) == [last_step(run)]


def test_nobody_saves_when_a_rank_was_lost(tessera_program, tmp_path):
    config, run = make_config(tmp_path, **ENDLESS), tmp_path / "run"
    with Job(tessera_program, "train", config, *TWO_RANKS) as job:
        job.wait_for_step(run, 2)
        other = job.worker(0)
        os.kill(job.worker(1), signal.SIGKILL)
        os.kill(other, signal.SIGTERM)
        job.finish(128 + signal.SIGKILL)
    assert saved_steps(run) == []


def launch(program, *words, **options) -> Job:
    return Job(program, "launch", *words, **options)


SLOW = """
import os, signal, sys, time
from tessera import _C
_C.ProgressReporter().saved(7, float(sys.argv[1]))
def save(number, frame):
    time.sleep(1.5)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("save_s,code", [(60, PREEMPTED), (0, 128 + signal.SIGTERM)])
def test_the_grace_is_as_long_as_the_last_save(tessera_program, tmp_path, save_s, code):
    (tmp_path / "slow.py").write_text(SLOW)
    with launch(tessera_program, "--grace_s", 0.2, tmp_path / "slow.py", save_s, env=PYTHON) as job:
        assert b"ready" in job.process.stdout.readline()
        job.signal(signal.SIGTERM)
        job.finish(code)


def test_a_failed_save_is_told(tessera_program, tmp_path):
    (tmp_path / "full.py").write_text(SLOW.replace("sys.exit(75)", "sys.exit('no space left')"))
    with launch(tessera_program, "--max_restarts", 3, tmp_path / "full.py", 1, env=PYTHON) as job:
        assert b"ready" in job.process.stdout.readline()
        job.signal(signal.SIGTERM)
        job.finish(1)
    assert "no space left" in job.report() and "restart" not in job.err


# Scripts


def steps_in(text: str) -> dict:
    return {int(step): loss for step, loss in re.findall(r"step (\d+)  loss (\S+)", text)}


@pytest.mark.parametrize("whom,sent", [("launcher", signal.SIGTERM), ("rank 1", signal.SIGUSR1)])
def test_the_example_goes_on_as_if_nothing_had_been(tessera_program, tmp_path, long_run, whom, sent):
    if whom == "launcher" and not long_run:
        pytest.skip("the other one is enough: runs with --long")

    # As where PyTorch is not installed: importing it is most of what these short runs do.
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('hidden', name='torch')\n")
    python = PYTHON | {"PYTHONPATH": f"{tmp_path}:{PYTHON['PYTHONPATH']}"}

    def words(state: str, steps: int) -> tuple:
        return ("--num_processes", 2, "--max_restarts", 2, EXAMPLE, "--state", tmp_path / state, "--steps", steps)

    with launch(tessera_program, *words("state", FOREVER), env=python) as job:
        said = [job.process.stdout.readline().decode() for _ in range(3)]
        os.kill(job.worker(1) if whom == "rank 1" else job.process.pid, sent)
        job.finish(PREEMPTED)
    before = steps_in("".join(said) + job.out)  # not all of them: some may be in neither
    last = max(before)
    with launch(tessera_program, *words("state", last + 2), env=python) as job:
        after = steps_in(job.finish().out)
    assert sorted(after) == [last + 1, last + 2]
    with launch(tessera_program, *words("straight", last + 2), env=python) as job:
        assert steps_in(job.finish().out).items() >= (before | after).items()


SCRIPT = """
import os, signal, sys
from tessera import Accelerator
how = sys.argv[1]
accelerator = Accelerator()
seen = []
if how == "chained":
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
if how == "ignored":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
if how == "nowhere":
    accelerator.exit_if_preempted()
before = [signal.getsignal(number) for number in range(1, 32)]
assert not accelerator.preemption_requested()
assert before != [signal.getsignal(number) for number in range(1, 32)]
if how == "chained":
    os.kill(os.getpid(), signal.SIGTERM)
    assert seen == [signal.SIGTERM] and accelerator.preemption_requested() and accelerator.preemption_requested()
    accelerator.exit_if_preempted(lambda: print("saved", flush=True))
if how == "ignored":
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN and not accelerator.preemption_requested()
"""


@pytest.mark.parametrize("how,code,said", [("chained", PREEMPTED, "saved"), ("ignored", 0, ""),
                                           ("nowhere", 1, "must know where to save")])
def test_handlers_of_the_script(python_build, tmp_path, how, code, said):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = python_build.run(tmp_path / "script.py", how, code=code, plain=True)
    assert said in done.stdout + done.stderr


def test_an_accelerator_alone_touches_no_handler(python_build):
    python_build.run("-c", "import signal\nfrom tessera import Accelerator\n"
                     "before = [signal.getsignal(n) for n in range(1, 32)]\nAccelerator()\n"
                     "assert before == [signal.getsignal(n) for n in range(1, 32)]", plain=True)


# torchrun


def test_torchrun(tessera_program, tmp_path, long_run):
    """It passes SIGTERM on to its workers and kills them 30 s later; what it exits with itself is its own affair."""
    if not long_run:
        pytest.skip("torchrun takes its time: runs with --long")
    pytest.importorskip("torch")
    config, run = make_config(tmp_path, **ENDLESS), tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--no_python"]
    with Job(*torchrun, tessera_program, "train", config, *TWO_RANKS) as job:
        job.wait_for_step(run, 2)
        job.signal(signal.SIGTERM)
        err = job.process.communicate(timeout=90)[1].decode()
        wait_for(lambda: not job.processes(), "the end of all processes", 20)
    last = last_step(run)
    assert saved_steps(run) == [last] and f"preempted after step {last}" in err, err
    train(tessera_program, config, *TWO_RANKS, f"training.steps={last + 1}")
    assert [line["step"] for line in metrics(run)] == list(range(1, last + 2))


# Restarts


def test_restarts_without_progress_are_given_up(tessera_program):
    with launch(tessera_program, "--max_restarts", 50, "--restart_delay_s", 0.05, "bash", "-c", "echo try $TESSERA_RESTART; exit 9") as job:
        job.finish(8)
    assert re.findall(r"try (\d)", job.out) == ["0", "1", "2"]
    assert "given up after 2 of 50 restarts" in job.err and "exited with code 9" in job.err, job.err


def test_restarts_that_get_further_go_on(tessera_program, tmp_path):
    (tmp_path / "further.py").write_text("import os, sys\nfrom tessera import _C\nattempt = int(os.environ['TESSERA_RESTART'])\n"
                                         "_C.ProgressReporter().step(10 + min(attempt, 1))\nsys.exit(9)\n")
    with launch(tessera_program, "--max_restarts", 50, "--restart_delay_s", 0.01, tmp_path / "further.py", env=PYTHON) as job:
        job.finish(8)
    assert "restart 4 of 50" in job.err and "restart 5" not in job.err  # attempts 2, 3 and 4 got no further than 1
    assert "got no further than step 11" in job.err


def test_a_signal_ends_the_wait_for_a_restart(tessera_program):
    for sent, code in ((signal.SIGINT, 130), (signal.SIGTERM, PREEMPTED), (signal.SIGUSR1, PREEMPTED)):
        with launch(tessera_program, "--max_restarts", 2, "--restart_delay_s", 60, "bash", "-c", "exit 9") as job:
            while b"starts again in 60 s" not in job.process.stderr.readline():
                assert job.process.poll() is None
            job.signal(sent)
            job.finish(code, timeout=30)


def test_a_restarted_run_goes_on_whatever_resume_says(tessera_program, tmp_path):
    config, run = make_config(tmp_path, checkpoint__resume="none", **SMALL | {"training__steps": 300, "checkpoint__every": 20}), tmp_path / "run"
    with Job(tessera_program, "train", config, *TWO_RANKS, "--max_restarts", 1) as job:
        pid = job.worker(1)
        job.wait_for_step(run, 25)
        os.kill(pid, signal.SIGKILL)
        job.finish()
    assert "resuming from" in job.err
    assert [line["step"] for line in metrics(run)] == list(range(1, 301))


def test_the_exit_codes_are_those_of_the_guide(python_build):
    printed = python_build.run("-c", "from tessera import _C\nfor row in _C.exit_codes().items(): print('| %d | %s |' % row)", plain=True).stdout
    guide = (ROOT / "docs/guides/several_processes.md").read_text()
    table = guide[guide.index("| Code | Means |"):].split("\n\n")[0].splitlines()[2:]
    assert table == printed.splitlines()
