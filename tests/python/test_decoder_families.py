"""Mistral with its window, Qwen3, Gemma, GPT-NeoX, GPTBigCode, BLOOM, Phi-3, GLM-4, OLMo 2, MPT, Falcon, stretched rotary positions, Mixtral, Qwen3-MoE and OLMoE, given to prepare() as Transformers'
objects: loss and every gradient are Transformers'."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

SCRIPT = Path(__file__).parent / "scripts" / "decoder_families.py"
ALL = "mistral,qwen2,qwen3,gemma2,gemma3,gpt_neox,gpt_bigcode,bloom,longrope,yarn,phi3,glm,glm4,olmo2,mpt,falcon,falcon_in_line,mixtral,qwen3_moe,olmoe"


@pytest.mark.parametrize("tp, pp, ep, names", [(1, 1, 1, ALL), (2, 1, 1, "qwen3,gemma2,bloom,olmo2,falcon,mixtral"),
                                               (1, 2, 1, "mistral,gemma3,glm4,qwen3_moe"), (1, 1, 2, "mixtral,qwen3_moe,olmoe")])
def test_equal_to_transformers(python_build, tmp_path, long_run, tp, pp, ep, names):
    if pp > 1 and not long_run:
        pytest.skip("--long")
    output = tmp_path / "errors.json"
    launcher = python_build.launcher("--num_processes", tp * pp * ep) if tp * pp * ep > 1 else ()
    python_build.run(SCRIPT, output, tp, pp, ep, names, launcher=launcher)
    results = json.loads(output.read_text())
    assert sorted(results) == sorted(names.split(","))
    assert {name: error for name, error in results.items() if not error <= 2e-5} == {}
