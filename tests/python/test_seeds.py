"""The seed of a script decides weights that are drawn, and dropout."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

SCRIPT = Path(__file__).parent / "scripts" / "seeds.py"


@pytest.fixture(scope="module")
def found(python_build, tmp_path_factory):
    output = tmp_path_factory.mktemp("seeds") / "result.json"
    python_build.run(SCRIPT, output)
    return json.loads(output.read_text())


def test_the_seed_of_pytorch_decides_weights_and_dropout(found):
    assert found["torch 5"] == found["torch 5 again"]
    assert all(a != b for a, b in zip(found["torch 5"], found["torch 6"]))


def test_set_seed_of_transformers_counts_as_pytorchs(found):
    assert found["transformers 6"] == found["torch 6"]


def test_set_seed_of_tessera_wins_over_pytorchs(found):
    assert found["tessera 5"] == found["torch 5"]
    assert found["tessera 7, then torch 5"] == found["tessera 7"] != found["tessera 5"]
