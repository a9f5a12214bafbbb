"""MegatronLMPlugin and its neighbours: values, variables, the native configuration that comes of them, methods."""

import dataclasses
import logging

import pytest

from tessera.errors import ConfigError
from tessera.plugin.config_map import micro_batch_size_of, native_config, resolve_horizon, sequence_length_of
from tessera.plugin.fields import FIELDS as TABLE, data_ranks, variables
from tessera.utils.dataclasses import MegatronLMPlugin, add_model_config_to_megatron_parser

GPT2 = {"model_type": "gpt2", "n_layer": 8, "n_embd": 64, "n_head": 4, "n_positions": 128, "vocab_size": 257}
LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 128, "max_position_embeddings": 256, "vocab_size": 257, "rms_norm_eps": 1e-6}
T5 = {"model_type": "t5", "d_model": 64, "num_layers": 2, "num_heads": 4, "d_kv": 16, "d_ff": 128, "vocab_size": 257}
FIELDS = [field.name for field in dataclasses.fields(MegatronLMPlugin)]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith(("MEGATRON_LM_", "ACCELERATE_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr("tessera.comm.warnings._told", set())


def flat(config: dict) -> dict:
    return {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}


def config_of(world=8, hf=GPT2, **fields) -> dict:
    more = {key: fields.pop(key) for key in ("pretrained", "mixed_precision", "optimizer_defaults", "grad_scaler") if key in fields}
    return flat(native_config(plugin=MegatronLMPlugin(**fields), hf_config=hf, world_size=world, micro_batch_size=2, **more))


def changed(base: dict, **fields) -> dict:
    """The native keys that the fields change, on top of `base` fields."""
    before, after = config_of(**base), config_of(**base, **fields)
    return {key: value for key, value in after.items() if before.get(key, object()) != value}


# field: (fields around it, its value, what the native configuration then says)
IN_CONFIG = {
    "tp_degree": ({}, 2, {"parallel.tensor": 2, "parallel.data": 4, "training.global_batch_size": 8}),
    "pp_degree": ({}, 4, {"parallel.pipeline": 4, "parallel.data": 2, "training.global_batch_size": 4}),
    "context_parallel_size": ({}, 2, {"parallel.context": 2, "parallel.data": 4, "training.global_batch_size": 8}),
    "expert_model_parallel_size": ({}, 2, {"parallel.expert": 2}),
    "decoder_last_pipeline_num_layers": ({"pp_degree": 4}, 2, {"parallel.pipeline_layout": "2,2,2,2"}),
    "recompute_granularity": ({}, "full", {"training.recompute": "full", "training.recompute_method": "uniform",
                                           "training.recompute_layers": 1, "training.recompute_partition": False}),
    "recompute_method": ({"recompute_granularity": "full"}, "block", {"training.recompute_method": "block"}),
    "recompute_num_layers": ({"recompute_granularity": "full"}, 3, {"training.recompute_layers": 3}),
    "attention_dropout": ({}, 0.3, {"model.attention_dropout": 0.3}),
    "hidden_dropout": ({}, 0.2, {"model.dropout": 0.2}),
    "use_rotary_position_embeddings": ({}, True, {"model.position_embedding": "rotary"}),
    "num_micro_batches": ({}, 4, {"training.global_batch_size": 64}),
    "gradient_clipping": ({}, 0.5, {"optimizer.clip_grad": 0.5}),
    "sequence_parallelism": ({"tp_degree": 2}, True, {"parallel.sequence": True}),
    "recompute_activations": ({}, True, {"training.recompute": "selective"}),
    "use_distributed_optimizer": ({}, True, {"parallel.zero_stage": 1}),
    "use_custom_fsdp": ({}, True, {"parallel.zero_stage": 3}),
    "use_precision_aware_optimizer": ({"mixed_precision": "bf16"}, True, {"optimizer.split_main_weights": True}),
    "optimizer_cpu_offload": ({}, True, {"offload.optimizer": "cpu"}),
    "num_layers_per_virtual_pipeline_stage": (
        {"pp_degree": 2, "num_micro_batches": 4}, 2, {"parallel.schedule": "interleaved", "parallel.virtual_stages": 2}),
    "pipeline_model_parallel_split_rank": ({"pp_degree": 2, "hf": T5}, 1, {"parallel.pipeline_split_rank": 1}),
    "seq_length": ({}, 64, {"training.seq_length": 64}),
    "decoder_seq_length": ({}, 32, {"training.seq_length": 32}),
    "other_megatron_args": ({}, {"seed": 77}, {"training.seed": 77}),
    "checkpoint_num_layers": ({"recompute_granularity": "full"}, 2, {"training.recompute_layers": 2}),
    "distribute_checkpointed_activations": (
        {"tp_degree": 2, "recompute_granularity": "full"}, True, {"training.recompute_partition": True}),
    "partition_activations": (
        {"tp_degree": 2, "recompute_granularity": "full"}, True, {"training.recompute_partition": True}),
    "check_for_nan_in_loss_and_grad": ({}, True, {"training.max_skipped_steps": 1}),
}

LENGTH = {"train_iters": 100}
# field: (fields around it, its value, rate or weight decay at step 40 with max_lr 1 and weight decay 0.1, what it is)
IN_HORIZON = {
    "train_iters": ({}, 80, "lr", 0.5),
    "train_samples": ({"num_micro_batches": 2}, 1600, "lr", 0.6),  # 4 data ranks x 2 x 2 samples: 100 steps
    "weight_decay_incr_style": ({**LENGTH, "start_weight_decay": 0.0, "end_weight_decay": 1.0}, "linear", "wd", 0.4),
    "start_weight_decay": ({**LENGTH, "weight_decay_incr_style": "linear", "end_weight_decay": 1.0}, 0.5, "wd", 0.7),
    "end_weight_decay": ({**LENGTH, "weight_decay_incr_style": "linear", "start_weight_decay": 0.0}, 2.0, "wd", 0.8),
    "lr_decay_style": (LENGTH, "constant", "lr", 1.0),
    "lr_decay_iters": (LENGTH, 50, "lr", 0.2),
    "lr_decay_samples": ({"train_samples": 800}, 400, "lr", 0.2),
    "lr_warmup_iters": (LENGTH, 80, "lr", 0.5),
    "lr_warmup_samples": ({"train_samples": 800}, 640, "lr", 0.5),
    "lr_warmup_fraction": (LENGTH, 0.8, "lr", 0.5),
    "min_lr": (LENGTH, 0.5, "lr", 0.8),
}


@pytest.mark.parametrize("name", IN_CONFIG)
def test_native_keys(name):
    around, value, expected = IN_CONFIG[name]
    assert changed(around, **{name: value}) == expected
    if TABLE[name].effect == "config":
        assert TABLE[name].detail == TABLE[name].yaml in expected


@pytest.mark.parametrize("name", IN_HORIZON)
def test_rates(name):
    around, value, what, expected = IN_HORIZON[name]
    horizon = resolve_horizon(MegatronLMPlugin(**around, **{name: value}), dp=4, micro_batch_size=2,
                              num_micro_batches=around.get("num_micro_batches", 1))
    found = horizon.lr_at(40, 1.0) if what == "lr" else horizon.weight_decay_at(40, 0.1)
    assert found == pytest.approx(expected, abs=1e-12)


def test_defaults():
    assert {field.name: field.default for field in dataclasses.fields(MegatronLMPlugin) if field.default is not None} == {
        name: row.default for name, row in TABLE.items() if row.default is not None and not row.key}


def test_fields_are_accelerates():
    accelerate = pytest.importorskip("accelerate.utils")
    theirs = [field.name for field in dataclasses.fields(accelerate.MegatronLMPlugin)]
    assert FIELDS[:len(theirs)] == theirs
    ours, other = MegatronLMPlugin(tp_degree=2, pp_degree=2), accelerate.MegatronLMPlugin(tp_degree=2, pp_degree=2)
    assert set(other.megatron_lm_default_args) == set(ours.megatron_lm_default_args)
    differs = {name for name in theirs if getattr(ours, name) != getattr(other, name)}
    # Decision 3 on the defaults of Accelerate 1.13 and later.
    assert differs == {"context_parallel_size", "recompute_granularity", "recompute_method", "recompute_num_layers",
                       "attention_backend", "attention_dropout", "hidden_dropout", "use_rotary_position_embeddings"}


# Environment


@pytest.mark.parametrize("name", [name for name in FIELDS if TABLE[name].key])
def test_environment(name, monkeypatch):
    rule = TABLE[name]
    text = {"int": "2", "float": "0.5", "bool": "Yes", "any": "flash"}.get(rule.kind) or rule.choices[0]
    if name == "calculate_per_token_loss" or name == "attention_softmax_in_fp32":
        text = "no" if name.startswith("att") else "true"
    for variable in variables(name):
        monkeypatch.setenv(variable, text)
        if name == "expert_tensor_parallel_size":
            with pytest.raises(ConfigError, match=name):
                MegatronLMPlugin()
        else:
            monkeypatch.setenv("MEGATRON_LM_PP_DEGREE", "2")
            value = getattr(MegatronLMPlugin(), name)
            assert value == {"2": 2, "0.5": 0.5, "Yes": True, "no": False, "true": True}.get(text, text)
        monkeypatch.delenv(variable)


def test_a_field_comes_before_the_environment(monkeypatch):
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "4")
    assert (MegatronLMPlugin().tp_degree, MegatronLMPlugin(tp_degree=2).tp_degree) == (4, 2)
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "two")
    with pytest.raises(ConfigError, match="MEGATRON_LM_TP_DEGREE is 'two'; it must be an integer"):
        MegatronLMPlugin()
    monkeypatch.delenv("MEGATRON_LM_TP_DEGREE")
    monkeypatch.setenv("MEGATRON_LM_SEQUENCE_PARALLELISM", "maybe")
    with pytest.raises(ConfigError, match="must be true or false"):
        MegatronLMPlugin()


