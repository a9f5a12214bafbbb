"""What the Python tests share."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Optional

import preloaded_python
import pytest

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser):
    parser.addoption("--build", type=Path, default=ROOT / "build/tests", help="the CMake build folder to test")
    parser.addoption("--long", action="store_true", help="tests that have one run their longer variant")


@pytest.fixture(scope="session")
def source_dir() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def long_run(request) -> bool:
    """Whether there is time for the longer variants (tests/run.sh --all)."""
    return request.config.getoption("--long")


@pytest.fixture(scope="session")
def build_dir(request) -> Path:
    """The CMake build folder that is being tested."""
    folder = request.config.getoption("--build").resolve()
    if not (folder / "CMakeCache.txt").is_file():
        pytest.skip(f"no build in {folder}; run tests/run.sh, or name one with --build")
    return folder


@pytest.fixture(scope="session")
def tessera_program(build_dir: Path) -> Path:
    """The `tessera` program of that build."""
    program = build_dir / "tessera"
    assert program.is_file(), f"{program} was not built"
    return program


# What a launcher tells its processes: a test that was started by one must not pass it on.
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class PythonBuild:
    """The package in its source tree with the compiled module, and the `tessera` program of its build."""

    program: Path
    preloaded: Path  # stands in for the interpreter: tests/python/preloaded_python.py

    def launcher(self, *flags) -> list:
        """What stands before a script that the launcher is to start."""
        return [self.program, "launch", *flags]

    def run(self, *command, launcher: Optional[list] = None, code: Optional[int] = 0, cwd=None, plain: bool = False,
            timeout: float = 300, **variables: str) -> subprocess.CompletedProcess:
        """A script with its arguments, by Python or by `launcher`; anything but exit code `code` (None: whatever it is) fails
        with what was printed. `plain`: by a fresh interpreter, not by one that has PyTorch in it already."""
        python = sys.executable if plain else str(self.preloaded)
        environment = {key: value for key, value in os.environ.items()
                       if key not in LAUNCHERS and not key.startswith(("ACCELERATE_", "MEGATRON_LM_", "TESSERA_"))}
        environment |= {"OMP_NUM_THREADS": "1", "TESSERA_PYTHON": python, "PYTHONPATH": str(ROOT / "python"), **variables}
        words = [str(word) for word in [*(launcher or [python]), *command]]
        done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout,
                              stdin=subprocess.DEVNULL)
        assert code is None or done.returncode == code, f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done


@pytest.fixture(scope="session")
def python_build(tessera_program: Path, tmp_path_factory) -> Iterator[PythonBuild]:
    """What scripts that `import tessera` need."""
    assert list((ROOT / "python/tessera").glob("_C.*.so")), "no compiled module in python/tessera: tests/run.sh puts it there"
    server = preloaded_python.Server(tmp_path_factory.mktemp("preloaded"))
    yield PythonBuild(tessera_program, server.python)
    server.close()
