"""One training job as several real processes: every layout and every launcher gives the losses of one process."""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from process_support import FOUR_RANKS, GPT2, LLAMA, SECRET, Job, assert_same, figures, make_config, run_job, train

MODELS = {"gpt2": GPT2, "llama": LLAMA}
EVALUATED = {"training__steps": 5, "training__eval_interval": 2, "training__eval_iters": 1, "checkpoint__every": 0}


@pytest.fixture(scope="module")
def straight(tessera_program, tmp_path_factory):
    """Folder and figures of each model's run in one process."""
    folder = tmp_path_factory.mktemp("straight")
    runs = {}
    for name, model in MODELS.items():
        train(tessera_program, make_config(folder, name, model, **EVALUATED))
        runs[name] = figures(folder / name)
        assert len(runs[name]) == 5 and len([line for line in runs[name] if "eval_loss" in line]) == 3
    return folder, runs


# (model, processes, layout)
LAYOUTS = [
    ("gpt2", 2, "data=2 zero_stage=0"),
    ("gpt2", 4, "data=4"),
    ("gpt2", 4, "tensor=2 data=2"),
    ("gpt2", 4, "tensor=2 data=2 zero_stage=3"),
    ("llama", 4, "pipeline=2 schedule=zb-v data=2 zero_stage=2"),
    ("gpt2", 4, "tensor=4 sequence=true"),
    ("gpt2", 2, "pipeline=2 training.recompute=full"),
    ("gpt2", 4, "pipeline=4 schedule=gpipe"),
    ("gpt2", 4, "tensor=2 sequence=true pipeline=2 schedule=zb-h1"),
    ("gpt2", 4, "pipeline=2 schedule=zb-v data=2 zero_stage=0"),
    ("gpt2", 4, "pipeline=2 virtual_stages=2 schedule=interleaved tensor=2 training.recompute=selective"),
    ("gpt2", 8, "tensor=2 pipeline=2 data=2 pipeline_layout='1,3'"),
    ("llama", 4, "tensor=4 sequence=true"),  # two ranks to a key-value head
    ("llama", 4, "tensor=4 training.recompute=full training.recompute_partition=true"),
    ("llama", 4, "tensor=2 pipeline=2 schedule=zb-v training.recompute=full"),
    ("llama", 4, "pipeline=2 virtual_stages=2 schedule=interleaved data=2"),
]


def overrides(layout: str) -> list:
    return [word if "." in word else "parallel." + word for word in layout.replace("'", "").split()]


@pytest.mark.parametrize("model,ranks,layout", LAYOUTS, ids=[f"{model} {layout}" for model, _, layout in LAYOUTS])
def test_every_layout_trains_the_same_model(tessera_program, tmp_path, straight, model, ranks, layout):
    folder, expected = straight
    # In some runs the ranks compare what they call.
    checked = {"TESSERA_CHECK_COLLECTIVES": "1"} if "pipeline=2" in layout and model == "llama" else {}
    run_job(tessera_program, "train", folder / f"{model}.yaml", f"logging.dir={tmp_path}/run", *overrides(layout), env=checked)
    assert_same(tmp_path / "run", expected[model])
    assert len(list((tmp_path / "run/ranks").glob("rank-*.log"))) == ranks
    checkpoint = tmp_path / "run/checkpoints/step-00000005"
    for kind in ("model", "optimizer"):
        assert len(list(checkpoint.glob(f"{kind}_tp_*_pp_*.safetensors"))) == ranks


def test_the_quickstart_with_and_without_processes(tessera_program, tmp_path, source_dir):
    """The files of configs/ as they are, made short."""
    make_config(tmp_path)
    short = [f"data.path={tmp_path}/corpus", f"data.cache_dir={tmp_path}/cache", "training.steps=3", "training.seq_length=64",
             "training.eval_iters=1", "logging.every=1"]
    runs = {}
    for name in ("quickstart", "quickstart_tp2_pp2"):
        where = f"logging.dir={tmp_path}/{name}"
        runs[name] = train(tessera_program, source_dir / f"configs/{name}.yaml", *short, where).err
    reference = figures(tmp_path / "quickstart")
    assert len(reference) == 3 and "eval_loss" in reference[-1]
    assert_same(tmp_path / "quickstart_tp2_pp2", reference)
    # Rank 0 alone speaks, and says what one process says.
    def said(name):
        return [line.partition("  grad")[0] for line in runs[name].splitlines() if line.startswith("step ")]
    assert len(said("quickstart")) == 4 and said("quickstart") == said("quickstart_tp2_pp2")


# Launchers


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def command(tessera_program, tmp_path, straight):
    """What each process of a job runs."""
    return [tessera_program, "train", straight[0] / "gpt2.yaml", f"logging.dir={tmp_path}/run", *FOUR_RANKS]


