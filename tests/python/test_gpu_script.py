"""tests/gpu/run_all.sh, rehearsed on the CPU: its parts run, say what they find, and what they say is summed up."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest

SCRIPTS = ("run_all.sh", "parts.sh", "offload.sh", "bundle.sh", "rank.sh")


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
        ("info", "ok"), ("parity", "ok"), ("layouts", "ok"), ("faults", "ok")]  # by their value
    # On one device fp32 agrees to the last bit.
    assert parts["parity"]["figures"]["gpt2 fp32"]["gradient"] == 0
    assert any("layouts equal one rank" in line["text"] for line in parts["layouts"]["lines"])
    summary = (script.out / "results.md").read_text()
    assert "rehearsal" in summary and "| parity | ok |" in summary
    assert {path.name for path in script.out.iterdir()} == {"results.json", "results.md", "logs.tar.gz"}


def test_generation(script, source_dir, build_dir):
    """Tiny models on the CPU: tokens per second, told beside the bound; what is no graph is a failure on a GPU alone."""
    if not (build_dir / "tests/bench/generate_bench").exists():
        pytest.skip("the build has no benches")
    code, results, printed = script("--rehearse", "generation")
    assert code == 0, printed
    lines = [line["text"] for line in results["parts"]["generation"]["lines"]]
    assert [line.split(":")[0] for line in lines] == [
        f"{name}, {batch} at once" for name in ("gpt2_124m_fp32", "gpt2_124m_bf16", "llama_7b_bf16") for batch in (1, 8)], printed
    assert all("tokens/s" in line and "of the bound" in line for line in lines), printed

    spec = importlib.util.spec_from_file_location("generation", source_dir / "tests/gpu/generation.py")
    part = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(part)
    row = {"batch": 1, "of_bound": 0.85, "passes_plain": 1, "passes_recorded": 2, "passes_replayed": 252}
    assert part.judged(row, 0.8, "cuda")
    assert not part.judged({**row, "of_bound": 0.7}, 0.8, "cuda")
    assert part.judged({**row, "of_bound": 0.7, "batch": 8}, 0.8, "cuda")
    assert not part.judged({**row, "passes_replayed": 0, "passes_plain": 255}, 0.0, "cuda")


def test_comparison_with_pytorch(script, build_dir, long_run):
    """Contenders side by side, and with --long one at a time as well."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if not (build_dir / "tests/bench/train_bench").exists():
        pytest.skip("the build has no benches")
    parts = [("compare_small", "tiny_gpt2", "beside"), ("compare_llama3", "tiny_llama", "restarted")][:2 if long_run else 1]
    code, results, printed = script("--rehearse", *(part for part, _, _ in parts))
    assert code == 0, printed
    for part, case, turns in parts:
        assert results["parts"][part]["outcome"] == "ok", printed
        entry = results["parts"][part]["figures"]["cases"][case]
        assert entry["turns"] == turns and set(entry["results"]) == {"tessera", "eager"}
        assert {name: (f["recompute"], f["last_turn"]["bytes_per_parameter"]) for name, f in entry["results"].items()} == {
            "tessera": (entry["case"]["tessera"][0], 16), "eager": (entry["case"]["eager"][0], 16)}
        assert all(figures["steps"] == entry["case"]["rounds"] for figures in entry["results"].values())
    summary = (script.out / "results.md").read_text()
    assert "| tiny_gpt2 | eager |" in summary and ("started anew for each turn" in summary) == long_run


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


SLOW = "#!/bin/sh\ntrap 'exit 1' TERM\nsleep 300 & wait\n"


def test_what_is_out_of_time_says_so(script, tmp_path):
    """Programs that would take minutes, in place of the tests: all ends in time, and what was found counts."""
    build = tmp_path / "build"
    (build / "tests").mkdir(parents=True)
    for name, text in (("tessera", "#!/bin/sh\nexit 0\n"), ("tests/test_engine", SLOW), ("tests/parity_driver", SLOW)):
        (build / name).write_text(text)
        (build / name).chmod(0o755)
    code, results, printed = script("--rehearse", "--build", build, "--within", "20", "info", "layouts", "sanitizer")
    assert "skipped  compare" not in printed
    parts = results["parts"]
    assert parts["info"]["outcome"] == "ok", printed
    assert any(line["outcome"] == "partly" for line in parts["layouts"]["lines"]), printed
    assert parts["layouts"]["seconds"] < 60  # far less than its programs would have taken


