"""Freezing and unfreezing between steps, and accumulation across save_state: as in plain PyTorch, on every kind of layout."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

SCRIPT = Path(__file__).parent / "scripts" / "unfreezing.py"


@pytest.mark.parametrize("processes, layouts", [(1, ["1,1", "1,1,kind=sgd"]),
                                                (2, ["1,1,zero=1", "2,1", "1,2", "1,1,zero=1,precision=bf16"])])
def test_what_trains_may_change_between_steps(python_build, tmp_path, processes, layouts):
    output = tmp_path / "result.json"
    python_build.run(SCRIPT, output, *layouts, launcher=python_build.launcher("--num_processes", processes))
    for layout, result in zip(layouts, json.loads(output.read_text())):
        exact = "bf16" not in layout
        assert result["loss"] <= (1e-5 if exact else 2e-2), layout
        assert result["norm"] <= (1e-4 if exact else 5e-2), layout
        assert result["weight"] <= (2e-5 if exact else 5e-2), layout
        told = "'transformer.h.0.ln_1.bias' is frozen on rank 1 and trained on rank 0. Set requires_grad alike on every rank"
        assert (told in result["refusal"]) == (processes > 1), layout


def test_what_cannot_be_frozen_and_states_without_counts(python_build, tmp_path):
    output = tmp_path / "result.json"
    python_build.run(SCRIPT.parent / "frozen_edges.py", output, tmp_path / "state")
    result = json.loads(output.read_text())
    assert "'model.layers.0.self_attn.q_proj.weight' is frozen and " in result["refused"]
    assert "set requires_grad of both alike" in result["refused"]
    assert sum("in none of the optimizer's groups" in line for line in result["lines"]) == 1
    assert result["expected"] == pytest.approx(result["again"], rel=1e-6)


def test_an_accumulation_goes_on_under_another_layout(python_build, tmp_path):
    output, script = tmp_path / "result.json", SCRIPT.parent / "resume_elsewhere.py"
    for action, processes, tp, pp in (("save", 2, 1, 1), ("load", 2, 1, 2)):
        python_build.run(script, output, action, tp, pp, tmp_path / "state",
                         launcher=python_build.launcher("--num_processes", processes))
    assert json.loads(output.read_text()) <= 2e-5