def test_under_torchrun(command, tmp_path, straight):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not in this Python environment")
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    run_job(*torchrun, "--nproc_per_node=4", f"--master_port={free_port()}", "--no-python", *command)
    assert_same(tmp_path / "run", straight[1]["gpt2"])


def test_under_mpirun(command, tmp_path, straight):
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    run_job("mpirun", *as_root, "--oversubscribe", "-n", 4, *command)
    assert_same(tmp_path / "run", straight[1]["gpt2"])


def test_as_tasks_of_srun(command, tmp_path, straight):
    """srun itself needs a cluster: its variables for a step of four tasks on one node."""
    step = {"SLURM_JOB_ID": str(time.time_ns()), "SLURM_NTASKS": "4", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "node[03-04]",
            "SLURM_STEP_TASKS_PER_NODE": "4"}
    with ExitStack() as jobs:
        tasks = [jobs.enter_context(Job(*command, env=step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}))
                 for rank in range(4)]
        for task in tasks:
            task.finish()
    assert_same(tmp_path / "run", straight[1]["gpt2"])
    assert "done: step 5" in tasks[0].out and not any(task.out for task in tasks[1:])


def test_started_by_hand(command, tmp_path, straight):
    """Four shells with RANK and the rest, the last one late."""
    place = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as jobs:
        tasks = []
        for rank in (2, 1, 0, 3):
            tasks.append(jobs.enter_context(Job(*command, env=place | {"RANK": str(rank)})))
            time.sleep(0.3)
        for task in tasks:
            task.finish()
    assert_same(tmp_path / "run", straight[1]["gpt2"])


