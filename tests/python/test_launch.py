"""tessera launch: what workers get, what becomes of their output, files and refusals. The workers are small scripts."""

import json
import os
import re
import signal
import socket
import subprocess
import time

import pytest
from launch_support import TELL_PLACE, Job, children, clean, launch, lines_of, python, shell, wait_for


# What workers get


def test_every_rank_is_told_its_place(tessera_program):
    job = launch(tessera_program, "--num_processes", 3, *python(TELL_PLACE))
    places = [json.loads(lines_of(job.out, rank)[0]) for rank in range(3)]
    threads = str(max(1, len(os.sched_getaffinity(0)) // 3))
    port = places[0]["MASTER_PORT"]
    for rank, place in enumerate(places):
        secret = place.pop("TESSERA_JOB_SECRET")
        assert re.fullmatch("[0-9a-f]{64}", secret) and (rank == 0 or secret == places[0]["secret"])
        assert place == {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3",
                         "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                         "TESSERA_STORE": f"127.0.0.1:{port}", "TESSERA_RESTART": "0", "OMP_NUM_THREADS": threads,
                         "TESSERA_THREADS": threads}
        place["secret"] = secret
    again = json.loads(lines_of(launch(tessera_program, *python(TELL_PLACE)).out, 0)[0])
    assert again["WORLD_SIZE"] == "1" and again["TESSERA_JOB_SECRET"] != places[0]["secret"]


def test_threads_are_left_as_somebody_set_them(tessera_program):
    def threads(*flags, **env):
        place = json.loads(lines_of(launch(tessera_program, *flags, *python(TELL_PLACE), env=env).out, 0)[0])
        return place["OMP_NUM_THREADS"], place["TESSERA_THREADS"]

    cores = str(len(os.sched_getaffinity(0)))
    assert threads(OMP_NUM_THREADS="7") == ("7", cores)
    assert threads(TESSERA_THREADS="3") == (cores, "3")
    assert threads("--threads_per_process", 5, OMP_NUM_THREADS="7") == ("5", "5")
    assert threads("--num-cpu-threads-per-process=2") == ("2", "2")


def test_workers_get_arguments_environment_and_nothing_else(tessera_program, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("import os, sys\nprint(sys.argv[1:], os.environ['MINE'], repr(sys.stdin.read()), os.getsid(0) == os.getpid())\n"
                      "progress = int(os.environ['TESSERA_PROGRESS'].partition(':')[0])\n"
                      "print(sorted(set(map(int, os.listdir('/proc/self/fd'))) - {progress}), os.fstat(progress).st_size)\n"
                      "print(os.getpid(), b'JOB_SECRET' in open('/proc/self/cmdline', 'rb').read())")
    arguments = ["train", "--num_processes", "9", "-h", "a b", "--config_file=x"]
    job = launch(tessera_program, "--num-processes=2", script, *arguments, env={"MINE": "kept"}, stdin=subprocess.PIPE)
    for rank in range(2):
        place, descriptors, _ = lines_of(job.out, rank)
        assert place == f"{arguments} kept '' True"
        # The launcher's sockets and pipes stay its own, but for the one to tell it how far the worker is; 3 is the listing itself.
        assert descriptors == "[0, 1, 2, 3] 0"


def test_scripts_modules_and_programs(tessera_program, tmp_path):
    (tmp_path / "hello.py").write_text("import sys\nprint('hello', sys.argv[1:], __name__)\n")
    where = {"cwd": tmp_path, "env": {"PYTHONPATH": str(tmp_path)}}
    for command in (["hello.py", "x"], ["-m", "hello", "x"], ["python3", "hello.py", "x"]):
        assert launch(tessera_program, *command, **where).out == "[rank 0] hello ['x'] __main__\n"
    other = tmp_path / "interpreter"
    other.write_text("#!/bin/sh\necho other \"$@\"\n")
    other.chmod(0o755)
    assert launch(tessera_program, "hello.py", cwd=tmp_path, env={"TESSERA_PYTHON": str(other)}).out == "[rank 0] other hello.py\n"
    assert launch(tessera_program, "./interpreter", "x", cwd=tmp_path).out == "[rank 0] other x\n"
    job = launch(tessera_program, "--num_processes", 2, "tessera", "--version", cwd=tmp_path)
    assert re.fullmatch(r"tessera [0-9.]+", lines_of(job.out, 1)[0])
    not_a_program = tmp_path / "text"
    not_a_program.write_text("words")
    not_a_program.chmod(0o755)
    assert "not a program" in launch(tessera_program, not_a_program, code=126).err


# Output


def test_prefixes_and_log_files(tessera_program, tmp_path):
    logs = tmp_path / "made/logs"
    worker = shell("echo out $RANK; echo err $RANK >&2; printf 'no end %s' $RANK; printf 'bar 1\\rbar 2\\n' >&2")
    job = launch(tessera_program, "--num_processes", 3, "--log_dir", logs, *worker)
    for rank in range(3):
        assert lines_of(job.out, rank) == [f"out {rank}", f"no end {rank}"]
        assert lines_of(job.err, rank) == [f"err {rank}", "bar 2"]
        heading, _, rest = (logs / f"rank-{rank}.log").read_bytes().decode().partition("\n")
        assert heading.startswith("--- attempt 0, ")
        assert sorted(rest) == sorted(f"out {rank}\nerr {rank}\nno end {rank}bar 1\rbar 2\n")
    assert len(job.out.splitlines()) == len(job.err.splitlines()) == 6
    launch(tessera_program, "--num_processes", 3, "--log_dir", logs, *worker)
    assert (logs / "rank-2.log").read_text().count("--- attempt 0, ") == 2


def test_quiet_passes_on_rank_0_as_it_is(tessera_program):
    job = launch(tessera_program, "--quiet", "--num_processes", 2, *shell("printf \"$RANK a\\rb\"; echo err $RANK >&2"))
    assert (job.out, job.err) == ("0 a\rb", "err 0\n")
    job = launch(tessera_program, "-q", "--num_processes", 2, *shell("[ $RANK = 0 ] || { echo reason >&2; exit 3; }; sleep 20"), code=3)
    assert "rank 1 " in job.err and "[rank 1] reason" in job.err


def test_lines_of_many_ranks_stay_whole(tessera_program):
    text = "import os\nfor i in range(4000): os.write(1, b'%s %d ' % (os.environ['RANK'].encode(), i)); os.write(1, b'x' * (i % 97) + b'\\n')"
    job = launch(tessera_program, "--num_processes", 4, *python(text))
    for rank in range(4):
        assert lines_of(job.out, rank) == [f"{rank} {i} {'x' * (i % 97)}" for i in range(4000)]
    assert len(job.out.splitlines()) == 16000


def test_a_flood_is_passed_on_whole(tessera_program):
    megabytes = 25
    text = f"import os\nblock = (b'y' * 1023 + b'\\n') * 1024\nfor i in range({megabytes}): os.write(1, block)"
    with Job(tessera_program, "--num_processes", 2, *python("def out(d):\n while d: d = d[os.write(1, d):]\n" +
                                                            text.replace("os.write(1, block)", "out(block)"))) as job:
        got = job.finish(timeout=120).out
    assert got.count("y" * 1023 + "\n") == 2 * megabytes * 1024
    assert len(got) == 2 * megabytes * 1024 * (1024 + len("[rank 0] "))


def test_a_reader_that_does_not_read_stops_nobody(tessera_program):
    """Output nobody takes: the launcher still hears a signal, and ends."""
    with Job(tessera_program, "--grace_s", 0.3, *shell("trap '' INT; yes")) as job:
        time.sleep(1)
        job.process.send_signal(signal.SIGINT)
        started = time.monotonic()
        wait_for(lambda: children(job.process.pid) == [] or len(children(job.process.pid)) == 1, "the worker's end")
        assert time.monotonic() - started < 5
        job.finish(130)


def test_output_that_goes_nowhere(tessera_program, tmp_path):
    done = subprocess.run(f"'{tessera_program}' launch --num_processes 2 --log_dir '{tmp_path}' bash -c "
                          "'for i in $(seq 2000); do echo line $i; done; echo end >&2' | head -n 1", shell=True,
                          capture_output=True, text=True, env=clean(), timeout=60)
    assert done.stdout.startswith("[rank ") and done.stderr.count("end") == 2
    for rank in range(2):
        assert "line 2000\n" in (tmp_path / f"rank-{rank}.log").read_text()


def test_a_worker_may_close_its_output(tessera_program, tmp_path):
    worker = shell(f"echo first; exec >&- 2>&-; sleep 0.3; echo done > '{tmp_path}'/done-$RANK")
    job = launch(tessera_program, "--num_processes", 2, *worker)
    assert lines_of(job.out, 1) == ["first"]
    assert len(list(tmp_path.glob("done-*"))) == 2


# Configuration


ACCELERATE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MEGATRON_LM
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 0
main_training_function: main
megatron_lm_config:
  megatron_lm_gradient_clipping: 1.0
  megatron_lm_num_micro_batches: 2
  megatron_lm_pp_degree: 2
  megatron_lm_recompute_activations: true
  megatron_lm_sequence_parallelism: true
  megatron_lm_tp_degree: 2
  megatron_lm_use_distributed_optimizer: true
mixed_precision: bf16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def test_a_file_of_accelerate_config(tessera_program, tmp_path):
    file = tmp_path / "default_config.yaml"
    file.write_text(ACCELERATE)
    worker = shell("echo $WORLD_SIZE; env | grep -E '^(ACCELERATE|MEGATRON)_' | sort")
    job = launch(tessera_program, "--config_file", file, *worker)
    told = [line for line in lines_of(job.out, 3) if line != "ACCELERATE_USE_CPU=true"]  # as there, if there is no GPU
    assert told == [
        "4", "ACCELERATE_MIXED_PRECISION=bf16", "ACCELERATE_USE_MEGATRON_LM=true", "MEGATRON_LM_GRADIENT_CLIPPING=1.0",
        "MEGATRON_LM_NUM_MICRO_BATCHES=2", "MEGATRON_LM_PP_DEGREE=2", "MEGATRON_LM_RECOMPUTE_ACTIVATIONS=true",
        "MEGATRON_LM_SEQUENCE_PARALLELISM=true", "MEGATRON_LM_TP_DEGREE=2", "MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER=true"]
    job = launch(tessera_program, "--config_file", file, "--num_processes", 2, "--megatron_lm_pp_degree", 1, "--cpu", *worker)
    assert lines_of(job.out, 1)[:2] == ["2", "ACCELERATE_MIXED_PRECISION=bf16"] and "ACCELERATE_USE_CPU=true" in job.out
    job = launch(tessera_program, "--config_file", file, "--num_processes", 2, *worker, code=2)
    assert "num_processes 2 must be a multiple of 4, which is megatron_lm_tp_degree 2 x megatron_lm_pp_degree 2" in job.err


def test_a_native_file(tessera_program, tmp_path):
    file = tmp_path / "launch.yaml"
    file.write_text(f"launch: {{num_processes: 3, log_dir: {tmp_path}/logs}}\n")
    assert launch(tessera_program, "--config_file", file, *shell("echo $WORLD_SIZE")).out.count("3") == 3
    assert len(list((tmp_path / "logs").glob("rank-*.log"))) == 3


# Refusals


def test_everything_wrong_is_said_at_once_and_nothing_started(tessera_program, tmp_path):
    job = launch(tessera_program, "--num_machines", 2, "--num_processes", 3, "--machine_rank", 2, "--main_process_port", 70000,
                 "--max_restarts", -1, "no_such_program", code=2, env={"TESSERA_REQUIRE_SECRET": "1"})
    for part in ("num_processes 3", "machine_rank must be from 0 to 1, not 2", "main_process_ip", "70000", "max_restarts",
                 "several machines need one secret in common", "'no_such_program' is not in PATH"):
        assert part in job.err, job.err
    assert job.out == ""


@pytest.mark.parametrize("arguments,part", [
    ([], "no program"), (["--num_procesess", 2, "true"], "did you mean '--num_processes'"), (["--num_processes", 0, "true"], "num_processes"),
    (["--num_processes", "two", "true"], "num_processes"), (["./nothing"], "does not exist"), (["nothing.py"], "does not exist"),
    (["/etc/passwd"], "not executable"), (["/etc"], "not a file"), (["--config_file", "/nowhere.yaml", "true"], "/nowhere.yaml"),
    (["--main_process_port", -1, "true"], "main_process_port"), (["--grace_s", -1, "true"], "grace_s")])
def test_refusals(tessera_program, arguments, part):
    job = launch(tessera_program, *arguments, code=2)
    assert part in job.err and job.out == "", job.err


def test_a_port_or_folder_that_cannot_be_had(tessera_program, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in launch(tessera_program, "--main_process_port", port, "true", code=3).err
    (tmp_path / "file").write_text("")
    assert f"{tmp_path}/file/logs" in launch(tessera_program, "--log_dir", tmp_path / "file/logs", "true", code=3).err
