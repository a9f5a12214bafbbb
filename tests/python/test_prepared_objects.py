"""After prepare() the caller's objects are honoured or say what to call instead, on every kind of layout."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from plugin_support import fresh_states  # noqa: E402, F401

SCRIPT = Path(__file__).parent / "scripts" / "prepared_objects.py"
LAYOUTS = {1: ["1,1,0"], 2: ["2,1,0", "1,2,0", "1,1,1"]}
READ, WRITE = "full_parameters(model)", "load_parameters(model"
SAID = {
    "averages": {
        "mul_": WRITE, "copy_": WRITE, "data.copy_": WRITE, "data =": WRITE, "init": WRITE, "item": READ, "cpu": READ, "clone": READ,
        "norm": READ, "pow": READ, "layers": READ, "head": READ, "embeddings": READ, "save": "save_pretrained()", "pickle": "save_pretrained()",
        "hook": "full_gradients(model)",
        "deepcopy": READ, "average": READ, "old model": "use the model that prepare() returned",
        "old state": "use the model that prepare() returned", "old step": "optimizer = accelerator.prepare(optimizer)",
        "half": "before prepare()", "to": "mixed_precision", "unknown name": "no parameter 'other'",
        "missing names": "'transformer.wte.weight' is missing (27 such names)", "shape": "has the shape (3,), the model needs (16,)",
        "not values": "'transformer.ln_f.bias' cannot be read as numbers: "},
    "groups_of_one": {"unequal": "put both into one group"},
    "evaluated_first": {},
    "trained_first": {"gradient": "before the first backward, or drop the gradient by model.zero_grad()",
                      "early loss": "called before its optimizer was prepared"},
    "subset": {},
    "penalty": {},
    "left_out": {"backward": "optimizer = accelerator.prepare(optimizer)", "step": "optimizer = accelerator.prepare(optimizer)"},
    "refused_optimizers": {"own step": "Own.step is not torch.optim.AdamW's own", "hook": "step hook print", "replaced step": "SGD.step",
                           "hook afterwards": "step hook print"}}


@pytest.mark.parametrize("processes", LAYOUTS)
def test_objects_after_prepare_count_or_say_why_not(python_build, tmp_path, processes):
    output = tmp_path / "result.json"
    done = python_build.run(SCRIPT, output, *LAYOUTS[processes], launcher=python_build.launcher("--num_processes", processes))
    results = json.loads(output.read_text())
    assert len(results) == len(SAID) * len(LAYOUTS[processes])
    for case, result in results.items():
        words = SAID[case.partition(" ")[0]]
        assert result["said"].keys() == words.keys(), case
        for name, text in result["said"].items():
            assert words[name] in text, (case, name, text)
        assert all(abs(value) <= 1e-5 for value in result["numbers"].values()), (case, result["numbers"])
    shown = results[f"averages {LAYOUTS[processes][0]}"]["print"]
    assert "gpt2: 2 layers of width 16, vocabulary 40" in shown and "7,488 in 28 tensors; 7,488 trained, 0 frozen" in shown
    assert f"tp 0 of {processes}, pp 0 of 1, dp 0 of 1" in shown
    assert "27 parameters have requires_grad=True and are in none of the optimizer's groups" in done.stdout + done.stderr


def test_the_order_of_prepare_does_not_matter():
    """What loaders say of a micro-batch counts for a model that comes after them; a prepare() that fails leaves what was there."""
    import torch

    from tessera import Accelerator, CausalLM
    from tessera.causal_lm import AdamW
    from tessera.errors import ConfigError

    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 8}
    loader = torch.utils.data.DataLoader(list(range(12)), batch_size=3)
    accelerator = Accelerator(cpu=True)
    before = accelerator._prepared
    with pytest.raises(ConfigError, match="an optimizer before its model"):
        accelerator.prepare(loader, AdamW())
    assert accelerator._prepared is before
    accelerator.prepare(loader)
    model, optimizer = accelerator.prepare(CausalLM(config), AdamW())
    training = model._session.training
    assert training.micro_batch_size == 3 and training.optimizer is optimizer.description
    with pytest.raises(ConfigError, match="two models"):
        accelerator.prepare(CausalLM(config))
    assert model._session.training is training and accelerator._models == (model,)
