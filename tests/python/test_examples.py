"""The C++ examples, run as their users run them; the parallel one under every launcher there is."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest
from cli_support import environment

LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "OMP_NUM_THREADS")
STEPS = 20


def example(build_dir: Path, name: str) -> Path:
    program = build_dir / name
    if not program.is_file():
        pytest.skip(f"no {name} in {build_dir}: it was configured without TESSERA_EXAMPLES")
    return program


def start(*command, code: int = 0, **more) -> subprocess.CompletedProcess:
    clean = {key: value for key, value in environment(**more).items() if key not in LAUNCHER}
    done = subprocess.run([str(part) for part in command], env=clean, capture_output=True, text=True, timeout=120,
                          stdin=subprocess.DEVNULL)
    assert done.returncode == code, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def losses(output: str) -> List[float]:
    found = [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)$", output, flags=re.M)]
    assert len(found) == STEPS, output
    return found


@pytest.fixture(scope="module")
def parallel_gpt(build_dir: Path) -> Path:
    return example(build_dir, "parallel_gpt")


@pytest.fixture(scope="module")
def alone(parallel_gpt: Path) -> List[float]:
    """The losses of one process."""
    found = losses(start(parallel_gpt).stdout)
    assert found[-1] < 0.6 * found[0], "it learns nothing"
    return found


def test_own_model_learns_its_line(build_dir: Path):
    start(example(build_dir, "own_model"))


@pytest.mark.parametrize("processes, tensor, pipeline", [(2, 2, 1), (2, 1, 2), (3, 1, 1), (4, 2, 2), (4, 2, 1), (4, 1, 2)])
def test_the_losses_are_those_of_one_process(tessera_program, parallel_gpt, alone, processes, tensor, pipeline):
    done = start(tessera_program, "launch", "--num_processes", processes, "--quiet", parallel_gpt, tensor, pipeline)
    assert losses(done.stdout) == pytest.approx(alone, rel=1e-5)


def test_mpirun_starts_it(parallel_gpt, alone):
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("there is no mpirun on this machine")
    # Open MPI asks root to say so in the environment, and to be allowed more ranks than cores.
    done = start(mpirun, "-n", 2, parallel_gpt, 1, 2, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                 OMPI_MCA_rmaps_base_oversubscribe="1")
    assert losses(done.stdout) == pytest.approx(alone, rel=1e-5)


def test_torchrun_starts_it(parallel_gpt, alone):
    pytest.importorskip("torch", reason="torchrun is part of PyTorch, which is not installed")
    done = start(sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc_per_node", 2,
                 parallel_gpt, 2, 1)
    assert losses(done.stdout) == pytest.approx(alone, rel=1e-5)


def test_an_impossible_layout_is_refused_before_anybody_waits(tessera_program, parallel_gpt):
    done = start(tessera_program, "launch", "--num_processes", 2, parallel_gpt, 3, 1, code=1)
    for part in ("does not divide model.num_heads (4)", "training.seq_length (32)", "there are 2 processes"):
        assert part in done.stderr, done.stderr
