"""What prepare() reads of a model is the module tree that is there; arguments of a call count or are refused."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import mutations  # noqa: E402

from tessera import Accelerator  # noqa: E402
from tessera.errors import ConfigError, InvalidArgument  # noqa: E402
from tessera.state import AcceleratorState, GradientState  # noqa: E402

SCRIPT = Path(__file__).parent / "scripts" / "call_arguments.py"
IDS = torch.randint(0, 90, (3, 10), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def fresh_states(monkeypatch):
    monkeypatch.setenv("TESSERA_THREADS", "1")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def made(family: str = "gpt2", change=lambda model: None, **config):
    return mutations.make(family, mutations.Mutation("here", config=config, model=change))


def prepared(model):
    return Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]


def test_dropout_of_the_modules_counts():
    """As TRL's disable_dropout leaves a model: p of the modules is 0, the config says 0.5."""
    def off(model):
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0

    model = made(change=off, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    expected = model(input_ids=IDS, labels=IDS).loss.item()
    assert prepared(model)(input_ids=IDS, labels=IDS).loss.item() == pytest.approx(expected, rel=1e-5)


def test_mixed_dropout_is_refused():
    with pytest.raises(ConfigError, match="'transformer.h.0.mlp.dropout.p' is 0.25"):
        prepared(made(change=lambda model: setattr(model.transformer.h[0].mlp.dropout, "p", 0.25)))


def test_own_loss_is_refused_with_a_way():
    with pytest.raises(ConfigError, match="loss_function.*call the model without labels"):
        prepared(made(change=lambda model: setattr(model, "loss_function", mutations.my_loss)))
    AcceleratorState._reset_state(reset_partial_state=True)
    model = prepared(made())
    with pytest.raises(ConfigError, match="loss_function"):
        model.loss_function = mutations.my_loss


def test_patched_functions_are_refused(monkeypatch):
    """As kernel libraries patch Transformers: its classes and functions, for all models at once."""
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *more, **named: (q, k))
    with pytest.raises(ConfigError, match="apply_rotary_pos_emb was replaced"):
        prepared(made("llama"))
    monkeypatch.undo()
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: x)
    with pytest.raises(ConfigError, match="Linear.forward was replaced"):
        prepared(made("llama"))
    monkeypatch.undo()

    class Norm(modeling_llama.LlamaRMSNorm):
        pass

    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", Norm)
    with pytest.raises(ConfigError, match="LlamaRMSNorm was replaced by .*Norm"):
        prepared(made("llama"))
    monkeypatch.undo()
    transformers.AttentionInterface.register("mine", lambda *given, **named: None)
    with pytest.raises(ConfigError, match="attn_implementation 'mine'"):
        prepared(made("llama", lambda model: setattr(model.config, "_attn_implementation", "mine")))


@pytest.mark.parametrize("family", mutations.CONFIGS)
def test_plain_models_pass(family, tmp_path):
    """What scripts do to a model and what loads one is no change of it."""
    from accelerate import init_empty_weights

    from tessera import PartialState
    from tessera.engine.model_description import describe_model
    from tessera.engine.model_check import check_model

    PartialState(cpu=True)
    model = made(family)
    model.config.pad_token_id = 3  # of the config alone: the module has no padding_idx
    model.config.use_cache = False
    model.forward = torch.compile(model.forward, backend="eager")
    check_model(model, describe_model(model).config_json)
    del model.forward
    model.enable_input_require_grads()
    model.compile(backend="eager")
    check_model(model, describe_model(model).config_json)
    model.config.pad_token_id = None
    model.save_pretrained(tmp_path)
    with init_empty_weights():
        empty = transformers.AutoModelForCausalLM.from_config(model.config)
    for other in (empty, transformers.AutoModelForCausalLM.from_pretrained(tmp_path),
                  transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager"),
                  made(family).to(torch.bfloat16)):
        check_model(other, describe_model(other).config_json)


@pytest.mark.parametrize("arguments, word", [
    ({"logits_to_keep": 2, "labels": IDS}, "logits_to_keep with labels"), ({"num_logits_to_keep": 2}, "num_logits_to_keep"),
    ({"use_cache": True}, "use_cache"), ({"shift_labels": IDS}, "shift_labels"), ({"ignore_index": 0, "labels": IDS}, "ignore_index"),
    ({"cache_position": IDS[0]}, "cache_position"), ({"output_hidden_states": True}, "output_hidden_states"),
    ({"is_causal": False}, "is_causal"), ({"num_items_in_batch": 0, "labels": IDS}, "num_items_in_batch"),
    ({"token_type_ids": IDS}, "token_type_ids")])
def test_arguments_that_are_refused(arguments, word):
    with pytest.raises(InvalidArgument, match=word):
        prepared(made())(input_ids=IDS, **arguments)


def test_arguments_by_place():
    """GPT-2's second argument is the cache, its third the mask."""
    model = made()
    mask = torch.ones_like(IDS)
    mask[0, 6:] = 0
    with torch.no_grad():
        expected = model(IDS, None, mask).logits
        model = prepared(model).eval()
        found = model(IDS, None, mask).logits
        assert (found - expected)[mask.bool()].abs().max() <= 1e-5
        with pytest.raises(InvalidArgument, match="(past_key_values|cache): .* a cache of keys"):
            model(IDS, mask)


def test_train_steps_refuse_what_they_do_not_use():
    from tessera.engine.step_runner import Recorder
    from tessera.utils.megatron_lm import tokens_and_labels

    with pytest.raises(InvalidArgument, match="num_items_in_batch"):
        tokens_and_labels({"input_ids": IDS, "labels": IDS, "num_items_in_batch": 5})
    with pytest.raises(InvalidArgument, match="loss_mask"):
        Recorder()(IDS, labels=IDS, loss_mask=torch.ones(1, 10))


@pytest.mark.parametrize("processes, tp, pp", [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_arguments_on_layouts(python_build, tmp_path, processes, tp, pp):
    output = tmp_path / "errors.json"
    launcher = python_build.launcher("--num_processes", processes) if processes > 1 else None
    python_build.run(SCRIPT, output, tp, pp, launcher=launcher)
    errors = json.loads(output.read_text())
    assert max(errors.values()) <= 1e-5, errors
