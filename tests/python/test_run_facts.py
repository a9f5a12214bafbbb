"""What a run says at its start, by `tessera train` and by a script's prepare(), and what its metrics are relative to."""

import re
from pathlib import Path

import pytest
from cli_support import metrics, run, text_documents, write_config, write_corpus

SCRIPT = Path(__file__).parent / "scripts" / "run_facts.py"


def parameters(layers: int, hidden: int, vocab: int, positions: int, tensor: int, first: bool, last: bool) -> int:
    """Of one rank of GPT-2: matrices and the biases of split rows are divided, other biases and norms are not."""
    layer = 12 * hidden * hidden // tensor + 7 * hidden // tensor + 6 * hidden
    count = layers * layer
    count += vocab // tensor * hidden if first or last else 0
    return count + (positions * hidden if first else 0) + (2 * hidden if last else 0)


def said(text: str) -> dict:
    found = re.findall(r"number of parameters on \(tensor, pipeline\) model parallel rank \((\d), (\d)\): (\d+)", text)
    assert len(found) == len({(t, p) for t, p, _ in found}), text  # each once, by one process
    return {(int(t), int(p)): int(n) for t, p, n in found}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus", text_documents())


def test_train_says_what_runs(tessera_program, tmp_path, corpus):
    config = write_config(tmp_path, corpus, training__steps=4, model__vocab_size=258, model__num_heads=4)
    err = run(tessera_program, "train", config, "parallel.tensor=2", "parallel.pipeline=2").stderr
    assert said(err) == {(t, p): parameters(1, 48, 258, 48, 2, p == 0, p == 1) for t in (0, 1) for p in (0, 1)}
    for line in ("vocabulary of 258 in 2 parts (2 x 129), nothing padded",
                 "number of micro-batches: 2 of 2 samples on each of 1 data rank", "total batch: 4 samples of 48 tokens a step",
                 "optimizer: adamw, lr 0.002", "learning rate: cosine, 3 steps of warm-up, down to 0 at step 4, of 4 steps"):
        assert err.count(line) == 1, (line, err)
    for step in metrics(tmp_path / "run"):
        assert step["mfu"] == step["mfu_of_measured"] > 0  # on a CPU, which the line says
        waited = sum(value for key, value in step.items() if key.endswith("_wait_ms") and key != "pp_wait_ms")
        assert step["communication_share"] == pytest.approx(waited / step["step_ms"], rel=1e-6) and waited > 0
    assert err.count("mfu is of the measured rate of matrix products") == 1


def test_a_given_peak_is_what_mfu_is_of(tessera_program, tmp_path, corpus):
    config = write_config(tmp_path, corpus, training__steps=3, logging__peak_tflops=1e-3)
    err = run(tessera_program, "train", config).stderr
    assert "mfu is of logging.peak_tflops, 0.001 TFLOP/s a rank" in err
    weights = 2 * 12 * 48 * 48 + 257 * 48
    for step in metrics(tmp_path / "run"):
        flops = (6 * weights + 6 * 2 * 48 * 48) * step["tokens_per_s"]  # the causal half of 12 L C S
        assert step["mfu"] == pytest.approx(flops / 1e9, rel=1e-6)
        assert step["communication_share"] == 0


def test_prepare_says_what_runs(python_build):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    done = python_build.run(SCRIPT, launcher=python_build.launcher("--num_processes", 4))
    text = done.stdout + done.stderr
    assert said(text) == {(t, 0): parameters(2, 32, 64, 16, 2, True, True) for t in (0, 1)}
    for line in ("vocabulary of 64 in 2 parts (2 x 32), nothing padded",
                 "number of micro-batches: 2 of 3 samples on each of 2 data ranks", "total batch: 12 samples",
                 "optimizer: AdamW, 1 parameter group (lr 0.001 and weight decay 0.01), its state divided among 2 data ranks"):
        assert text.count(line) == 1, (line, text)
