"""Losses a script makes itself, on every kind of layout: gradients equal PyTorch's."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))
from test_train_like_torch import launch  # noqa: E402

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
    environment = {"PYTHONPATH": f"{python_build.environment['PYTHONPATH']}:{SCRIPT.parent}"}
    launch(python_build.build, processes, [SCRIPT, family, output, *layouts], environment)
    results = json.loads(output.read_text())
    for layout, errors in zip(layouts, results):
        assert set(errors) == (KEYWORD if "keyword" in layout else CASES), layout
        assert max(errors.values()) <= 1e-5, (layout, errors)
    assert len(results) == len(layouts)
