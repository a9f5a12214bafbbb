"""Jobs of several processes: starting and watching them, comparing their metrics, finding what they leave behind."""

import os
import re
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest
from cli_support import environment, metrics, text_documents, write_config, write_corpus

SECRET = "0123456789abcdef0123456789abcdef"
GPT2 = {"model__num_layers": 4, "model__num_heads": 4, "training__micro_batch_size": 1, "training__global_batch_size": 8}
LLAMA = GPT2 | {"model__family": "llama", "model__num_kv_heads": 2, "model__ffn_hidden_size": 96}
FOUR_RANKS = ("parallel.tensor=2", "parallel.pipeline=2")
FOREVER = 1_000_000
MARK = "JOB_OF_THIS_TEST"
PLACE = ("OMPI_", "PMI_", "PMIX_", "MPI_", "SLURM_", "TORCHELASTIC_", "MASTER_", "GROUP_RANK")


def make_config(folder: Path, name: str = "run", model: dict = GPT2, **changes) -> Path:
    """A configuration whose run is folder/name; all configurations of a folder read the same data."""
    corpus = folder / "corpus"
    if not corpus.with_suffix(".bin").exists():
        write_corpus(corpus, text_documents())
    return write_config(folder, corpus, name, **(model | changes))


def wait_for(condition, what: str, timeout: float = 60, pause: float = 0.005):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(pause)
    pytest.fail(f"not within {timeout} s: {what}")


def read(path: Path, name: str) -> str:
    try:
        return (path / name).read_bytes().decode(errors="replace")
    except OSError:  # it has ended
        return ""


class Job:
    """A command and all processes that come of it, known by a variable in their environment."""

    def __init__(self, *command, env: dict = {}, **options):
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        clean = {key: value for key, value in environment().items() if not key.startswith(PLACE)}
        clean |= {"TESSERA_THREADS": "1", "OMP_NUM_THREADS": "1", MARK: self.mark.partition("=")[2]} | env
        self.process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, env=clean, **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def processes(self) -> dict:
        """Numbers of the processes that are alive, each with its environment."""
        found = {}
        for path in Path("/proc").iterdir():
            if path.name.isdigit() and self.mark in (variables := read(path, "environ").split("\0")):
                found[int(path.name)] = dict(variable.partition("=")[::2] for variable in variables)
        return found

    def worker(self, rank: int) -> int:
        def find():
            return [pid for pid, variables in self.processes().items() if variables.get("RANK") == str(rank)]
        return wait_for(find, f"a process of rank {rank}")[0]

    def signal(self, number: int):
        self.process.send_signal(number)

    def wait_for_step(self, run: Path, step: int):
        """Until the run has written that step."""
        def there():
            assert self.process.poll() is None, self.process.communicate()[1].decode()
            return last_step(run) >= step
        wait_for(there, f"step {step} of {run}", 120, 0.002)

    def gone(self, timeout: float = 2):
        """Nothing is left of the job."""
        wait_for(lambda: not self.processes(), f"the end of {list(self.processes())}", timeout)

    def finish(self, code: int = 0, timeout: float = 120) -> "Job":
        out, err = self.process.communicate(timeout=timeout)
        self.out, self.err = out.decode(), err.decode()
        assert self.process.returncode == code, f"exit {self.process.returncode}\n{self.out}\n{self.err}"
        for mark in ("terminate called", "Traceback", "Segmentation", "what():"):
            assert mark not in self.err, self.err
        self.gone()
        return self

    def report(self) -> str:
        """The launcher's one message about a failure; before it may stand what rank 0 said itself."""
        lines = self.err.splitlines()
        starts = [i for i, line in enumerate(lines) if re.match(r"error: rank \d+ \(host ", line)]
        assert len(starts) == 1, self.err
        return "\n".join(lines[starts[0]:])


def run_job(*command, code: int = 0, **options) -> Job:
    with Job(*command, **options) as job:
        return job.finish(code)


def train(program: Path, config: Path, *overrides, code: int = 0) -> Job:
    return run_job(program, "train", config, *overrides, code=code)


def last_step(run: Path) -> int:
    text = read(run, "metrics.jsonl")
    lines = text[:text.rfind("\n") + 1].splitlines()
    return int(lines[-1].partition('"step":')[2].partition(",")[0]) if lines else 0


def figures(run: Path) -> list:
    """What the layout and interruptions must not change, as printed."""
    names = ("step", "loss", "grad_norm", "lr", "tokens", "skipped", "eval_loss")
    return [{name: line[name] for name in names if name in line} for line in metrics(run)]


def assert_same(run: Path, reference: list, tolerance: float = 1e-5):
    """Every step once, with the reference's figures."""
    lines = figures(run)
    assert [line.keys() for line in lines] == [line.keys() for line in reference]
    for line, expected in zip(lines, reference):
        for name in ("loss", "grad_norm", "eval_loss"):
            if name in line:
                assert abs(line[name] / expected[name] - 1) <= tolerance, (name, line, expected)
        assert {**line, "loss": 0, "grad_norm": 0, "eval_loss": 0} == {**expected, "loss": 0, "grad_norm": 0, "eval_loss": 0}


def listening(pids) -> set:
    """Ports on which these processes listen."""
    sockets = set()
    for pid in pids:
        sockets |= set(map(target, descriptors(pid)))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in read(Path("/proc/net"), table).splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # it has been closed
        return ""


def descriptors(pid: int) -> list:
    try:
        return [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    except OSError:
        return []


def open_ports() -> set:
    """All ports that somebody on this machine listens on."""
    lines = [line.split() for table in ("tcp", "tcp6") for line in read(Path("/proc/net"), table).splitlines()[1:]]
    return {int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[3] == "0A"}


def assert_closed(ports: set):
    """Nobody listens on these ports any more. A process that ends shows no environment a moment before its sockets close."""
    wait_for(lambda: not ports & open_ports(), f"the end of the ports {sorted(ports)}", 2)


def shared_files() -> set:
    """What a job could leave where all programs put their files."""
    return {path for folder in ("/dev/shm", "/tmp") for path in Path(folder).iterdir()
            if any(word in path.name.lower() for word in ("tessera", "gloo"))}
