"""docs/performance.md has what tests/gpu/floors.py computes, and the passes it lists are those of a profile."""

import json
import sys
from collections import Counter

import pytest
from cli_support import run, text_documents, write_config, write_corpus

HIDDEN, KV, FFN, SEQ, SAMPLES = 128, {"gpt2": 128, "llama": 64}, {"gpt2": 512, "llama": 320}, 32, 2


@pytest.fixture(scope="module")
def floors(source_dir):
    sys.path.insert(0, str(source_dir / "tests/gpu"))
    import floors

    return floors


def test_the_page_is_current(floors, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["floors.py", "--check"])
    assert floors.main() == 0


def test_the_sums_are_those_of_the_models(floors):
    """Against figures that were computed without this code."""
    limits = {model.name: 1 / sum(floors.floors(model).values()) for model in floors.MODELS}
    for name, limit in (("GPT-2 124M", 683e3), ("GPT-2 XL 1.56B", 64.3e3), ("LLaMA-7B", 16.1e3), ("LLaMA3-8B", 13.3e3)):
        assert limits[name] == pytest.approx(limit, rel=0.005), name


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus", text_documents())


def passes(tessera_program, corpus, folder, family: str, layers: int) -> Counter:
    """Bytes of the element-wise kernels of one training step, by kernel."""
    config = write_config(
        folder, corpus, model__family=family, model__num_layers=layers, model__hidden_size=HIDDEN, model__num_heads=4,
        model__max_positions=SEQ, model__dropout=0.0, model__attention_dropout=0.0, training__steps=2, training__seq_length=SEQ,
        training__micro_batch_size=SAMPLES, training__global_batch_size=SAMPLES, training__precision="bf16",
        training__fp32_residual=False, lr_schedule__warmup_steps=0, checkpoint__every=0, logging__profile=[2, 3])
    llama = [f"model.ffn_hidden_size={FFN['llama']}", "model.num_kv_heads=2"] if family == "llama" else []
    run(tessera_program, "train", config, *llama)
    events = json.loads((folder / "run/profile/trace_rank0.json").read_text())["traceEvents"]
    moved = Counter()
    for event in events:
        if event.get("cat") == "element-wise":
            moved[event["name"]] += event.get("args", {}).get("bytes", 0)
    return moved


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_passes_over_activations(floors, tessera_program, corpus, tmp_path, family):
    counts = []
    for layers in (1, 3):
        folder = tmp_path / str(layers)
        folder.mkdir()
        counts.append(passes(tessera_program, corpus, folder, family, layers))
    per_layer = {name: (counts[1][name] - counts[0][name]) / 2 / (SAMPLES * SEQ) for name in counts[1]}
    expected = {name: floors.bytes_of(text, HIDDEN, KV[family], FFN[family]) for name, text in floors.PASSES[family].items()}
    assert {name: moved for name, moved in per_layer.items() if moved} == expected
