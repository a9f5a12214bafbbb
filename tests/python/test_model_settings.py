"""What a Transformers config or module says about a model counts: defaults of absent keys, windows, biases, padding, positions,
ids of any integer type. Loss and every gradient equal Transformers', or the key is refused by name."""

import json
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SCRIPT = Path(__file__).parent / "scripts" / "model_settings.py"
NAMES = {"num_layers": ("n_layer", "num_hidden_layers"), "hidden_size": ("n_embd", "hidden_size"),
         "num_heads": ("n_head", "num_attention_heads"), "vocab_size": ("vocab_size", "vocab_size"),
         "max_positions": ("n_positions", "max_position_embeddings"),
         "init_std": ("initializer_range", "initializer_range"), "tied_head": ("tie_word_embeddings", "tie_word_embeddings"),
         "attention_dropout": ("attn_pdrop", "attention_dropout")}
CONFIGS = {"gpt2": transformers.GPT2Config, "llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig,
           "qwen2": transformers.Qwen2Config, "gpt_bigcode": transformers.GPTBigCodeConfig, "starcoder2": transformers.Starcoder2Config,
           "qwen3": transformers.Qwen3Config, "gemma2": transformers.Gemma2Config}


def expected(config) -> dict:
    """What Tessera must make of a Transformers config."""
    gpt2, starcoder2 = config.model_type in ("gpt2", "gpt_bigcode"), config.model_type == "starcoder2"
    values = {ours: getattr(config, theirs[not gpt2]) for ours, theirs in NAMES.items()}
    if gpt2:
        values.update(ffn_hidden_size=config.n_inner or 4 * config.n_embd, dropout=config.resid_pdrop, padding_id=None,
                      norm_eps=config.layer_norm_epsilon, position_embedding="learned",
                      num_kv_heads=1 if config.model_type == "gpt_bigcode" else config.n_head,
                      embedding_dropout=None if config.embd_pdrop == config.resid_pdrop else config.embd_pdrop)
        return values
    slides = config.model_type in ("mistral", "starcoder2") or "sliding_attention" in (getattr(config, "layer_types", None) or ())
    values.update(ffn_hidden_size=config.intermediate_size, num_kv_heads=config.num_key_value_heads, padding_id=config.pad_token_id,
                  head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
                  rope_theta=config.rope_parameters["rope_theta"], position_embedding="rotary",
                  norm="layernorm" if starcoder2 else "rmsnorm", norm_eps=config.norm_epsilon if starcoder2 else config.rms_norm_eps,
                  dropout=config.residual_dropout if starcoder2 else 0.0, qkv_bias=starcoder2 or config.model_type == "qwen2",
                  sliding_window=config.sliding_window if slides else None)
    return values


@pytest.mark.parametrize("family", CONFIGS)
def test_absent_keys_have_the_defaults_of_transformers(python_build, family):
    """Each key alone left out, and all of them."""
    from tessera.plugin.model_shape import described

    whole = json.loads(CONFIGS[family]().to_json_string(use_diff=False))
    del whole["transformers_version"]
    for left_out in [*whole, "", "all"]:
        left = {key: value for key, value in whole.items() if key == "model_type" or left_out not in (key, "all")}
        if "model_type" == left_out:
            continue
        ours, theirs = described(left), expected(CONFIGS[family](**{k: v for k, v in left.items() if k != "model_type"}))
        assert {key: ours[key] for key in theirs} == theirs, left_out


@pytest.mark.parametrize("family, key, value", [
    ("gpt2", "scale_attn_weights", False), ("gpt2", "scale_attn_by_inverse_layer_idx", True), ("gpt2", "add_cross_attention", True),
    ("gpt2", "activation_function", "quick_gelu"), ("gpt2", "layer_norm_epsilon", 0.0), ("llama", "hidden_act", "gelu"),
    ("llama", "is_causal", False), ("llama", "quantization_config", {"bits": 4}), ("llama", "per_layer_config", {"0": {"head_dim": 2}}),
    ("llama", "rope_scaling", {"rope_type": "ntk", "factor": 2.0}), ("llama", "rope_scaling", {"rope_type": "yarn", "factor": 2.0, "mrope_section": [1]}),
    ("gemma2", "use_bidirectional_attention", True), ("gemma3_text", "rope_parameters", {"rope_theta": 1.0}), ("qwen3", "hidden_act", "gelu"),
    ("bloom", "apply_residual_connection_post_layernorm", True), ("gemma2", "attn_logit_softcapping", 0.0),
    ("llama", "rope_scaling", {"rope_type": "linear", "factor": 0.5}), ("llama", "partial_rotary_factor", 0.5),
    ("llama", "pad_token_id", 32000), ("llama", "final_logit_softcapping", 30.0), ("llama", "num_attention_heads", 7),
    ("gpt_bigcode", "multi_query", False), ("starcoder2", "hidden_act", "silu"), ("starcoder2", "rope_scaling", {"rope_type": "proportional", "factor": 2.0}),
    ("qwen2", "layer_types", ["sliding_attention"]), ("mistral", "num_attention_heads", 4),
    ("mpt", "attn_config", {"clip_qkv": 8.0}), ("mpt", "no_bias", False), ("falcon", "alibi", True), ("falcon", "hidden_dropout", 0.1),
    ("falcon", "num_ln_in_parallel_attn", 2), ("glm4", "hidden_act", "gelu"), ("olmo2", "clip_qkv", 8.0)])
def test_what_is_not_computed_is_refused_by_key(python_build, family, key, value):
    from tessera.errors import ConfigError
    from tessera.plugin.model_shape import described

    with pytest.raises(ConfigError) as refusal:
        described({"model_type": family, key: value})
    assert key in str(refusal.value) and not re.search(r"model\.\w", str(refusal.value))


@pytest.mark.parametrize("processes", [1, 2])
def test_settings_count_as_in_transformers(python_build, tmp_path, processes):
    output = tmp_path / "errors.json"
    python_build.run(SCRIPT, output, launcher=python_build.launcher("--num_processes", processes) if processes > 1 else ())
    results = json.loads(output.read_text())
    assert len(results) == (21 if processes == 1 else 18)
    assert {name: error for name, error in results.items() if not error <= 2e-5} == {}
