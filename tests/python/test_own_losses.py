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


def run(python_build, tmp_path, processes, *arguments) -> dict:
    output = tmp_path / "errors.json"
    family, tp, pp, micro, *options = arguments
    environment = {"PYTHONPATH": f"{python_build.environment['PYTHONPATH']}:{SCRIPT.parent}"}
    launch(python_build.build, processes, [SCRIPT, family, tp, pp, micro, output, *options], environment)
    return json.loads(output.read_text())


@pytest.mark.parametrize("layout", [(1, "gpt2", 1, 1, 1), (2, "llama", 1, 2, 2), (2, "gpt2", 1, 1, 1), (4, "llama", 2, 2, 2)], ids=str)
def test_gradients(python_build, tmp_path, layout):
    errors = run(python_build, tmp_path, *layout)
    assert set(errors) == CASES
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("layout", [(1, "llama", 1, 1, 2), (4, "gpt2", 1, 2, 2)], ids=str)
def test_keyword_step(python_build, tmp_path, layout):
    errors = run(python_build, tmp_path, *layout, "keyword")
    assert set(errors) == {"keyword step", "keyword loss"}
    assert max(errors.values()) <= 1e-5, errors
