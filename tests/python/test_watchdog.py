"""Processes that hang: on a dead disk, in a kernel, or because another one was stopped; and what their dumps say."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_support import run
from process_support import FOREVER, FOUR_RANKS, Job, make_config, wait_for

HUNG = 7  # the exit code
ENDLESS = {"training__steps": FOREVER, "lr_schedule__decay_steps": 100, "checkpoint__every": 0}
SOON = 30  # far more than it takes, as the machine may be busy


@pytest.fixture(scope="module")
def stand_still(build_dir) -> str:
    """What makes a process hang when it is preloaded: tests/support/stand_still."""
    library = build_dir / "tests/libstand_still.so"
    assert library.is_file(), f"{library} was not built"
    return str(library)


def dump_of(run_folder: Path, rank: int) -> dict:
    return json.loads((run_folder / f"flight/rank-{rank}.json").read_text())


def test_a_stopped_rank_is_named_by_the_dumps_of_the_others(tessera_program, tmp_path):
    deadline = 4
    config = make_config(tmp_path, parallel__timeout_s=deadline, **ENDLESS)
    with Job(tessera_program, "train", config, *FOUR_RANKS) as job:
        job.wait_for_step(tmp_path / "run", 3)
        os.kill(job.worker(3), signal.SIGSTOP)
        job.process.communicate(timeout=deadline + 2 * SOON)
        assert job.process.returncode == HUNG
        job.gone()
    assert sorted(path.name for path in (tmp_path / "run/flight").iterdir()) == ["rank-0.json", "rank-1.json", "rank-2.json"]
    said = run(tessera_program, "flight", tmp_path / "run").stdout
    assert "dumps of 3 of 4 ranks" in said and re.search(r"wrote: .* did not finish within 4 s", said), said
    assert said.endswith("behind: rank 3\n  rank 3 left no dump: it was stopped or killed, or its machine is gone\n"), said
    waits = re.findall(r"rank \d: in Engine::\w+\(\) for [\d.]+ s; waits for (\w+) (\d+) on group (\w+) \(ranks ([^)]*)\)", said)
    assert len(waits) == 3 and any("3" in ranks for _, _, _, ranks in waits), said
    # Each has its last operations, kernels and communication, with states and times.
    for rank in range(3):
        dump = dump_of(tmp_path / "run", rank)
        assert dump["rank"] == rank and dump["world_size"] == 4
        kinds = {operation["kind"] for operation in dump["operations"]}
        assert kinds == {"kernel", "communication"}
        assert any(operation["name"] == "gemm" and operation["state"] == "done" and len(operation["shape"]) == 3
                   for operation in dump["operations"])
        assert any(operation["state"] != "done" and operation["waited"] for operation in dump["operations"]
                   if operation["kind"] == "communication")


def test_a_signal_asks_for_a_dump_and_ends_nothing(tessera_program, tmp_path):
    config = make_config(tmp_path, **ENDLESS)
    with Job(tessera_program, "train", config, "parallel.data=2") as job:
        job.wait_for_step(tmp_path / "run", 2)
        job.signal(signal.SIGUSR2)  # to the launcher, which passes it on
        wait_for(lambda: (tmp_path / "run/flight/rank-1.json").exists() and (tmp_path / "run/flight/rank-0.json").exists(),
                 "both dumps", SOON)
        after = int((tmp_path / "run/metrics.jsonl").read_text().count("\n"))
        job.wait_for_step(tmp_path / "run", after + 5)
        said = run(tessera_program, "flight", tmp_path / "run").stdout
        assert "dumps of 2 of 2 ranks" in said and "asked for by a signal" in said, said
        job.signal(signal.SIGINT)
        job.process.communicate(timeout=SOON)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dead_disk_under_the_data_ends_the_run(tessera_program, stand_still, tmp_path, long_run, ranks):
    """The thread that reads the corpus hangs for ever, in the system."""
    if ranks == 1 and not long_run:
        pytest.skip("waits for a deadline: runs with --long")
    deadline, trigger = 5, tmp_path / "disk_dies"
    config = make_config(tmp_path, parallel__timeout_s=deadline, **ENDLESS)
    shim = {"LD_PRELOAD": stand_still, "DEAD_DISK": f"corpus.bin:{trigger}"}
    with Job(tessera_program, "train", config, f"parallel.data={ranks}", env=shim) as job:
        job.wait_for_step(tmp_path / "run", 3)
        trigger.touch()
        died = time.monotonic()
        job.finish(3, timeout=deadline + 2 * SOON)
        assert time.monotonic() - died < deadline + SOON
    assert re.search(r"the data loader got no batch within 4\.5 s \(samples \d+ to \d+\)\. Is the file system", job.err), job.err
    if ranks > 1:
        assert re.match(r"error: rank \d \(host \S+, pid \d+\) exited with code 3", job.report()), job.report()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_is_dead_at_the_start_ends_the_run(tessera_program, stand_still, tmp_path, ranks):
    """Rank 0 opens the data, which hangs; the other one waits for it."""
    deadline, dead = 3, tmp_path / "dead"
    dead.touch()
    config = make_config(tmp_path, parallel__timeout_s=deadline, **ENDLESS)
    shim = {"LD_PRELOAD": stand_still, "DEAD_DISK": f"corpus.idx:{dead}"}
    with Job(tessera_program, "train", config, f"parallel.data={ranks}", env=shim) as job:
        wait_for((tmp_path / "run/run.lock").exists, "the beginning", SOON)
        begun = time.monotonic()
        job.finish(HUNG, timeout=deadline + 2 * SOON)
        assert time.monotonic() - begun < deadline + SOON
    hangs = f"rank 0 hangs in opening the data: no operation began or ended for {deadline} s"
    if ranks == 1:
        assert hangs in job.err and dump_of(tmp_path / "run", 0)["call"]["name"] == "opening the data", job.err
    else:  # whoever's deadline passes first names it
        assert hangs in job.err or re.search(r"did not finish within 3 s.*rank 0 \(.*has not called it", job.err), job.err


def test_a_disk_that_is_slow_at_the_start_does_not(tessera_program, stand_still, tmp_path):
    """Forty reads of 0.1 s, with a deadline of 2 s."""
    config = make_config(tmp_path, parallel__timeout_s=2, **ENDLESS | {"training__steps": 1, "training__global_batch_size": 2})
    with Job(tessera_program, "train", config, "parallel.data=2",
             env={"LD_PRELOAD": stand_still, "SLOW_DISK": "corpus.bin:0.1"}) as job:
        job.finish(timeout=4 * SOON)


def test_a_kernel_that_never_ends_ends_the_run(tessera_program, stand_still, tmp_path):
    deadline, trigger = 2, tmp_path / "kernel_hangs"
    config = make_config(tmp_path, parallel__timeout_s=deadline, **ENDLESS)
    shim = {"LD_PRELOAD": stand_still, "DEAD_KERNEL": str(trigger), "OMP_NUM_THREADS": "2"}
    with Job(tessera_program, "train", config, "device.threads=2", env=shim) as job:
        job.wait_for_step(tmp_path / "run", 3)
        trigger.touch()
        job.finish(HUNG, timeout=deadline + 2 * SOON)
    assert re.search(r"error: rank 0 hangs in Engine::\w+\(\): no operation began or ended for 2 s \(parallel\.timeout_s\); "
                     r"\w+ [\dx]+ is running; what it did last is in \S+/rank-0\.json", job.err), job.err
    assert any(operation["state"] == "running" for operation in dump_of(tmp_path / "run", 0)["operations"])
    assert "behind: rank 0" in run(tessera_program, "flight", tmp_path / "run").stdout
    # The next run in the folder puts what this one left aside.
    trigger.unlink()
    run(tessera_program, "train", config, "training.steps=1")
    assert not (tmp_path / "run/flight/rank-0.json").exists()
    assert (tmp_path / "run/flight/before/rank-0.json").is_file()


def test_dumps_that_are_missing_or_damaged(tessera_program, tmp_path):
    for folder, words in ((tmp_path / "nowhere", "there is no such folder"), (tmp_path, "there is no dump")):
        assert words in run(tessera_program, "flight", folder, code=4).stderr
    (tmp_path / "rank-0.json").write_text('{"format": "tessera fl')
    assert "rank-0.json: this dump is damaged" in run(tessera_program, "flight", tmp_path, code=4).stderr


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from tessera import Accelerator
seen = []
signal.signal(signal.SIGUSR2, lambda *_: seen.append(1))
accelerator = Accelerator(cpu=True, project_dir=sys.argv[1])
os.kill(os.getpid(), signal.SIGUSR2)
dump = Path(sys.argv[1]) / "flight/rank-0.json"
end = time.monotonic() + 60
while not dump.exists() and time.monotonic() < end:
    time.sleep(0.01)
assert seen == [1], "the script's own handler was not called"
print("written", dump.exists())
"""


