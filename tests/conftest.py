"""What the Python tests share."""

from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class PythonBuild:
    """The package in its source tree with the compiled module, and the build it is of."""

    build: Path
    environment: dict


@pytest.fixture(scope="session")
def python_build(tessera_program: Path) -> PythonBuild:
    """What scripts that `import tessera` need."""
    assert list((ROOT / "python/tessera").glob("_C.*.so")), "no compiled module in python/tessera: tests/run.sh puts it there"
    return PythonBuild(tessera_program.parent, {"PYTHONPATH": str(ROOT / "python")})
