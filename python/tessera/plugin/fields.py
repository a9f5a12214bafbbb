"""The fields of MegatronLMPlugin, each once: its type, what it may hold, its other names, and what it does.

`PluginFields` is the table; the plugin is made of it. `FIELDS` has the rows by name. Also written from it, by
`tessera.plugin.reference`: the launcher's keys and flags, the configuration's hints at its own keys, pages of docs/.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from tessera.compat.refusals import boolean, nearest
from tessera.errors import ConfigError


class Row(NamedTuple):
    """Of one field: what it may hold, what it is when neither the script nor the environment says so, its effect.

    Effects, each with a detail:
    - "config": a key of the native configuration that `config_map.native_config` makes;
    - "documents": a rule about ends of documents in every batch;
    - "horizon": the learning rates of `lr_horizon.resolve_horizon`;
    - "train step", "model", "data loader", "optimizer", "checkpoint", "tracker": that part reads the field;
    - "arguments": every key has an effect of its own;
    - "warns", "refuses": the values for which `applies` holds have no effect, or are refused; why."""

    kind: str  # bool, int, float, choice, text, call, ints, mapping, any
    default: Any = None
    effect: str = ""
    detail: str = ""
    yaml: str = ""  # its key in YAML
    megatron: Optional[Tuple[str, ...]] = None  # Megatron-LM's names; None: the same one
    key: str = ""  # what `tessera launch` says of its key megatron_lm_NAME in Accelerate's files; "" where there is none
    variables: Tuple[str, ...] = ()  # names after MEGATRON_LM_, of a field with a key, besides its own
    least: Optional[float] = None  # None: 1 of whole numbers, 0 of others
    below: Optional[float] = None
    choices: Tuple[str, ...] = ()
    applies: Optional[Callable[[Any], bool]] = None
    axis: str = ""  # of the mesh, whose ranks it counts
    later: bool = False  # not among Megatron's arguments from the start: a method of the plugin adds it, or none


def _field(default: Any = None, *, config: str = "", warns: tuple = (), refuses: tuple = (), **row: Any) -> Any:
    if config:
        row.update(effect=("config", config), yaml=config)
    for kind, told in (("warns", warns), ("refuses", refuses)):
        if told:
            row.update(applies=told[0], effect=(kind, told[1]))
    row["effect"], row["detail"] = row["effect"]
    return dataclasses.field(default=None if row.get("key") else default, metadata={"default": default, **row})


_KINDS = {int: "int", float: "float", bool: "bool", str: "text", Callable: "call", List[int]: "ints", Dict[str, Any]: "mapping", Any: "any"}
_STYLES = ("constant", "linear", "cosine")
_MODEL_CODE = ("Tessera builds the model from its Hugging Face config and does not run Megatron's model code; "
               "pass the model to prepare()")


@dataclass
class PluginFields:
    """In the order of Accelerate's class."""

    tp_degree: Optional[int] = _field(1, axis="tp", config="parallel.tensor", megatron=("tensor_model_parallel_size",),
        key="tensor-parallel ranks")
    pp_degree: Optional[int] = _field(1, axis="pp", config="parallel.pipeline", megatron=("pipeline_model_parallel_size",),
        key="pipeline stages")
    use_custom_fsdp: Optional[bool] = _field(False, config="parallel.zero_stage",
        key="weights, gradients and optimizer state are shared out over data ranks (ZeRO stage 3)")
    overlap_cpu_optimizer_d2h_h2d: Optional[bool] = _field(False,
        warns=(bool, "offloaded state always comes and goes beside the update of what is there"), key="without effect: it always does")
    no_load_optim: Optional[bool] = _field(False, effect=("checkpoint", "load_state leaves the optimizer as it is"),
        key="load_state leaves the optimizer as it is")
    eod_mask_loss: Optional[bool] = _field(False, effect=("documents", "no loss where the input is the end of a document"),
        yaml="data.eod_mask_loss", key="no loss on end-of-document tokens")
    no_save_optim: Optional[bool] = _field(False, effect=("checkpoint", "save_state writes no optimizer state"),
        key="save_state writes no optimizer state")
    optimizer_cpu_offload: Optional[bool] = _field(False,
        config="offload.optimizer", key="the optimizer's state and main weights lie in host memory and pass through the device")
    use_precision_aware_optimizer: Optional[bool] = _field(False, config="optimizer.split_main_weights",
        key="bf16: keep of the main weights what bf16 weights lack")
    decoder_last_pipeline_num_layers: Optional[int] = _field(config="parallel.pipeline_layout",
        key="layers of the last pipeline stage")
    recompute_granularity: Optional[str] = _field(choices=("full", "selective"), config="training.recompute",
        key="full or selective recomputation")
    recompute_method: Optional[str] = _field(choices=("uniform", "block"), config="training.recompute_method",
        key="full recomputation: uniform or block")
    recompute_num_layers: Optional[int] = _field(config="training.recompute_layers", key="full recomputation: layers of a segment")
    attention_backend: Optional[Any] = _field(
        warns=(lambda v: v is not None and "auto" not in str(v).lower(), "there is one attention kernel for each device"),
        key="without effect")
    expert_model_parallel_size: Optional[int] = _field(1, config="parallel.expert",
        key="expert-parallel ranks: data ranks that each hold a part of the experts")
    context_parallel_size: Optional[int] = _field(1, axis="cp", config="parallel.context",
        key="context-parallel ranks: each holds a part of every sample's positions")
    attention_dropout: Optional[float] = _field(below=1, config="model.attention_dropout", key="dropout on attention probabilities")
    hidden_dropout: Optional[float] = _field(below=1, config="model.dropout", key="dropout on embeddings and residual branches")
    attention_softmax_in_fp32: Optional[bool] = _field(True,
        warns=(lambda on: not on, "the softmax of attention is always computed in fp32"), key="without effect: it always is")
    expert_tensor_parallel_size: Optional[int] = _field(1,
        refuses=(lambda n: n > 1, "tensor ranks share out experts as they do all else, by tp_degree; leave it at 1"),
        key="1: it follows the tensor-parallel ranks")
    calculate_per_token_loss: Optional[bool] = _field(True,
        refuses=(lambda on: not on, "the loss is always averaged over all target tokens of the global batch; remove it"),
        key="true: the loss always is")
    use_rotary_position_embeddings: Optional[bool] = _field(False, config="model.position_embedding",
        key="rotary positions in a new model")
    num_micro_batches: Optional[int] = _field(1, config="training.global_batch_size",
        key="micro-batches of a data rank per optimizer step")
    gradient_clipping: Optional[float] = _field(1.0, config="optimizer.clip_grad", megatron=("clip_grad",),
        key="largest global gradient norm; 0 = no clipping")
    sequence_parallelism: Optional[bool] = _field(False, config="parallel.sequence", megatron=("sequence_parallel",),
        key="sequence parallelism over the tensor ranks")
    # The launcher of Accelerate 0.14 to 0.17 wrote the plural, its plugin read the singular.
    recompute_activations: Optional[bool] = _field(False, config="training.recompute", key="selective recomputation",
        variables=("RECOMPUTE_ACTIVATION",), later=True)
    use_distributed_optimizer: Optional[bool] = _field(False, config="parallel.zero_stage",
        key="shard the optimizer's state over data ranks")
    pipeline_model_parallel_split_rank: Optional[int] = _field(config="parallel.pipeline_split_rank")
    num_layers_per_virtual_pipeline_stage: Optional[int] = _field(config="parallel.virtual_stages")
    is_train_batch_min: bool = _field(True,
        effect=("data loader", "which batch_size is the micro-batch: config_map.micro_batch_size_of"), megatron=(), later=True)
    train_iters: Optional[int] = _field(effect=("horizon", "train_iters"), yaml="training.steps")
    train_samples: Optional[int] = _field(effect=("horizon", "train_iters"))
    weight_decay_incr_style: str = _field("constant", choices=_STYLES, effect=("horizon", "weight_decay_at"),
        yaml="lr_schedule.weight_decay_style")
    start_weight_decay: Optional[float] = _field(effect=("horizon", "weight_decay_at"), yaml="optimizer.weight_decay")
    end_weight_decay: Optional[float] = _field(effect=("horizon", "weight_decay_at"), yaml="lr_schedule.end_weight_decay")
    lr_decay_style: str = _field("linear", choices=(*_STYLES, "inverse-square-root", "WSD"), effect=("horizon", "lr_at"),
        yaml="lr_schedule.style")
    lr_decay_iters: Optional[int] = _field(effect=("horizon", "lr_at"), yaml="lr_schedule.decay_steps",
        key="optimizer steps over which the learning rate decays")
    lr_decay_samples: Optional[int] = _field(effect=("horizon", "lr_at"))
    lr_warmup_iters: Optional[int] = _field(least=0, effect=("horizon", "lr_at"), yaml="lr_schedule.warmup_steps")
    lr_warmup_samples: Optional[int] = _field(least=0, effect=("horizon", "lr_at"))
    lr_warmup_fraction: Optional[float] = _field(below=1, effect=("horizon", "lr_at"))
    min_lr: float = _field(0, effect=("horizon", "lr_at"), yaml="lr_schedule.min_lr")
    consumed_samples: Optional[List[int]] = _field(
        effect=("data loader", "first sample of the train, valid and test loaders over .idx/.bin"))
    no_wd_decay_cond: Optional[Callable] = _field(
        effect=("optimizer", "parameters without weight decay: config_map.parameter_rules"))
    scale_lr_cond: Optional[Callable] = _field(
        effect=("optimizer", "parameters whose rate is times lr_mult: config_map.parameter_rules"))
    lr_mult: float = _field(1.0,
        effect=("optimizer", "factor on the rate of scale_lr_cond's parameters: config_map.parameter_rules"))
    megatron_dataset_flag: bool = _field(False,
        effect=("train step", "the second argument of a custom step's get_batch_func(accelerator, flag)"))
    seq_length: Optional[int] = _field(config="training.seq_length", later=True)
    encoder_seq_length: Optional[int] = _field(config="training.seq_length", later=True)
    decoder_seq_length: Optional[int] = _field(config="training.seq_length", later=True)
    tensorboard_dir: Optional[str] = _field(
        effect=("tracker", "the engine writes its own scalars there: config_map.tensorboard_scalars"), later=True)
    set_all_logging_options: bool = _field(False,
        effect=("tracker", "more scalars in tensorboard_dir: config_map.tensorboard_scalars"), later=True)
    eval_iters: int = _field(100, effect=("data loader", "steps of an evaluation: how many samples of .idx/.bin are drawn"),
        yaml="training.eval_iters")
    eval_interval: int = _field(1000, least=0,
        effect=("data loader", "steps between evaluations: how many samples of .idx/.bin are drawn"), yaml="training.eval_interval")
    return_logits: bool = _field(False, effect=("model", "outputs.logits"), later=True)
    custom_train_step_class: Optional[Callable] = _field(effect=("train step", "the class that takes the step"), later=True)
    custom_train_step_kwargs: Optional[Dict[str, Any]] = _field(effect=("train step", "keywords of that class"), later=True)
    custom_model_provider_function: Optional[Callable] = _field(refuses=(lambda f: f is not None, _MODEL_CODE), later=True)
    custom_prepare_model_function: Optional[Callable] = _field(refuses=(lambda f: f is not None, _MODEL_CODE), later=True)
    custom_megatron_datasets_provider_function: Optional[Callable] = _field(
        effect=("data loader", "makes the data sets of MegatronLMDummyDataLoader"), later=True)
    custom_get_batch_function: Optional[Callable] = _field(effect=("train step", "replaces get_batch"), later=True)
    custom_loss_function: Optional[Callable] = _field(effect=("train step", "replaces the loss function"), later=True)
    other_megatron_args: Optional[Dict[str, Any]] = _field(effect=("arguments", "each key its own: megatron_args.ARGUMENTS"),
        megatron=(), later=True)
    # Not in Accelerate's class, but in guides of its versions.
    checkpoint_num_layers: Optional[int] = _field(config="training.recompute_layers", later=True)
    distribute_checkpointed_activations: Optional[bool] = _field(False, config="training.recompute_partition",
        megatron=("distribute_saved_activations", "distribute_checkpointed_activations"),
        key="full recomputation: tensor ranks share what is kept", later=True)
    partition_activations: Optional[bool] = _field(False, config="training.recompute_partition", key="the same", later=True)
    check_for_nan_in_loss_and_grad: Optional[bool] = _field(False, config="training.max_skipped_steps", later=True)
    require_logits: Optional[bool] = _field(False, effect=("model", "outputs.logits"), later=True)


