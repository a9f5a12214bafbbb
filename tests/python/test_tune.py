"""`tessera tune`: a table on a GPU; without one it says why not."""

import pytest
from cli_support import run, text_documents, write_config, write_corpus


@pytest.fixture(scope="module")
def gpus(tessera_program):
    """What `tessera env` says of them when there are none."""
    lines = [line for line in run(tessera_program, "env").stdout.splitlines() if line.startswith("gpus")]
    return lines[0] if lines else ""


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path, write_corpus(tmp_path / "corpus", text_documents()))


def test_without_a_gpu_it_says_so(tessera_program, gpus, config, tmp_path):
    if "none: " not in gpus:
        pytest.skip("there is a GPU")
    table = tmp_path / "table.txt"
    done = run(tessera_program, "tune", config, "--output", table, code=2)
    assert "times matrix products on a GPU" in done.stderr and gpus.split("none: ")[1] in done.stderr
    assert "Run it on a machine like those you will train on" in done.stderr
    assert done.stdout == "" and not table.exists()


def test_a_table(tessera_program, gpus, config, tmp_path):
    if "none: " in gpus:
        pytest.skip(gpus)
    cache = tmp_path / "cache"
    done = run(tessera_program, "tune", config, env={"XDG_CACHE_HOME": str(cache)})
    assert (cache / "tessera/gemm_table.txt").read_text().startswith("tessera gemm cache")
    assert "96 x 144 x 48, B transposed" in done.stdout and "TFLOP/s" in done.stdout
    again = run(tessera_program, "tune", config, env={"XDG_CACHE_HOME": str(cache)})
    assert " 0 of them timed" in again.stdout
    named = run(tessera_program, "tune", config, "--output", tmp_path / "named.txt")
    assert f"device.gemm_cache={tmp_path / 'named.txt'}" in named.stdout
    refused = run(tessera_program, "tune", config, "device.type=cpu", code=2)
    assert "device.type is cpu" in refused.stderr


def test_help(tessera_program):
    assert "tune" in run(tessera_program, "--help").stdout
    text = run(tessera_program, "tune", "--help").stdout
    assert "--output" in text and "gemm_cache" in text


@pytest.mark.parametrize("arguments,part", [(["/nowhere/config.yaml"], "/nowhere/config.yaml"), ([], "config")])
def test_refusals(tessera_program, arguments, part):
    assert part in run(tessera_program, "tune", *arguments, code=2).stderr
