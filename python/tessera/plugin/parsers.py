"""How a Hugging Face model is described under Megatron's argument names, by its `config.model_type`.

The engine itself reads the model's config; these arguments are what custom train steps see as `args`.
"""

from typing import Any, Callable, Dict, Optional

from tessera.errors import ConfigError
from tessera.plugin.heads import ENCODER_DECODERS, ENCODERS, config_of, heads_of
from tessera.plugin.model_shape import decoder_length_given, described, length_given

Parser = Callable[[Any, Any, Optional[dict]], None]

MODEL_CONFIGS_TO_MEGATRON_PARSERS: Dict[str, Parser] = {}


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Parser], Parser]:
    """Decorator: `parse(plugin, model, batch_data)` fills plugin.megatron_lm_default_args for models whose
    `config.model_type` contains `model_type`."""

    def register(parse: Parser) -> Parser:
        MODEL_CONFIGS_TO_MEGATRON_PARSERS[model_type] = parse
        return parse

    return register


def find_parser(model_type: str) -> Parser:
    """The parser for a model type. Errors: ConfigError that names the types there are."""
    from tessera import _C

    own, types = MODEL_CONFIGS_TO_MEGATRON_PARSERS, _C.hf_model_types()
    # The whole name before a part of it.
    for known in sorted(own, key=len, reverse=True):
        if known in model_type.lower():
            return own[known]
    if model_type in types:
        return parse_model_config
    raise ConfigError(f"models of type '{model_type}' are not supported; "
                      f"{', '.join([*types, *own])} are, and add_model_config_to_megatron_parser "
                      "registers a parser of your own")


def _sequence_length(plugin, config: dict, batch_data: Optional[dict], positions: int) -> int:
    given = length_given(plugin, config)
    if given is not None:
        return given
    return int(batch_data["input_ids"].shape[1]) if batch_data and "input_ids" in batch_data else positions


def parse_model_config(plugin, model, batch_data: Optional[dict] = None) -> None:
    """Any of the families that the engine has, from what it reads of the model's config."""
    from tessera import _C

    config, text = model.config, config_of(model)
    own = described(text)
    plugin.seq_length = _sequence_length(plugin, text, batch_data, own["max_positions"])
    arguments = dict(
        model_type_name="gpt", num_layers=own["num_layers"], hidden_size=own["hidden_size"], num_attention_heads=own["num_heads"],
        pretraining_flag=True, orig_vocab_size=config.vocab_size, padded_vocab_size=config.vocab_size,
        max_position_embeddings=own["max_positions"], seq_length=plugin.seq_length,
        model_return_dict=getattr(config, "return_dict", True), return_logits=plugin.return_logits or plugin.require_logits,
        tokenizer_type=_C.hf_megatron_tokenizer(config.model_type), eos_token_id=getattr(config, "eos_token_id", None),
        **_architecture(own))
    if config.model_type in ENCODERS:
        arguments.update(_heads(plugin, text, own))
    elif config.model_type in ENCODER_DECODERS:
        arguments.update(_two_stacks(plugin, config.model_type, own, batch_data))
    elif plugin.given_arguments.get("model_type_name", "gpt") != "gpt":
        raise ConfigError(f"other_megatron_args: 'model_type_name' is {plugin.given_arguments['model_type_name']!r}, and a {config.model_type} "
                          "makes it 'gpt'; leave it out, or give prepare() another model")
    plugin.megatron_lm_default_args.update({name: value for name, value in arguments.items() if name not in plugin.given_arguments})


def _heads(plugin, config: dict, own: Dict[str, Any]) -> Dict[str, Any]:
    """What an encoder's heads are. Errors: ConfigError for an argument that says otherwise."""
    heads = heads_of(config)
    arguments = dict(model_type_name="bert", pretraining_flag=not heads.of_samples, bert_binary_head=own["binary_head"],
                     num_labels=own["num_labels"] or 2)
    for name in ("model_type_name", "pretraining_flag", "bert_binary_head") + (("num_labels",) if heads.of_samples else ()):
        given = plugin.given_arguments.get(name)
        if given is not None and given != arguments[name]:
            raise ConfigError(f"other_megatron_args: '{name}' is {given!r}, and a {config['architectures'][0]} makes it {arguments[name]!r}; "
                              f"leave it out, or give prepare() another model")
    return arguments


def _two_stacks(plugin, kind: str, own: Dict[str, Any], batch_data: Optional[dict]) -> Dict[str, Any]:
    """What an encoder and a decoder are. Errors: ConfigError for an argument that says otherwise."""
    given = plugin.given_arguments.get("model_type_name", "t5")
    if given != "t5":
        raise ConfigError(f"other_megatron_args: 'model_type_name' is {given!r}, and a {kind} makes it 't5'; leave it out, or give prepare() "
                          "another model")
    encoder = own["encoder_layers"]
    decoder_length = decoder_length_given(plugin, {"model_type": kind})
    if decoder_length is None and batch_data and "labels" in batch_data:
        decoder_length = int(batch_data["labels"].shape[1])
    plugin.encoder_seq_length, plugin.decoder_seq_length = plugin.seq_length, decoder_length
    return dict(model_type_name="t5", num_layers=encoder, encoder_num_layers=encoder, decoder_num_layers=own["num_layers"] - encoder,
                ffn_hidden_size=own["ffn_hidden_size"], kv_channels=own["head_dim"], position_embedding_type="relative",
                encoder_seq_length=plugin.encoder_seq_length, decoder_seq_length=decoder_length or own["max_positions"])


def _architecture(own: Dict[str, Any]) -> Dict[str, Any]:
    """What makes a model another one than Megatron's default, a GPT-2."""
    groups = own["num_kv_heads"]
    if own["position_embedding"] != "rotary":
        return {"attention_head_type": "multiquery"} if groups == 1 else {}
    arguments = dict(ffn_hidden_size=own["ffn_hidden_size"], group_query_attention=groups != own["num_heads"], num_query_groups=groups,
                     position_embedding_type="rope", rotary_base=own["rope_theta"], layernorm_epsilon=own["norm_eps"],
                     add_bias_linear=own["linear_bias"], untie_embeddings_and_output_weights=not own["tied_head"])
    if own["rope_fraction"] != 1:
        arguments["rotary_percent"] = own["rope_fraction"]
    if own["norm"] == "rmsnorm":
        arguments.update(normalization="RMSNorm", swiglu=own["activation"] == "swiglu", add_qkv_bias=own["qkv_bias"])
    if own["qk_norm"] == "head":
        arguments["qk_layernorm"] = True
    if own["sliding_window"] is not None and own["window_pattern"] is None:
        arguments["window_size"] = (own["sliding_window"] - 1, 0)  # keys before a position, and behind it
    return arguments


parse_bert_config = parse_gpt2_config = parse_llama_config = parse_t5_config = parse_model_config
