"""Models with experts, and their tensors' names: those of files, and those of Transformers' modules, which hold a layer's experts
as one tensor."""

import numpy as np
import second_tier

MIXTRAL = second_tier.LLAMA | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2,
    "sliding_window": 5, "output_router_logits": False, "router_jitter_noise": 0.0,
}
# One layer of three is dense.
QWEN3_MOE = second_tier.LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 14, "attention_bias": False, "num_experts": 7,
    "num_experts_per_tok": 3, "moe_intermediate_size": 37, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [1],
    "use_sliding_window": False, "output_router_logits": False,
}

OLMOE = second_tier.LLAMA | {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "attention_bias": False, "num_experts": 5, "num_experts_per_tok": 3,
    "norm_topk_prob": False, "clip_qkv": None, "output_router_logits": False, "pad_token_id": None, "eos_token_id": 1,
}


def has(config: dict) -> bool:
    return config["model_type"] in NAMES


def experts_of(config: dict, layer: int) -> int:
    if layer in config.get("mlp_only_layers", ()):
        return 0
    return config.get("num_experts") or config["num_local_experts"]


def width_of(config: dict) -> int:
    return config.get("moe_intermediate_size") or config["intermediate_size"]


# A layer's MLP by Transformers' names: that of the module, the router, and gate, up and down of an expert.
NAMES = {"mixtral": ("block_sparse_moe", "gate", ("w1", "w3", "w2")),
         "qwen3_moe": ("mlp", "gate", ("gate_proj", "up_proj", "down_proj")),
         "olmoe": ("mlp", "gate", ("gate_proj", "up_proj", "down_proj"))}


def weight_shapes(config: dict) -> dict:
    """As files have them."""
    c, f, w = config["hidden_size"], config["intermediate_size"], width_of(config)
    d = config.get("head_dim") or c // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], c), "model.norm.weight": (c,),
              "lm_head.weight": (config["vocab_size"], c)}
    module, router, names = NAMES[config["model_type"]]
    for i in range(config["num_hidden_layers"]):
        h = f"model.layers.{i}."
        shapes |= {f"{h}{norm}.weight": (c,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{h}self_attn.q_proj.weight": (q, c), f"{h}self_attn.k_proj.weight": (kv, c),
                   f"{h}self_attn.v_proj.weight": (kv, c), f"{h}self_attn.o_proj.weight": (c, q)}
        if config["model_type"] == "qwen3_moe":
            shapes |= {f"{h}self_attn.{x}_norm.weight": (d,) for x in "qk"}
        if config["model_type"] == "olmoe":
            shapes |= {f"{h}self_attn.q_norm.weight": (q,), f"{h}self_attn.k_norm.weight": (kv,)}
        if experts_of(config, i) == 0:
            shapes |= {f"{h}mlp.gate_proj.weight": (f, c), f"{h}mlp.up_proj.weight": (f, c), f"{h}mlp.down_proj.weight": (c, f)}
            continue
        shapes[f"{h}{module}.{router}.weight"] = (experts_of(config, i), c)
        for e in range(experts_of(config, i)):
            shapes |= {f"{h}{module}.experts.{e}.{name}.weight": (c, w) if name == names[2] else (w, c) for name in names}
    return shapes


def to_tessera(config: dict, tensors: dict) -> dict:
    """Of Transformers' modules (version 5)."""
    result = {"embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
              "decoder.final_layernorm.weight": tensors["model.norm.weight"], "output_layer.weight": tensors["lm_head.weight"]}
    for i in range(config["num_hidden_layers"]):
        theirs, ours = f"model.layers.{i}.", f"decoder.layers.{i}."
        result |= {f"{ours}input_layernorm.weight": tensors[f"{theirs}input_layernorm.weight"],
                   f"{ours}pre_mlp_layernorm.weight": tensors[f"{theirs}post_attention_layernorm.weight"],
                   f"{ours}self_attention.linear_proj.weight": tensors[f"{theirs}self_attn.o_proj.weight"],
                   f"{ours}self_attention.linear_qkv.weight":
                       np.concatenate([tensors[f"{theirs}self_attn.{x}_proj.weight"] for x in "qkv"])}
        if config["model_type"] != "mixtral":
            result |= {f"{ours}self_attention.{x}_layernorm.weight": tensors[f"{theirs}self_attn.{x}_norm.weight"] for x in "qk"}
        if experts_of(config, i) == 0:
            result |= {f"{ours}mlp.linear_fc1.weight":
                           np.concatenate([tensors[f"{theirs}mlp.{x}_proj.weight"] for x in ("gate", "up")]),
                       f"{ours}mlp.linear_fc2.weight": tensors[f"{theirs}mlp.down_proj.weight"]}
            continue
        result[f"{ours}mlp.router.weight"] = tensors[f"{theirs}mlp.gate.weight"]
        for e in range(experts_of(config, i)):
            expert = f"{ours}mlp.experts.local_experts.{e}."
            result |= {f"{expert}linear_fc1.weight": tensors[f"{theirs}mlp.experts.gate_up_proj"][e],
                       f"{expert}linear_fc2.weight": tensors[f"{theirs}mlp.experts.down_proj"][e]}
    return result
