"""What becomes of each key of `MegatronLMPlugin.other_megatron_args`: Megatron-LM's argument names.

`ARGUMENTS` has by name an Effect, (kind, detail):

- ("field", name): the same as that field of the plugin, and comes before it, as in Accelerate;
- ("config", key): that key of the native configuration;
- ("model", key): what the model is made of. A model that was made from a config is made so: tensors that still fit keep
  their weights, the others are drawn anew. Weights that were read from a folder are kept: a value that contradicts them
  is refused without `reinitialize`. False, for a switch, leaves the model as it is;
- ("weights", what): of a model that the arguments before change;
- ("documents", what): a rule about ends of documents in every batch;
- ("processes", what), ("outputs", what), ("train step", what), ("data loader", what), ("tracker", what), ("horizon", what): that part reads it;
- ("warns", why): speed, memory or logging of Megatron only;
- ("refuses", why).
"""

from typing import Any, Dict, NamedTuple, Optional

from tessera.comm.warnings import warn_once
from tessera.compat.refusals import nearest
from tessera.errors import ConfigError
from tessera.plugin.fields import FIELDS


class Effect(NamedTuple):
    """Of an argument. `yaml`: its key in YAML; `number`: int or float, where that is what it must be, at least `least`."""

    kind: str
    detail: str
    yaml: str = ""
    number: Optional[type] = None
    least: int = 1


def _each(kind: str, detail: str, names: str) -> Dict[str, Effect]:
    return {name: Effect(kind, detail) for name in names.split()}


def _config(key: str, number: Optional[type] = None, least: int = 1) -> Effect:
    return Effect("config", key, key, number, least)


def _model(key: str, number: Optional[type] = None) -> Effect:
    return Effect("model", key, f"model.{key}", number)


IN_ITS_ARGS = "in its args; one warning without a custom_train_step_class"
OF_HEADS = "in its args; what the model given to prepare() says, and another value is refused; a decoder: one warning without a custom_train_step_class"
OF_MASKING = "of a MegatronLMDummyDataLoader that has none: how samples of BERT and T5 are made, as the key of this name in YAML's section `data`"
# What the plugin's fields are called by Megatron-LM.
_FIELDS = {argument: Effect("field", name, row.yaml)
           for name, row in FIELDS.items() for argument in ((name,) if row.megatron is None else row.megatron)}

