"""Rotary and ALiBi positions, multi-query attention and the other arguments that make another model of the one given to
prepare(): loss, logits, every gradient and a step equal Transformers' model of that kind, on every layout; weights that fit are
kept, the others drawn alike everywhere; what is saved loads again."""

import json
import logging
import re
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

import models  # noqa: E402

from tessera import Accelerator, init_empty_weights  # noqa: E402
from tessera.errors import ConfigError  # noqa: E402
from tessera.state import AcceleratorState, GradientState  # noqa: E402
from tessera.utils import MegatronLMPlugin  # noqa: E402

SCRIPT = Path(__file__).parent / "scripts" / "changed_models.py"
SAVED_AS = {"multiquery": "gpt_bigcode", "rotary": "starcoder2", "rotary_multiquery": "starcoder2", "alibi": None, "untied": "gpt2",
            "grouped_llama": None}
IDS = torch.randint(0, 97, (4, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def fresh_states(monkeypatch):
    monkeypatch.setenv("TESSERA_THREADS", "1")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def layouts(python_build, tmp_path_factory):
    """The folder of each layout's output; every one goes on from the one before too."""
    folders, before = {}, "none"
    for name, processes, tp, pp in (("one", 1, 1, 1), ("tp2", 2, 2, 1), ("pp2", 2, 1, 2)):
        folders[name] = tmp_path_factory.mktemp(name)
        done = python_build.run(SCRIPT, folders[name], tp, pp, before,
                                launcher=python_build.launcher("--num_processes", processes) if processes > 1 else ())
        (folders[name] / "said").write_text(done.stdout + done.stderr)
        before = folders[name]
    return folders


def distance(ours, theirs) -> float:
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-30))


def by_tessera_name(values: dict, kind: str) -> dict:
    return {name.removeprefix(f"{kind}."): value for name, value in values.items() if name.startswith(f"{kind}.")}


def check(found: dict, loss, logits, gradients: dict, trained: dict) -> None:
    assert abs(float(found["loss"]) / loss - 1) <= 1e-5
    assert distance(found["logits"], logits) <= 1e-5
    ours = by_tessera_name(found, "grad")
    assert ours.keys() == gradients.keys()
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert np.abs(ours[name] - gradient).max() <= 1e-5 * largest, name
    ours = by_tessera_name(found, "trained")
    for name, weight in trained.items():
        assert np.abs(ours[name] - weight).max() <= 2e-5, name


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2"])
@pytest.mark.parametrize("case", [case for case, kind in SAVED_AS.items() if kind])
def test_as_transformers_model_of_that_kind(layouts, case, layout):
    found = dict(np.load(layouts[layout] / f"{case}.npz"))
    model = transformers.AutoModelForCausalLM.from_pretrained(layouts[layout] / case).train()
    config = model.config
    assert (config.model_type, config.bos_token_id, config.eos_token_id) == (SAVED_AS[case], 1, 2)
    output = model(input_ids=IDS, labels=IDS)
    output.loss.backward()

    def arrays(values) -> dict:
        return models.to_tessera_names(config.to_dict(), {name: value.detach().numpy() for name, value in values})

    gradients = arrays((name, parameter.grad) for name, parameter in model.named_parameters())
    if not config.tie_word_embeddings:
        gradients["output_layer.weight"] = model.lm_head.weight.grad.numpy()
    torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.0).step()
    check(found, output.loss.item(), output.logits.detach().numpy(), gradients, arrays(model.named_parameters()))