def test_a_script_is_watched_too(python_build, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = python_build.run(tmp_path / "script.py", tmp_path / "project", plain=True)
    assert "written True" in done.stdout and "asked for by a signal" not in done.stdout
    assert re.search(r"tessera: rank 0: what it did last is in \S+/project/flight/rank-0\.json", done.stderr), done.stderr
    assert "dumps of 1 of 1 ranks" in run(python_build.program, "flight", tmp_path / "project").stdout



HANGING = """
import os, sys
from datetime import timedelta
from pathlib import Path
import numpy as np
from tessera import Accelerator, AdamW, CausalLM
from tessera.utils import InitProcessGroupKwargs
accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=2))])
config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 83, "n_positions": 64}
model, optimizer = accelerator.prepare(CausalLM(config), AdamW(lr=1e-3))
ids = np.arange(512).reshape(8, 64) % 83
for step in range(1000):
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    if step == 2:
        Path(os.environ["DEAD_KERNEL"]).touch()
"""


def test_a_script_whose_call_never_returns_is_ended(python_build, stand_still, tmp_path):
    (tmp_path / "script.py").write_text(HANGING)
    done = python_build.run(tmp_path / "script.py", code=HUNG, plain=True, cwd=tmp_path, LD_PRELOAD=stand_still, OMP_NUM_THREADS="2",
                            DEAD_KERNEL=str(tmp_path / "kernel_hangs"))
    assert re.search(r"tessera: rank 0 hangs in Engine::\w+\(\): no operation began or ended for 2 s", done.stderr), done.stderr
    assert dump_of(tmp_path, 0)["call"]["name"].startswith("Engine::")


ONE_OF_TWO = "import os\nif os.environ['RANK'] != '0':\n    del os.environ['DEAD_KERNEL']\n" + HANGING.replace(
    'Path(os.environ["DEAD_KERNEL"]).touch()', 'Path(os.environ.get("DEAD_KERNEL", "other")).touch()')


def test_a_script_on_two_ranks_ends_with_the_code_of_a_hang(python_build, stand_still, tmp_path):
    (tmp_path / "script.py").write_text(ONE_OF_TWO)
    done = python_build.run(tmp_path / "script.py", launcher=python_build.launcher("--num_processes", 2, "--threads_per_process", 2),
                            code=HUNG, plain=True, cwd=tmp_path, LD_PRELOAD=stand_still, DEAD_KERNEL=str(tmp_path / "kernel_hangs"))
    # Both wait as long: who is first names rank 0, by its call or by what it has not called.
    assert re.search(r"rank 0 hangs in Engine::|CommunicationTimeout: .*rank 0 .*has not called it", done.stderr), done.stderr


def spin_count(command: list, **variables: str) -> str:
    """What libgomp says it took, as OMP_DISPLAY_ENV makes it."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run([str(word) for word in command], env={**environment, "OMP_DISPLAY_ENV": "verbose", **variables},
                          capture_output=True, text=True, timeout=120)
    found = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    assert found, done.stderr
    return found[-1]  # the program starts itself anew


def test_threads_sleep_soon_unless_somebody_said_otherwise(tessera_program, source_dir):
    from tessera.launch.thread_waits import SPIN_COUNT

    module = [sys.executable, "-c", "import tessera, tessera._C"]
    path = {"PYTHONPATH": str(source_dir / "python")}
    for command, more in (([tessera_program, "--version"], {}), (module, path)):
        assert spin_count(command, **more) == SPIN_COUNT
        assert spin_count(command, GOMP_SPINCOUNT="77", **more) == "77"
        assert spin_count(command, OMP_WAIT_POLICY="passive", **more) == "0"
