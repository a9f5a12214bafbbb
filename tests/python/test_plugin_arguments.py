"""other_megatron_args name by name: each changes something of a run, is said once to have no effect, or is refused. Names of the
plugin's fields are in test_plugin.py."""

import json

import plugin_support
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import plugin_runs as see  # noqa: E402
from plugin_support import IDS, make_encoder, prepared, step  # noqa: E402

from tessera import Accelerator  # noqa: E402
from tessera.comm import process_group  # noqa: E402
from tessera.errors import ConfigError  # noqa: E402
from tessera.plugin import megatron_args  # noqa: E402
from tessera.utils import InitProcessGroupKwargs, MegatronLMPlugin  # noqa: E402

END = int(IDS[0, 2])
fresh_states = plugin_support.fresh_states


def with_end(model):
    model.config.eos_token_id = END
    return model


def loss(arguments, **fields):
    return see.second_loss(other_megatron_args=arguments, **fields)


def loss_of_mixture(arguments):
    around = {"moe_router_load_balancing_type": "seq_aux_loss"} if "moe_aux_loss_coeff" in arguments else {}
    return loss({**around, **arguments}, change=lambda model: plugin_support.make_mixture())


def new_model(arguments):
    return see.new_model(other_megatron_args=arguments)


def rates(arguments):
    style = "WSD" if any("wsd" in name for name in arguments) else "linear"
    around = {"lr_wsd_decay_iters": 2} if style == "WSD" else {}
    return see.rates(train_iters=4, lr_warmup_iters=2, lr_decay_style=style, other_megatron_args={**around, **arguments})


def index_text(arguments):
    return see.indexed_run({"data_path": None, "split": None}, other_megatron_args=arguments)


def loss_scales(arguments):
    """Of four steps in fp16, the third and fourth of which overflow."""
    accelerator, model, optimizer = prepared(mixed_precision="fp16", other_megatron_args={"initial_loss_scale": 4.0, **arguments})
    found = []
    for factor in (1.0, 1.0, float("inf"), float("inf")):
        accelerator.backward(model(input_ids=IDS, labels=IDS).loss * factor)
        optimizer.step()
        found.append(optimizer.last_step["loss_scale"])
    return found


# name: (its value, what is seen of a run with these arguments)
MODEL = {"position_embedding_type": "rotary", "add_position_embedding": False, "attention_head_type": "multiquery",
         "normalization": "RMSNorm", "layernorm_epsilon": 0.5, "norm_epsilon": 0.5, "swiglu": True, "ffn_hidden_size": 96,
         "kv_channels": 4, "qk_layernorm": True, "window_size": (2, 0), "untie_embeddings_and_output_weights": True, "disable_bias_linear": True, "add_bias_linear": False,
         "init_method_std": 0.5, "seed": 77}
ROWS = {
    **{name: (value, new_model) for name, value in MODEL.items()},
    "loss_scale": (64.0, loss_scales), "initial_loss_scale": (128.0, loss_scales), "min_loss_scale": (3.0, loss_scales),
    "loss_scale_window": (1, loss_scales), "hysteresis": (1, loss_scales),
    "moe_aux_loss_coeff": (0.5, loss_of_mixture), "moe_z_loss_coeff": (0.5, loss_of_mixture),
    "lr_warmup_init": (0.005, rates), "lr_wsd_decay_iters": (3, rates), "lr_wsd_decay_style": ("exponential", rates),
    "reset_position_ids": (True, lambda arguments: loss(arguments, change=with_end)),
    "reset_attention_mask": (True, lambda arguments: loss(arguments, change=with_end)),
    "eos_token_id": (END, lambda arguments: loss(arguments, change=lambda model: setattr(model.config, "eos_token_id", 39) or model,
                                                 eod_mask_loss=True)),
    "model_return_dict": (False, lambda arguments: isinstance(prepared(other_megatron_args=arguments)[1](input_ids=IDS, labels=IDS),
                                                              torch.Tensor)),
}
# Beside others, for those that say something of a model only then.
BESIDE = {"rotary_base": (5.0, {"position_embedding_type": "rotary"}), "rotary_percent": (0.5, {"position_embedding_type": "rotary"}),
          "rotary_interleaved": (True, {"position_embedding_type": "rotary"}),
          "use_rope_scaling": (True, {"position_embedding_type": "rotary"}),
          "rotary_seq_len_interpolation_factor": (4, {"position_embedding_type": "rotary"}),
          "window_attn_skip_freq": (2, {"window_size": (2, 0)}),
          "group_query_attention": (True, {"num_query_groups": 1}), "num_query_groups": (1, {"group_query_attention": True, "num_query_groups": 2}),
          "add_qkv_bias": (True, {"disable_bias_linear": True})}
