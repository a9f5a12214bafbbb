"""Accelerate's Megatron-LM example, call by call, under `tessera launch` with a file as `accelerate config` writes it."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")

SCRIPT = Path(__file__).parent / "scripts" / "gpt_pretraining.py"
CONFIG = Path(__file__).parents[2] / "examples/python/configs/megatron_tp2_pp2.yaml"


def run(python_build, output: Path, *arguments) -> list:
    """What each rank found out."""
    python_build.run(SCRIPT, output, *arguments, launcher=python_build.launcher("--config_file", CONFIG), HF_HUB_OFFLINE="1",
                     HF_DATASETS_OFFLINE="1")
    return [json.loads(path.read_text()) for path in sorted(output.glob("all_results_*.json"))]


def test_the_example(python_build, tmp_path):
    whole = run(python_build, tmp_path / "whole")
    assert len(whole) == 4 and all(each == whole[0] for each in whole)
    result = whole[0]
    assert result["total_batch_size"] == 8 and result["completed"] == 2 * result["updates"]
    assert result["perplexity"][1] < result["perplexity"][0] < 257
    assert result["lr"] == pytest.approx([0.0, 0.0], abs=1e-9)  # the horizon is that of the run
    assert list((tmp_path / "whole").rglob("events.out.tfevents*"))
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole/hf")
    resumed = run(python_build, tmp_path / "again", tmp_path / "whole/step_3")[0]
    assert resumed["losses"] == result["losses"][3:]
    assert resumed["perplexity"] == result["perplexity"]
