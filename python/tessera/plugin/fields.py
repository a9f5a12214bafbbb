"""What each field of MegatronLMPlugin may hold, where it is read from and what it does.

`FIELDS` has one rule per field; `FIELD_EFFECTS` says of each where its effect can be seen:

- ("config", key): a key of the native configuration that `config_map.native_config` makes;
- ("documents", what): a rule about ends of documents in every batch;
- ("horizon", what): the learning rates of `lr_horizon.resolve_horizon`;
- ("train step" | "model" | "data loader" | "optimizer" | "checkpoint" | "tracker", what): that part reads the field;
- ("arguments", where): every key has an effect of its own;
- ("warns", text), ("refuses", text): see `WARNED` and `REFUSED`.
"""

import math
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

from tessera.compat.refusals import nearest
from tessera.errors import ConfigError


class Rule(NamedTuple):
    """Of one field: what it may hold, and what it is when neither the script nor the environment says so."""

    kind: str  # bool, int, float, choice, text, call, ints, mapping, any
    default: Any = None
    least: Optional[float] = None
    below: Optional[float] = None
    choices: Tuple[str, ...] = ()
    env: Tuple[str, ...] = ()  # names after MEGATRON_LM_


_STYLES = ("constant", "linear", "cosine")


def _env(*names: str) -> Tuple[str, ...]:
    return names