@pytest.fixture(scope="module")
def choose(source_dir):
    sys.path.insert(0, str(source_dir / "tests/gpu"))
    import choose

    return choose


def chosen(choose, within, known=(), too_large=None):
    lines = list(choose.choose(choose.PARTS, within, set(known), too_large or {}))
    return ([(line[1], int(line[2])) for line in lines if line[0] == "run"],
            {line[1]: line[2] for line in lines if line[0] == "skip"})


def test_choice_of_parts(choose):
    for within in (60, 300, 590, 1700, 3500, 9000):
        run, skipped = chosen(choose, within)
        names = [name for name, _ in run]
        assert sum(seconds for _, seconds in run) <= within - choose.SPARE
        stages = [choose.BY_NAME[name].stage for name in names]
        assert stages == sorted(stages), "correctness before speed, the sanitizer last"
        assert set(names) | set(skipped) == set(choose.BY_NAME)
        assert names[0] == "info"
        for name, seconds in run:
            assert choose.BY_NAME[name].least <= seconds <= min(480, choose.BY_NAME[name].most)
    assert len(chosen(choose, 9000)[0]) == len(choose.PARTS)


def test_what_was_never_measured_comes_first(choose):
    first = [name for name, _ in chosen(choose, 590)[0]]
    then = [name for name, _ in chosen(choose, 590, known=first)[0]]
    assert then[0] == "info" and not set(then[1:]) & set(first[1:])


def test_models_that_cannot_fit_are_skipped_with_the_figure(choose, tessera_program):
    part = choose.BY_NAME["compare_llama3"]
    why = choose.why_too_large(part, 79.0, str(tessera_program))
    assert why is not None and "GB with recompute full, the GPU has 79.0 GB" in why
    assert choose.why_too_large(part, 150.0, str(tessera_program)) is None, "an H200 is large enough"
    assert chosen(choose, 9000, too_large={part.name: why})[1] == {part.name: why}


def test_measured_figures_come_from_runs(source_dir, tmp_path):
    """The page's last column is made of docs/gpu_runs: the best run of an H200 counts."""
    sys.path.insert(0, str(source_dir / "tests/gpu"))
    import record

    assert record.measured("LLaMA-7B", tmp_path) == "not measured"
    for name, gpu, rate in (("a", "NVIDIA H200", 14000.0), ("b", "NVIDIA H100 80GB HBM3", 15000.0), ("c", "NVIDIA H200", 14600.0)):
        entry = {"results": {"tessera": {"tokens_per_s": rate}, "compile": {"tokens_per_s": rate / 1.25}}}
        report = {"device": "cuda", "machine": {"gpu": {"name": gpu}},
                  "parts": {"compare_llama": {"outcome": "ok", "figures": {"cases": {"gpu_llama_7b_bf16": entry}}}}}
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    assert record.measured("LLaMA-7B", tmp_path) == "14.6k, 1.25× torch.compile ([run](gpu_runs/c.md))"
    page = (source_dir / "docs/performance.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| LLaMA-7B, 4096"))
    changed = record.page_with("head\n|---|\n" + row.replace("14.5k", "15k"), page)
    assert changed == page.replace(row, row.replace("14.5k", "15k"))


def test_unknown_parts_are_refused(script):
    code, _, printed = script("benches")
    assert code == 2 and "PART" in printed


@pytest.mark.parametrize("name", SCRIPTS)
def test_shell(source_dir, name):
    subprocess.run(["bash", "-n", source_dir / "tests/gpu" / name], check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", "-x", f"tests/gpu/{name}"], cwd=source_dir, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
