"""tessera launch --hostfile: a launcher on each machine, over ssh to a server on this one where one is installed."""

import getpass
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_support import text_documents, write_config, write_corpus
from documents_support import changed, commands, printed
from launch_support import (LOST, SECRET, TELL_PLACE, Job, alive, children, free_port, launch, lines_of, numbers_in, python, shell,
                            wait_for, wait_until_gone)

SSHD = Path("/usr/sbin/sshd")
ADDRESS = ("--main_process_ip", "127.0.0.1")


# Where no server of ssh is installed: a session of its own with a bare environment, and the end of the input when ssh is gone.
STAND_IN = """import subprocess, sys, threading
host, command = sys.argv[-2:]
if host.startswith("off-"):
    sys.exit(print(f"ssh: connect to host {host} port 22: Connection refused", file=sys.stderr) or 255)
child = subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.PIPE, start_new_session=True, env={"PATH": "/usr/bin:/bin"})

def copy():
    try:
        for piece in iter(lambda: sys.stdin.buffer.raw.read(65536), b""):
            child.stdin.write(piece)
            child.stdin.flush()
        child.stdin.close()
    except BrokenPipeError:
        pass

threading.Thread(target=copy, daemon=True).start()
sys.exit(child.wait() % 256)
"""


def serve(folder: Path) -> subprocess.Popen:
    """A server of ssh on this machine, and the client's configuration."""
    port, off = free_port(), free_port()
    for key in ("server", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    (folder / "known").write_text(f"[127.0.0.1]:{port} {(folder / 'server.pub').read_text()}")
    (folder / "sshd_config").write_text(f"""Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/server
AuthorizedKeysFile {folder}/authorized
PidFile {folder}/sshd.pid
StrictModes no
UsePAM no
PermitRootLogin yes
""")
    (folder / "config").write_text(f"""Host node-* off-* host1 host2
  HostName 127.0.0.1
  User {getpass.getuser()}
  IdentityFile {folder}/user
  UserKnownHostsFile {folder}/known
Host node-* host1 host2
  Port {port}
Host off-*
  Port {off}
""")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=subprocess.DEVNULL)
    wait_for(lambda: (folder / "sshd.pid").exists(), "sshd")
    return server


@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    """A folder with an `ssh` that reaches this machine as node-1, node-2 and so on. Nobody listens on off-1, and bare-1 has no
    Tessera."""
    folder = tmp_path_factory.mktemp("ssh")
    server = serve(folder) if SSHD.exists() else None
    (folder / "stand_in.py").write_text(STAND_IN)
    program = f"/usr/bin/ssh -F {folder}/config" if server else f"{sys.executable} -S {folder}/stand_in.py"
    (folder / "bin").mkdir()
    wrapper = folder / "bin/ssh"
    wrapper.write_text(f"""#!/bin/sh
case "$*" in *bare-1*) exec /no/such/program ;; esac
exec {program} "$@"
""")
    wrapper.chmod(0o755)
    yield folder / "bin"
    if server:
        server.terminate()
        server.wait()


@pytest.fixture
def hosts(ssh, tmp_path, monkeypatch):
    """Writes a hostfile and gives the flags that name it."""
    monkeypatch.setenv("PATH", f"{ssh}:{os.environ['PATH']}")

    def write(text: str = "node-1 slots=2\nnode-2 slots=2  # the second\n") -> list:
        (tmp_path / "hosts").write_text(text)
        return ["--hostfile", tmp_path / "hosts", "--main_process_port", free_port(), *ADDRESS]
    return write


