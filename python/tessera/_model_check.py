"""What prepare() reads of a Transformers model beside its config: the modules count, and what cannot is refused by name."""

from __future__ import annotations

import json
import sys
from typing import Any, Dict, List

import torch

from tessera import _module_tree
from tessera.errors import ConfigError
from tessera.logging import get_logger

logger = get_logger(__name__)

# Fields of a config that Transformers reads while a model runs, with the only values that the engine computes.
_RUNNING = {"is_causal": (None, True), "output_hidden_states": (None, False), "output_attentions": (None, False),
            "return_dict": (None, True), "attention_chunk_size": (None,)}
# Attributes of modules that are a dropout's probability, and the key of the section `model` that it is.
_PROBABILITIES = {"attention_dropout": "attention_dropout", "attn_dropout": "attention_dropout", "residual_dropout": "dropout",
                  "embedding_dropout": "embedding_dropout"}
# Dropout of the section `model`, and where it is.
_PLACES = {"dropout": "in the residual branches (and after the embedding)", "embedding_dropout": "after the embedding",
           "attention_dropout": "within attention"}


def check_model(model: torch.nn.Module, config_json: str) -> Dict[str, Any]:
    """Values of the section `model` that the modules of a model say over its config. Errors: ConfigError naming what Tessera
    would not compute as PyTorch does."""
    from tessera import _C

    config = model.config
    own = _module_tree.own_class(model, config.model_type)
    _check_config(config)
    _check_loss(model)
    _module_tree.check_attention(config)
    _module_tree.check_global_hooks()
    _module_tree.check_layers(model)
    twin = _module_tree.twin_of(own, config)
    _module_tree.compare(model, twin)
    items = dict(_C.hf_model_items(config_json))
    _check_engine(twin, items)
    return {**_dropouts(model, items), **_padding(model, items)}


def _check_config(config: Any) -> None:
    for key, allowed in _RUNNING.items():
        value = getattr(config, key, None)
        if value not in allowed:
            raise ConfigError(f"config.{key} = {value!r} is not supported; Tessera's models are causal decoders that return loss "
                              f"and logits. Set it to {allowed[-1]!r}")
    if config.model_type in ("gpt2", "gpt_bigcode") and set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        raise ConfigError(f"config.layer_types = {config.layer_types!r} is not what a GPT-2 has; take the field out")


def _check_loss(model: Any) -> None:
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    function = vars(model).get("_loss_function") or LOSS_MAPPING.get(model.loss_type, ForCausalLMLoss)
    if function is not ForCausalLMLoss or _module_tree.foreign(function):
        raise refused_loss(getattr(function, "__qualname__", type(function).__qualname__))


def refused_loss(name: Any) -> ConfigError:
    return ConfigError(f"loss_function of the model is {name}, and Tessera's engine computes Transformers' ForCausalLMLoss. A loss "
                       f"of your own: {_module_tree.OWN_LOSS}")


# Dropout.

def _dropouts(model: torch.nn.Module, items: Dict[str, str]) -> Dict[str, float]:
    """The probabilities of the modules, which count whatever the config says."""
    found: Dict[str, Dict[str, float]] = {kind: {} for kind in _PLACES if kind in items}
    for name, module in model.named_modules():
        for key, kind in _PROBABILITIES.items():
            if key in vars(module):
                found[kind][f"{name}.{key}"] = _probability(name, key, module, model)
        if isinstance(module, (torch.nn.Dropout, torch.nn.Identity)):
            kind = "attention_dropout" if name.endswith("attn_dropout") else "dropout"
            if name.endswith(".drop") and "embedding_dropout" in found:
                kind = "embedding_dropout"
            value = _probability(name, "p", module, model) if isinstance(module, torch.nn.Dropout) else 0.0
            found[kind][f"{name}.p"] = value
    values = {kind: _one_value(kind, places) for kind, places in found.items()}
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

def _padding(model: Any, items: Dict[str, str]) -> Dict[str, Any]:
    """The row of the embedding without a gradient: the module's, as in PyTorch."""
    value = model.get_input_embeddings().padding_idx
    if "padding_id" in items:
        return {"padding_id": value}
    if value is not None:
        raise ConfigError(f"padding_idx {value} of the embedding (config.pad_token_id) gives that row no gradient, which is not "
                          "supported; set model.get_input_embeddings().padding_idx = None")
    return {}


def _check_engine(twin: Any, items: Dict[str, str]) -> None:
    """Compares what the engine has read of the config with what Transformers has made of it."""
    for key, value in _sizes_of(twin).items():
        if key in items and json.loads(items[key]) != value:
            raise ConfigError(f"Transformers {sys.modules['transformers'].__version__} builds a model with {key} {value} from this "
                              f"config, and Tessera reads {items[key]}; please report it, with the config.json")


def _sizes_of(twin: Any) -> Dict[str, Any]:
    """Keys of the section `model` as the modules of a model have them."""
    config, table = twin.config, twin.get_input_embeddings()
    values: Dict[str, Any] = {"vocab_size": table.num_embeddings, "hidden_size": table.embedding_dim,
                              "tied_head": twin.lm_head.weight is table.weight}
    if config.model_type in ("gpt2", "gpt_bigcode"):
        layers: List[Any] = list(twin.transformer.h)
        first = layers[0]
        return {**values, "num_layers": len(layers), "num_heads": first.attn.num_heads, "head_dim": first.attn.head_dim,
                "num_kv_heads": getattr(first.attn, "kv_heads", first.attn.num_heads),
                "ffn_hidden_size": first.mlp.c_proj.weight.numel() // table.embedding_dim, "max_positions": twin.transformer.wpe.num_embeddings,
                "norm_eps": first.ln_1.eps}
    layers = list(twin.model.layers[: config.num_hidden_layers])
    first = layers[0]
    attention = first.self_attn
    if config.model_type == "starcoder2":
        values.update(ffn_hidden_size=first.mlp.c_fc.out_features, norm_eps=first.input_layernorm.eps,
                      linear_bias=first.mlp.c_fc.bias is not None)
    else:
        values.update(ffn_hidden_size=first.mlp.gate_proj.out_features, norm_eps=first.input_layernorm.variance_epsilon,
                      linear_bias=first.mlp.gate_proj.bias is not None)
    return {**values, "num_layers": len(layers), "head_dim": attention.head_dim,
            "num_heads": attention.q_proj.out_features // attention.head_dim,
            "num_kv_heads": attention.k_proj.out_features // attention.head_dim,
            "qkv_bias": attention.q_proj.bias is not None}
