"""What becomes of each key of `MegatronLMPlugin.other_megatron_args`: Megatron-LM's argument names.

`ARGUMENTS` maps a name to (effect, detail):

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

from typing import Any, Dict, Tuple

from tessera.comm.warnings import warn_once
from tessera.compat.refusals import nearest
from tessera.errors import ConfigError
from tessera.plugin.fields import FIELDS

Effect = Tuple[str, str]


def _each(effect: Effect, names: str) -> Dict[str, Effect]:
    return {name: effect for name in names.split()}


_SAME = {name: ("field", name) for name in FIELDS if name not in (
    "tp_degree", "pp_degree", "gradient_clipping", "sequence_parallelism", "other_megatron_args", "is_train_batch_min",
    "distribute_checkpointed_activations")}

ARGUMENTS: Dict[str, Effect] = {
    **_SAME,
    "tensor_model_parallel_size": ("field", "tp_degree"),
    "pipeline_model_parallel_size": ("field", "pp_degree"),
    "sequence_parallel": ("field", "sequence_parallelism"),
    "clip_grad": ("field", "gradient_clipping"),
    "distribute_saved_activations": ("field", "distribute_checkpointed_activations"),
    "distribute_checkpointed_activations": ("field", "distribute_checkpointed_activations"),

    "seed": ("config", "training.seed"),
    "distributed_timeout_minutes": ("processes", "the deadline of every wait, `parallel.timeout_s`"),
    "loss_scale": ("config", "training.loss_scale"),
    "initial_loss_scale": ("config", "training.initial_loss_scale"),
    "min_loss_scale": ("config", "training.min_loss_scale"),
    "loss_scale_window": ("config", "training.loss_scale_window"),
    "hysteresis": ("config", "training.hysteresis"),
    "enable_cuda_graph": ("config", "device.cuda_graph"),
    "tp_comm_overlap": ("config", "parallel.tensor_chunks"),
    "reset_position_ids": ("documents", "positions begin anew after the end of a document"),
    "reset_attention_mask": ("documents", "attention stays within a document"),
    "eos_token_id": ("documents", "the id that ends a document, instead of the model config's"),
    "vocab_file": ("documents", "its <|endoftext|> is the id that ends a document"),
    "data_path": ("data loader", "of a MegatronLMDummyDataLoader that has none: prefixes of .idx/.bin"),
    "split": ("data loader", "of a MegatronLMDummyDataLoader that has none: shares of training, validation, test"),
    "data_cache_path": ("data loader", "of a MegatronLMDummyDataLoader that has none: where index files are kept"),
    "reinitialize": ("weights", "what fits of those that were read is kept, the rest is drawn anew"),

    "position_embedding_type": ("model", "position_embedding"),
    "add_position_embedding": ("model", "position_embedding"),
    "attention_head_type": ("model", "num_kv_heads"),
    "group_query_attention": ("model", "num_kv_heads"),
    "num_query_groups": ("model", "num_kv_heads"),
    "normalization": ("model", "norm"),
    "layernorm_epsilon": ("model", "norm_eps"),
    "norm_epsilon": ("model", "norm_eps"),
    "swiglu": ("model", "activation"),
    "openai_gelu": ("model", "activation"),
    "ffn_hidden_size": ("model", "ffn_hidden_size"),
    "kv_channels": ("model", "head_dim"),
    "rotary_base": ("model", "rope_theta"),
    "rotary_percent": ("model", "rope_fraction"),
    "rotary_interleaved": ("model", "rope_interleaved"),
    "untie_embeddings_and_output_weights": ("model", "tied_head"),
    "add_qkv_bias": ("model", "qkv_bias"),
    "disable_bias_linear": ("model", "linear_bias"),
    "add_bias_linear": ("model", "linear_bias"),
    "init_method_std": ("model", "init_std"),
    "num_layers": ("model", "num_layers"),
    "hidden_size": ("model", "hidden_size"),
    "num_attention_heads": ("model", "num_heads"),
    "max_position_embeddings": ("model", "max_positions"),
    "orig_vocab_size": ("model", "vocab_size"),
    "vocab_size": ("model", "vocab_size"),

    "lr_warmup_init": ("horizon", "lr_at"),
    "lr_wsd_decay_iters": ("horizon", "lr_at"),
    "lr_wsd_decay_style": ("horizon", "lr_at"),
    "model_return_dict": ("outputs", "False: a call returns the loss itself"),
    "pretraining_flag": ("tracker", "False: log_eval_results() leaves out the perplexity"),
    "model_type_name": ("train step", "gpt; bert and t5 are refused: they are not in this build yet"),
    **_each(("train step", "in its args; one warning without a custom_train_step_class"),
            "merge_file vocab_extra_ids tokenizer_type tokenizer_model num_labels bert_binary_head"),

    **_each(("warns", "it tunes Megatron's kernels"),
            "use_flash_attn bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion masked_softmax_fusion "
            "gradient_accumulation_fusion no_bias_gelu_fusion no_bias_swiglu_fusion no_bias_dropout_fusion "
            "no_masked_softmax_fusion no_gradient_accumulation_fusion no_rope_fusion apply_rope_fusion "
            "apply_query_key_layer_scaling no_query_key_layer_scaling no_persist_layer_norm persist_layer_norm "
            "transformer_impl use_mcore_models use_legacy_models deterministic_mode cross_entropy_loss_fusion "
            "onnx_safe make_vocab_size_divisible_by"),
    **_each(("warns", "it tunes Megatron's communication"),
            "async_tensor_model_parallel_allreduce no_async_tensor_model_parallel_allreduce overlap_grad_reduce "
            "overlap_param_gather overlap_p2p_communication no_overlap_p2p_communication "
            "delay_grad_reduce ddp_bucket_size use_ring_exchange_p2p scatter_gather_tensors_in_pipeline "
            "no_scatter_gather_tensors_in_pipeline distributed_backend DDP_impl use_contiguous_buffers_in_local_ddp "
            "accumulate_allreduce_grads_in_fp32 empty_unused_memory_level nccl_communicator_config_path"),
    **_each(("warns", "it concerns how Megatron starts, reads and reports"),
            "lazy_mpu_init use_cpu_initialization num_workers no_initialization barrier_with_L1_time manual_gc "
            "manual_gc_interval manual_gc_eval adlr_autoresume report_topk_accuracies mmap_bin_files no_mmap_bin_files "
            "local_rank rank world_size no_create_attention_mask_in_dataloader create_attention_mask_in_dataloader "
            "check_weight_hash_across_dp_replicas_interval exit_signal_handler"),

    **_each(("refuses", "the optimizer given to prepare() says it"),
            "optimizer lr weight_decay adam_beta1 adam_beta2 adam_eps sgd_momentum decoupled_weight_decay"),
    **_each(("refuses", "mixed_precision says it"), "bf16 fp16 params_dtype fp32_residual_connection fp16_lm_cross_entropy"),
    **_each(("refuses", "it follows from the loader's batch_size, the processes and num_micro_batches"),
            "micro_batch_size global_batch_size data_parallel_size rampup_batch_size"),
    **_each(("refuses", "accelerator.save_state and load_state do it"),
            "save load save_interval no_save_rng no_load_rng finetune pretrained_checkpoint use_checkpoint_args "
            "load_dir ckpt_format dist_ckpt_format use_dist_ckpt exit_interval exit_duration_in_mins"),
    **_each(("refuses", "the script's own loop decides it"), "log_interval"),
    **_each(("refuses", "Tessera's models do not have it"),
            "apply_residual_connection_post_layernorm qk_layernorm squared_relu glu_activation "
            "multi_latent_attention mtp_num_layers window_size add_biases_to_lm_head apply_layernorm_1p "
            "use_rope_scaling rope_scaling_factor rotary_seq_len_interpolation_factor num_experts onnx_safe_gelu "
            "standalone_embedding_stage account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
            "decoder_first_pipeline_num_layers pipeline_model_parallel_layout label_smoothing"),
    **_each(("refuses", "data of .idx/.bin is given to MegatronLMDummyDataLoader"),
            "train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path mock_data dataloader_type"),
}

# Families of names, for those that the table does not have.
PREFIXES: Dict[str, Effect] = {
    "log_": ("warns", "the engine reports through trackers"),
    "no_log_": ("warns", "the engine reports through trackers"),
    "tensorboard_": ("warns", "the engine reports through trackers; tensorboard_dir is a field of the plugin"),
    "wandb_": ("warns", "give log_with='wandb' to the Accelerator"),
    "timing_": ("warns", "the engine reports through trackers"),
    "profile": ("warns", "accelerator.profile() records"),
    "moe_": ("refuses", "mixtures of experts are not in this build yet"),
    "fp8": ("refuses", "fp8 is not in this build yet"),
    "retro_": ("refuses", "Tessera's models do not have it"),
    "biencoder_": ("refuses", "Tessera's models do not have it"),
    "mamba_": ("refuses", "Tessera's models do not have it"),
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
        kind, detail = effect_of(name)
        if kind == "refuses" and value is not None and value is not False:
            raise ConfigError(f"other_megatron_args: '{name}' is refused: {detail}")
        if name == "model_type_name" and value not in (None, "gpt"):
            raise ConfigError(f"other_megatron_args: 'model_type_name' is {value!r}: models with an encoder (BERT, T5) are not in this "
                               "build yet; leave it out")
        if kind == "warns":
            warn_once(f"other_megatron_args: '{name}' has no effect in Tessera: {detail}")
        if kind == "field" and value is not None:
            fields[detail] = value
    return fields