# Bad values


@pytest.mark.parametrize("fields, message", [
    ({"tp_degree": 0}, "tp_degree is 0; it must be an integer of at least 1"),
    ({"tp_degree": 2.0}, "tp_degree is 2.0; it must be an integer"),
    ({"tp_degree": True}, "it must be an integer"),
    ({"gradient_clipping": -1.0}, "gradient_clipping is -1.0; it must be a number of at least 0"),
    ({"gradient_clipping": float("nan")}, "must be a number of at least 0"),
    ({"hidden_dropout": 1.0}, "it must be below 1"),
    ({"recompute_granularity": "ful"}, "must be one of full, selective; did you mean 'full'?"),
    ({"lr_decay_style": "cosin"}, "did you mean 'cosine'?"),
    ({"sequence_parallelism": "perhaps"}, "must be True or False"),
    ({"no_wd_decay_cond": "bias"}, "must be a function"),
    ({"consumed_samples": [1, 2, 3, 4]}, "one to three sample counts"),
    ({"other_megatron_args": ["seed"]}, "must be a dict"),
    ({"num_layers_per_virtual_pipeline_stage": 1}, "needs a pipeline"),
    ({"decoder_last_pipeline_num_layers": 1}, "needs a pipeline"),
    ({"lr_mult": 2.0}, "scale_lr_cond"),
    ({"custom_train_step_kwargs": {"a": 1}}, "needs a custom_train_step_class"),
    ({"set_all_logging_options": True}, "needs a tensorboard_dir"),
    ({"seq_length": 8, "encoder_seq_length": 9}, "give one"),
])
def test_bad_values(fields, message):
    with pytest.raises(ConfigError) as error:
        MegatronLMPlugin(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize("fields, message", [
    ({"tp_degree": 3}, "tp_degree 3 x pp_degree 1 = 3 does not divide the 8 processes there are; start a multiple of 3"),
    ({"recompute_method": "block"}, "give recompute_granularity='full' too"),
    ({"recompute_activations": True, "recompute_num_layers": 2}, "give recompute_granularity='full' too"),
    ({"checkpoint_num_layers": 2, "recompute_num_layers": 3}, "older name"),
    ({"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 3}, "does not divide the model's 8 layers"),
    ({"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 2, "num_micro_batches": 3}, "multiples of pp_degree 2, not 3"),
    ({"pp_degree": 4, "decoder_last_pipeline_num_layers": 3}, "leaves 5 of 8 layers for the other 3 stages"),
    ({"other_megatron_args": {"window_attn_skip_freq": 2}}, "there is none; give window_size too"),
    ({"other_megatron_args": {"window_attn_skip_freq": "([1]*2+[0])*2", "window_size": (4, 0)}}, "texts are not evaluated"),
    ({"other_megatron_args": {"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2}}, "are two rules"),
    ({"pp_degree": 2, "pipeline_model_parallel_split_rank": 1}, "no encoder beside it"),
    ({"pp_degree": 2, "pipeline_model_parallel_split_rank": 2, "hf": T5}, "is 2; it must be above 0 and below pp_degree 2"),
    ({"pp_degree": 2, "pipeline_model_parallel_split_rank": 1, "decoder_last_pipeline_num_layers": 1, "hf": T5}, "remove one"),
    ({"seq_length": 129}, "sequences of 129 tokens are longer than the model's 128 positions"),
    ({"mixed_precision": "fp8"}, "mixed_precision 'fp8' is not in this build yet"),
    ({"mixed_precision": "half"}, "unknown; it is no, fp16 or bf16"),
])
def test_what_cannot_be_had_together(fields, message):
    with pytest.raises(ConfigError) as error:
        config_of(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize("fields, recompute, why", [
    ({"recompute_activations": True, "checkpoint_num_layers": 1}, "full", "there is one; give tp_degree above 1"),
    ({"recompute_granularity": "full", "tp_degree": 2, "sequence_parallelism": True}, "full", "sequence_parallelism shares"),
    ({"recompute_activations": True, "tp_degree": 2}, "selective", "give recompute_granularity='full' too"),
])
def test_activations_without_somebody_to_share_them(fields, recompute, why, caplog):
    both = {"distribute_checkpointed_activations": True, "partition_activations": True}
    with caplog.at_level(logging.WARNING, "tessera"):
        for _ in range(2):
            config = config_of(**fields, **both)
    assert (config["training.recompute"], config.get("training.recompute_partition", False)) == (recompute, False)
    said = [text for text in caplog.messages if "partition_activations=True" in text]
    assert len(said) == 1 and "distribute_checkpointed_activations=True" in said[0] and why in said[0]


def test_sequence_parallelism_of_one_tensor_rank(caplog):
    with caplog.at_level(logging.WARNING, "tessera"):
        for _ in range(2):
            config_of(sequence_parallelism=True)
            config_of(sequence_parallelism=True, tp_degree=2)
    assert [text for text in caplog.messages if "sequence_parallelism=True" in text] == [
        "MegatronLMPlugin without effect: sequence_parallelism=True: sequences are shared out over tensor ranks, and there is one; "
        "give tp_degree above 1"]


def test_virtual_stages_and_uneven_stages():
    assert config_of(pp_degree=2, decoder_last_pipeline_num_layers=3)["parallel.pipeline_layout"] == "5,3"
    one = config_of(pp_degree=2, num_layers_per_virtual_pipeline_stage=4)
    assert (one["parallel.schedule"], one["parallel.virtual_stages"]) == ("1f1b", 1)
    with pytest.raises(ConfigError, match="cannot be had together"):
        MegatronLMPlugin(pp_degree=2, num_layers_per_virtual_pipeline_stage=2, decoder_last_pipeline_num_layers=2)
    with pytest.raises(ConfigError, match="number of layers"):
        config_of(hf=None, pp_degree=2, num_layers_per_virtual_pipeline_stage=2)
    assert config_of(checkpoint_num_layers=2)["training.recompute"] == "full"


def test_full_counts_before_selective(caplog):
    with caplog.at_level(logging.WARNING, "tessera"):
        assert config_of(recompute_activations=True, recompute_granularity="full")["training.recompute"] == "full"
    assert "recompute_granularity 'full'" in caplog.text


# Model


@pytest.mark.parametrize("arguments, expected", [
    ({"position_embedding_type": "absolute"}, {"model.position_embedding": "learned"}),
    ({"position_embedding_type": "rotary"}, {"model.position_embedding": "rotary"}),
    ({"position_embedding_type": "rope"}, {"model.position_embedding": "rotary"}),
    ({"position_embedding_type": "alibi"}, {"model.position_embedding": "alibi"}),
    ({"add_position_embedding": False}, {"model.position_embedding": "none"}),
    ({"attention_head_type": "multiquery"}, {"model.num_kv_heads": 1}),
    ({"attention_head_type": "multihead"}, {"model.num_kv_heads": 4}),
    ({"group_query_attention": True, "num_query_groups": 2}, {"model.num_kv_heads": 2}),
    ({"num_query_groups": 1}, {}),  # Megatron's default, without group_query_attention
    ({"normalization": "RMSNorm", "layernorm_epsilon": 1e-3}, {"model.norm": "rmsnorm", "model.norm_eps": 1e-3}),
    ({"swiglu": True, "ffn_hidden_size": 96}, {"model.activation": "swiglu", "model.ffn_hidden_size": 96}),
    ({"swiglu": False, "untie_embeddings_and_output_weights": False}, {}),
    ({"untie_embeddings_and_output_weights": True}, {"model.tied_head": False}),
    ({"disable_bias_linear": True}, {"model.linear_bias": False, "model.qkv_bias": False}),
    ({"disable-bias-linear": True, "add-qkv-bias": True}, {"model.linear_bias": False, "model.qkv_bias": True}),
    ({"rotary_base": 500000}, {}),  # which positions that are learned do not have
    ({"position_embedding_type": "rope", "rotary_base": 500000, "rotary_percent": 0.5, "rotary_interleaved": True},
     {"model.position_embedding": "rotary", "model.rope_theta": 500000, "model.rope_fraction": 0.5, "model.rope_interleaved": True}),
    ({"position_embedding_type": "rope", "use_rope_scaling": True},
     {"model.position_embedding": "rotary", "model.rope_scaling.type": "llama3", "model.rope_scaling.factor": 8.0,
      "model.rope_scaling.low_freq_factor": 1.0, "model.rope_scaling.high_freq_factor": 4.0,
      "model.rope_scaling.original_max_positions": 8192}),
    ({"position_embedding_type": "rope", "rotary_seq_len_interpolation_factor": 4},
     {"model.position_embedding": "rotary", "model.rope_scaling.type": "linear", "model.rope_scaling.factor": 4.0}),
    ({"use_rope_scaling": True, "rope_scaling_factor": 4.0}, {}),  # of positions that are learned
    ({"window_size": (4, 0), "window_attn_skip_freq": 3}, {"model.sliding_window": 5, "model.window_pattern": "SSF"}),
    ({"window_size": (4, 0), "window_attn_skip_freq": [1, 0, 0, 1]}, {"model.sliding_window": 5, "model.window_pattern": "SFFS"}),
    ({"qk_layernorm": True, "window_size": (4, 0)}, {"model.qk_norm": "head", "model.sliding_window": 5}),
    ({"init_method_std": 0.01, "kv_channels": 32}, {"model.init_std": 0.01, "model.head_dim": 32}),
    ({"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128, "orig_vocab_size": 257}, {}),
    ({"hidden_dropout": 0.2, "attention_dropout": 0.1}, {"model.dropout": 0.2, "model.attention_dropout": 0.1}),
])
def test_arguments_make_a_new_model(arguments, expected):
    assert changed({}, other_megatron_args=arguments) == expected


def test_pretrained_weights_are_not_contradicted():
    same = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "num_query_groups": 2,
            "group_query_attention": True, "rotary_base": 10000, "untie_embeddings_and_output_weights": True,
            "disable_bias_linear": True, "layernorm_epsilon": 1e-6}
    scaled = config_of(hf=LLAMA, other_megatron_args={"use_rope_scaling": True, "rope_scaling_factor": 4.0})
    assert (scaled["model.rope_scaling.type"], scaled["model.rope_scaling.factor"]) == ("llama3", 4.0)
    assert not [key for key in config_of(hf=LLAMA, pretrained=True, other_megatron_args=same) if key.startswith("model.")]
    for arguments, message in (({"position_embedding_type": "alibi"}, "asks for position_embedding 'alibi'.*model with 'rotary'"),
                               ({"attention_head_type": "multiquery"}, "num_kv_heads 1.*with 2"),
                               ({"use_rope_scaling": True}, "rope_scaling.factor 8.0.*with 1.0"), ({"rotary_base": 5}, "rope_theta 5")):
        with pytest.raises(ConfigError, match=message):
            config_of(hf=LLAMA, pretrained=True, other_megatron_args=arguments)
    with pytest.raises(ConfigError, match="pretrained weights"):
        config_of(pretrained=True, use_rotary_position_embeddings=True)
    assert config_of(pretrained=True, hidden_dropout=0.3)["model.dropout"] == 0.3
    with pytest.raises(ConfigError, match="asks for num_layers 9, and the model given to prepare.. has 8"):
        config_of(other_megatron_args={"num_layers": 9})
    with pytest.raises(ConfigError, match="contradicts"):
        config_of(use_rotary_position_embeddings=True, other_megatron_args={"position_embedding_type": "alibi"})


# Megatron's other arguments


def test_arguments_come_last_and_unknown_ones_are_refused():
    plugin = MegatronLMPlugin(tp_degree=1, other_megatron_args={"tensor_model_parallel_size": 2, "clip_grad": 0.25})
    assert (plugin.tp_degree, plugin.gradient_clipping, plugin.megatron_lm_default_args["clip_grad"]) == (2, 0.25, 0.25)
    with pytest.raises(ConfigError, match="'position_embeding_type' is no argument.*did you mean 'position_embedding_type'"):
        MegatronLMPlugin(other_megatron_args={"position_embeding_type": "alibi"})
    with pytest.raises(ConfigError, match="the model given to prepare"):
        MegatronLMPlugin(other_megatron_args={"moe_router_topk": 2})
    with pytest.raises(ConfigError, match="may be 'seq_aux_loss' or 'none'"):
        MegatronLMPlugin(other_megatron_args={"moe_router_load_balancing_type": "aux_loss"})
    with pytest.raises(ConfigError, match="needs moe_router_load_balancing_type 'seq_aux_loss'"):
        config_of(other_megatron_args={"moe_aux_loss_coeff": 0.01})
    balanced = config_of(other_megatron_args={"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "seq_aux_loss",
                                              "moe_z_loss_coeff": 0.001})
    assert (balanced["model.router_aux_loss"], balanced["model.router_z_loss"]) == (0.01, 0.001)
    for arguments, message in (({"seed": -1}, "seed is -1"), ({"loss_scale": "x"}, "must be a number"),
                               ({"position_embedding_type": "rotery"}, "did you mean 'rotary'"),
                               ({"group_query_attention": True}, "needs num_query_groups"), ({"ffn_hidden_size": 0}, "above 0")):
        with pytest.raises(ConfigError, match=message):
            config_of(other_megatron_args=arguments)
    assert config_of(other_megatron_args={"enable_cuda_graph": True})["device.cuda_graph"] is True
    for overlap, chunks in ((True, 0), (False, 1)):
        assert config_of(other_megatron_args={"tp_comm_overlap": overlap})["parallel.tensor_chunks"] == chunks
    for word, method in (("a2a", "ulysses"), ("all_gather", "all_gather"), (["a2a", "a2a"], "ulysses")):
        assert config_of(other_megatron_args={"cp_comm_type": word})["parallel.context_method"] == method
    for word in ("p2p", "a2a+p2p", ["a2a", "all_gather"], True):
        with pytest.raises(ConfigError, match="cp_comm_type is .*may be 'all_gather' or 'a2a'"):
            config_of(other_megatron_args={"cp_comm_type": word})


def test_main_weights_are_split_in_bf16_alone(caplog):
    with caplog.at_level(logging.WARNING, "tessera"):
        for precision in ("no", "fp16"):
            keys = config_of(mixed_precision=precision, use_precision_aware_optimizer=True)
            assert "optimizer.split_main_weights" not in keys
    assert len(caplog.messages) == 1 and "mixed_precision='bf16'" in caplog.text
    keys = config_of(mixed_precision="bf16", other_megatron_args={"use_precision_aware_optimizer": True})
    assert keys["optimizer.split_main_weights"] is True


# Methods


class Adam:
    defaults = {"lr": 0.1, "weight_decay": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}


class SGD:
    defaults = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9}


class Model:
    def __init__(self, **config):
        values = {**config, "tie_word_embeddings": False}
        self.config = type("Config", (), {**values, "to_dict": lambda self: values})()


def test_methods_fill_the_arguments():
    plugin = MegatronLMPlugin(tp_degree=2, num_micro_batches=4)
    plugin.set_mixed_precision("bf16")
    plugin.set_training_args(micro_batch_size=3, dp_degree=2)
    plugin.set_optimizer_type(Adam())
    arguments = plugin.megatron_lm_default_args
    assert (plugin.DDP_impl, arguments["bf16"], arguments["DDP_impl"]) == ("local", True, "local")
    assert (plugin.data_parallel_size, plugin.micro_batch_size, plugin.global_batch_size) == (2, 3, 24)
    assert (arguments["optimizer"], arguments["adam_beta2"], arguments["lr"], arguments["weight_decay"]) == ("adam", 0.95, 0.1, 0.01)
    plugin.set_optimizer_type(SGD())
    assert (arguments["optimizer"], arguments["sgd_momentum"]) == ("sgd", 0.9)
    with pytest.raises(ValueError, match="not supported; use AdamW, Adam or SGD"):
        plugin.set_optimizer_type(type("Lion", (), {"defaults": {}})())
    scheduler = type("S", (), {"total_num_steps": 80, "warmup_num_steps": 8})()
    plugin.set_scheduler_args(scheduler)
    assert (plugin.train_iters, plugin.lr_warmup_iters, arguments["train_iters"], arguments["lr_decay_style"]) == (10, 1, 10, "linear")
    with pytest.raises(ConfigError, match="fp8"):
        plugin.set_mixed_precision("fp8")
    assert [MegatronLMPlugin(pp_degree=2).DDP_impl, MegatronLMPlugin(use_distributed_optimizer=True).DDP_impl,
            MegatronLMPlugin().DDP_impl] == ["local", "local", "torch"]


def test_network_size():
    plugin = MegatronLMPlugin(seq_length=48)
    plugin.set_network_size_args(Model(**GPT2))
    arguments = plugin.megatron_lm_default_args
    assert (arguments["num_layers"], arguments["hidden_size"], arguments["model_type_name"], arguments["seq_length"]) == (8, 64, "gpt", 48)
    plugin = MegatronLMPlugin()
    batch = {"input_ids": type("Tensor", (), {"shape": (2, 40)})()}
    plugin.set_network_size_args(Model(**LLAMA), batch)
    arguments = plugin.megatron_lm_default_args
    assert (plugin.seq_length, arguments["normalization"], arguments["num_query_groups"]) == (40, "RMSNorm", 2)
    assert arguments["untie_embeddings_and_output_weights"] is True and arguments["ffn_hidden_size"] == 128
    with pytest.raises(ValueError, match="'gemma' are not supported; gpt2, .*add_model_config_to_megatron_parser"):
        plugin.set_network_size_args(Model(model_type="gemma"))

    @add_model_config_to_megatron_parser("toy")
    def parse(plugin, model, batch_data):
        plugin.megatron_lm_default_args["toy"] = model.config.size

    plugin.set_network_size_args(Model(model_type="Toy-2", size=5))
    assert plugin.megatron_lm_default_args["toy"] == 5 and parse.__name__ == "parse"


def test_plain_data_parallelism_and_other_inputs():
    from tessera.utils.dataclasses import GradScalerKwargs

    config = flat(native_config(world_size=4, micro_batch_size=2, mixed_precision="fp16", seq_length=16, train_steps=9, seed=3,
                                timeout_s=60, cpu=True, grad_scaler=GradScalerKwargs(init_scale=1024.0, growth_interval=5),
                                optimizer_defaults={"name": "sgd", "lr": 0.1, "momentum": 0.8, "weight_decay": 0.0}))
    assert config == {
        "parallel.tensor": 1, "parallel.sequence": False, "parallel.pipeline": 1, "parallel.schedule": "1f1b",
        "parallel.virtual_stages": 1, "parallel.pipeline_layout": None, "parallel.data": 4, "parallel.zero_stage": 0,
        "parallel.timeout_s": 60.0, "optimizer.name": "sgd", "optimizer.lr": 0.1, "optimizer.momentum": 0.8,
        "optimizer.weight_decay": 0.0, "optimizer.clip_grad": 0.0, "lr_schedule.style": "constant",
        "training.micro_batch_size": 2, "training.global_batch_size": 8, "training.precision": "fp16",
        "training.initial_loss_scale": 1024.0, "training.loss_scale_window": 5, "training.hysteresis": 1,
        "training.seq_length": 16, "training.steps": 9, "training.seed": 3, "device.type": "cpu", "device.threads": 0}
    adam = config_of(optimizer_defaults={"name": "adamw", "betas": (0.9, 0.99), "eps": 1e-6, "lr": 0.0, "weight_decay": 0.1})
    assert adam["optimizer.betas"] == [0.9, 0.99] and "optimizer.lr" not in adam
    assert "max_skipped_steps" not in str(config_of(check_for_nan_in_loss_and_grad=True, mixed_precision="fp16"))
    assert data_ranks(None, 3) == 3 and sequence_length_of(None, GPT2, 17) == 17 and sequence_length_of(None, LLAMA) == 256
    with pytest.raises(ConfigError, match="batch_size"):
        micro_batch_size_of(None, [None])
