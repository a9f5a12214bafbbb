"""What prepare() reads of a Transformers model beside its config: the modules count, and what cannot is refused by name."""

from __future__ import annotations

import json
import sys
from typing import Any, Dict, Optional

import torch

from tessera.engine import module_tree
from tessera.engine.model_description import head_is_tied
from tessera.plugin.heads import Heads, heads_of
from tessera.errors import ConfigError
from tessera.logging import get_logger

logger = get_logger(__name__)

# Fields of a config that Transformers reads while a model runs, with the only values that the engine computes.
_RUNNING = {"is_causal": (None, True), "output_hidden_states": (None, False), "output_attentions": (None, False),
            "return_dict": (None, True), "attention_chunk_size": (None,)}
# Attributes of modules that are a dropout's probability, and the key of the section `model` that it is.
_PROBABILITIES = {"attention_dropout": "attention_dropout", "hidden_dropout": "dropout", "attn_dropout": "attention_dropout", "residual_dropout": "dropout",
                  "embedding_dropout": "embedding_dropout", "dropout": "attention_dropout"}  # the last: T5's, a number
# Dropout of the section `model`, and where it is.
_PLACES = {"dropout": "in the residual branches (and after the embedding)", "embedding_dropout": "after the embedding",
           "attention_dropout": "within attention"}


def check_model(model: torch.nn.Module, config_json: str) -> Dict[str, Any]:
    """Values of the section `model` that the modules of a model say over its config. Errors: ConfigError naming what Tessera
    would not compute as PyTorch does."""
    config = model.config
    own = module_tree.own_class(model, config.model_type)
    heads = heads_of(json.loads(config_json))
    if heads.looks_back:
        _check_config(config)
        _check_loss(model)
    else:
        _check_encoder(model, heads)
    module_tree.check_attention(config)
    module_tree.check_global_hooks()
    module_tree.check_layers(model)
    twin = module_tree.twin_of(own, config)
    if heads.encodes and not head_is_tied(model):  # whatever the config says, as weights of version 1.1 are read
        twin.lm_head.weight = torch.nn.Parameter(torch.empty_like(twin.shared.weight))
    module_tree.compare(model, twin)
    _check_engine(twin, config_json)
    # The row of the embedding without a gradient is the module's, as in PyTorch.
    return {**_dropouts(model, encoder=not heads.looks_back), "padding_id": model.get_input_embeddings().padding_idx}


def _check_encoder(model: Any, heads: Heads) -> None:
    _check_config(model.config, {**_RUNNING, "is_causal": (None, False)})
    function = vars(model).get("_loss_function")  # which Transformers' encoders do not read
    if function is not None and module_tree.foreign(function):
        raise refused_loss(getattr(function, "__qualname__", type(function).__qualname__), f"the losses of {heads.endings[0]} models")


def _check_config(config: Any, rules: Optional[Dict[str, tuple]] = None) -> None:
    for key, allowed in (rules or _RUNNING).items():
        value = getattr(config, key, None)
        if value not in allowed:
            kind = "causal decoders" if rules is None else "encoders"
            raise ConfigError(f"config.{key} = {value!r} is not supported; Tessera's models of this type are {kind} that return loss "
                              f"and logits. Set it to {allowed[-1]!r}")


def _check_loss(model: Any) -> None:
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    function = vars(model).get("_loss_function") or LOSS_MAPPING.get(model.loss_type, ForCausalLMLoss)
    if function is not ForCausalLMLoss or module_tree.foreign(function):
        raise refused_loss(getattr(function, "__qualname__", type(function).__qualname__))


def refused_loss(name: Any, own: str = "Transformers' ForCausalLMLoss") -> ConfigError:
    return ConfigError(f"loss_function of the model is {name}, and Tessera's engine computes {own}. A loss "
                       f"of your own: {module_tree.OWN_LOSS}")


# Dropout.

def _dropouts(model: torch.nn.Module, encoder: bool = False) -> Dict[str, float]:
    """The probabilities of the modules, which count whatever the config says. An `encoder` has one for embeddings and residual
    branches."""
    found: Dict[str, Dict[str, float]] = {kind: {} for kind in _PLACES}
    for name, module in model.named_modules():
        for key, kind in _PROBABILITIES.items():
            if key in vars(module):
                found[kind][f"{name}.{key}"] = _probability(name, key, module, model)
        if isinstance(module, (torch.nn.Dropout, torch.nn.Identity)):
            kind = "attention_dropout" if name.endswith(("attn_dropout", ".attention.self.dropout", ".attention_dropout")) else "dropout"
            if name.endswith(".drop"):
                kind = "embedding_dropout"
            value = _probability(name, "p", module, model) if isinstance(module, torch.nn.Dropout) else 0.0
            found[kind][f"{name}.p"] = value
    values = {kind: _one_value(kind, places) for kind, places in found.items() if places or kind != "embedding_dropout" or not encoder}
    rates = ", ".join(f"{kind} {value:g}" for kind, value in values.items() if value)
    if rates and not model.training:
        logger.warning(f"the model is in eval mode, as from_pretrained() leaves it; after prepare() it is in training mode with "
                       f"{rates}. Without dropout: set p of the modules to 0 before prepare()")
    return values


def _probability(name: str, key: str, module: torch.nn.Module, model: torch.nn.Module) -> float:
    value = float(getattr(module, key))
    if not 0 <= value < 1:
        raise ConfigError(f"'{name}.{key}' is {value:g}; a dropout probability is at least 0 and below 1")
    if value and module.training != model.training:
        modes = ["eval", "training"]
        raise ConfigError(f"'{name}' is in {modes[module.training]} mode and the model in {modes[model.training]} mode; Tessera's "
                          f"modes are the whole model's: call model.train() before prepare(), and to turn one dropout off set "
                          f"its {key} to 0")
    return value


def _one_value(kind: str, places: Dict[str, float]) -> float:
    values: Dict[float, str] = {}
    for name, value in places.items():
        values.setdefault(value, name)
    if len(values) > 1:
        listed = ", ".join(f"'{name}' is {value:g}" for value, name in values.items())
        raise ConfigError(f"dropout {_PLACES[kind]} differs: {listed}; Tessera has one probability for all of these. Give them "
                          "the same")
    return next(iter(values), 0.0)


# What else counts.

def _check_engine(twin: Any, config_json: str) -> None:
    """Compares what the engine has read of the config with what Transformers has made of it: every parameter, and the attributes
    that the family's row names."""
    from tessera import _C

    theirs = {name: tuple(parameter.shape) for name, parameter in twin.named_parameters()}
    ours = {name: tuple(shape) for _, parts in _C.hf_parameters(config_json) for name, shape, *_ in parts}
    for name in {**theirs, **ours}:
        if theirs.get(name) != ours.get(name):
            raise _unlike(name, theirs.get(name), ours.get(name))
    items = _C.hf_model_items(config_json)
    for key, path in _C.hf_attributes(twin.config.model_type):
        place, _, attribute = path.rpartition(".")
        value = getattr(twin.get_submodule(place), attribute)
        if items[key] != value:
            raise _unlike(key, value, items[key])


def _unlike(what: str, theirs: Any, ours: Any) -> ConfigError:
    return ConfigError(f"Transformers {sys.modules['transformers'].__version__} builds a model with {what} {theirs} from this "
                       f"config, and Tessera reads {ours}; please report it, with the config.json")