def alibi_gpt2(weights: dict, ids: torch.Tensor, heads: int = 4) -> torch.Tensor:
    """Logits of a GPT-2 whose positions are ALiBi's: the score of a key falls by the head's slope for each place it is back."""
    slopes = torch.tensor([2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)])
    x, length = weights["wte.weight"][ids], ids.shape[1]
    places = torch.arange(length)
    bias = slopes[:, None, None] * (places[None, :] - places[:, None])
    bias = bias.masked_fill(places[None, :] > places[:, None], float("-inf"))

    def norm(x, name):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(x, name):
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    for i in range(2):
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in
                   linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, dim=-1))
        seen = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias, dim=-1) @ v
        x = x + linear(seen.transpose(1, 2).flatten(2), f"h.{i}.attn.c_proj")
        inner = torch.nn.functional.gelu(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
        x = x + linear(inner, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ weights["wte.weight"].T


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2"])
def test_alibi_as_plain_pytorch(layouts, layout):
    found = dict(np.load(layouts[layout] / "alibi.npz"))
    names = {name.removeprefix("state.transformer."): name for name in found if name.startswith("state.transformer.")}
    assert "wpe.weight" not in names
    weights = {name: torch.nn.Parameter(torch.from_numpy(found[key])) for name, key in names.items()}
    logits = alibi_gpt2(weights, IDS)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    loss.backward()
    zeros = {"transformer.wpe.weight": np.zeros((16, 32), np.float32)}  # which the names of a GPT-2 have besides

    def arrays(values) -> dict:
        named = models.to_tessera_names({"model_type": "gpt2", "n_layer": 2}, zeros | {f"transformer.{n}": v for n, v in values.items()})
        del named["embedding.position_embeddings.weight"]
        return named

    gradients = arrays({name: weight.grad.numpy() for name, weight in weights.items()})
    torch.optim.AdamW(weights.values(), lr=1e-3, eps=1e-5, weight_decay=0.0).step()
    check(found, loss.item(), logits.detach().numpy(), gradients, arrays({n: w.detach().numpy() for n, w in weights.items()}))


@pytest.mark.parametrize("case", SAVED_AS)
def test_layouts_agree_and_go_on_from_each_other(layouts, case):
    first = dict(np.load(layouts["one"] / f"{case}.npz"))
    for layout in ("tp2", "pp2"):
        other = dict(np.load(layouts[layout] / f"{case}.npz"))
        for name, weight in by_tessera_name(first, "state").items():
            assert np.array_equal(weight, other[f"state.{name}"]), name
        for key in ("loss", "after", "resumed"):
            assert abs(float(other[key]) / float(first[key]) - 1) <= 1e-5
    assert float(first["after"]) < float(first["loss"])


@pytest.mark.parametrize("case, drawn, dropped", [
    ("multiquery", "attn.c_attn", None), ("rotary", None, "wpe"), ("rotary_multiquery", "attn.c_attn", "wpe"), ("alibi", None, "wpe"),
    ("untied", "lm_head", None), ("grouped_llama", r"[kv]_proj.weight|[qkv]_proj.bias|norm.bias", None)])
def test_what_fits_is_kept_and_one_line_says_so(layouts, case, drawn, dropped):
    found = dict(np.load(layouts["tp2"] / f"{case}.npz"))
    given, state = by_tessera_name(found, "given"), by_tessera_name(found, "state")
    assert [name for name in given if name not in state] == [name for name in given if dropped and dropped in name]
    for name, value in state.items():
        if drawn is None or not re.search(drawn, name):
            assert np.array_equal(value, given[name]), name
        elif name.endswith("weight") and "norm" not in name:
            assert name not in given or value.shape != given[name].shape, name
            assert 0.015 <= value.std() <= 0.025, name  # initializer_range 0.02, not zeros
    facts = json.loads((layouts["tp2"] / f"{case}.json").read_text())
    kept = [name for name in given if name in state]
    assert facts["names"][:len(kept)] == kept and set(facts["names"][len(kept):]) == state.keys() - given.keys()
    assert facts["shapes"] == [list(state[name].shape) for name in facts["names"]] and facts["grouped"] == len(state)
    assert "changed by the plugin" in facts["print"] and f"{sum(value.size for value in state.values()):,}" in facts["print"]
    said = [line for line in (layouts["tp2"] / "said").read_text().splitlines() if "makes another model of" in line]
    assert len(said) == len(SAVED_AS)  # one rank says it
    line = said[list(SAVED_AS).index(case)]
    assert ("Drawn anew from the seed: " in line) == bool(drawn) and "keep their weights" in line
    assert (f"eft out: transformer.{dropped}.weight" in line) if dropped else ("eft out" not in line)


def test_a_folder_of_tesseras_says_so_and_loads_again(layouts):
    from tessera.causal_lm import AdamW, CausalLM

    said = (layouts["one"] / "said").read_text()
    assert re.search("wrote a Tessera folder .*alibi, as Transformers has no such model .position_embedding alibi", said)
    assert "wrote a model of the type starcoder2" in said and "wrote a model of the type gpt_bigcode" in said
    for case in ("alibi", "grouped_llama"):
        folder = layouts["pp2"] / case
        assert not (folder / "config.json").exists()
        accelerator = Accelerator(cpu=True)
        model, _ = accelerator.prepare(CausalLM.from_pretrained(folder), AdamW(lr=1e-3))
        found = dict(np.load(layouts["pp2"] / f"{case}.npz"))
        assert abs(float(model(input_ids=IDS.numpy(), labels=IDS.numpy()).loss) / float(found["loss"]) - 1) <= 1e-5
        model.save_pretrained(folder.with_name(f"{case}_again"))
        assert (folder.with_name(f"{case}_again") / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        accelerator.free_memory()
        AcceleratorState._reset_state(reset_partial_state=True)


# What is refused, and what is not.

def gpt2() -> torch.nn.Module:
    torch.manual_seed(1)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=97, n_positions=16))


def prepare(model, **arguments):
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(other_megatron_args=arguments))
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


