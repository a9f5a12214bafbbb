"""The model's part of the plugin: what a Hugging Face config says, and what Megatron's arguments would change of it."""

import json
from typing import Any, Dict, Optional

from tessera.comm.warnings import warn_once
from tessera.compat.refusals import nearest
from tessera.plugin.heads import ENCODER_DECODERS, ENCODERS
from tessera.errors import ConfigError
from tessera.plugin import megatron_args

_POSITIONS = {"absolute": "learned", "learned_absolute": "learned", "learned": "learned", "rotary": "rotary", "rope": "rotary",
              "alibi": "alibi", "none": "none"}
_ROPE = {"rope_theta": "rotary_base", "rope_fraction": "rotary_percent", "rope_interleaved": "rotary_interleaved",
         "rope_scaling.type": "use_rope_scaling, or rotary_seq_len_interpolation_factor,"}
# Llama 3.1's rule as Megatron-LM has it: but for the factor these never change there.
_LLAMA3 = {"type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
_HEADS = ("multihead", "multiquery")

# What makes a model another model, hence cannot be changed under given weights; dropout and init_std can.
_STRUCTURE = ("position_embedding", "norm", "norm_eps", "activation", "tied_head", "linear_bias", "qkv_bias", "rope_theta",
              "rope_fraction", "rope_interleaved", "num_kv_heads", "head_dim", "ffn_hidden_size", "proj_bias", "qk_norm", "sliding_window",
              "window_pattern", "rope_scaling.factor", *(f"rope_scaling.{key}" for key in _LLAMA3))
# What the model given to prepare() says, and nothing can say otherwise.
_SIZES = ("num_layers", "hidden_size", "num_heads", "max_positions", "vocab_size")


def described(config: Optional[dict]) -> Dict[str, Any]:
    """The native keys of a transformers `config.to_dict()`, with Transformers' defaults, or of the object `model` of a
    tessera.json; {} for other types."""
    from tessera import _C

    config = config or {}
    if "hf_model_type" not in config and config.get("model_type") not in _C.hf_model_types():
        return {}
    return _C.hf_model_items(json.dumps(config, default=str))


def section_with(own: Dict[str, Any], *changes: Dict[str, Any]) -> Dict[str, Any]:
    """The section `model` of a model described so, with what changes it; what is open is left out."""
    values = dict(own)
    for each in changes:
        values.update(each)
    return {key: value for key, value in values.items() if value is not None}


def length_given(plugin, config: Optional[dict]) -> Optional[int]:
    """Tokens per sample as the plugin says it, for a model of this config; None where it does not. Of a model with encoder and decoder
    the encoder's, whose decoder has decoder_seq_length. Errors: ConfigError for the length of a decoder that the model has not, or of
    an encoder."""
    kind = config.get("model_type") if config else None
    encoder = kind in ENCODERS
    names = ("seq_length", "encoder_seq_length") if kind in ENCODER_DECODERS else ("seq_length", "encoder_seq_length", "decoder_seq_length")
    given = {name: value for name in names if (value := _said(plugin, name, kind)) is not None}
    other = "decoder_seq_length" if encoder else "encoder_seq_length"
    if config and kind not in ENCODER_DECODERS and other in given:
        raise ConfigError(f"MegatronLMPlugin.{other} is {given[other]}, and a {config.get('model_type')} is "
                          f"{'an encoder alone' if encoder else 'a decoder alone'}; give seq_length")
    if len(set(given.values())) > 1:
        first, second, *_ = given
        raise ConfigError(f"MegatronLMPlugin.{first} is {given[first]} and {second} {given[second]}; they are the same thing, so give one")
    return next(iter(given.values()), None)


def decoder_length_given(plugin, config: Optional[dict]) -> Optional[int]:
    """Tokens that the decoder of a model with an encoder reads, as the plugin says it."""
    kind = config.get("model_type") if config else None
    return _said(plugin, "decoder_seq_length", kind) if kind in ENCODER_DECODERS else None


def _said(plugin, name: str, kind: Optional[str]) -> Optional[int]:
    """A length of the plugin's, or of the loader's over .idx/.bin, which counts over it: of two stacks no batch says both."""
    loaders = plugin.given_arguments.get(name) if kind in ENCODER_DECODERS else None
    return getattr(plugin, name) if loaders is None else loaders


def _one_of(name: str, value: Any, table: Dict[str, str]) -> str:
    if value not in table:
        raise ConfigError(f"other_megatron_args: {name} is {value!r}; it must be one of {', '.join(table)}"
                          f"{nearest(str(value), table)}")
    return table[value]


def _number(name: str, value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or value <= 0:
        raise ConfigError(f"other_megatron_args: {name} is {value!r}; it must be "
                          f"{'an integer' if kind is int else 'a number'} above 0")
    return value


def _window(value: Any) -> int:
    """Keys a position sees, of Megatron's (keys before it, keys behind it)."""
    pair = tuple(value) if isinstance(value, (list, tuple)) else ()
    if len(pair) != 2 or any(isinstance(each, bool) or not isinstance(each, int) for each in pair) or pair[0] < 0 or pair[1] != 0:
        raise ConfigError(f"other_megatron_args: window_size is {value!r}; it must be (keys before a position, 0)")
    return pair[0] + 1


def _window_pattern(value: Any) -> str:
    """Of Megatron's N, N - 1 layers with a window and one without, or of a list of 1 (a window) and 0 for each layer."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return "S" * (value - 1) + "F"
    if isinstance(value, (list, tuple)) and value and all(each in (0, 1) for each in value):
        return "".join("S" if each else "F" for each in value)
    raise ConfigError(f"other_megatron_args: window_attn_skip_freq is {value!r}; it must be an integer of at least 1, or a list of 1 (a layer with "
                      "the window) and 0 (one without); texts are not evaluated")


def _rope_scaling(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """What scales rotary positions. Errors: ConfigError for two rules."""
    linear, factor = arguments.get("rotary_seq_len_interpolation_factor"), arguments.get("rope_scaling_factor")
    if arguments.get("use_rope_scaling"):
        if linear is not None:
            raise ConfigError("other_megatron_args: use_rope_scaling and rotary_seq_len_interpolation_factor are two rules of scaling rotary "
                              "positions; remove one")
        scaling = {**_LLAMA3, "factor": 8.0 if factor is None else float(_number("rope_scaling_factor", factor, float))}
    elif linear is not None:
        scaling = {"type": "linear", "factor": float(_number("rotary_seq_len_interpolation_factor", linear, float))}
    else:
        scaling = {}
        if factor is not None:
            warn_once("other_megatron_args: rope_scaling_factor has no effect without use_rope_scaling")
    return {f"rope_scaling.{key}": value for key, value in scaling.items()}


def _asked(arguments: Dict[str, Any], heads: Optional[int]) -> Dict[str, Any]:
    """What the arguments of effect "model" ask for, under native keys. Switches that are off ask for nothing."""
    asked: Dict[str, Any] = {}

    def on(name: str) -> bool:
        return bool(arguments.get(name))

    for name, effect in megatron_args.ARGUMENTS.items():
        if effect.kind == "model" and effect.number is not None and arguments.get(name) is not None:
            asked[effect.detail] = _number(name, arguments[name], effect.number)
    if arguments.get("position_embedding_type") is not None:
        asked["position_embedding"] = _one_of("position_embedding_type", arguments["position_embedding_type"], _POSITIONS)
    elif arguments.get("add_position_embedding") is False:
        asked["position_embedding"] = "none"
    if arguments.get("normalization") is not None:
        asked["norm"] = _one_of("normalization", arguments["normalization"], _NORMS)
    if arguments.get("attention_head_type") is not None:
        kind = _one_of("attention_head_type", arguments["attention_head_type"], {name: name for name in _HEADS})
        asked["num_kv_heads"] = 1 if kind == "multiquery" else (heads or 0)
    if arguments.get("num_query_groups") is not None and (on("group_query_attention") or arguments["num_query_groups"] != 1):
        asked["num_kv_heads"] = _number("num_query_groups", arguments["num_query_groups"], int)
    elif on("group_query_attention"):
        raise ConfigError("other_megatron_args: group_query_attention needs num_query_groups")
    for name, key, value in (("swiglu", "activation", "swiglu"), ("openai_gelu", "activation", "gelu_tanh"),
                             ("rotary_interleaved", "rope_interleaved", True), ("add_qkv_bias", "qkv_bias", True),
                             ("qk_layernorm", "qk_norm", "head"),
                             ("untie_embeddings_and_output_weights", "tied_head", False)):
        if on(name):
            asked[key] = value
    if arguments.get("window_size") is not None:
        asked["sliding_window"] = _window(arguments["window_size"])
    if arguments.get("window_attn_skip_freq") is not None:
        asked["window_pattern"] = _window_pattern(arguments["window_attn_skip_freq"])
    asked.update(_rope_scaling(arguments))
    if on("disable_bias_linear") or arguments.get("add_bias_linear") is False:
        asked["linear_bias"] = False
        asked.setdefault("qkv_bias", False)  # Megatron's switch is for both
    return asked


def _checked(plugin, hf_config: Optional[dict], pretrained: bool) -> Dict[str, Any]:
    """What the arguments ask for, without what the model given to prepare() says itself."""
    own = described(hf_config)
    arguments = megatron_args.normalised(plugin.other_megatron_args or {})
    asked = _asked(arguments, own.get("num_heads"))
    if plugin.use_rotary_position_embeddings:
        if asked.get("position_embedding", "rotary") != "rotary":
            raise ConfigError("MegatronLMPlugin.use_rotary_position_embeddings contradicts other_megatron_args' "
                              "position_embedding_type; remove one")
        asked["position_embedding"] = "rotary"
    for key in _SIZES:
        wanted, has = asked.pop(key, None), own.get(key)
        if key == "num_layers" and own.get("encoder_layers") is not None:  # Megatron's is the encoder's
            has = own["encoder_layers"]
        if wanted is not None and own and has != wanted:
            raise ConfigError(f"other_megatron_args asks for {key} {wanted}, and the model given to prepare() has {has}; "
                              "change the model's config")
    if "linear_bias" in asked and own.get("proj_bias") is not None:  # the plugin's word is for both
        asked["proj_bias"] = asked["linear_bias"]
    positions = asked.get("position_embedding", own.get("position_embedding", "rotary"))
    for key, name in _ROPE.items():
        if positions != "rotary" and asked.pop(key, None) is not None:
            warn_once(f"other_megatron_args: {name} has no effect on a model whose positions are {positions}")
    if positions != "rotary":
        asked = {key: value for key, value in asked.items() if not key.startswith("rope_scaling.")}
    if "window_pattern" in asked and own and asked.get("sliding_window", own.get("sliding_window")) is None:
        raise ConfigError("other_megatron_args: window_attn_skip_freq says which layers have a window, and there is none; give window_size too")
    if not pretrained or arguments.get("reinitialize"):
        return asked
    for key in _STRUCTURE:
        if key in asked and key in own and asked[key] != own[key]:
            raise ConfigError(f"the plugin asks for {key} {asked[key]!r}, but the pretrained weights are of a model with "
                              f"{own[key]!r}; remove it, or start from a config without weights, or give other_megatron_args="
                              "{'reinitialize': True}: tensors that still fit keep their weights, the others are drawn anew")
    return {key: value for key, value in asked.items() if key not in _STRUCTURE or not own}


def asked_structure(plugin, hf_config: Optional[dict], pretrained: bool) -> Dict[str, Any]:
    """What the plugin asks for that makes the model another one than its config describes, or the same, under native keys.

    Errors: ConfigError when the plugin contradicts pretrained weights, or sizes that the model given to prepare() has.
    """
    return {key: value for key, value in _checked(plugin, hf_config, pretrained).items() if key in _STRUCTURE}


def model_overrides(plugin, hf_config: Optional[dict], pretrained: bool) -> Dict[str, Any]:
    """The keys of the native section `model` that the plugin sets over those of the Hugging Face config. Errors: as
    asked_structure."""
    own, asked = described(hf_config), _checked(plugin, hf_config, pretrained)
    if plugin.hidden_dropout is not None:
        asked["dropout"] = plugin.hidden_dropout
        if own.get("embedding_dropout") is not None:  # the plugin's word is for both
            asked["embedding_dropout"] = plugin.hidden_dropout
    if plugin.attention_dropout is not None:
        asked["attention_dropout"] = plugin.attention_dropout
    return asked
