"""From a MegatronLMPlugin, a model's config and a loader to Tessera's native configuration: pure functions.

What each field of the plugin does is in `fields.FIELDS`, what each of Megatron's arguments does in
`megatron_args.ARGUMENTS`.
"""

from typing import Any, Dict, Iterable, Optional, Sequence, Tuple

from tessera.comm.warnings import warn_once
from tessera.compat.refusals import check_precision
from tessera.errors import ConfigError
from tessera.plugin import megatron_args
from tessera.plugin.fields import data_ranks
from tessera.plugin.lr_horizon import Horizon, resolve_horizon
from tessera.plugin.model_shape import decoder_length_given, described, length_given, model_overrides

__all__ = ["Horizon", "micro_batch_size_of", "native_config", "native_value", "parameter_rules",
           "resolve_horizon", "sequence_length_of", "tensorboard_scalars"]


def micro_batch_size_of(plugin, batch_sizes: Sequence[int]) -> int:
    """Samples of a micro-batch on one data rank, for loaders with these batch sizes: the least, or with
    `is_train_batch_min=False` the greatest. Errors: ConfigError without a batch size."""
    sizes = [size for size in batch_sizes if size is not None]
    if not sizes:
        raise ConfigError("no loader given to prepare() has a batch_size; give at least one a batch_size")
    return min(sizes) if plugin is None or plugin.is_train_batch_min else max(sizes)


def sequence_length_of(plugin, hf_config: Optional[dict] = None, batch_width: Optional[int] = None) -> Optional[int]:
    """Tokens per sample: the plugin's seq_length (decoder_seq_length, of a model with an encoder encoder_seq_length), else the width of the
    first batch, else the model's positions. Errors: ConfigError for the length of what the model has not."""
    given = None if plugin is None else length_given(plugin, hf_config)
    own = described(hf_config)
    positions = own.get("max_positions")
    length = given if given is not None else batch_width if batch_width is not None else positions
    if length is not None and positions is not None and length > positions and own["position_embedding"] == "learned":
        raise ConfigError(f"sequences of {length} tokens are longer than the model's {positions} positions; shorten them, "
                          "or make the model with more")
    return length


def parameter_rules(plugin, named_parameters: Iterable[Tuple[str, Any]]) -> Dict[str, Dict[str, float]]:
    """What `no_wd_decay_cond` and `scale_lr_cond` say: name -> {"weight_decay": 0.0} and/or {"lr_mult": x}, for the
    parameters they hold for. Both are called with (name, parameter)."""
    rules: Dict[str, Dict[str, float]] = {}
    for name, parameter in named_parameters:
        if plugin.no_wd_decay_cond is not None and plugin.no_wd_decay_cond(name, parameter):
            rules.setdefault(name, {})["weight_decay"] = 0.0
        if plugin.scale_lr_cond is not None and plugin.scale_lr_cond(name, parameter):
            rules.setdefault(name, {})["lr_mult"] = plugin.lr_mult
    return rules


def tensorboard_scalars(plugin) -> Tuple[str, ...]:
    """What the engine writes to `tensorboard_dir` at each optimizer step, under Megatron's names; () without a folder."""
    if plugin is None or plugin.tensorboard_dir is None:
        return ()
    usual = ("lm loss", "learning-rate", "grad-norm", "loss-scale")
    more = ("batch-size", "world-size", "iteration-time", "tokens-per-second", "memory")
    return usual + (more if plugin.set_all_logging_options else ())


def _split_rank(plugin, model: Dict[str, Any]) -> Dict[str, Any]:
    """The key of the section `parallel` on where the decoder begins, for the section `model` of a model with an encoder."""
    rank = plugin.pipeline_model_parallel_split_rank
    if rank is None:
        return {}
    if model and model.get("encoder_layers") is None:
        raise ConfigError("MegatronLMPlugin.pipeline_model_parallel_split_rank says at which stage the decoder begins, and the model given to "
                          "prepare() has no encoder beside it; remove it")
    if rank >= plugin.pp_degree:
        raise ConfigError(f"MegatronLMPlugin.pipeline_model_parallel_split_rank is {rank}; it must be above 0 and below pp_degree "
                          f"{plugin.pp_degree}: it is the first stage of the decoder")
    for name in ("num_layers_per_virtual_pipeline_stage", "decoder_last_pipeline_num_layers"):
        if getattr(plugin, name) is not None:
            raise ConfigError(f"MegatronLMPlugin.pipeline_model_parallel_split_rank and {name} both say where the model is cut; remove one")
    return {"pipeline_split_rank": rank}