# Two machines


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def machines():
    """Two network namespaces, joined by a wire. Their names; the first one's address is 10.213.7.1."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command")
    spaces = [f"t{os.getpid()}{end}" for end in "ab"]
    try:
        for space in spaces:
            ip("netns", "add", space)
        ip("link", "add", f"v{spaces[0]}", "netns", spaces[0], "type", "veth", "peer", "name", f"v{spaces[1]}", "netns", spaces[1])
        for number, space in enumerate(spaces, start=1):
            ip("-n", space, "addr", "add", f"10.213.7.{number}/24", "dev", f"v{space}")
            ip("-n", space, "link", "set", f"v{space}", "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield spaces
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def on_machine(machines, rank: int, command, secret: str = SECRET, flags=()) -> Job:
    """The launcher of one machine, which starts two of four processes."""
    return Job("ip", "netns", "exec", machines[rank], command[0], "launch", "--num_machines", 2, "--num_processes", 4, "--machine_rank",
               rank, "--main_process_ip", "10.213.7.1", "--main_process_port", 29511, *flags, *command, env={"TESSERA_JOB_SECRET": secret})


def lease(folder) -> tuple:
    """How many held it so far, and whether the last one gave it back."""
    holder = json.loads((folder / "run.lock").read_text())
    return holder["generation"], holder.get("released", False)


def test_two_machines(machines, command, tmp_path, straight):
    """Tensor ranks on one machine, pipeline stages across; before, somebody tries to join without the secret."""
    with on_machine(machines, 0, command) as first:
        started = time.monotonic()
        with on_machine(machines, 1, command, secret="f" * 32) as stranger:
            error = stranger.finish(5).err
        assert time.monotonic() - started < 10
        assert "error: " in error and "secret" in error and "10.213.7.1" in error, error
        with on_machine(machines, 1, command) as second:
            second.finish()
            first.finish()
    assert_same(tmp_path / "run", straight[1]["gpt2"])
    assert "[rank 0] done: step 5" in first.out and "[rank 2]" not in first.out
    assert lease(tmp_path / "run") == (1, True)  # one for both launchers


def test_two_machines_without_a_secret(machines, command, tmp_path, straight):
    with on_machine(machines, 0, command, secret="") as first, on_machine(machines, 1, command, secret="") as second:
        errors = [second.finish().err, first.finish().err]
    assert_same(tmp_path / "run", straight[1]["gpt2"])
    for error in errors:
        assert error.count("meet at 10.213.7.1:29511 without a secret") == 1, error


def test_processes_of_two_machines_without_a_launcher_of_ours_and_a_secret(machines, command, tmp_path, straight):
    """As under torchrun: an address and a port are enough."""
    with ExitStack() as stack:
        jobs = [stack.enter_context(Job("ip", "netns", "exec", machines[rank // 2], *command, env={
            "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.213.7.1",
            "MASTER_PORT": "29512"})) for rank in range(4)]
        said = [job.finish().err.count("meet at 10.213.7.1:29512 without a secret") for job in jobs]
    assert said == [1, 0, 0, 0]
    assert_same(tmp_path / "run", straight[1]["gpt2"])
    with Job("ip", "netns", "exec", machines[0], *command, env={
            "RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "10.213.7.1", "MASTER_PORT": "29512", "TESSERA_REQUIRE_SECRET": "1"}) as job:
        assert "TESSERA_REQUIRE_SECRET is set" in job.finish(2).err


def test_a_restart_on_two_machines(machines, tessera_program, tmp_path):
    settings = {"training__steps": 10, "checkpoint__every": 3}
    train(tessera_program, make_config(tmp_path, "straight", **settings), *FOUR_RANKS)
    command = [tessera_program, "train", make_config(tmp_path, **settings), *FOUR_RANKS]
    with on_machine(machines, 0, command, flags=["--max_restarts", 1]) as first:
        with on_machine(machines, 1, command, flags=["--max_restarts", 1]) as second:
            first.wait_for_step(tmp_path / "run", 5)
            os.kill(second.worker(3), signal.SIGKILL)
            for job in (first, second):
                job.finish()
                assert "rank 3 (host " in job.err and "killed by signal 9" in job.err and "restart 1 of 1" in job.err, job.err
    assert figures(tmp_path / "run") == figures(tmp_path / "straight")
    assert lease(tmp_path / "run") == (2, True)  # the restart's own


def test_a_machine_whose_wire_is_cut(machines, command, tmp_path, long_run):
    if not long_run:
        pytest.skip("takes half a minute: runs with --long")
    with on_machine(machines, 0, [*command, "training.steps=100000", "parallel.timeout_s=4"]) as first:
        with on_machine(machines, 1, [*command, "training.steps=100000", "parallel.timeout_s=4"]) as second:
            first.wait_for_step(tmp_path / "run", 2)
            ip("-n", machines[1], "link", "set", f"v{machines[1]}", "down")
            cut = time.monotonic()
            for job, other in ((first, 1), (second, 0)):
                job.process.wait(timeout=60)
                assert job.process.returncode != 0
                out, err = job.process.communicate()
                assert f"machine {other}" in err.decode() or f"rank {2 * other}" in err.decode(), err.decode()
            # A launcher knows of the others what it hears in 30 s.
            assert time.monotonic() - cut < 40
            first.gone()
            second.gone()


# Another layout for the same run


def test_a_run_goes_on_under_other_layouts(tessera_program, tmp_path):
    """Saved by four processes, continued by two others, then by one."""
    changes = {"training__steps": 9, "checkpoint__every": 3, "lr_schedule__decay_steps": 9}
    train(tessera_program, make_config(tmp_path, "straight", **changes))
    config = make_config(tmp_path, **changes)
    train(tessera_program, config, *FOUR_RANKS, "training.steps=3")
    for layout, until in ((["parallel.data=2"], 6), (["parallel.tensor=1"], 9)):
        again = train(tessera_program, config, *layout, f"training.steps={until}")
        assert f"resuming from {tmp_path}/run/checkpoints/step-{until - 3:08d} at step {until - 3}" in again.err
    assert_same(tmp_path / "run", figures(tmp_path / "straight"))


# Layouts that cannot be


@pytest.mark.parametrize("layout,parts", [
    ("tensor=3 sequence=true pipeline=7 data=3 training.seq_length=47",
     ["parallel.tensor (3) does not divide model.num_heads (4)", "model.num_layers (4) is less than the 7 pieces",
      "training.seq_length (47) is not a multiple of parallel.tensor (3)", "training.global_batch_size (8) is not a multiple"]),
    ("tensor=4 model.num_heads=12 model.num_kv_heads=6 model.family=llama virtual_stages=2",
     ["parallel.tensor (4)", "model.num_kv_heads (6)", "parallel.virtual_stages"]),
    ("pipeline=2 virtual_stages=2 schedule=interleaved training.global_batch_size=3", ["groups of parallel.pipeline (2), but there are 3"]),
    ("pipeline=2 pipeline_layout=5,1", ["parallel.pipeline_layout"]),
])
def test_impossible_layouts_are_refused_before_anything_starts(tessera_program, tmp_path, layout, parts):
    config = make_config(tmp_path)
    job = train(tessera_program, config, *overrides(layout), code=2)
    for part in parts:
        assert part in job.err, job.err
    assert "[rank" not in job.err and "pid" not in job.err, job.err
    assert not (tmp_path / "run").exists()


def test_processes_that_do_not_fit_the_layout(tessera_program, tmp_path):
    command = [tessera_program, "launch", "--num_processes", 3, tessera_program, "train", make_config(tmp_path), *FOUR_RANKS]
    job = run_job(*command, code=2)
    assert "tensor 2 x pipeline 2 = 4 ranks" in job.report() and "there are 3 processes" in job.report()
    assert not (tmp_path / "run").exists()


def test_a_folder_of_somebody_else_stays_as_it_is(tessera_program, tmp_path):
    config = make_config(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.txt").write_text("words")
    job = train(tessera_program, config, *FOUR_RANKS, code=2)
    assert "not empty" in job.err and "[rank" not in job.err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]