ARGUMENTS: Dict[str, Effect] = {
    **_FIELDS,
    "seed": _config("training.seed", int, least=0),
    "distributed_timeout_minutes": Effect("processes", "the deadline of every wait, `parallel.timeout_s`", yaml="parallel.timeout_s",
                                          number=int),
    "loss_scale": _config("training.loss_scale", float),
    "initial_loss_scale": _config("training.initial_loss_scale", float),
    "min_loss_scale": _config("training.min_loss_scale", float),
    "loss_scale_window": _config("training.loss_scale_window", int),
    "hysteresis": _config("training.hysteresis", int),
    "enable_cuda_graph": _config("device.cuda_graph"),
    "tp_comm_overlap": _config("parallel.tensor_chunks"),
    "cp_comm_type": _config("parallel.context_method"),
    "moe_aux_loss_coeff": _config("model.router_aux_loss", float),
    "moe_z_loss_coeff": _config("model.router_z_loss", float),
    "moe_router_load_balancing_type": Effect("model", "seq_aux_loss, for moe_aux_loss_coeff, or none: experts are balanced for each "
                                             "sample, as the whole batch's balance would depend on the layout"),
    "reset_position_ids": Effect("documents", "positions begin anew after the end of a document", yaml="data.reset_position_ids"),
    "reset_attention_mask": Effect("documents", "attention stays within a document", yaml="data.reset_attention_mask"),
    "eos_token_id": Effect("documents", "the id that ends a document, and a text of megatron_generate, instead of the model config's"),
    "vocab_file": Effect("documents", "its <|endoftext|> is the id that ends a document, and a text of megatron_generate"),
    "data_path": Effect("data loader", "of a MegatronLMDummyDataLoader that has none: prefixes of .idx/.bin", yaml="data.path"),
    "split": Effect("data loader", "of a MegatronLMDummyDataLoader that has none: shares of training, validation, test",
                    yaml="data.split"),
    "data_cache_path": Effect("data loader", "of a MegatronLMDummyDataLoader that has none: where index files are kept",
                              yaml="data.cache_dir"),
    **{name: Effect("data loader", OF_MASKING, yaml=f"data.{name}")
       for name in "mask_prob short_seq_prob masking_max_ngram masking_do_full_word masking_use_longer_ngrams "
                   "masking_use_geometric_distribution cls_id sep_id mask_id pad_id".split()},
    "reinitialize": Effect("weights", "what fits of those that were read is kept, the rest is drawn anew"),

    "position_embedding_type": _model("position_embedding"),
    "add_position_embedding": _model("position_embedding"),
    "attention_head_type": _model("num_kv_heads"),
    "group_query_attention": _model("num_kv_heads"),
    "num_query_groups": _model("num_kv_heads"),
    "normalization": _model("norm"),
    "layernorm_epsilon": _model("norm_eps", float),
    "norm_epsilon": _model("norm_eps", float),
    "swiglu": _model("activation"),
    "openai_gelu": _model("activation"),
    "ffn_hidden_size": _model("ffn_hidden_size", int),
    "kv_channels": _model("head_dim", int),
    "rotary_base": _model("rope_theta", float),
    "rotary_percent": _model("rope_fraction", float),
    "rotary_interleaved": _model("rope_interleaved"),
    "untie_embeddings_and_output_weights": _model("tied_head"),
    "use_rope_scaling": _model("rope_scaling.type"),
    "rope_scaling_factor": _model("rope_scaling.factor"),
    "rotary_seq_len_interpolation_factor": _model("rope_scaling.factor"),
    "qk_layernorm": _model("qk_norm"),
    "window_size": _model("sliding_window"),
    "window_attn_skip_freq": _model("window_pattern"),
    "add_qkv_bias": _model("qkv_bias"),
    "disable_bias_linear": _model("linear_bias"),
    "add_bias_linear": _model("linear_bias"),
    "init_method_std": _model("init_std", float),
    "num_layers": _model("num_layers", int),
    "hidden_size": _model("hidden_size", int),
    "num_attention_heads": _model("num_heads", int),
    "max_position_embeddings": _model("max_positions", int),
    "orig_vocab_size": _model("vocab_size", int),
    "vocab_size": _model("vocab_size", int),

    "lr_warmup_init": Effect("horizon", "lr_at", yaml="lr_schedule.init_lr"),
    "lr_wsd_decay_iters": Effect("horizon", "lr_at", yaml="lr_schedule.wsd_decay_steps"),
    "lr_wsd_decay_style": Effect("horizon", "lr_at", yaml="lr_schedule.wsd_style"),
    "model_return_dict": Effect("outputs", "False: a call returns the loss itself"),
    "pretraining_flag": Effect("tracker", "False: log_eval_results() leaves out the perplexity; of an encoder what its head says"),
    "model_type_name": Effect("train step", "gpt, bert or t5, as the model given to prepare() is; another value is refused"),
    **_each("train step", IN_ITS_ARGS, "merge_file tokenizer_type"),
    "vocab_extra_ids": Effect("train step", IN_ITS_ARGS, yaml="data.vocab_extra_ids"),
    **_each("train step", OF_HEADS, "num_labels bert_binary_head"),
    "tokenizer_model": Effect("train step", IN_ITS_ARGS, yaml="data.tokenizer"),

    **_each("warns", "it tunes Megatron's kernels",
            "use_flash_attn bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion masked_softmax_fusion "
            "gradient_accumulation_fusion no_bias_gelu_fusion no_bias_swiglu_fusion no_bias_dropout_fusion "
            "no_masked_softmax_fusion no_gradient_accumulation_fusion no_rope_fusion apply_rope_fusion "
            "apply_query_key_layer_scaling no_query_key_layer_scaling no_persist_layer_norm persist_layer_norm "
            "transformer_impl use_mcore_models use_legacy_models deterministic_mode cross_entropy_loss_fusion "
            "onnx_safe make_vocab_size_divisible_by"),
    **_each("warns", "it tunes Megatron's communication",
            "async_tensor_model_parallel_allreduce no_async_tensor_model_parallel_allreduce overlap_grad_reduce "
            "overlap_param_gather overlap_p2p_communication no_overlap_p2p_communication "
            "delay_grad_reduce ddp_bucket_size use_ring_exchange_p2p scatter_gather_tensors_in_pipeline "
            "no_scatter_gather_tensors_in_pipeline distributed_backend DDP_impl use_contiguous_buffers_in_local_ddp "
            "accumulate_allreduce_grads_in_fp32 empty_unused_memory_level nccl_communicator_config_path"),
    **_each("warns", "it concerns how Megatron starts, reads and reports",
            "lazy_mpu_init use_cpu_initialization num_workers no_initialization barrier_with_L1_time manual_gc "
            "manual_gc_interval manual_gc_eval adlr_autoresume report_topk_accuracies mmap_bin_files no_mmap_bin_files "
            "local_rank rank world_size no_create_attention_mask_in_dataloader create_attention_mask_in_dataloader "
            "check_weight_hash_across_dp_replicas_interval exit_signal_handler"),

    **_each("refuses", "the optimizer given to prepare() says it",
            "optimizer lr weight_decay adam_beta1 adam_beta2 adam_eps sgd_momentum decoupled_weight_decay"),
    **_each("refuses", "mixed_precision says it", "bf16 fp16 params_dtype fp32_residual_connection fp16_lm_cross_entropy"),
    **_each("refuses", "it follows from the loader's batch_size, the processes and num_micro_batches",
            "micro_batch_size global_batch_size data_parallel_size rampup_batch_size"),
    **_each("refuses", "accelerator.save_state and load_state do it",
            "save load save_interval no_save_rng no_load_rng finetune pretrained_checkpoint use_checkpoint_args "
            "load_dir ckpt_format dist_ckpt_format use_dist_ckpt exit_interval exit_duration_in_mins"),
    **_each("refuses", "the script's own loop decides it", "log_interval"),
    **_each("refuses", "the family of the model given to prepare() says it", "apply_layernorm_1p"),
    **_each("refuses", "Tessera's models do not have it",
            "apply_residual_connection_post_layernorm squared_relu glu_activation "
            "multi_latent_attention mtp_num_layers add_biases_to_lm_head "
            "onnx_safe_gelu "
            "standalone_embedding_stage account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
            "decoder_first_pipeline_num_layers pipeline_model_parallel_layout label_smoothing"),
    **_each("refuses", "the model given to prepare() says it",
            "num_experts moe_router_topk moe_ffn_hidden_size moe_layer_freq moe_router_pre_softmax"),
    **_each("warns", "tokens go to the ranks of their experts and back in two exchanges, and none is dropped",
            "moe_token_dispatcher_type moe_grouped_gemm moe_permute_fusion moe_use_legacy_grouped_gemm "
            "moe_per_layer_logging moe_pad_expert_input_to_capacity"),
    **_each("refuses", "data of .idx/.bin is given to MegatronLMDummyDataLoader",
            "train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path mock_data dataloader_type"),
}