def _pipeline(plugin, layers: Optional[int]) -> Dict[str, Any]:
    """Keys of the section `parallel` on stages and their pieces."""
    keys: Dict[str, Any] = {"pipeline": plugin.pp_degree, "schedule": "1f1b", "virtual_stages": 1, "pipeline_layout": None}
    stage = plugin.num_layers_per_virtual_pipeline_stage
    last = plugin.decoder_last_pipeline_num_layers
    if stage is None and last is None:
        return keys
    if layers is None:
        raise ConfigError("num_layers_per_virtual_pipeline_stage and decoder_last_pipeline_num_layers need the model's "
                          "number of layers; pass a model with a Hugging Face config to prepare()")
    if stage is not None:
        if layers % (plugin.pp_degree * stage) != 0:
            raise ConfigError(f"num_layers_per_virtual_pipeline_stage {stage} x pp_degree {plugin.pp_degree} does not divide "
                              f"the model's {layers} layers")
        chunks = layers // (plugin.pp_degree * stage)
        if chunks > 1:
            if plugin.num_micro_batches % plugin.pp_degree != 0:
                raise ConfigError(f"an interleaved pipeline (num_layers_per_virtual_pipeline_stage) needs num_micro_batches "
                                  f"in multiples of pp_degree {plugin.pp_degree}, not {plugin.num_micro_batches}")
            keys.update(schedule="interleaved", virtual_stages=chunks)
    if last is not None:
        others, rest = plugin.pp_degree - 1, layers - last
        if rest < others or rest % others != 0:
            raise ConfigError(f"decoder_last_pipeline_num_layers {last} leaves {rest} of {layers} layers for the other "
                              f"{others} stages, which must get equal shares of at least 1")
        keys["pipeline_layout"] = ",".join(map(str, [rest // others] * others + [last]))
    return keys


def _recompute(plugin) -> Dict[str, Any]:
    granularity = plugin.recompute_granularity
    layers = plugin.recompute_num_layers
    if plugin.checkpoint_num_layers is not None:
        if layers not in (None, plugin.checkpoint_num_layers):
            raise ConfigError(f"checkpoint_num_layers {plugin.checkpoint_num_layers} is an older name of recompute_num_layers, "
                              f"which is {layers}; give one")
        layers = plugin.checkpoint_num_layers
        granularity = granularity or "full"
    if granularity is None:
        granularity = "selective" if plugin.recompute_activations else "none"
    elif granularity == "full" and plugin.recompute_activations:
        warn_once("recompute_granularity 'full' says more than recompute_activations=True, and counts")
    partition = _partition(plugin, granularity)
    if granularity != "full":
        for name, value in (("recompute_method", plugin.recompute_method), ("recompute_num_layers", layers)):
            if value is not None:
                raise ConfigError(f"MegatronLMPlugin.{name} is for full recomputation; give recompute_granularity='full' too")
        return {"recompute": granularity}
    return {"recompute": "full", "recompute_method": plugin.recompute_method or "uniform", "recompute_layers": layers or 1,
            "recompute_partition": partition}


def _partition(plugin, granularity: str) -> bool:
    """Whether tensor ranks share the activations that full recomputation keeps; says so where there is nothing to share."""
    given = [name for name in ("distribute_checkpointed_activations", "partition_activations") if getattr(plugin, name)]
    why = ("shared out is what full recomputation keeps; give recompute_granularity='full' too" if granularity != "full" else
           "activations are shared out over tensor ranks, and there is one; give tp_degree above 1" if plugin.tp_degree == 1 else
           "sequence_parallelism shares these activations out already" if plugin.sequence_parallelism else None)
    if given and why:
        warn_once(f"MegatronLMPlugin without effect: {', '.join(f'{name}=True' for name in given)}: {why}")
    return bool(given) and why is None


def native_value(name: str, value: Any) -> Any:
    """The native value of an argument of effect "config" or "processes". Errors: ConfigError for a wrong type."""
    _, _, key, number, least = megatron_args.ARGUMENTS[name]
    if number is int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"other_megatron_args: {name} is {value!r}; it must be an integer of at least {least}")
        return value * 60.0 if key == "parallel.timeout_s" else value
    if number is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1e18:
            raise ConfigError(f"other_megatron_args: {name} is {value!r}; it must be a number above 0 and at most 1e18")
        return float(value)
    if name == "tp_comm_overlap":  # 0 = as the device and the sizes suggest, 1 = off
        return 0 if value else 1
    if name == "cp_comm_type":
        return _context_method(value)
    return bool(value)


def _context_method(value: Any) -> str:
    """Of Megatron's word, which its command line has as a list that may name one for each layer."""
    words = {str(word) for word in (value if isinstance(value, (list, tuple)) else [value])}
    if len(words) == 1 and words <= {"all_gather", "a2a"}:
        return "ulysses" if "a2a" in words else "all_gather"
    raise ConfigError(f"other_megatron_args: cp_comm_type is {value!r}; it may be 'all_gather' or 'a2a', one for all layers: the numbers "
                      "are the same. Leave it out for what sends less")


def _sections_of(arguments: Dict[str, Any]) -> Dict[str, Dict[str, Any]]:
    sections: Dict[str, Dict[str, Any]] = {}
    for name, value in arguments.items():
        effect = megatron_args.effect_of(name)
        if effect.kind == "config" and value is not None:
            section, _, word = effect.yaml.partition(".")
            sections.setdefault(section, {})[word] = native_value(name, value)
    return sections


def _check_balance(arguments: Dict[str, Any]) -> None:
    if arguments.get("moe_aux_loss_coeff") is not None and arguments.get("moe_router_load_balancing_type") != "seq_aux_loss":
        raise ConfigError("other_megatron_args: moe_aux_loss_coeff needs moe_router_load_balancing_type 'seq_aux_loss': experts are balanced "
                          "for each sample, and Megatron's own default balances them over a whole batch")


def _optimizer(defaults: Optional[dict], clip: float) -> Dict[str, Any]:
    given = dict(defaults or {})
    section = {key: given[key] for key in ("name", "eps", "weight_decay", "momentum", "nesterov") if given.get(key) is not None}
    if given.get("betas") is not None:
        section["betas"] = [float(beta) for beta in given["betas"]]
    if given.get("lr"):
        section["lr"] = float(given["lr"])
    section["clip_grad"] = float(clip)
    return section


def _scaling(grad_scaler) -> Dict[str, Any]:
    if grad_scaler is None:
        return {}
    if not grad_scaler.enabled:
        return {"loss_scale": 1.0}
    return {"initial_loss_scale": float(grad_scaler.init_scale), "loss_scale_window": grad_scaler.growth_interval, "hysteresis": 1}


def native_config(*, plugin=None, hf_config: Optional[dict] = None, pretrained: bool = False,
                  optimizer_defaults: Optional[dict] = None, world_size: int = 1, mixed_precision: str = "no",
                  seq_length: Optional[int] = None, micro_batch_size: int = 1, train_steps: Optional[int] = None,
                  seed: Optional[int] = None, timeout_s: Optional[float] = None, grad_scaler=None, cpu: bool = False,
                  threads: int = 0, checkpointed: bool = False, sharding=None) -> Dict[str, Dict[str, Any]]:
    """Tessera's configuration (docs/configuration.md) as nested dicts; keys that nobody sets are left out.

    `plugin` None is plain data parallelism. `hf_config`: a transformers `config.to_dict()`; the section `model` holds only
    what the plugin sets over it. `pretrained`: the model has weights that must be kept (from files). `optimizer_defaults`: name
    (adamw, adam, sgd), lr, betas, eps, weight_decay, momentum. `micro_batch_size`: samples on one data rank;
    `seq_length`: tokens. `grad_scaler`: a GradScalerKwargs. `seed` (of set_seed) yields to other_megatron_args' seed.
    `checkpointed`: gradient_checkpointing_enable() was called on the model, which means full recomputation of activations
    unless the plugin says what is recomputed. `sharding`: a DeepSpeedPlugin or FullyShardedDataParallelPlugin, without `plugin`.
    The learning rate is constant here: the caller sets that of each step.
    Errors: ConfigError for what cannot be had together, all by the names that scripts use.
    """
    check_precision(mixed_precision)
    dp = data_ranks(plugin, world_size)
    micro_batches = plugin.num_micro_batches if plugin is not None else 1
    length = sequence_length_of(plugin, hf_config, seq_length)
    training: Dict[str, Any] = {
        "micro_batch_size": micro_batch_size, "global_batch_size": dp * micro_batches * micro_batch_size,
        "precision": "fp32" if mixed_precision == "no" else mixed_precision, **_scaling(grad_scaler)}
    if checkpointed:
        training["recompute"] = "full"
    decoder = None if plugin is None else decoder_length_given(plugin, hf_config)
    for key, value in (("seq_length", length), ("decoder_seq_length", decoder), ("steps", train_steps), ("seed", seed)):
        if value is not None:
            training[key] = value
    parallel: Dict[str, Any] = {"tensor": 1, "sequence": False, "pipeline": 1, "schedule": "1f1b", "virtual_stages": 1,
                                "pipeline_layout": None, "data": dp, "zero_stage": 0}
    config: Dict[str, Dict[str, Any]] = {
        "model": {}, "parallel": parallel, "optimizer": {}, "lr_schedule": {"style": "constant"}, "training": training,
        "device": {"type": "cpu" if cpu else "auto", "threads": threads}, "offload": {}}
    if timeout_s is not None:
        parallel["timeout_s"] = float(timeout_s)
    if plugin is None:
        config["optimizer"] = _optimizer(optimizer_defaults, (sharding and sharding.clip_grad) or 0.0)
        if sharding is not None:
            parallel.update(sharding.parallel)
            config["offload"].update(sharding.offload)
            if mixed_precision == "fp16":
                training.update(sharding.loss_scaling)
            if sharding.recompute:
                training["recompute"] = "full"
        return config

    model = described(hf_config)
    parallel.update({**_pipeline(plugin, model.get("num_layers")), **_split_rank(plugin, model)}, tensor=plugin.tp_degree,
                    context=plugin.context_parallel_size, expert=plugin.expert_model_parallel_size,
                    sequence=plugin.sequence_parallelism,
                    zero_stage=3 if plugin.use_custom_fsdp else int(plugin.use_distributed_optimizer))
    if plugin.sequence_parallelism and plugin.tp_degree == 1:
        warn_once("MegatronLMPlugin without effect: sequence_parallelism=True: sequences are shared out over tensor ranks, and there "
                  "is one; give tp_degree above 1")
    recomputed = _recompute(plugin)
    if not checkpointed or recomputed["recompute"] != "none":
        training.update(recomputed)
    if plugin.check_for_nan_in_loss_and_grad:
        # As in Megatron: with a dynamic loss scale a step that is not finite is part of the search for the scale.
        if mixed_precision == "fp16" and "loss_scale" not in (plugin.other_megatron_args or {}):
            warn_once("check_for_nan_in_loss_and_grad has no effect with fp16's dynamic loss scale")
        else:
            training["max_skipped_steps"] = 1
    config["optimizer"] = _optimizer(optimizer_defaults, plugin.gradient_clipping)
    if plugin.use_precision_aware_optimizer:
        # What Megatron's does with its default dtypes: fp32 state, and of main weights what bf16 weights lack.
        if mixed_precision == "bf16":
            config["optimizer"]["split_main_weights"] = True
        else:
            warn_once("use_precision_aware_optimizer has no effect without mixed_precision='bf16': the optimizer's state is fp32, "
                      "and only bf16 weights are halves of their main weights")
    if plugin.optimizer_cpu_offload:
        config["offload"]["optimizer"] = "cpu"
    config["model"] = model_overrides(plugin, hf_config, pretrained)
    _check_balance(plugin.given_arguments)
    for section, keys in _sections_of(plugin.given_arguments).items():
        config[section].update(keys)
    return config
