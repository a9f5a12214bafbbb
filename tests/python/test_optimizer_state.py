"""torch's optimizer state goes into a prepared optimizer and comes back, on every kind of layout."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

SCRIPT = Path(__file__).parent / "scripts" / "optimizer_state.py"
TOLD = ("has the shape (3,)", "has 'square_avg'", "groups of", "1 parameter groups, this one 2")


@pytest.mark.parametrize("processes, layouts", [(1, ["1,1,0,adam", "1,1,0,sgd"]),
                                                (2, ["1,1,1,adamw", "2,1,0,adamw", "1,2,0,sgd"])])
def test_state_of_torch_goes_in_and_out(python_build, tmp_path, processes, layouts):
    output = tmp_path / "result.json"
    python_build.run(SCRIPT, output, *layouts, launcher=python_build.launcher("--num_processes", processes))
    for layout, result in zip(layouts, json.loads(output.read_text())):
        assert result["loss"] <= 1e-5, layout
        assert result["weight"] <= 2e-5, layout
        assert result["emptied"] == 0, layout
        for text, part in zip(result["refusals"], TOLD):
            assert part in text, layout
