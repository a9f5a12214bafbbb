"""The same script in plain PyTorch and in Tessera: losses, gradients, weights, on every kind of layout."""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

SCRIPT = Path(__file__).parent / "scripts" / "train_like_torch.py"
# Processes, family, layouts: tp,pp,micro-batches and options. Starting Python costs more than training: layouts share it.
LAYOUTS = {
    "alone": (1, "llama", ["1,1,1", "1,1,2,plugin=1"]),
    "two": (2, "gpt2", ["1,1,1", "1,1,2,plugin=1,zero=1", "1,2,4,virtual=1,recompute=1", "2,1,2,sp=1"]),
    "four": (4, "llama", ["2,2,2,sp=1", "2,1,1,zero=1", "1,2,2", "1,1,1"]),
    "eight": (8, "gpt2", ["2,2,2,zero=1,sp=1"]),
    "two encoders": (2, "BertForPreTraining", [
        "1,1,2,plugin=1,zero=1", "2,1,2,sp=1,family=MegatronBertForPreTraining", "1,2,2,family=BertForMaskedLM", "2,1,1,sp=1,step=bert",
        "1,1,2,plugin=1,family=T5", "2,1,2,sp=1,family=T5", "1,2,1,step=t5,split=1,family=MT5"]),
    "four encoders": (4, "MegatronBertForPreTraining", [
        "2,2,2,sp=1", "2,2,2,family=BertForSequenceClassification", "2,1,2,sp=1,family=BertForSequenceClassification:multi_label_classification",
        "1,2,2,step=bert,family=MegatronBertForSequenceClassification:regression", "2,2,2,family=T5"]),
    "experts": (2, "Mixtral", ["1,1,2,ep=2", "1,1,1,ep=2,zero=3,recompute=1,family=Qwen3Moe", "2,1,2,sp=1", "1,2,2,family=Qwen3Moe"]),
    "four of experts": (4, "Mixtral", ["1,1,1,ep=2,zero=1", "2,1,2,sp=1,ep=2,family=Qwen3Moe", "1,2,2,ep=2,train=upper"]),
    "frozen": (2, "gpt2", ["1,1,2,plugin=1,zero=1,train=biases", "2,1,2,sp=1,train=matrices", "1,2,2,train=upper"]),
}


# The long run's.
MORE = {
    "encoder": (1, "BertForPreTraining", ["1,1,1", "1,1,2,plugin=1,family=MegatronBertForSequenceClassification"]),
    "T5": (1, "T5", ["1,1,1", "1,1,2,plugin=1,family=MT5", "1,1,1,plugin=1,step=t5", "1,1,2,plugin=1,logits=1"]),
    "more of T5": (2, "MT5", ["1,1,1", "1,1,1,family=T5", "2,1,2,sp=1", "1,2,4,virtual=1,family=T5", "1,2,2,recompute=1", "2,1,1,step=t5", "1,2,2,logits=1,family=T5"]),
    "more encoders": (2, "BertForPreTraining", [
        "1,2,4,virtual=1,family=BertForMaskedLM", "1,1,1,family=MegatronBertForMaskedLM", "2,1,1,family=BertForSequenceClassification",
        "1,2,2,recompute=1,family=MegatronBertForSequenceClassification", "1,2,1,step=bert,family=BertForSequenceClassification",
        "1,2,2,logits=1", "2,1,2,sp=1,logits=1,family=BertForSequenceClassification", "1,1,2,plugin=1,logits=1",
        "1,1,1,logits=1,plugin=1,rest=1,family=BertForMaskedLM"]),
}


def check(result: dict) -> None:
    assert result["steps"] == 21
    for name, limit in (("losses", 1e-5), ("norms", 1e-3)):
        expected = result["expected" if name == "losses" else "expected_norms"]
        worst = max(abs(a - b) / abs(b) for a, b in zip(result[name], expected))
        assert worst <= limit, (name, worst)
    assert result["gradient_error"] <= 1e-5
    assert result["weight_error"] <= 5e-5
    assert result["reload_error"] == 0 and result["frozen_error"] == 0
    assert result["lr"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("name", {**LAYOUTS, **MORE})
def test_layouts(python_build, tmp_path, name, long_run):
    if name in MORE and not long_run:
        pytest.skip("the long run has it (--long)")
    processes, family, layouts = {**LAYOUTS, **MORE}[name]
    output = tmp_path / "result.json"
    python_build.run(SCRIPT, family, output, *layouts, launcher=python_build.launcher("--num_processes", processes))
    results = json.loads(output.read_text())
    assert len(results) == len(layouts)
    for layout, result in zip(layouts, results):
        check(result)
        assert (result["frozen"] > 0) == ("train=" in layout)


def test_torchrun(python_build, tmp_path):
    output = tmp_path / "result.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 2]
    python_build.run(SCRIPT, "gpt2", output, "2,1,1", launcher=torchrun)
    check(json.loads(output.read_text())[0])
