"""tests/bench/compare_torch.py: its cases are those of docs/performance.md, and its ways to take turns."""

import argparse
import dataclasses
import os
import sys

import pytest

# Speaks the contenders' protocol; each step takes as many seconds as its place in the life of the process.
CONTENDER = """
import json, sys
print("ready", flush=True)
steps = 0
for line in sys.stdin:
    seconds = [steps + 1 + i for i in range(int(line))]
    steps += len(seconds)
    print(json.dumps({"seconds": seconds, "rss_bytes": steps, "loss": 0.5, "attention": "flash"}), flush=True)
"""
TOO_LARGE = "import sys; sys.exit('error: out of memory on GPU 0')"
BROKEN = "import sys; sys.exit('something else')"


@pytest.fixture(scope="module")
def bench(source_dir):
    sys.path[:0] = [str(source_dir / "tests/bench"), str(source_dir / "tests/gpu")]
    import compare_torch

    return compare_torch


@pytest.fixture
def case(bench):
    return dataclasses.replace(bench.REHEARSAL_CASES[0], rounds=3, steps=2)


def script(text):
    return [sys.executable, "-c", text]


def test_cases_are_those_of_the_page(bench):
    import floors

    models = {model.name: model for model in floors.MODELS}
    found = {case.name: case for case in bench.CUDA_CASES}
    for name, model in (("gpu_124m_bf16", "GPT-2 124M"), ("gpu_xl_bf16", "GPT-2 XL 1.56B"), ("gpu_llama_7b_bf16", "LLaMA-7B"),
                        ("gpu_llama3_8b_bf16", "LLaMA3-8B")):
        case, model = found[name], models[model]
        assert (case.layers, case.hidden, case.heads, case.vocab, case.seq) == (
            model.layers, model.hidden, model.heads, model.vocab, model.seq)
        assert case.batch * case.seq == model.micro_batch
        assert (case.kv_heads or case.heads, case.ffn or 4 * case.hidden) == (model.kv_heads, model.ffn)
        assert (case.family == "llama") == model.llama and case.versus_compile == model.over_compile
        assert case.floor_ns == pytest.approx(1e9 * sum(floors.floors(model).values()), rel=1e-3)


def test_no_case_takes_longer_than_eight_minutes(bench):
    for case in bench.CUDA_CASES:
        assert bench.expected_seconds(case) < 480, case.name


def test_what_is_not_equal_is_said(bench):
    """PyTorch's bf16 gradients spare 2 bytes per parameter, and so do Tessera's split main weights."""
    for case in bench.CUDA_CASES + bench.REHEARSAL_CASES:
        assert ("in fp32" in case.note) == (case.state == "bf16"), case.name
        assert ("18 bytes per parameter" in case.note) == (case.tessera_bytes == 18 and case.state == "bf16"), case.name
        assert case.split == ("optimizer.split_main_weights=true" in case.overrides(1)), case.name
    assert {case.name: case.tessera_bytes for case in bench.CUDA_CASES} == {
        "gpu_124m_bf16": 18, "gpu_124m_autocast": 18, "gpu_124m_fp32": 16, "gpu_xl_bf16": 18, "gpu_llama_7b_bf16": 18,
        "gpu_llama3_8b_bf16": 16}


def test_both_sides_train_the_same(bench):
    for case in bench.CASES + bench.CUDA_CASES + bench.REHEARSAL_CASES:
        flags = case.flags() + case.torch_flags()
        torch = {flag: value for flag, value in zip(flags, flags[1:]) if flag.startswith("--")}
        tessera = dict(text.split("=") for text in case.overrides(1))
        for flag, key in (("--family", "model.family"), ("--layers", "model.num_layers"), ("--hidden", "model.hidden_size"),
                          ("--heads", "model.num_heads"), ("--vocab", "model.vocab_size"), ("--seq", "training.seq_length"),
                          ("--batch", "training.micro_batch_size"), ("--precision", "training.precision")):
            assert torch[flag] == tessera[key]
        assert int(torch["--kv-heads"]) == int(tessera.get("model.num_kv_heads", 0))
        assert int(torch["--batch"]) * int(torch["--micro-batches"]) == int(tessera["training.global_batch_size"])
        assert case.tokens == int(tessera["training.global_batch_size"]) * case.seq


def test_beside(bench, case):
    done = bench.take_turns(case, None, {"tessera": script(CONTENDER), "eager": script(CONTENDER)}, dict(os.environ))
    assert done["eager"].seconds == [1, 2, 3, 4, 5, 6]


