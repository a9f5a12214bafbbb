"""What commands say about things that are not there or not as expected."""

import re
import shutil
import sys

import pytest
from cli_support import run, text_documents, write_config, write_corpus


@pytest.fixture(scope="module")
def trained(tessera_program, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    corpus = write_corpus(folder / "corpus", text_documents())
    run(tessera_program, "train", write_config(folder, corpus, training__steps=3, model__dropout=0.0))
    return folder / "run"


def test_a_folder_that_is_not_there_is_not_damaged(tessera_program, tmp_path):
    done = run(tessera_program, "checkpoint", "verify", tmp_path / "absent", code=4)
    assert "there is no such folder" in done.stderr and "damaged" not in done.stdout


def test_a_folder_of_save_state_is_converted(tessera_program, trained, tmp_path):
    state = tmp_path / "saved/tessera_state"
    shutil.copytree(trained / "checkpoints", state / "model_0")
    run(tessera_program, "convert", "--from", "tessera", tmp_path / "saved", "--to", "hf", tmp_path / "hf")
    run(tessera_program, "convert", "--from", "tessera", trained, "--to", "hf", tmp_path / "same")
    assert (tmp_path / "hf/model.safetensors").read_bytes() == (tmp_path / "same/model.safetensors").read_bytes()
    (state / "model_1").mkdir()
    error = run(tessera_program, "convert", "--from", "tessera", tmp_path / "saved", "--to", "hf", tmp_path / "none", code=2).stderr
    assert "several models" in error and str(state / "model_0") in error


def test_a_plan_of_little_memory_and_many_micro_batches(tessera_program, trained, tmp_path):
    config = trained / "config.yaml"
    assert " 0.001 GB" in run(tessera_program, "plan", config, "--memory_gb", 0.001, code=5).stdout
    picture = tmp_path / "schedule.svg"
    run(tessera_program, "plan", config, "parallel.pipeline=2", "training.micro_batch_size=1", "training.global_batch_size=128",
        "--svg", picture)
    assert "time, in % of the step" in picture.read_text() and ">100</text>" in picture.read_text()
    assert float(re.search(r'width="([\d.]+)"', picture.read_text())[1]) < 2600


def test_the_named_interpreter_runs_python_commands(source_dir, trained, tmp_path):
    """Also from the program that pip installs."""
    console = "import sys; from tessera.cli import console; sys.exit(console())"
    package = {"PYTHONPATH": str(source_dir / "python")}
    other = tmp_path / "python"
    other.write_text('#!/bin/sh\necho other "$@"\n')
    other.chmod(0o755)
    said = run(sys.executable, "-c", console, "plot", "x", env=package | {"TESSERA_PYTHON": str(other)}).stdout
    assert said.startswith("other -c import sys;") and "run_module('tessera'" in said and said.endswith(" plot x\n")
    said = run(sys.executable, "-c", console, "plot", "x", env=package | {"TESSERA_PYTHON": "/nowhere"}, code=2).stderr
    assert "TESSERA_PYTHON is /nowhere, which cannot be run" in said
    # A matplotlib that is there but broken is not called absent.
    broken = tmp_path / "broken/matplotlib"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('numpy 0.1 is too old')\n")
    said = run(sys.executable, "-m", "tessera", "plot", trained, code=1,
               env={"PYTHONPATH": f"{source_dir / 'python'}:{broken.parent}"}).stderr
    assert "cannot load: numpy 0.1 is too old" in said and "not installed" not in said


def test_env_without_the_package_speaks_once(tessera_program, tmp_path):
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho No module named tessera >&2\nexit 1\n")
    other.chmod(0o755)
    done = run(tessera_program, "env", env={"TESSERA_PYTHON": str(other)})
    assert f"{other} does not run the package tessera" in done.stdout and done.stderr == ""
