"""A process that comes to every port on which a job listens, during set-up and training: nothing changes. And what lies in
the current folder is not taken for Python's own."""

import json
import os
import random
import signal
import socket
import struct
import sys
import threading
from contextlib import ExitStack

import pytest
from cli_support import environment, run
from process_support import FOUR_RANKS, Job, figures, listening, make_config, train, wait_for
from test_processes import free_port

MAGIC = b"TESSERA2"
MOST_SILENT = 400  # more than a store or a rank keeps of those that prove nothing


def gloo_message(opcode: int, slot: int, length: int) -> bytes:
    """What Gloo's pairs send each other: six numbers, and of a message (opcode 1) its bytes."""
    return struct.pack("<6Q", 48 + length, opcode, slot, 0, length, 0) + bytes(length)


class Strangers:
    """Comes to a job's ports until it is told to stop."""

    def __init__(self, jobs: list, seed: int):
        self.jobs, self.random, self.over = jobs, random.Random(seed), threading.Event()
        self.visits, self.silent = {}, []  # how often by port; connections that say nothing
        self.thread = threading.Thread(target=self.work)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        for connection in self.silent:
            connection.close()

    def work(self):
        while not self.over.wait(0.005):
            for port in listening([pid for job in self.jobs for pid in job.processes()]):
                for _ in range(8):
                    self.visit(port)

    def visit(self, port: int):
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=0.2)
        except OSError:
            return  # it has just closed
        self.visits[port] = self.visits.get(port, 0) + 1
        kind = self.random.randrange(8)
        if kind < 3 and len(self.silent) < MOST_SILENT:
            self.silent.append(connection)
            return
        with connection:
            try:
                connection.sendall(self.words(kind, connection))
            except OSError:
                pass  # it has hung up

    def words(self, kind: int, connection: socket.socket) -> bytes:
        noise = self.random.randbytes
        if kind == 3:
            return noise(self.random.randrange(5000))
        if kind == 4:  # of the slots that Gloo would hold, the first are ours
            return b"".join(gloo_message(opcode, slot, 16 * opcode) for opcode in (1, 2, 3, 0) for slot in range(4))
        if kind == 5:
            connection.recv(40)
            return noise(self.random.randrange(60))  # half a proof, then nothing more
        if kind == 6:
            greeting = connection.recv(40)  # who knows the words, but not the secret; as a rank, and as a client
            return struct.pack("<I", self.random.randrange(4)) + greeting[8:] + noise(32)
        return MAGIC + noise(32) + noise(64) + struct.pack("<I", 9) + b"\x05" + bytes(8) + noise(32)


LATE = 'while [ "$RANK" = 3 ] && [ ! -e "$0" ]; do sleep 0.02; done; exec "$@"'  # a rank for which the others wait


def disturbed(jobs: list, begin, run_folder, seed: int) -> None:
    """Finishes the jobs under attack: strangers come to the store and to three ranks while rank 3 waits for the file `begin`,
    and at least once while the ranks train."""
    with Strangers(jobs, seed) as strangers:
        wait_for(lambda: len(strangers.visits) >= 4, "ports to come to", 120)
        begin.touch()
        jobs[0].wait_for_step(run_folder, 1)
        stopped = jobs[-1].worker(3)
        os.kill(stopped, signal.SIGSTOP)
        before = sum(strangers.visits.values())
        wait_for(lambda: sum(strangers.visits.values()) > before, "a visit while the ranks train")
        os.kill(stopped, signal.SIGCONT)
        for job in jobs:
            job.finish()


@pytest.fixture(scope="module")
def quiet(tessera_program, tmp_path_factory):
    """Configuration and figures of the run that nobody disturbs: long enough for visits while it trains."""
    folder = tmp_path_factory.mktemp("quiet")
    config = make_config(folder, training__steps=60, checkpoint__every=0)
    train(tessera_program, config, *FOUR_RANKS)
    return config, figures(folder / "run")


