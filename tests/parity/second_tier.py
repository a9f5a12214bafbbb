"""Models of Phi-3, GLM, OLMo 2, MPT and Falcon, and their tensors' names."""

import numpy as np

LLAMA = {
    "vocab_size": 211, "hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 3,
    "intermediate_size": 131, "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
}
PHI3 = LLAMA | {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": 5, "hidden_size": 96, "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 16,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.5, 2.5, 3.0, 4.0], "long_factor": [1.0, 1.5, 3.0, 4.0, 5.0, 6.0]},
}
GLM4 = LLAMA | {
    "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "head_dim": 12, "rms_norm_eps": 1.5625e-7, "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
OLMO2 = LLAMA | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False}
MPT = {
    "architectures": ["MptForCausalLM"], "model_type": "mpt", "vocab_size": 211, "d_model": 60, "n_heads": 5, "n_layers": 3,
    "max_seq_len": 64, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "no_bias": True,
    "attn_config": {"alibi": True, "attn_pdrop": 0, "attn_type": "multihead_attention", "clip_qkv": None}, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": None,
}
FALCON = {
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "vocab_size": 211, "hidden_size": 60, "num_attention_heads": 6,
    "num_kv_heads": 2, "num_hidden_layers": 3, "ffn_hidden_size": 131, "max_position_embeddings": 64, "activation": "gelu",
    "layer_norm_epsilon": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "new_decoder_architecture": True,
    "parallel_attn": True, "multi_query": False, "bias": False, "alibi": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
}


def modules_of(config: dict) -> dict:
    """Phi-3, GLM, OLMo2, MPT, Falcon: Transformers' name of a module to Tessera's, the shape of its weight, whether it has a bias."""
    c, kind = config.get("hidden_size") or config["d_model"], config["model_type"]
    heads = config.get("num_attention_heads") or config["n_heads"]
    f = config.get("intermediate_size") or config.get("ffn_hidden_size") or 4 * c
    d = config.get("head_dim") or c // heads
    kv = d * (config.get("num_key_value_heads") or heads)
    if kind == "falcon":
        kv = d * (config["num_kv_heads"] if config["new_decoder_architecture"] else 1 if config["multi_query"] else heads)
    q, bias, mlp, final = heads * d, config.get("attention_bias", config.get("bias", False)), "mlp.", "norm"
    qkv, proj = ("self_attn.qkv_proj", "self_attn.o_proj")
    fc1, fc2, norms = ("gate_up_proj", 2 * f), "down_proj", {"input_layernorm": "input_layernorm"}
    begin, table = "model.layers.", "model.embed_tokens"
    if kind == "glm4":
        norms |= {"post_self_attn_layernorm": "post_attention_layernorm", "post_mlp_layernorm": "post_mlp_layernorm"}
    if kind in ("phi3", "glm", "glm4"):
        norms["post_attention_layernorm"] = "pre_mlp_layernorm"
    if kind == "olmo2":
        norms = {"post_attention_layernorm": "post_attention_layernorm", "post_feedforward_layernorm": "post_mlp_layernorm"}
    if kind == "mpt":
        qkv, proj, mlp, final = "attn.Wqkv", "attn.out_proj", "ffn.", "norm_f"
        fc1, norms = ("up_proj", f), {"norm_1": "input_layernorm", "norm_2": "pre_mlp_layernorm"}
        begin, table = "transformer.blocks.", "transformer.wte"
    if kind == "falcon":
        qkv, proj, fc1, fc2, final = "self_attention.query_key_value", "self_attention.dense", ("dense_h_to_4h", f), "dense_4h_to_h", "ln_f"
        begin, table = "transformer.h.", "transformer.word_embeddings"
        if config["new_decoder_architecture"]:
            norms = {"ln_attn": "input_layernorm", "ln_mlp": "pre_mlp_layernorm"}
        elif not config["parallel_attn"]:
            norms["post_attention_layernorm"] = "pre_mlp_layernorm"
    norm_bias = kind == "falcon"
    all_bias = bias and kind == "falcon"
    layer = {f"{theirs}": (ours, (c,), norm_bias) for theirs, ours in norms.items()}
    if kind in ("glm", "glm4", "olmo2"):
        layer |= {f"self_attn.{x}_proj": (f"self_attention.linear_qkv.{x}", (rows, c), bias)
                  for x, rows in (("q", q), ("k", kv), ("v", kv))}
    else:
        layer[qkv] = ("self_attention.linear_qkv", (q + 2 * kv, c), bias)
    layer[proj] = ("self_attention.linear_proj", (c, q), all_bias or (bias and kind == "olmo2"))
    if kind == "olmo2":
        layer |= {f"self_attn.{x}_norm": (f"self_attention.{x}_layernorm", (rows,), False) for x, rows in (("q", q), ("k", kv))}
        layer |= {f"mlp.{x}_proj": (f"mlp.linear_fc1.{x}", (f, c), False) for x in ("gate", "up")}
    else:
        layer[f"{mlp}{fc1[0]}"] = ("mlp.linear_fc1", (fc1[1], c), all_bias)
    layer[f"{mlp}{fc2}"] = ("mlp.linear_fc2", (c, f), all_bias)
    modules = {table: ("embedding.word_embeddings", (config["vocab_size"], c), False),
               f"{begin.split('.')[0]}.{final}": ("decoder.final_layernorm", (c,), norm_bias)}
    for i in range(config.get("num_hidden_layers") or config["n_layers"]):
        modules |= {f"{begin}{i}.{theirs}": (f"decoder.layers.{i}.{ours}", *rest) for theirs, (ours, *rest) in layer.items()}
    return modules if config["tie_word_embeddings"] else modules | {"lm_head": ("output_layer", (config["vocab_size"], c), False)}


def to_tessera(config: dict, tensors: dict) -> dict:
    stacked = {}
    for theirs, (ours, _, bias) in modules_of(config).items():
        name = ours.rsplit(".", 1)[0] if ours.endswith((".q", ".k", ".v", ".gate", ".up")) else ours
        for kind in ("weight", "bias") if bias else ("weight",):
            tensor = tensors[f"{theirs}.{kind}"]
            if theirs.endswith("query_key_value"):  # by key-value head: its queries, key, value
                d = config["hidden_size"] // config["num_attention_heads"]
                kv = (len(tensor) // d - config["num_attention_heads"]) // 2
                groups = tensor.reshape(kv, -1, d, *tensor.shape[1:])
                tensor = np.concatenate([part.reshape(-1, *tensor.shape[1:]) for part in (groups[:, :-2], groups[:, -2], groups[:, -1])])
            stacked.setdefault(f"{name}.{kind}", []).append(tensor)
    return {name: np.concatenate(parts) if len(parts) > 1 else parts[0] for name, parts in stacked.items()}


def has(config: dict) -> bool:
    return config["model_type"] in ("phi3", "glm", "glm4", "olmo2", "mpt", "falcon")