FIELDS: Dict[str, Rule] = {
    "tp_degree": Rule("int", 1, 1, env=_env("TP_DEGREE")),
    "pp_degree": Rule("int", 1, 1, env=_env("PP_DEGREE")),
    "use_custom_fsdp": Rule("bool", False, env=_env("USE_CUSTOM_FSDP")),
    "overlap_cpu_optimizer_d2h_h2d": Rule("bool", False, env=_env("OVERLAP_CPU_OPTIMIZER_D2H_H2D")),
    "no_load_optim": Rule("bool", False, env=_env("NO_LOAD_OPTIM")),
    "eod_mask_loss": Rule("bool", False, env=_env("EOD_MASK_LOSS")),
    "no_save_optim": Rule("bool", False, env=_env("NO_SAVE_OPTIM")),
    "optimizer_cpu_offload": Rule("bool", False, env=_env("OPTIMIZER_CPU_OFFLOAD")),
    "use_precision_aware_optimizer": Rule("bool", False, env=_env("USE_PRECISION_AWARE_OPTIMIZER")),
    "decoder_last_pipeline_num_layers": Rule("int", None, 1, env=_env("DECODER_LAST_PIPELINE_NUM_LAYERS")),
    "recompute_granularity": Rule("choice", None, choices=("full", "selective"), env=_env("RECOMPUTE_GRANULARITY")),
    "recompute_method": Rule("choice", None, choices=("uniform", "block"), env=_env("RECOMPUTE_METHOD")),
    "recompute_num_layers": Rule("int", None, 1, env=_env("RECOMPUTE_NUM_LAYERS")),
    "attention_backend": Rule("any", None, env=_env("ATTENTION_BACKEND")),
    "expert_model_parallel_size": Rule("int", 1, 1, env=_env("EXPERT_MODEL_PARALLEL_SIZE")),
    "context_parallel_size": Rule("int", 1, 1, env=_env("CONTEXT_PARALLEL_SIZE")),
    "attention_dropout": Rule("float", None, 0, 1, env=_env("ATTENTION_DROPOUT")),
    "hidden_dropout": Rule("float", None, 0, 1, env=_env("HIDDEN_DROPOUT")),
    "attention_softmax_in_fp32": Rule("bool", True, env=_env("ATTENTION_SOFTMAX_IN_FP32")),
    "expert_tensor_parallel_size": Rule("int", 1, 1, env=_env("EXPERT_TENSOR_PARALLEL_SIZE")),
    "calculate_per_token_loss": Rule("bool", True, env=_env("CALCULATE_PER_TOKEN_LOSS")),
    "use_rotary_position_embeddings": Rule("bool", False, env=_env("USE_ROTARY_POSITION_EMBEDDINGS")),
    "num_micro_batches": Rule("int", 1, 1, env=_env("NUM_MICRO_BATCHES")),
    "gradient_clipping": Rule("float", 1.0, 0, env=_env("GRADIENT_CLIPPING")),
    "sequence_parallelism": Rule("bool", False, env=_env("SEQUENCE_PARALLELISM")),
    # The launcher of Accelerate 0.14 to 0.17 wrote the plural, its plugin read the singular.
    "recompute_activations": Rule("bool", False, env=_env("RECOMPUTE_ACTIVATIONS", "RECOMPUTE_ACTIVATION")),
    "use_distributed_optimizer": Rule("bool", False, env=_env("USE_DISTRIBUTED_OPTIMIZER")),
    "pipeline_model_parallel_split_rank": Rule("int", None, 1),
    "num_layers_per_virtual_pipeline_stage": Rule("int", None, 1),
    "is_train_batch_min": Rule("bool", True),
    "train_iters": Rule("int", None, 1),
    "train_samples": Rule("int", None, 1),
    "weight_decay_incr_style": Rule("choice", "constant", choices=_STYLES),
    "start_weight_decay": Rule("float", None, 0),
    "end_weight_decay": Rule("float", None, 0),
    "lr_decay_style": Rule("choice", "linear", choices=(*_STYLES, "inverse-square-root", "WSD")),
    "lr_decay_iters": Rule("int", None, 1, env=_env("LR_DECAY_ITERS")),
    "lr_decay_samples": Rule("int", None, 1),
    "lr_warmup_iters": Rule("int", None, 0),
    "lr_warmup_samples": Rule("int", None, 0),
    "lr_warmup_fraction": Rule("float", None, 0, 1),
    "min_lr": Rule("float", 0, 0),
    "consumed_samples": Rule("ints", None, 0),
    "no_wd_decay_cond": Rule("call", None),
    "scale_lr_cond": Rule("call", None),
    "lr_mult": Rule("float", 1.0, 0),
    "megatron_dataset_flag": Rule("bool", False),
    "seq_length": Rule("int", None, 1),
    "encoder_seq_length": Rule("int", None, 1),
    "decoder_seq_length": Rule("int", None, 1),
    "tensorboard_dir": Rule("text", None),
    "set_all_logging_options": Rule("bool", False),
    "eval_iters": Rule("int", 100, 1),
    "eval_interval": Rule("int", 1000, 0),
    "return_logits": Rule("bool", False),
    "custom_train_step_class": Rule("call", None),
    "custom_train_step_kwargs": Rule("mapping", None),
    "custom_model_provider_function": Rule("call", None),
    "custom_prepare_model_function": Rule("call", None),
    "custom_megatron_datasets_provider_function": Rule("call", None),
    "custom_get_batch_function": Rule("call", None),
    "custom_loss_function": Rule("call", None),
    "other_megatron_args": Rule("mapping", None),
    "checkpoint_num_layers": Rule("int", None, 1),
    "distribute_checkpointed_activations": Rule("bool", False, env=_env("DISTRIBUTE_CHECKPOINTED_ACTIVATIONS")),
    "partition_activations": Rule("bool", False, env=_env("PARTITION_ACTIVATIONS")),
    "check_for_nan_in_loss_and_grad": Rule("bool", False),
    "require_logits": Rule("bool", False),
}

_MODEL_CODE = ("Tessera builds the model from its Hugging Face config and does not run Megatron's model code; "
               "pass the model to prepare()")

# name: (values that are refused, why)
REFUSED: Dict[str, Tuple[Callable[[Any], bool], str]] = {
    "use_custom_fsdp": (bool, "Megatron's FSDP is not in this build; use_distributed_optimizer=True shards the optimizer"),
    "expert_model_parallel_size": (lambda n: n > 1, "expert parallelism is not in this build yet; leave it at 1"),
    "expert_tensor_parallel_size": (lambda n: n > 1, "expert parallelism is not in this build yet; leave it at 1"),
    "context_parallel_size": (lambda n: n > 1, "context parallelism is not in this build yet; leave it at 1, and give "
                                               "sequence_parallelism=True for long sequences"),
    "calculate_per_token_loss": (lambda on: not on, "the loss is always averaged over all target tokens of the global "
                                                    "batch; remove it"),
    "pipeline_model_parallel_split_rank": (lambda n: n is not None, "it splits encoder from decoder, and T5 is not in "
                                                                    "this build yet"),
    "encoder_seq_length": (lambda n: n is not None, "models with an encoder (BERT, T5) are not in this build yet; "
                                                    "for a decoder give seq_length"),
    "custom_model_provider_function": (lambda f: f is not None, _MODEL_CODE),
    "custom_prepare_model_function": (lambda f: f is not None, _MODEL_CODE),
}