def test_strangers_change_nothing(tessera_program, tmp_path, quiet, long_run):
    """Under the launcher: its store, and the ranks' ports, which close when all are connected."""
    config, expected = quiet
    for seed in range(3 if long_run else 1):
        begin = tmp_path / f"begin{seed}"
        command = [tessera_program, "train", config, f"logging.dir={tmp_path}/{seed}", *FOUR_RANKS]
        with Job(tessera_program, "launch", "--num_processes", 4, "bash", "-c", LATE, begin, *command) as job:
            disturbed([job], begin, tmp_path / str(seed), seed)
        assert figures(tmp_path / str(seed)) == expected


def test_strangers_change_nothing_without_a_launcher(tessera_program, tmp_path, quiet, long_run):
    """As under torchrun or mpirun: rank 0 serves the store, and its secret is in a file."""
    if not long_run:
        pytest.skip("starts more jobs: runs with --long")
    config, expected = quiet
    for seed in range(2):
        place = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": str(free_port())}
        begin = tmp_path / f"begin{seed}"
        command = ["bash", "-c", LATE, begin, tessera_program, "train", config, f"logging.dir={tmp_path}/{seed}", *FOUR_RANKS]
        with ExitStack() as stack:
            jobs = [stack.enter_context(Job(*command, env=place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}))
                    for rank in range(4)]
            disturbed(jobs, begin, tmp_path / str(seed), seed)
        assert figures(tmp_path / str(seed)) == expected


# The current folder


@pytest.fixture
def hostile(tmp_path):
    """A folder whose modules leave a mark when they are imported."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    trap = f"open({str(tmp_path / 'sprung')!r}, 'w').write(__name__)\nraise SystemExit('the trap')\n"
    for name in ("json", "numpy", "runpy", "argparse", "tokenizers", "importlib", "tessera", "yaml", "typing", "struct", "site"):
        (folder / f"{name}.py").write_text(trap)
    yield folder
    assert not (tmp_path / "sprung").exists(), (tmp_path / "sprung").read_text()


def test_the_programs_children_import_nothing_from_the_current_folder(tessera_program, tmp_path, hostile, source_dir):
    python = {"TESSERA_PYTHON": sys.executable, "PYTHONPATH": str(source_dir / "python")}
    done = run(tessera_program, "config", "default", "--config_file", tmp_path / "c.yaml", cwd=hostile, env=python)
    assert (tmp_path / "c.yaml").exists(), done.stdout
    done = run(tessera_program, "env", cwd=hostile, env=python)
    assert "does not run the package" not in done.stdout


def test_the_tokenizers_worker_neither(tessera_program, tmp_path, hostile, source_dir):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "model").mkdir()
    words.save(str(tmp_path / "model/tokenizer.json"))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "a b a"}) + "\n")
    run(tessera_program, "preprocess", "--input", tmp_path / "text.jsonl", "--output-prefix", tmp_path / "out", "--tokenizer-type",
        "HuggingFaceTokenizer", "--tokenizer-model", tmp_path / "model", cwd=hostile,
        env={"TESSERA_PYTHON": sys.executable, "PYTHONPATH": str(source_dir / "python")})
    assert (tmp_path / "out_text_document.bin").read_bytes()[:6] == struct.pack("<3H", 0, 1, 0)


def test_the_packages_own_processes_neither(tmp_path, hostile, source_dir):
    """`tessera train` of the Python package starts its ranks as this interpreter's."""
    config = make_config(tmp_path, training__steps=4, checkpoint__every=0)
    code = ("import sys; sys.path[:] = [p for p in sys.path if p]; from tessera.cli import main; "
            f"sys.exit(main({['train', str(config), 'parallel.data=2']!r}))")
    run(sys.executable, "-c", code, cwd=hostile, env={"PYTHONPATH": str(source_dir / "python")})
    assert len(figures(tmp_path / "run")) == 4


def test_a_script_still_finds_what_lies_beside_it(tessera_program, tmp_path):
    (tmp_path / "beside.py").write_text("WORD = 'found'\n")
    (tmp_path / "script.py").write_text("import sys, beside; print(beside.WORD, sys.path[0])\n")
    done = run(tessera_program, "launch", "--num_processes", 1, "--config_file", "none", tmp_path / "script.py", cwd=os.sep,
               env=environment(TESSERA_PYTHON=sys.executable))
    assert f"found {tmp_path}" in done.stdout
