"""Losses a script makes itself, on every kind of layout: gradients equal PyTorch's."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

SCRIPT = Path(__file__).parent / "scripts" / "own_losses.py"
CASES = {"scaled", "two forwards", "second backward", "accumulate", "own loss on logits", "two logits in one loss"}
KEYWORD = {"keyword step", "keyword loss"}
LAYOUTS = {
    1: ("gpt2", ["1,1,1", "1,1,2,keyword"]),
    2: ("llama", ["1,2,2", "2,1,1", "1,1,1", "2,1,2,keyword"]),
    4: ("gpt2", ["2,2,2", "1,2,2,keyword"]),
}


@pytest.mark.parametrize("processes", LAYOUTS)
def test_gradients(python_build, tmp_path, processes):
    family, layouts = LAYOUTS[processes]
    output = tmp_path / "errors.json"
    python_build.run(SCRIPT, family, output, *layouts, launcher=python_build.launcher("--num_processes", processes))
    results = json.loads(output.read_text())
    for layout, errors in zip(layouts, results):
        assert set(errors) == (KEYWORD if "keyword" in layout else CASES), layout
        assert max(errors.values()) <= 1e-5, (layout, errors)
    assert len(results) == len(layouts)