# name: (values that have no effect, why)
WARNED: Dict[str, Tuple[Callable[[Any], bool], str]] = {
    "overlap_cpu_optimizer_d2h_h2d": (bool, "the optimizer's state stays on the device"),
    "optimizer_cpu_offload": (bool, "the optimizer's state stays on the device; use_distributed_optimizer=True shards it"),
    "attention_backend": (lambda v: v is not None and "auto" not in str(v).lower(), "there is one attention kernel for each device"),
    "attention_softmax_in_fp32": (lambda on: not on, "the softmax of attention is always computed in fp32"),
}

FIELD_EFFECTS: Dict[str, Tuple[str, str]] = {
    "tp_degree": ("config", "parallel.tensor"),
    "pp_degree": ("config", "parallel.pipeline"),
    "no_load_optim": ("checkpoint", "load_state leaves the optimizer as it is"),
    "eod_mask_loss": ("documents", "no loss where the input is the end of a document"),
    "no_save_optim": ("checkpoint", "save_state writes no optimizer state"),
    "decoder_last_pipeline_num_layers": ("config", "parallel.pipeline_layout"),
    "recompute_granularity": ("config", "training.recompute"),
    "recompute_method": ("config", "training.recompute_method"),
    "recompute_num_layers": ("config", "training.recompute_layers"),
    "attention_dropout": ("config", "model.attention_dropout"),
    "hidden_dropout": ("config", "model.dropout"),
    "use_rotary_position_embeddings": ("config", "model.position_embedding"),
    "num_micro_batches": ("config", "training.global_batch_size"),
    "gradient_clipping": ("config", "optimizer.clip_grad"),
    "sequence_parallelism": ("config", "parallel.sequence"),
    "recompute_activations": ("config", "training.recompute"),
    "use_distributed_optimizer": ("config", "parallel.zero_stage"),
    "use_precision_aware_optimizer": ("config", "optimizer.split_main_weights"),
    "num_layers_per_virtual_pipeline_stage": ("config", "parallel.virtual_stages"),
    "is_train_batch_min": ("data loader", "which batch_size is the micro-batch: config_map.micro_batch_size_of"),
    "train_iters": ("horizon", "train_iters"),
    "train_samples": ("horizon", "train_iters"),
    "weight_decay_incr_style": ("horizon", "weight_decay_at"),
    "start_weight_decay": ("horizon", "weight_decay_at"),
    "end_weight_decay": ("horizon", "weight_decay_at"),
    "lr_decay_style": ("horizon", "lr_at"),
    "lr_decay_iters": ("horizon", "lr_at"),
    "lr_decay_samples": ("horizon", "lr_at"),
    "lr_warmup_iters": ("horizon", "lr_at"),
    "lr_warmup_samples": ("horizon", "lr_at"),
    "lr_warmup_fraction": ("horizon", "lr_at"),
    "min_lr": ("horizon", "lr_at"),
    "consumed_samples": ("data loader", "first sample of the train, valid and test loaders over .idx/.bin"),
    "no_wd_decay_cond": ("optimizer", "parameters without weight decay: config_map.parameter_rules"),
    "scale_lr_cond": ("optimizer", "parameters whose rate is times lr_mult: config_map.parameter_rules"),
    "lr_mult": ("optimizer", "factor on the rate of scale_lr_cond's parameters: config_map.parameter_rules"),
    "megatron_dataset_flag": ("train step", "the second argument of a custom step's get_batch_func(accelerator, flag)"),
    "seq_length": ("config", "training.seq_length"),
    "decoder_seq_length": ("config", "training.seq_length"),
    "tensorboard_dir": ("tracker", "the engine writes its own scalars there: config_map.tensorboard_scalars"),
    "set_all_logging_options": ("tracker", "more scalars in tensorboard_dir: config_map.tensorboard_scalars"),
    "eval_iters": ("data loader", "steps of an evaluation: how many samples of .idx/.bin are drawn"),
    "eval_interval": ("data loader", "steps between evaluations: how many samples of .idx/.bin are drawn"),
    "return_logits": ("model", "outputs.logits"),
    "custom_train_step_class": ("train step", "the class that takes the step"),
    "custom_train_step_kwargs": ("train step", "keywords of that class"),
    "custom_megatron_datasets_provider_function": ("data loader", "makes the data sets of MegatronLMDummyDataLoader"),
    "custom_get_batch_function": ("train step", "replaces get_batch"),
    "custom_loss_function": ("train step", "replaces the loss function"),
    "other_megatron_args": ("arguments", "each key its own: megatron_args.ARGUMENTS"),
    "checkpoint_num_layers": ("config", "training.recompute_layers"),
    "distribute_checkpointed_activations": ("config", "training.recompute_partition"),
    "partition_activations": ("config", "training.recompute_partition"),
    "check_for_nan_in_loss_and_grad": ("config", "training.max_skipped_steps"),
    "require_logits": ("model", "outputs.logits"),
    **{name: ("warns", text) for name, (_, text) in WARNED.items()},
    **{name: ("refuses", text) for name, (_, text) in REFUSED.items()},
}

