"""What of the objects given to an Accelerator must be equal on all ranks, as place: value, for `comm.agreement.agreed`."""

from __future__ import annotations

import json
from types import MethodType
from typing import Any, Dict, List, Optional

from tessera.engine.plan import ModelPlan
from tessera.plugin.facts import plugin_facts

_CONFIG_OF_ITS_OWN = ("_name_or_path", "transformers_version", "_attn_implementation", "_attn_implementation_autoset")
_SPEED = ("params", "foreach", "fused", "capturable")  # of an optimizer's group, beside its parameters
_LOADER = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "data_seed")
_ACCUMULATION = ("num_steps", "adjust_scheduler", "sync_with_dataloader")


def accelerator_facts(accelerator: Any) -> Dict[str, Any]:
    facts = {f"GradientAccumulationPlugin.{name}": getattr(accelerator.gradient_state, name) for name in _ACCUMULATION}
    facts.update({f"DataLoaderConfiguration.{name}": getattr(accelerator.dataloader_config, name, None) for name in _LOADER})
    facts["step_scheduler_with_optimizer"] = accelerator.step_scheduler_with_optimizer
    facts["rng_types"] = accelerator.rng_types and [str(each) for each in accelerator.rng_types]
    facts["mixed_precision"] = accelerator.mixed_precision
    scaler = accelerator.scaler_handler
    facts["GradScalerKwargs"] = None if scaler is None else vars(scaler)
    return {**facts, **plugin_facts(accelerator.state.megatron_lm_plugin)}


def kind_facts(objects: tuple, kinds: Dict[str, List[int]]) -> Dict[str, Any]:
    kind_of = {i: kind for kind, places in kinds.items() for i in places}
    return {f"argument {i + 1}": f"{kind_of.get(i, 'other')} {type(each).__name__}" if i in kind_of else "something else"
            for i, each in enumerate(objects)}


def model_facts(plan: ModelPlan) -> Dict[str, Any]:
    facts: Dict[str, Any] = {"the model's dtype": plan.dtype}
    for key, value in json.loads(plan.config_json).items():
        if key not in _CONFIG_OF_ITS_OWN:
            facts[f"config.{key}"] = value
    for each in plan.parameters:
        facts[f"parameter {each.name}"] = f"{list(each.shape)}, {'trained' if each.requires_grad else 'frozen'}"
    facts["what the model's modules say over its config"] = plan.values
    facts["what the plugin makes of the model"] = plan.change and plan.change.architecture
    return facts


def optimizer_facts(optimizer: Any, names: Dict[int, str]) -> Dict[str, Any]:
    facts: Dict[str, Any] = {"optimizer": type(optimizer)}
    if not hasattr(optimizer, "param_groups"):  # tessera.causal_lm's
        return {**facts, **{f"optimizer.{name}": value for name, value in vars(optimizer).items()}}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in _SPEED:
                facts[f"optimizer.param_groups[{number}].{key}"] = value
        for parameter in group["params"]:
            name = names.get(id(parameter), f"one of shape {tuple(parameter.shape)} that is not the model's")
            facts[f"the optimizer's group of {name}"] = number
    return facts


def scheduler_facts(scheduler: Any, place: str) -> Dict[str, Any]:
    facts: Dict[str, Any] = {place: type(scheduler)}
    for name, value in vars(scheduler).items():
        if name in ("_schedulers", "schedulers"):
            for number, each in enumerate(value):
                facts.update(scheduler_facts(each, f"{place}.{name}[{number}]"))
        elif name != "optimizer" and not isinstance(value, MethodType) and not name.startswith("__"):
            facts[f"{place}.{name}"] = value
    return facts


def loader_facts(loader: Any, place: str, length: Optional[int]) -> Dict[str, Any]:
    return {f"{place}.batch_size": getattr(loader, "batch_size", None),
            f"{place}.drop_last": getattr(loader, "drop_last", None), f"{place}: batches": length}