@pytest.mark.parametrize("arguments, message", [
    ({"position_embedding_type": "sinus"}, "position_embedding_type is 'sinus'; it must be one of absolute, .*rotary.*alibi"),
    ({"position_embedding_type": "rotery"}, "did you mean 'rotary'"),
    ({"attention_head_type": "multiqueri"}, "did you mean 'multiquery'"),
    ({"group_query_attention": True, "num_query_groups": 3}, "num_kv_heads"),
    ({"position_embedding_type": "rotary", "kv_channels": 7}, "rotary"), ({"num_layers": 3}, "asks for num_layers 3")])
def test_wrong_values_are_refused_and_the_model_stays(arguments, message):
    model = gpt2()
    with pytest.raises(ConfigError, match=message):
        prepare(model, **arguments)
    assert model.transformer.wpe.weight.shape == (16, 32)  # untouched


def test_weights_that_were_read_are_kept_unless_told_otherwise(tmp_path, caplog):
    gpt2().save_pretrained(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="position_embedding 'alibi'.*pretrained weights.*'learned'.*'reinitialize': True"):
        prepare(read, position_embedding_type="alibi")
    read.train()
    with pytest.raises(ConfigError, match="pretrained weights"):
        prepare(read, position_embedding_type="alibi")
    with init_empty_weights():  # prepare() would read the folder
        empty = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    with pytest.raises(ConfigError, match="pretrained weights"):
        prepare(empty, attention_head_type="multiquery")
    original = gpt2().state_dict()
    for model in (read, empty):
        with caplog.at_level(logging.WARNING, "tessera"):
            prepared, _ = prepare(model, position_embedding_type="alibi", attention_head_type="multiquery", reinitialize=True)
        state = prepared.state_dict()
        assert torch.equal(state["transformer.h.1.mlp.c_fc.weight"], original["transformer.h.1.mlp.c_fc.weight"])
        assert state["transformer.h.1.attn.c_attn.weight"].shape == (32, 48) and "transformer.wpe.weight" not in state
    assert "Drawn anew from the seed: transformer.h.*.attn.c_attn.weight" in caplog.text
    # A config that came from a folder is no weights.
    prepare(transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path)), position_embedding_type="alibi")


def test_what_asks_for_nothing_changes_nothing(caplog):
    with caplog.at_level(logging.WARNING, "tessera"):
        prepared, _ = prepare(gpt2(), position_embedding_type="absolute", attention_head_type="multihead", rotary_base=500,
                              reinitialize=True)
    assert "the plugin makes" not in caplog.text and "rotary_base has no effect" in caplog.text
    assert "'reinitialize' has no effect here" in caplog.text
    assert "changed by the plugin" not in repr(prepared)


def test_a_changed_models_own_state_dict_loads_and_others_are_refused():
    from tessera.errors import InvalidArgument

    prepared, optimizer = prepare(gpt2(), attention_head_type="multiquery")
    state = prepared.state_dict()
    prepared.load_state_dict({name: value * 2 for name, value in state.items()})
    assert torch.equal(prepared.state_dict()["transformer.h.0.attn.c_attn.bias"], 2 * state["transformer.h.0.attn.c_attn.bias"])
    with pytest.raises(InvalidArgument, match="c_attn.*has the shape"):
        prepared.load_state_dict(gpt2().state_dict())
    with pytest.raises(ConfigError, match="leave state_dict out"):
        prepared.save_pretrained("nowhere", state_dict=state)
    prepared(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    moments = optimizer.full_state_dict()["state"]
    assert sorted(list(each["exp_avg"].shape) for each in moments.values()) == sorted(list(value.shape) for value in prepared.parameters())


def test_an_optimizer_that_has_made_steps_is_refused():
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    before = [len(group["params"]) for group in optimizer.param_groups]
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(use_rotary_position_embeddings=True))
    with pytest.raises(ConfigError, match="has made steps with a model that the plugin changes"):
        accelerator.prepare(model, optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == before