_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")


def boolean(text: Any) -> Optional[bool]:
    """Of a bool or a word for one, as Accelerate reads them; None for anything else."""
    word = str(text).strip().lower()
    return True if word in _TRUE else False if word in _FALSE else None


def parse(name: str, text: str, source: str) -> Any:
    """The value of a field as a variable gives it. Errors: ConfigError that names `source`."""
    rule = FIELDS[name]
    try:
        value = {"int": int, "float": float, "bool": boolean}.get(rule.kind, str)(text.strip())
    except ValueError:
        value = None
    if value is None:
        wanted = {"int": "an integer", "float": "a number", "bool": "true or false"}[rule.kind]
        raise ConfigError(f"{source} is '{text}'; it must be {wanted}")
    return value


def _fault(rule: Rule, value: Any) -> str:
    """What is wrong with a value; empty if nothing is."""
    if rule.kind in ("int", "float"):
        wanted = "an integer" if rule.kind == "int" else "a number"
        if isinstance(value, bool) or not isinstance(value, int if rule.kind == "int" else (int, float)):
            return f"it must be {wanted}"
        if not math.isfinite(value) or (rule.least is not None and value < rule.least):
            return f"it must be {wanted} of at least {rule.least:g}"
        if rule.below is not None and value >= rule.below:
            return f"it must be below {rule.below:g}"
    elif rule.kind == "choice" and value not in rule.choices:
        return f"it must be one of {', '.join(rule.choices)}{nearest(str(value), rule.choices)}"
    elif rule.kind == "call" and not callable(value):
        return "it must be a function or class"
    elif rule.kind == "mapping" and not isinstance(value, dict):
        return "it must be a dict"
    elif rule.kind == "ints" and not (isinstance(value, (list, tuple)) and 1 <= len(value) <= 3
                                      and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)):
        return "it must be a list of one to three sample counts (train, valid, test)"
    return ""


def check(name: str, value: Any) -> Any:
    """The value of a field, as it is kept. Errors: ConfigError for a wrong type, range or word, or a refused value."""
    rule = FIELDS[name]
    if value is None:
        return rule.default
    if rule.kind == "bool":
        word = boolean(value)
        if word is None:
            raise ConfigError(f"MegatronLMPlugin.{name} is {value!r}; it must be True or False")
        value = word
    elif rule.kind == "text":
        value = str(value)
    fault = _fault(rule, value)
    if fault:
        raise ConfigError(f"MegatronLMPlugin.{name} is {value!r}; {fault}")
    if name in REFUSED and REFUSED[name][0](value):
        raise ConfigError(f"MegatronLMPlugin.{name}={value!r}: {REFUSED[name][1]}")
    return value
