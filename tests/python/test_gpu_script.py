"""tests/gpu/run_all.sh, rehearsed on the CPU: its parts run, say what they find, and what they say is summed up."""

import json
import os
import shutil
import subprocess
import sys

import pytest

SCRIPTS = ("run_all.sh", "parts.sh", "bundle.sh", "rank.sh")


@pytest.fixture(scope="module")
def script(source_dir, build_dir, tmp_path_factory):
    """Runs the script on this build; returns its exit code, its results and what it printed."""
    folder = tmp_path_factory.mktemp("gpu")

    def run(*arguments, path=None):
        environment = {**os.environ, "PYTHON": sys.executable, "RESULTS": str(folder / "all"), "OUT": str(folder / "out"),
                       "OMP_NUM_THREADS": "1", "PATH": path or os.environ["PATH"]}
        done = subprocess.run([source_dir / "tests/gpu/run_all.sh", "--build", build_dir, *arguments], env=environment,
                              capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
        results = folder / "out/results.json"
        return done.returncode, json.loads(results.read_text()) if results.exists() else None, done.stdout + done.stderr

    run.out = folder / "out"
    return run


def test_rehearsal(script):
    code, results, printed = script("--rehearse", "info", "layouts", "parity", "faults")
    assert code == 0, printed
    assert results["device"] == "cpu"
    assert {"date", "commit", "gpu", "backends", "packages"} <= results["machine"].keys()
    parts = results["parts"]
    assert [(name, part["outcome"]) for name, part in parts.items()] == [
        ("info", "ok"), ("layouts", "ok"), ("parity", "ok"), ("faults", "ok")]
    # On one device fp32 agrees to the last bit.
    assert parts["parity"]["figures"]["gpt2 fp32"]["gradient"] == 0
    assert any("layouts equal one rank" in line["text"] for line in parts["layouts"]["lines"])
    summary = (script.out / "results.md").read_text()
    assert "rehearsal" in summary and "| parity | ok |" in summary
    assert {path.name for path in script.out.iterdir()} == {"results.json", "results.md", "logs.tar.gz"}


def test_comparison_with_pytorch(script, build_dir):
    """Contenders side by side, and one at a time."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if not (build_dir / "tests/bench/train_bench").exists():
        pytest.skip("the build has no benches")
    code, results, printed = script("--rehearse", "compare_small", "compare_llama3")
    assert code == 0, printed
    for part, case, turns in (("compare_small", "tiny_gpt2", "beside"), ("compare_llama3", "tiny_llama", "restarted")):
        assert results["parts"][part]["outcome"] == "ok", printed
        entry = results["parts"][part]["figures"]["cases"][case]
        assert entry["turns"] == turns and set(entry["results"]) == {"tessera", "eager"}
        assert {name: (f["recompute"], f["last_turn"]["bytes_per_parameter"]) for name, f in entry["results"].items()} == {
            "tessera": (entry["case"]["tessera"][0], 16), "eager": (entry["case"]["eager"][0], 16)}
        assert all(figures["steps"] == entry["case"]["rounds"] for figures in entry["results"].values())
    summary = (script.out / "results.md").read_text()
    assert "| tiny_gpt2 | eager |" in summary and "started anew for each turn" in summary


def test_a_failure_is_seen(script, tmp_path):
    """A program that is not what it should be, in place of the tests."""
    build = tmp_path / "build"
    (build / "tests").mkdir(parents=True)
    for name, text in (("tessera", "exit 0"), ("tests/test_engine", "echo '[  FAILED  ] LayoutMatrix.*'; exit 1")):
        (build / name).write_text(f"#!/bin/sh\n{text}\n")
        (build / name).chmod(0o755)
    code, results, printed = script("--rehearse", "--build", build, "layouts")
    assert code == 1, printed
    assert results["parts"]["layouts"]["outcome"] == "failed"
    assert results["parts"]["layouts"]["lines"][0] == {"outcome": "FAILED", "text": "layouts of 2 ranks (exit code 1)"}


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there may be a GPU")
def test_without_a_gpu_it_says_so(script):
    code, results, printed = script("tests", "sanitizer")
    assert code == 77, printed
    assert printed.count("no GPU: no nvidia-smi") == 2
    assert results["parts"]["tests"]["outcome"] == "skipped"


def test_unknown_parts_are_refused(script):
    code, _, printed = script("benches")
    assert code == 2 and "PART" in printed


@pytest.mark.parametrize("name", SCRIPTS)
def test_shell(source_dir, name):
    subprocess.run(["bash", "-n", source_dir / "tests/gpu" / name], check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", "-x", f"tests/gpu/{name}"], cwd=source_dir, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
