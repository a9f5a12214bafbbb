"""Scripts of the shape that public tutorials have: losses, metrics and weights are plain PyTorch's, on every kind of layout."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

SCRIPTS = Path(__file__).parent / "scripts"
KINDS = {2: ["1,1,2", "2,1,2", "1,2,2"], 4: ["2,2,2"]}  # processes; tp, pp, micro-batches
NAMES = {"tutorials.py": ("documented", "finetune", "dpo"), "tutorials_of_weights.py": ("average", "unfreeze")}
# What is expected beside the loss; later weights and norms have gathered rounding of all steps.
MORE = {"documented": {}, "finetune": {"norm": 1e-4, "perplexity": 1e-4, "accuracy": 1e-6, "samples": 0.0}, "dpo": {"weights": 1e-5},
        "average": {"average's loss": 1e-5, "average's accuracy": 1e-6, "weights": 1e-5}, "unfreeze": {"weights": 5e-5}}


@pytest.mark.parametrize("script", NAMES)
@pytest.mark.parametrize("processes", KINDS)
def test_the_numbers_are_pytorchs(python_build, tmp_path, processes, script):
    layouts = [f"{name},{layout}" for name in NAMES[script] for layout in KINDS[processes]]
    output = tmp_path / "results.json"
    python_build.run(SCRIPTS / script, output, *layouts, launcher=python_build.launcher("--num_processes", processes))
    results = json.loads(output.read_text())
    assert len(results) == len(layouts)
    for layout, found in zip(layouts, results):
        limits = {"loss": 1e-5, **MORE[layout.partition(",")[0]]}
        assert found.keys() == limits.keys(), layout
        assert all(found[name] <= limits[name] for name in limits), (layout, found)