# What the model given to prepare() says: another value is refused.
CONTRADICTED = {"num_layers": 9, "hidden_size": 9, "num_attention_heads": 9, "max_position_embeddings": 9, "orig_vocab_size": 9,
                "vocab_size": 9}
FOR_STEPS = ("merge_file", "vocab_extra_ids", "tokenizer_type", "tokenizer_model", "num_labels", "bert_binary_head")
OF_MASKING = ("mask_prob", "short_seq_prob", "masking_max_ngram", "masking_do_full_word", "masking_use_longer_ngrams",
              "masking_use_geometric_distribution", "cls_id", "sep_id", "mask_id", "pad_id")  # test_sentence_loaders.py
ALONE = (*OF_MASKING, "moe_router_load_balancing_type",  # test_plugin_settings.py
         "data_path", "split", "data_cache_path", "vocab_file", "distributed_timeout_minutes", "model_type_name",
         "rope_scaling_factor",  # of positions beyond thousands: test_plugin_settings.py
         "tp_comm_overlap", "cp_comm_type", "enable_cuda_graph", "openai_gelu",  # tests of their own below, but
         "pretraining_flag", "reinitialize")  # in test_megatron_engine.py and test_changed_models.py


def test_every_argument_has_a_row():
    kinds = {name: effect.kind for name, effect in megatron_args.ARGUMENTS.items()}
    rows = {*ROWS, *BESIDE, *CONTRADICTED, *FOR_STEPS, *ALONE}
    assert {name for name, kind in kinds.items() if kind not in ("field", "warns", "refuses")} == rows


@pytest.mark.parametrize("name", ROWS)
def test_what_an_argument_changes(name):
    value, run = ROWS[name]
    assert run({name: value}) != run({})


@pytest.mark.parametrize("name", BESIDE)
def test_what_an_argument_changes_beside_others(name):
    value, around = BESIDE[name]
    usual = see.failure(lambda: new_model(around)) or new_model(around)
    assert new_model({**around, name: value}) != usual


@pytest.mark.parametrize("name", CONTRADICTED)
def test_what_the_model_says_is_not_contradicted(name):
    assert "and the model given to prepare() has" in see.failure(lambda: new_model({name: CONTRADICTED[name]}))


@pytest.mark.parametrize("name", [name for name, effect in megatron_args.ARGUMENTS.items() if effect.kind in ("warns", "refuses")])
def test_said_or_refused(name, caplog):
    kind, why = megatron_args.ARGUMENTS[name][:2]
    if kind == "refuses":
        with pytest.raises(ConfigError) as error:
            MegatronLMPlugin(other_megatron_args={name: 1})
        assert f"'{name}' is refused: {why}" in str(error.value)
        return
    found = see.said(caplog, lambda: [MegatronLMPlugin(other_megatron_args={name: 1}) for _ in range(2)])
    assert len(found) == 1 and f"'{name}' has no effect in Tessera: {why}" in found[0]


@pytest.mark.parametrize("name", [name for name, effect in megatron_args.ARGUMENTS.items() if effect.kind == "field" and effect.detail != name])
def test_other_names_of_fields(name):
    """The value comes to the field, whose effect test_plugin.py shows."""
    field = megatron_args.ARGUMENTS[name].detail
    value = {"gradient_clipping": 0.25, "tp_degree": 2, "pp_degree": 2}.get(field, True)
    assert getattr(MegatronLMPlugin(other_megatron_args={name: value}), field) == value != getattr(MegatronLMPlugin(), field)


def test_indexed_data(tmp_path):
    prefix = plugin_support.indexed(tmp_path)
    kept = tmp_path / "kept"
    usual = index_text({"data_path": prefix, "split": "900,50,50"})
    assert index_text({"data_path": prefix, "split": "500,250,250"}).counts != usual.counts
    assert "data_path" in see.failure(lambda: index_text({"split": "900,50,50"}))
    assert index_text({"data_path": prefix, "split": "900,50,50", "data_cache_path": str(kept)}) == usual and list(kept.iterdir())