# Families of names, for those that the table does not have.
PREFIXES: Dict[str, Effect] = {
    "log_": Effect("warns", "the engine reports through trackers"),
    "no_log_": Effect("warns", "the engine reports through trackers"),
    "tensorboard_": Effect("warns", "the engine reports through trackers; tensorboard_dir is a field of the plugin"),
    "wandb_": Effect("warns", "give log_with='wandb' to the Accelerator"),
    "timing_": Effect("warns", "the engine reports through trackers"),
    "profile": Effect("warns", "accelerator.profile() records"),
    "moe_": Effect("refuses", "Tessera's models do not have it"),
    "fp8": Effect("refuses", "fp8 is not in this build yet"),
    "retro_": Effect("refuses", "Tessera's models do not have it"),
    "biencoder_": Effect("refuses", "Tessera's models do not have it"),
    "mamba_": Effect("refuses", "Tessera's models do not have it"),
}


def effect_of(name: str) -> Effect:
    """The effect of an argument. Errors: ConfigError for an unknown name, with the nearest one."""
    if name in ARGUMENTS:
        return ARGUMENTS[name]
    for prefix, effect in PREFIXES.items():
        if name.startswith(prefix):
            return effect
    raise ConfigError(f"other_megatron_args: '{name}' is no argument that Tessera knows{nearest(name, ARGUMENTS)}")


def normalised(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """The arguments under Megatron's own spelling: '_', without the dashes of a command line."""
    return {str(name).lstrip("-").replace("-", "_"): value for name, value in arguments.items()}


def admit(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Checks the names, warns about those without an effect and returns the plugin fields they set.

    Errors: ConfigError for an unknown or refused name.
    """
    fields = {}
    for name, value in normalised(arguments).items():
        kind, detail = effect_of(name)[:2]
        if kind == "refuses" and value is not None and value is not False:
            raise ConfigError(f"other_megatron_args: '{name}' is refused: {detail}")
        if name == "model_type_name" and value not in (None, "gpt", "bert", "t5"):
            raise ConfigError(f"other_megatron_args: 'model_type_name' is {value!r}; it is gpt, bert or t5, and follows from the model given to "
                              "prepare(): leave it out")
        if name == "moe_router_load_balancing_type" and value not in (None, "none", "seq_aux_loss"):
            raise ConfigError(f"other_megatron_args: '{name}' is {value!r}; it may be 'seq_aux_loss' or 'none': the balance of a whole "
                              "batch depends on the layout")
        if kind == "warns":
            warn_once(f"other_megatron_args: '{name}' has no effect in Tessera: {detail}")
        if kind == "field" and value is not None:
            fields[detail] = value
    return fields