def test_every_machine_gets_its_ranks(tessera_program, hosts, tmp_path):
    program = python(TELL_PLACE + "; print(os.getcwd(), os.environ.get('MINE'), os.environ['NCCL_DEBUG'], os.environ.get('OTHER'))")
    env = {"MINE": "it's two\nlines", "NCCL_DEBUG": "WARN", "OTHER": "stays here", "MEGATRON_LM_TP_DEGREE": "2"}
    job = launch(tessera_program, *hosts(), "--export_env", "MINE", *program, env=env, cwd=tmp_path)
    places = [json.loads(lines_of(job.out, rank)[0]) for rank in range(4)]
    for rank, place in enumerate(places):
        told = [place[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")]
        assert told == [str(rank), str(rank % 2), "4", "2", str(rank // 2), "127.0.0.1"]
        assert lines_of(job.out, rank)[1:] == [f"{tmp_path} it's two", "lines WARN None"]
    secrets = {place["TESSERA_JOB_SECRET"] for place in places}
    assert len(secrets) == 1 and len(secrets.pop()) == 64 and job.err == "", job.err


def test_the_secret_is_on_no_command_line(tessera_program, hosts):
    with Job(tessera_program, *hosts(), *shell("cat /proc/[0-9]*/cmdline | tr '\\0' ' '"), env={"TESSERA_JOB_SECRET": SECRET}) as job:
        out = job.finish().out
    assert "launch --ordered" in out and SECRET not in out


def test_quietly_rank_0_is_all_there_is(tessera_program, hosts):
    job = launch(tessera_program, *hosts(), "--quiet", *shell("printf 'rank %s\\n' $RANK"))
    assert (job.out, job.err) == ("rank 0\n", "")


def test_training_over_machines_is_training_here(tessera_program, hosts, tmp_path):
    corpus = write_corpus(tmp_path / "corpus", text_documents())
    losses = []
    for run, flags in (("here", ["--num_processes", 3]), ("there", hosts("node-1 slots=1\nnode-2 slots=1\nnode-3 slots=1\n"))):
        config = write_config(tmp_path, corpus, run=run, parallel__tensor=3)
        launch(tessera_program, *flags, "--cpu", "tessera", "train", config)
        losses.append([json.loads(line)["loss"] for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()])
    assert losses[0] == losses[1] and len(losses[0]) == 6


def test_the_documents_machines(tessera_program, hosts, tmp_path):
    (tmp_path / "train.sh").write_text("#!/bin/sh\necho $RANK of $WORLD_SIZE\n")
    (tmp_path / "train.sh").chmod(0o755)
    hosts()
    command, *more = commands("002/multi_node.sh")
    words = [*command.removeprefix("tessera launch ").split()[:-1], *ADDRESS, "--main_process_port", free_port(), "./train.sh"]
    assert not more and command.endswith(" ./train.sh")
    (tmp_path / "hostfile").write_text(printed("002/hostfile.txt"))
    dots = launch(tessera_program, *words, cwd=tmp_path, code=2)
    assert "hostfile:3: must be NAME slots=N" in dots.err, dots.err
    (tmp_path / "hostfile").write_text(changed("002/hostfile.txt"))
    job = launch(tessera_program, *words, cwd=tmp_path)
    assert sorted(job.out.splitlines()) == sorted(f"[rank {rank}] {rank} of 16" for rank in range(16))


def test_a_failure_is_said_once(tessera_program, hosts):
    job = launch(tessera_program, *hosts(), *shell("[ $RANK != 3 ] || { echo reason >&2; exit 6; }; sleep 100"), code=6)
    assert job.err.count("error: ") == job.err.count("exited with code 6") == 1, job.err
    assert "rank 3 (host" in job.err and "[node-1] error: " in job.err, job.err


def test_restarts_are_those_of_the_launchers(tessera_program, hosts):
    worker = shell("echo attempt $TESSERA_RESTART; [ $RANK$TESSERA_RESTART != 20 ] || exit 6; sleep 0.3")
    job = launch(tessera_program, *hosts(), "--max_restarts", 1, "--restart_delay_s", 0.1, *worker)
    assert job.out.count("attempt 0") == job.out.count("attempt 1") == 4


@pytest.mark.parametrize("text, says", [
    ("node-1 slots=1\noff-1 slots=1\n", "machine 1 (off-1): ssh could not reach it, or lost the connection"),
    ("off-1 slots=1\nnode-1 slots=1\n", "machine 0 (off-1): ssh could not reach it, or lost the connection"),
])
def test_a_machine_that_cannot_be_reached_ends_the_job_at_once(tessera_program, hosts, text, says):
    begin = time.monotonic()
    job = launch(tessera_program, *hosts(text), *shell("echo started"), code=LOST)
    assert says in job.err and "Connection refused" in job.err and job.out == "", job.err
    assert time.monotonic() - begin < 10


def test_a_machine_without_tessera_is_named(tessera_program, hosts):
    job = launch(tessera_program, *hosts("node-1 slots=1\nbare-1 slots=1\n"), *shell("echo started"), code=LOST)
    assert f"machine 1 (bare-1): there is no {tessera_program} to be executed" in job.err and job.out == "", job.err


@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_signals_are_passed_on(tessera_program, hosts, tmp_path, name, code):
    with Job(tessera_program, *hosts(), *shell(f"echo $$ > {tmp_path}/pid-$RANK; exec sleep 100")) as job:
        workers = numbers_in(tmp_path, 4)
        job.process.send_signal(signal.Signals[name])
        job.finish(code, timeout=20)
        assert not any(map(alive, workers))


def test_who_saves_when_asked_ends_as_preempted(tessera_program, hosts, tmp_path):
    worker = shell(f"trap 'exit 75' TERM; echo $$ > {tmp_path}/pid-$RANK; while true; do sleep 0.05; done")
    with Job(tessera_program, *hosts(), *worker) as job:
        numbers_in(tmp_path, 4)
        job.process.send_signal(signal.SIGTERM)
        job.finish(75, timeout=20)


def test_nobody_outlives_who_started_them(tessera_program, hosts, tmp_path):
    """They are asked to save and end as soon as the connection is gone."""
    worker = shell(f"trap 'echo saved > {tmp_path}/saved-$RANK; exit 75' TERM; echo $$ > {tmp_path}/pid-$RANK; "
                   "while true; do sleep 0.05; done")
    with Job(tessera_program, *hosts(), *worker) as job:
        workers = numbers_in(tmp_path, 4)
        job.process.kill()
        wait_until_gone(*workers, timeout=20)
    assert len(list(tmp_path.glob("saved-*"))) == 4


def test_a_lost_connection_ends_the_others(tessera_program, hosts, tmp_path):
    with Job(tessera_program, *hosts(), *shell(f"echo $$ > {tmp_path}/pid-$RANK; exec sleep 100")) as job:
        workers = numbers_in(tmp_path, 4)
        connection = next(pid for pid in children(job.process.pid) if b"node-2" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(connection, signal.SIGKILL)
        job.finish(LOST, timeout=30)
        assert "machine 1 (node-2): was ended here by signal 9" in job.err, job.err
        wait_until_gone(*workers, timeout=20)


def test_the_filters_and_the_gpus_they_leave(tessera_program, hosts):
    program = shell("echo $GROUP_RANK.$LOCAL_RANK of $WORLD_SIZE sees ${CUDA_VISIBLE_DEVICES-all}")
    job = launch(tessera_program, *hosts("node-1 slots=3\nnode-2 slots=4\nnode-3 slots=9\n"), "--include", "node-2:1,3@node-1",
                 "--num_processes", 4, *program)
    assert sorted(line.split("] ")[1] for line in job.out.splitlines()) == [
        "0.0 of 4 sees all", "0.1 of 4 sees all", "1.0 of 4 sees 1,3", "1.1 of 4 sees 1,3"]


def test_with_a_rank_it_is_one_of_the_machines(tessera_program, hosts):
    """As with DeepSpeed's --no_ssh: by hand on each."""
    flags = [*hosts("far-1 slots=1\nfar-2 slots=2\n"), "--exclude", "far-2:0"]
    jobs = [Job(tessera_program, *flags, "--machine_rank", rank, *shell("echo $RANK of $WORLD_SIZE sees ${CUDA_VISIBLE_DEVICES-all}"),
                env={"TESSERA_JOB_SECRET": SECRET}) for rank in (0, 1)]
    with jobs[0], jobs[1]:
        assert [job.finish().out for job in jobs] == ["[rank 0] 0 of 2 sees all\n", "[rank 1] 1 of 2 sees 1\n"]


@pytest.mark.parametrize("flags, says", [
    (["--include", "node-3"], "include names 'node-3', which is not in the hostfile"),
    (["--num_processes", 3], "num_processes 3 must be a multiple of the 2 machines"),
    (["--export_env", "NOT_THERE"], "export_env names NOT_THERE, which is not set here"),
    (["--main_process_port", 0], "main_process_port 0 (a free one) is for one machine"),
    (["--machine_rank", 2], "machine_rank must be from 0 to 1, not 2"),
    (["--machine_rank", 0, "--ssh_port", 22], "without --machine_rank"),
])
def test_what_cannot_be_is_refused_before_anything_starts(tessera_program, hosts, flags, says):
    given = hosts()
    given = given[:2] + given[4:] if "--main_process_port" in flags else given
    job = launch(tessera_program, *given, *flags, *shell("echo started"), code=2)
    assert says in job.err and job.out == "", job.err


def test_flags_of_a_hostfile_need_one(tessera_program, hosts):
    for flags, says in ((["--include", "a"], "include picks among the machines of a hostfile"),
                        (["--export_env", "HOME"], "give --hostfile")):
        assert says in launch(tessera_program, *flags, *shell("true"), code=2).err
    job = launch(tessera_program, *hosts(), "no_such_program", code=2)
    assert "'no_such_program' is not in PATH" in job.err


def test_without_ssh(tessera_program, hosts, tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("bash", "true"):
        (tmp_path / "bin" / name).symlink_to(f"/bin/{name}")
    job = launch(tessera_program, *hosts(), *shell("true"), code=2, env={"PATH": str(tmp_path / "bin")})
    assert "program 'ssh' is not in PATH" in job.err, job.err


def test_this_machine_needs_no_ssh(tessera_program, tmp_path):
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    job = launch(tessera_program, "--hostfile", tmp_path / "hosts", *shell("echo $RANK of $WORLD_SIZE"))
    assert sorted(job.out.splitlines()) == ["[rank 0] 0 of 2", "[rank 1] 1 of 2"]
