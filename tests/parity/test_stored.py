"""Loss, gradients and 20 updates against PyTorch's stored results: the parity test that needs no PyTorch."""

import json
from pathlib import Path

import models
import numpy as np
import pytest
from driver import run_tessera, training_overrides
from summaries import disagreement

REFERENCES = json.loads((Path(__file__).parent / "references.json").read_text())


@pytest.mark.parametrize("name, kind", models.ALL_CASES)
def test_agrees_with_stored_results(long_run, build_dir, tmp_path, name, kind):
    if (name, kind) not in models.CASES and not long_run:
        pytest.skip("--long")
    stored = REFERENCES[f"{name}/{kind}"]
    batches = [models.make_batch(kind, i, config=models.MODELS[name]) for i in range(4)]
    ours = run_tessera(build_dir, tmp_path, name, batches, [*training_overrides(), "device.threads=2"])
    assert abs(ours["loss"][0] / stored["loss"] - 1) <= 1e-6
    assert np.abs(ours["losses"] / np.array(stored["losses"]) - 1).max() <= 1e-5
    assert np.abs(ours["grad_norms"] / np.array(stored["grad_norms"]) - 1).max() <= 1e-4
    ours["logits"] = ours["logits"][models.valid_rows(batches[0])]
    for key, numbers in stored["tensors"].items():
        # A projection of the error is up to a few times its norm.
        assert disagreement(ours[key], numbers) <= (2e-4 if key.startswith("weight.") else 4e-5), key
