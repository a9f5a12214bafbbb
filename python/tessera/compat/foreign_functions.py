"""Functions of Accelerate that serve engines which Tessera does not run. The names exist, so that modules which import them can
be imported; calling one says what to use instead."""

from typing import Any, Callable, Dict, Optional, Tuple

from tessera.compat.refusals import LAYOUT, not_ours

_PLACED = ("for training, prepare() shards the model over tp_degree and pp_degree; for inference, use Transformers' "
           "device_map")
_LAUNCH = "use tessera.notebook_launcher, or `tessera launch`"

# (names, what they are for, what to use instead)
_FAMILIES: Tuple[Tuple[str, str, str], ...] = (
    ("disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading ensure_weights_retied fsdp2_apply_ac "
     "fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_model fsdp2_switch_optimizer_parameters "
     "get_fsdp2_grad_scaler", "PyTorch's FSDP", LAYOUT),
    ("load_fsdp_model load_fsdp_optimizer merge_fsdp_weights save_fsdp_model save_fsdp_optimizer", "PyTorch's FSDP",
     "use accelerator.save_state, load_state and save_model"),
    ("apply_fp8_autowrap contextual_fp8_autocast convert_model convert_model_to_fp8_ao filter_first_and_last_linear_layers "
     "has_transformer_engine_layers has_ao_layers", "fp8 of TransformerEngine and torchao",
     "give mixed_precision='bf16' until fp8 is in the build"),
    ("load_and_quantize_model has_4bit_bnb_layers", "bitsandbytes' quantization", "load the model in its own precision"),
    ("OffloadedWeightsLoader PrefixedDataset align_module_device calculate_maximum_sizes check_device_map "
     "check_tied_parameters_in_config check_tied_parameters_on_same_device compute_module_sizes extract_submodules_state_dict "
     "get_balanced_memory get_max_layer_size get_max_memory has_offloaded_params id_tensor_storage load_offloaded_weight "
     "load_offloaded_weights load_state_dict offload_state_dict offload_weight retie_parameters save_offload_index "
     "set_module_tensor_to_device", "inference with a model's layers spread over devices", _PLACED),
    ("PrepareForLaunch prepare_deepspeed_cmd_env prepare_multi_gpu_env prepare_sagemager_args_inputs "
     "prepare_simple_launcher_cmd_env prepare_tpu install_xla", "Accelerate's own launcher", _LAUNCH),
    ("get_grad_scaler get_mixed_precision_context_manager", "PyTorch's automatic mixed precision",
     "the engine computes in mixed_precision; accelerator.autocast() is for your own torch code"),
    ("finish_mpu_init initialize model_provider_func prepare_data_loader prepare_model_optimizer_scheduler prepare_optimizer "
     "prepare_scheduler megatron_lm_initialize megatron_lm_prepare_data_loader megatron_lm_prepare_model "
     "megatron_lm_prepare_model_optimizer_scheduler megatron_lm_prepare_optimizer megatron_lm_prepare_scheduler",
     "Megatron-LM's own start-up", "use Accelerator(megatron_lm_plugin=...) and accelerator.prepare()"),
    ("LocalSGD", "averaging weights now and then", "data ranks reduce every gradient; use gradient_accumulation_steps to "
     "communicate less often"),
)


def _refusing(name: str, what: str, instead: str) -> Callable:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise not_ours(name, what, instead)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = "Errors: NotImplementedError, always."
    function.refused = True  # type: ignore[attr-defined]
    return function


_FUNCTIONS: Dict[str, Callable] = {
    name: _refusing(name, what, instead) for names, what, instead in _FAMILIES for name in names.split()}


def find(name: str) -> Optional[Callable]:
    """The function of that name, which refuses; None if there is none."""
    return _FUNCTIONS.get(name)