def test_restarted(bench, case):
    """Each turn is one of a new process; what does not fit is left out, or computes again."""
    commands = {"tessera": {"none": script(TOO_LARGE), "full": script(CONTENDER)}, "eager": {"none": script(CONTENDER)},
                "compile": {"none": script(TOO_LARGE)}}
    done, failed = bench.take_turns_alone(case, 3, commands, dict(os.environ), "cuda")
    assert done["tessera"].seconds == [1, 2] * 3 and done["tessera"].recompute == "full"
    assert done["eager"].seconds == [1, 2] * 3 and done["eager"].recompute == "none" and done["eager"].rss_bytes == 2
    assert list(failed) == ["compile"] and "out of memory on GPU 0" in failed["compile"]
    assert list(commands["tessera"]) == ["full"], "what did not fit is not tried again"


def test_no_round_begins_that_would_last_too_long(bench, case):
    done, _ = bench.take_turns_alone(case, 50, {"eager": {"none": script(CONTENDER)}}, dict(os.environ), "cpu", seconds=0.01)
    assert done["eager"].seconds == [1, 2]


def test_other_failures_end_the_comparison(bench, case):
    with pytest.raises(bench.BenchError, match="something else"):
        bench.take_turns_alone(case, 1, {"eager": {"none": script(BROKEN), "full": script(CONTENDER)}}, dict(os.environ), "cpu")


def test_clocks_are_noted(bench, case, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '1755, 3201, 512.25, 61'\necho '1, 1, 1, 1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    state = {"clocks.sm": 1755, "clocks.mem": 3201, "power.draw": 512.25, "temperature.gpu": 61}
    assert bench.gpu_state() == state
    done, _ = bench.take_turns_alone(case, 2, {"eager": {"none": script(CONTENDER)}}, dict(os.environ), "cuda")
    assert done["eager"].gpu == [{"before": state, "after": state}] * 2
    assert bench.gpu_range(bench.summary(case, done["eager"])) == "1755-1755 MHz, 512-512 W, 61-61 °C"
    program.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert bench.gpu_state() is None


def test_the_table_says_how(bench):
    case = bench.REHEARSAL_CASES[1]
    commands = {"tessera": {"full": script(CONTENDER)}, "eager": {"none": script(TOO_LARGE)}}
    done, failed = bench.take_turns_alone(case, 1, commands, dict(os.environ), "cpu")
    report = {"machine": "M", "device": "cpu", "threads": 1, "torch": "T", "copy_bytes_per_s": 1e9, "cases": {case.name: {
        "case": dataclasses.asdict(case), "results": {name: bench.summary(case, c) for name, c in done.items()},
        "failed": failed, "turns": "restarted", "ceiling": None}}}
    text = bench.table(report)
    assert "flash attention, recompute full" in text and "| tiny_llama | eager | does not fit |" in text
    assert "- tiny_llama: one at a time, started anew for each turn. Tessera adds gradients up in fp32" in text


def test_pytorch_with_few_bytes_trains_the_same(bench):
    """Weights in bf16 beside main weights in fp32, logits by parts, everything computed again."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import torch_contender

    def train(**changes):
        options = argparse.Namespace(family="llama", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=101, seq=16, batch=2,
                                     micro_batches=2, precision="bf16", best=False, compile=False, device="cpu", experts=0,
                                     **{"state": "bf16", "recompute": "none", **changes})
        trainer = torch_contender.Trainer(options)
        return [trainer.step() for _ in range(4)], trainer.about["bytes_per_parameter"]

    plain, sixteen = train()
    again, _ = train(recompute="full+head")
    autocast, eighteen = train(state="autocast")
    assert (sixteen, eighteen) == (16, 18)
    assert again == pytest.approx(plain, rel=1e-3)
    assert autocast == pytest.approx(plain, rel=1e-2)
    assert torch.isfinite(torch.tensor(plain)).all()


def test_the_table_of_generation(bench):
    """Ratios are of single rounds; beams count their rows."""
    import compare_generation

    rates = {"prefill 512": [100, 300], "decode 1": [4, 8], "unequal 8": [20, 44], "decode 4": [8, 16], "beams 4": [2, 3]}
    report = {"machine": "CPU", "threads": 1, "precision": "fp32", "bytes_per_s": [100, 200], "weight_bytes": 20,
              "tokens_per_s": {task: {"tessera": own, "transformers": [2, 2]} for task, own in rates.items()}}
    text = compare_generation.table(report)
    for part in ("| decode 1 | 6.0 | 2.0 | 3.00× (goal 1.5) |", "once per token: 0.80 (goal 0.8)", "beside decode 1: 5.25 (goal 4.0)",
                 "beams 4 beside decode 4: 0.88 (goal 0.8)"):
        assert part in text, text
    assert set(compare_generation.GOALS) <= set(compare_generation.tasks(8))