def test_what_only_loaders_of_indexed_data_read(caplog, tmp_path):
    fields = dict(eval_iters=7, eval_interval=9, consumed_samples=[2], megatron_dataset_flag=True,
                  custom_megatron_datasets_provider_function=see.own_provider,
                  other_megatron_args={"data_path": "x", "split": "1,1,1", "data_cache_path": "y"})
    found = see.said(caplog, lambda: [see.loaded(**fields) for _ in range(2)])
    names = ["data_path", "split", "data_cache_path", *[name for name in fields if name != "other_megatron_args"]]
    assert len(found) == len(names) and all(sum(f"{name}" in text.split(" has no effect here: ")[0] for text in found) >= 1
                                            for name in names)
    assert not [text for text in see.said(caplog, lambda: see.indexed_run(eval_iters=7, consumed_samples=[2])) if "no effect" in text]


@pytest.mark.parametrize("name", FOR_STEPS)
def test_what_only_custom_steps_see(name, caplog):
    seen = []

    class Step(see.Scaled):
        def __init__(self, args):
            seen.append(getattr(args, name))
            super().__init__(args)

    arguments = {"other_megatron_args": {name: 3}}
    assert not see.said(caplog, lambda: prepared(custom_train_step_class=Step, **arguments)) and seen == [3]
    found = see.said(caplog, lambda: [prepared(**arguments) for _ in range(2)])
    assert len(found) == 1 and f"'{name}' has no effect here" in found[0]


@pytest.mark.parametrize("name", ["vocab_file", "eos_token_id"])
def test_the_end_of_documents_without_a_rule(name, caplog, tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"<|endoftext|>": END}))
    arguments = {name: {"vocab_file": str(tmp_path / "vocab.json")}.get(name, END)}
    assert not see.said(caplog, lambda: [loss(arguments), loss(arguments, eod_mask_loss=True)])  # texts end with it
    plugin_support.forget_states()
    encoder = MegatronLMPlugin(other_megatron_args=arguments)
    found = see.said(caplog, lambda: [Accelerator(megatron_lm_plugin=encoder).prepare(make_encoder()) for _ in range(2)])
    assert len(found) == 1 and f"'{name}' has no effect here: it says which id ends a document" in found[0]


def test_the_gelu_of_openai():
    exact = {**see.NEW, "activation_function": "gelu"}
    assert see.new_model(exact, other_megatron_args={"openai_gelu": True}) == see.new_model() != see.new_model(exact)


def test_the_kind_of_model():
    MegatronLMPlugin(other_megatron_args={"model_type_name": "gpt"})
    with pytest.raises(ConfigError, match="'model_type_name' is 'retro'; it is gpt, bert or t5"):
        MegatronLMPlugin(other_megatron_args={"model_type_name": "retro"})
    assert "'t5', and a gpt2 makes it 'gpt'" in see.failure(lambda: prepared(other_megatron_args={"model_type_name": "t5"}))
    assert "'bert', and a gpt2 makes it 'gpt'" in see.failure(lambda: prepared(other_megatron_args={"model_type_name": "bert"}))


def test_the_deadline(monkeypatch, caplog):
    told = []
    connect = process_group.connect
    monkeypatch.setattr(process_group, "connect", lambda seconds: told.append(seconds) or connect(seconds))

    def accelerator(minutes, *handlers):
        plugin_support.forget_states()
        return plugin_support.Accelerator(kwargs_handlers=list(handlers),
                                          megatron_lm_plugin=MegatronLMPlugin(other_megatron_args={"distributed_timeout_minutes": minutes}))

    from datetime import timedelta

    accelerator(2)
    assert told == [120.0]
    accelerator(2, InitProcessGroupKwargs(timeout=timedelta(minutes=2)))
    with pytest.raises(ConfigError, match="InitProcessGroupKwargs say timeout"):
        accelerator(2, InitProcessGroupKwargs(timeout=timedelta(minutes=3)))
    with pytest.raises(ConfigError, match="distributed_timeout_minutes is 0"):
        accelerator(0)
    plugin_support.forget_states()
    plugin_support.Accelerator()
    plugin_support.AcceleratorState._reset_state()
    found = see.said(caplog, lambda: plugin_support.Accelerator(
        megatron_lm_plugin=MegatronLMPlugin(other_megatron_args={"distributed_timeout_minutes": 2})))
    assert len(found) == 1 and "were connected before, with a deadline of 600 s" in found[0]


def test_switches_of_the_device():
    """On a GPU alone, or with several chunks: what reaches the engine is checked by it."""
    for name, value in (("tp_comm_overlap", True), ("tp_comm_overlap", False), ("enable_cuda_graph", False)):
        assert step(*prepared(other_megatron_args={name: value})) == pytest.approx(step(*prepared()), rel=1e-6)