def _row(each: dataclasses.Field) -> Row:
    kind = next(word for kind, word in _KINDS.items() if each.type in (kind, Optional[kind]))
    return Row("choice" if "choices" in each.metadata else kind, **each.metadata)


FIELDS: Dict[str, Row] = {each.name: _row(each) for each in dataclasses.fields(PluginFields)}
AXES: Dict[str, str] = {row.axis: name for name, row in FIELDS.items() if row.axis}  # the axes of one copy of the model


def degrees(plugin: Any) -> Dict[str, int]:
    """Ranks along the axes of one copy of the model; of None one each."""
    return {axis: 1 if plugin is None else getattr(plugin, name) for axis, name in AXES.items()}


def data_ranks(plugin: Any, world_size: int) -> int:
    """Data-parallel ranks of a layout. Errors: ConfigError when the degrees do not divide the processes."""
    ranks = degrees(plugin)
    model = math.prod(ranks.values())
    if world_size % model != 0:
        told = " x ".join(f"{AXES[axis]} {count}" for axis, count in ranks.items() if count > 1 or axis in ("tp", "pp"))
        raise ConfigError(f"{told} = {model} does not divide the "
                          f"{world_size} processes there are; start a multiple of {model} (tessera launch --num_processes "
                          f"{max(1, world_size // model) * model}), or give other degrees")
    return world_size // model


def variables(name: str) -> Tuple[str, ...]:
    """The variables that a field is read from where the script does not give it."""
    row = FIELDS[name]
    return tuple(f"MEGATRON_LM_{suffix}" for suffix in (name.upper(), *row.variables)) if row.key else ()


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


def _fault(rule: Row, value: Any) -> str:
    """What is wrong with a value; empty if nothing is."""
    if rule.kind in ("int", "float"):
        wanted = "an integer" if rule.kind == "int" else "a number"
        if isinstance(value, bool) or not isinstance(value, int if rule.kind == "int" else (int, float)):
            return f"it must be {wanted}"
        least = (rule.kind == "int") if rule.least is None else rule.least
        if not math.isfinite(value) or value < least:
            return f"it must be {wanted} of at least {least:g}"
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
    if rule.effect == "refuses" and rule.applies(value):
        raise ConfigError(f"MegatronLMPlugin.{name}={value!r}: {rule.detail}")
    return value
