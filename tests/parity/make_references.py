"""Writes references.json, what test_stored.py compares with: PyTorch's results on the parity tests' models.

Run it with the oracle environment after changing models.py or TRAINING: python tests/parity/make_references.py
"""

import json
import tempfile
from pathlib import Path

import models
import oracle
from summaries import summarize


def reference(name: str, kind: str) -> dict:
    config = models.MODELS[name]
    batches = [models.make_batch(kind, i, config=models.MODELS[name]) for i in range(4)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        models.write_model(folder, name)
        first = oracle.first_step(folder, config, batches[0])
        trained = oracle.train(folder, config, batches)
    tensors = {key: summarize(value) for key, value in (first | trained).items() if key.startswith(("grad.", "weight."))}
    tensors["logits"] = summarize(first["logits"][models.valid_rows(batches[0])])
    return {"loss": first["loss"], "losses": trained["losses"].tolist(), "grad_norms": trained["grad_norms"].tolist(),
            "tensors": tensors}


if __name__ == "__main__":
    references = {f"{name}/{kind}": reference(name, kind) for name, kind in models.ALL_CASES}
    text = json.dumps(references, separators=(",", ":")).replace('},"', '},\n"')
    (Path(__file__).parent / "references.json").write_text(text + "\n")
