"""How a Hugging Face model is described under Megatron's argument names, by its `config.model_type`.

The engine itself reads the model's config; these arguments are what custom train steps see as `args`.
"""

from typing import Any, Callable, Dict, Optional

from tessera.utils.refusals import config_error

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
    wanted = model_type.lower()
    # The whole name before a part of it: 'gpt2' must not win over an own parser for 'my-gpt2'.
    for known in sorted(MODEL_CONFIGS_TO_MEGATRON_PARSERS, key=len, reverse=True):
        if known in wanted:
            return MODEL_CONFIGS_TO_MEGATRON_PARSERS[known]
    raise config_error(f"models of type '{model_type}' are not supported; "
                       f"{', '.join(MODEL_CONFIGS_TO_MEGATRON_PARSERS)} are, and add_model_config_to_megatron_parser "
                       "registers a parser of your own")


def _sequence_length(plugin, batch_data: Optional[dict], positions: int) -> int:
    given = plugin.seq_length if plugin.seq_length is not None else plugin.decoder_seq_length
    if given is not None:
        return given
    return int(batch_data["input_ids"].shape[1]) if batch_data and "input_ids" in batch_data else positions


def _describe(plugin, config, batch_data: Optional[dict], *, layers: int, hidden: int, heads: int, positions: int,
              tokenizer: str, **more) -> None:
    plugin.seq_length = _sequence_length(plugin, batch_data, positions)
    arguments = dict(
        model_type_name="gpt", num_layers=layers, hidden_size=hidden, num_attention_heads=heads, pretraining_flag=True,
        orig_vocab_size=config.vocab_size, padded_vocab_size=config.vocab_size, max_position_embeddings=positions,
        seq_length=plugin.seq_length, model_return_dict=getattr(config, "return_dict", True),
        return_logits=plugin.return_logits or plugin.require_logits, tokenizer_type=tokenizer,
        eos_token_id=getattr(config, "eos_token_id", None), **more)
    plugin.megatron_lm_default_args.update({name: value for name, value in arguments.items() if name not in plugin.given_arguments})


@add_model_config_to_megatron_parser("gpt2")
def parse_gpt2_config(plugin, model, batch_data: Optional[dict] = None, **more) -> None:
    """GPT-2: learned positions, LayerNorm, GELU, tied head."""
    config = model.config
    _describe(plugin, config, batch_data, layers=config.n_layer, hidden=config.n_embd, heads=config.n_head,
              positions=config.n_positions, tokenizer="GPT2BPETokenizer", **more)


@add_model_config_to_megatron_parser("gpt_bigcode")
def _parse_bigcode(plugin, model, batch_data: Optional[dict] = None) -> None:
    """A GPT-2 with one key and value head."""
    parse_gpt2_config(plugin, model, batch_data, attention_head_type="multiquery")


@add_model_config_to_megatron_parser("starcoder2")
def _parse_starcoder2(plugin, model, batch_data: Optional[dict] = None) -> None:
    """LayerNorm, GELU and biases as in GPT-2, rotary positions and query groups as in Llama."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    groups = config.num_key_value_heads
    _describe(plugin, config, batch_data, layers=config.num_hidden_layers, hidden=config.hidden_size,
              heads=config.num_attention_heads, positions=config.max_position_embeddings, tokenizer="GPT2BPETokenizer",
              ffn_hidden_size=config.intermediate_size, group_query_attention=groups != config.num_attention_heads,
              num_query_groups=groups, position_embedding_type="rope",
              rotary_base=getattr(config, "rope_theta", None) or rope.get("rope_theta", 10000.0),
              layernorm_epsilon=config.norm_epsilon, add_bias_linear=config.use_bias,
              untie_embeddings_and_output_weights=not config.tie_word_embeddings)


def _parse_llama(plugin, model, batch_data: Optional[dict] = None) -> None:
    """Llama and its relatives, described whole: RMSNorm, SwiGLU, query groups, rotary base, untied head."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    _describe(plugin, config, batch_data, layers=config.num_hidden_layers, hidden=config.hidden_size,
              heads=config.num_attention_heads, positions=config.max_position_embeddings, tokenizer="Llama2Tokenizer",
              normalization="RMSNorm", swiglu=True, ffn_hidden_size=config.intermediate_size,
              group_query_attention=groups != config.num_attention_heads, num_query_groups=groups,
              position_embedding_type="rope", rotary_base=getattr(config, "rope_theta", None) or rope.get("rope_theta", 10000.0),
              layernorm_epsilon=config.rms_norm_eps, add_bias_linear=bool(getattr(config, "mlp_bias", False)),
              add_qkv_bias=bool(getattr(config, "attention_bias", config.model_type == "qwen2")),
              untie_embeddings_and_output_weights=not config.tie_word_embeddings)


for _name in ("llama", "mistral", "qwen2"):
    add_model_config_to_megatron_parser(_name)(_parse_llama)
parse_llama_config = _parse_llama
