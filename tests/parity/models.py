"""Small models and batches for the parity tests, made with numpy alone: the same numbers on every machine."""

import json
from pathlib import Path

import mixtures
import numpy as np
import second_tier
from safetensors.numpy import save_file

GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 211, "n_embd": 60, "n_head": 5,
    "n_layer": 3, "n_positions": 64, "n_ctx": 64, "n_inner": None, "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": True,
    "bos_token_id": 0, "eos_token_id": 0,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 211, "hidden_size": 96,
    "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8, "num_hidden_layers": 3,
    "intermediate_size": 131, "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
}
STARCODER2 = {
    "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "vocab_size": 211, "hidden_size": 60,
    "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 3, "intermediate_size": 131,
    "max_position_embeddings": 64, "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "use_bias": True,
    "rope_theta": 10000.0, "sliding_window": None, "tie_word_embeddings": True, "attention_dropout": 0.0,
    "residual_dropout": 0.0, "embedding_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}
GPT_NEOX = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "vocab_size": 211, "hidden_size": 60,
    "num_attention_heads": 5, "num_hidden_layers": 3, "intermediate_size": 131, "max_position_embeddings": 64, "hidden_act": "gelu",
    "layer_norm_eps": 1e-5, "rotary_pct": 0.5, "rotary_emb_base": 10000, "use_parallel_residual": True, "attention_bias": True,
    "tie_word_embeddings": False, "attention_dropout": 0.0, "hidden_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}
BERT = {
    "architectures": ["BertForPreTraining"], "model_type": "bert", "vocab_size": 211, "hidden_size": 60, "num_attention_heads": 5,
    "num_hidden_layers": 3, "intermediate_size": 131, "max_position_embeddings": 64, "type_vocab_size": 3, "hidden_act": "gelu",
    "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "tie_word_embeddings": True,
    "pad_token_id": 0,
}
# Windows of 5 keys, so that most of 37 positions lose some.
MISTRAL = {key: value for key, value in LLAMA.items() if key not in ("attention_bias", "mlp_bias")} | {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 5,
}
QWEN3 = MISTRAL | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 14, "attention_bias": False, "use_sliding_window": True, "max_window_layers": 1,
}
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 211, "hidden_size": 60, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 14, "num_hidden_layers": 3, "intermediate_size": 131, "max_position_embeddings": 64,
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "attention_bias": False, "attention_dropout": 0.0, "query_pre_attn_scalar": 10, "sliding_window": 5, "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}
GEMMA3 = GEMMA2 | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "num_hidden_layers": 4, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"], "pad_token_id": None,
}
BLOOM = {
    "architectures": ["BloomForCausalLM"], "model_type": "bloom", "vocab_size": 211, "hidden_size": 60, "n_head": 5, "n_layer": 3,
    "seq_length": 64, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "apply_residual_connection_post_layernorm": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64, "short_factor": [1.0, 1.1, 1.5, 2.5],
            "long_factor": [1.0, 1.5, 3.0, 4.0]}
T5 = {
    "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": 211, "d_model": 60, "num_heads": 3, "d_kv": 7,
    "d_ff": 131, "num_layers": 2, "num_decoder_layers": 3, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    "feed_forward_proj": "relu", "layer_norm_epsilon": 1e-6, "dropout_rate": 0.0, "tie_word_embeddings": True,
    "is_encoder_decoder": True, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}
MODELS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "llama3_tied": LLAMA | {
        "tie_word_embeddings": True, "num_key_value_heads": 1, "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 32},
    },
    "gpt_bigcode": GPT2 | {"architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode", "multi_query": True,
                           "activation_function": "gelu_pytorch_tanh"},
    "starcoder2": STARCODER2,
    "gpt_neox": GPT_NEOX,
    "bert": BERT,
    "bert_masked_lm": BERT | {"architectures": ["BertForMaskedLM"], "hidden_act": "gelu_new", "pad_token_id": None},
    "megatron_bert": BERT | {"architectures": ["MegatronBertForPreTraining"], "model_type": "megatron-bert", "pad_token_id": 5},
    "megatron_bert_masked_lm": BERT | {"architectures": ["MegatronBertForMaskedLM"], "model_type": "megatron-bert"},
    "bert_classes": BERT | {"architectures": ["BertForSequenceClassification"], "id2label": {str(i): f"class {i}" for i in range(5)}},
    "megatron_bert_classes": BERT | {"architectures": ["MegatronBertForSequenceClassification"], "model_type": "megatron-bert",
                                     "id2label": {str(i): f"class {i}" for i in range(3)}},
    "mistral": MISTRAL,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "bloom": BLOOM,
    "llama_yarn": LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "llama_longrope": LLAMA | {"rope_scaling": LONGROPE},
    "llama_longrope_long": LLAMA | {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 16}},
    "llama_dynamic": LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 20},
    "llama_linear": LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "t5": T5,
    "t5_v1_1": T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": T5 | {"architectures": ["MT5ForConditionalGeneration"], "model_type": "mt5", "feed_forward_proj": "gated-gelu",
                 "tie_word_embeddings": False, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
                 "num_layers": 3, "num_decoder_layers": None},
    "phi3": second_tier.PHI3,
    "glm4": second_tier.GLM4,
    "glm": second_tier.GLM4 | {"architectures": ["GlmForCausalLM"], "model_type": "glm", "tie_word_embeddings": True},
    "olmo2": second_tier.OLMO2,
    "mpt": second_tier.MPT,
    "falcon": second_tier.FALCON,
    "falcon_7b": second_tier.FALCON | {"new_decoder_architecture": False, "multi_query": True},
    "falcon_in_line": second_tier.FALCON | {"new_decoder_architecture": False, "parallel_attn": False, "num_kv_heads": None, "bias": True,
                                "tie_word_embeddings": False, "activation": "relu"},
    "mixtral": mixtures.MIXTRAL,
    "qwen3_moe": mixtures.QWEN3_MOE,
    "olmoe": mixtures.OLMOE,
    "gpt_neox_in_line": GPT_NEOX | {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new"},
}

KINDS = ("plain", "padded", "packed")
# What stretches positions by the length of a sequence takes no sequences that begin anew within one.
WHOLE = ("llama_longrope_long", "llama_dynamic", "phi3")
ALL_CASES = [(name, kind) for name in MODELS for kind in KINDS if kind == "plain" or name not in WHOLE]
# Of the later families each run takes one kind, in turn; --long takes all.
LATER = ("mistral", "qwen3", "gemma2", "gemma3", "bloom", "llama_yarn", "llama_longrope", "llama_linear", "glm4", "glm", "olmo2",
         "mpt", "falcon", "falcon_7b", "falcon_in_line", "mixtral", "qwen3_moe", "olmoe")
CASES = [(name, kind) for name, kind in ALL_CASES if name not in LATER or kind == KINDS[LATER.index(name) % 3]]


def window_of(config: dict, layer: int) -> int:
    """Keys that a position of a layer sees; 0 = all."""
    window = config.get("sliding_window") or 0
    if config["model_type"] == "qwen3" and layer < config["max_window_layers"]:
        return 0
    if config["model_type"] == "gemma2" and layer % 2 == 1:
        return 0
    return 0 if config.get("layer_types", ["sliding_attention"] * 99)[layer] == "full_attention" else window


def is_gemma(config: dict) -> bool:
    return config["model_type"].startswith("gemma")


# Norms of a layer beside the first one, in Transformers' and Tessera's words.
def layer_norms(config: dict) -> dict:
    if not is_gemma(config):
        return {"post_attention_layernorm": "pre_mlp_layernorm"}
    return {"post_attention_layernorm": "post_attention_layernorm", "pre_feedforward_layernorm": "pre_mlp_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm"}


def norms_heads(config: dict) -> bool:
    return config["model_type"] in ("qwen3", "gemma3_text")


# GPT-NeoX's modules of a layer, and Tessera's.
NEOX = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_mlp_layernorm",
        "attention.query_key_value": "self_attention.linear_qkv", "attention.dense": "self_attention.linear_proj",
        "mlp.dense_h_to_4h": "mlp.linear_fc1", "mlp.dense_4h_to_h": "mlp.linear_fc2"}


def neox_shapes(config: dict) -> dict:
    c, f = config["hidden_size"], config["intermediate_size"]
    shapes = {"gpt_neox.embed_in.weight": (config["vocab_size"], c), "embed_out.weight": (config["vocab_size"], c)}
    sizes = dict(zip(NEOX, [(c,), (c,), (3 * c, c), (c, c), (f, c), (c, f)]))
    for i in range(config["num_hidden_layers"]):
        for module, shape in sizes.items():
            shapes[f"gpt_neox.layers.{i}.{module}.weight"] = shape
            if config["attention_bias"] or not module.startswith("attention."):
                shapes[f"gpt_neox.layers.{i}.{module}.bias"] = shape[:1]
    return shapes | {"gpt_neox.final_layer_norm.weight": (c,), "gpt_neox.final_layer_norm.bias": (c,)}


def neox_to_tessera(config: dict, tensors: dict) -> dict:
    plain = {"gpt_neox.embed_in.": "embedding.word_embeddings.", "gpt_neox.final_layer_norm.": "decoder.final_layernorm.",
             "embed_out.": "output_layer.", "lm_head.": "output_layer."}
    for i in range(config["num_hidden_layers"]):
        plain |= {f"gpt_neox.layers.{i}.{theirs}.": f"decoder.layers.{i}.{ours}." for theirs, ours in NEOX.items()}
    result = {}
    for name, tensor in tensors.items():
        begin = next(begin for begin in plain if name.startswith(begin))
        if ".query_key_value." in name:  # by head: query, key, value
            heads = config["num_attention_heads"]
            tensor = tensor.reshape(heads, 3, -1, *tensor.shape[1:]).swapaxes(0, 1).reshape(tensor.shape)
        result[plain[begin] + name.removeprefix(begin)] = tensor
    return result


BLOOM_LAYER = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_mlp_layernorm",
               "self_attention.query_key_value": "self_attention.linear_qkv", "self_attention.dense": "self_attention.linear_proj",
               "mlp.dense_h_to_4h": "mlp.linear_fc1", "mlp.dense_4h_to_h": "mlp.linear_fc2"}


def bloom_modules(config: dict) -> dict:
    """BLOOM's modules: Transformers' name to Tessera's and the shape of the weight; all but the table have a bias."""
    c = config["hidden_size"]
    shapes = dict(zip(BLOOM_LAYER, [(c,), (c,), (3 * c, c), (c, c), (4 * c, c), (c, 4 * c)]))
    modules = {"word_embeddings": ("embedding.word_embeddings", (config["vocab_size"], c)),
               "word_embeddings_layernorm": ("embedding.norm", (c,)), "ln_f": ("decoder.final_layernorm", (c,))}
    for i in range(config["n_layer"]):
        modules |= {f"h.{i}.{theirs}": (f"decoder.layers.{i}.{ours}", shapes[theirs]) for theirs, ours in BLOOM_LAYER.items()}
    return {f"transformer.{theirs}": entry for theirs, entry in modules.items()}


def bloom_shapes(config: dict) -> dict:
    shapes = {}
    for module, (_, shape) in bloom_modules(config).items():
        shapes[f"{module}.weight"] = shape
        if not module.endswith("word_embeddings"):
            shapes[f"{module}.bias"] = shape[:1]
    return shapes


def bloom_to_tessera(config: dict, tensors: dict) -> dict:
    result = {}
    for module, (ours, _) in bloom_modules(config).items():
        for kind in ("weight", "bias"):
            tensor = tensors.get(f"{module}.{kind}")
            if tensor is not None and module.endswith("query_key_value"):  # by head: query, key, value
                tensor = tensor.reshape(config["n_head"], 3, -1, *tensor.shape[1:]).swapaxes(0, 1).reshape(tensor.shape)
            if tensor is not None:
                result[f"{ours}.{kind}"] = tensor
    return result


def is_t5(config: dict) -> bool:
    return config["model_type"] in ("t5", "mt5")


def t5_modules(config: dict) -> dict:
    """T5's weights: Transformers' name to Tessera's (the parts of a stacked one by their own names) and the shape."""
    c, f, inner = config["d_model"], config["d_ff"], config["num_heads"] * config["d_kv"]
    first = ("wi_0", "wi_1") if config["feed_forward_proj"].startswith("gated") else ("wi",)
    modules = {"shared": ("embedding.word_embeddings", (config["vocab_size"], c))}
    for stack in ("encoder", "decoder"):
        modules[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"] = (
            f"{stack}.relative_attention_bias", (config["relative_attention_num_buckets"], config["num_heads"]))
        count = config["num_decoder_layers"] if stack == "decoder" and config["num_decoder_layers"] else config["num_layers"]
        for i in range(count):
            ours, theirs, mlp = f"{stack}.layers.{i}.", f"{stack}.block.{i}.layer.", 2 if stack == "decoder" else 1
            parts = {"0.SelfAttention": ("self_attention", {x: f"linear_qkv.{x}" for x in "qkv"}, "input_layernorm")}
            if stack == "decoder":
                cross = {"q": "linear_q", "k": "linear_kv.k", "v": "linear_kv.v"}
                parts["1.EncDecAttention"] = ("cross_attention", cross, "pre_cross_attn_layernorm")
            for part, (module, products, norm) in parts.items():
                modules |= {f"{theirs}{part}.{x}": (f"{ours}{module}.{name}", (inner, c)) for x, name in products.items()}
                modules[f"{theirs}{part}.o"] = (f"{ours}{module}.linear_proj", (c, inner))
                modules[f"{theirs}{part[0]}.layer_norm"] = (f"{ours}{norm}", (c,))
            modules |= {f"{theirs}{mlp}.DenseReluDense.{x}": (f"{ours}mlp.linear_fc1.{x}", (f, c)) for x in first}
            modules[f"{theirs}{mlp}.DenseReluDense.wo"] = (f"{ours}mlp.linear_fc2", (c, f))
            modules[f"{theirs}{mlp}.layer_norm"] = (f"{ours}pre_mlp_layernorm", (c,))
        modules[f"{stack}.final_layer_norm"] = (f"{stack}.final_layernorm", (c,))
    return modules if config["tie_word_embeddings"] else modules | {"lm_head": ("output_layer", (config["vocab_size"], c))}


def t5_to_tessera(config: dict, tensors: dict) -> dict:
    stacked = {}
    for theirs, (ours, _) in t5_modules(config).items():
        name = ours.rsplit(".", 1)[0] if ours.endswith((".q", ".k", ".v", ".wi", ".wi_0", ".wi_1")) else ours
        stacked.setdefault(f"{name}.weight", []).append(tensors[f"{theirs}.weight"])
    return {name: np.concatenate(parts) if len(parts) > 1 else parts[0] for name, parts in stacked.items()}


def is_bert(config: dict) -> bool:
    return config["model_type"].endswith("bert")


def has_binary_head(config: dict) -> bool:
    return is_bert(config) and config["architectures"][0].endswith("ForPreTraining")


def classifies(config: dict) -> bool:
    return config["architectures"][0].endswith("ForSequenceClassification")


def bert_modules(config: dict) -> dict:
    """BERT's modules: Transformers' name to Tessera's and the shape of the weight; all but tables have a bias."""
    c, f, megatron = config["hidden_size"], config["intermediate_size"], config["model_type"] == "megatron-bert"
    norms = {"attention.ln": "input_layernorm", "ln": "pre_mlp_layernorm"} if megatron else {
        "attention.output.LayerNorm": "post_attention_layernorm", "output.LayerNorm": "post_mlp_layernorm"}
    layer = {"attention.output.dense": ("self_attention.linear_proj", (c, c)), "intermediate.dense": ("mlp.linear_fc1", (f, c)),
             "output.dense": ("mlp.linear_fc2", (c, f))} | {theirs: (ours, (c,)) for theirs, ours in norms.items()}
    layer |= {f"attention.self.{x}": (f"self_attention.linear_qkv.{x}", (c, c)) for x in ("query", "key", "value")}
    modules = {"embeddings.word_embeddings": ("embedding.word_embeddings", (config["vocab_size"], c)),
               "embeddings.position_embeddings": ("embedding.position_embeddings", (config["max_position_embeddings"], c)),
               "embeddings.token_type_embeddings": ("embedding.token_type_embeddings", (config["type_vocab_size"], c))}
    modules |= {"encoder.ln": ("decoder.final_layernorm", (c,))} if megatron else {"embeddings.LayerNorm": ("embedding.norm", (c,))}
    for i in range(config["num_hidden_layers"]):
        modules |= {f"encoder.layer.{i}.{theirs}": (f"decoder.layers.{i}.{ours}", shape) for theirs, (ours, shape) in layer.items()}
    if has_binary_head(config) or classifies(config):
        modules["pooler.dense"] = ("pooler.dense", (c, c))
    modules = {f"bert.{theirs}": entry for theirs, entry in modules.items()}
    if classifies(config):
        return modules | {"classifier": ("classifier", (len(config["id2label"]), c))}
    modules |= {"cls.predictions.transform.dense": ("lm_head.dense", (c, c)),
                "cls.predictions.transform.LayerNorm": ("lm_head.layernorm", (c,))}
    return modules | ({"cls.seq_relationship": ("binary_head", (2, c))} if has_binary_head(config) else {})


def bert_shapes(config: dict) -> dict:
    shapes = {} if classifies(config) else {"cls.predictions.bias": (config["vocab_size"],)}
    for module, (_, shape) in bert_modules(config).items():
        shapes[f"{module}.weight"] = shape
        if not module.endswith("_embeddings"):
            shapes[f"{module}.bias"] = shape[:1]
    return shapes


def bert_to_tessera(config: dict, tensors: dict) -> dict:
    result = {} if classifies(config) else {"lm_head.bias": tensors["cls.predictions.bias"]}
    for module, (ours, _) in bert_modules(config).items():
        for kind in ("weight", "bias"):
            tensor = tensors.get(f"{module}.{kind}")
            if ours.endswith(".query"):
                stacked = [tensors[f"{module.removesuffix('query')}{x}.{kind}"] for x in ("query", "key", "value")]
                result[f"{ours.removesuffix('.query')}.{kind}"] = np.concatenate(stacked)
            elif tensor is not None and not ours.endswith((".key", ".value")):
                result[f"{ours}.{kind}"] = tensor
    return result


def weight_shapes(config: dict) -> dict:
    """Names and shapes of a model's tensors as Transformers saves them."""
    if is_bert(config):
        return bert_shapes(config)
    if is_t5(config):
        return {f"{theirs}.weight": shape for theirs, (_, shape) in t5_modules(config).items()}
    if mixtures.has(config):
        return mixtures.weight_shapes(config)
    if second_tier.has(config):
        modules = second_tier.modules_of(config)
        return ({f"{theirs}.weight": shape for theirs, (_, shape, _) in modules.items()}
                | {f"{theirs}.bias": shape[:1] for theirs, (_, shape, bias) in modules.items() if bias})
    if config["model_type"] == "gpt_neox":
        return neox_shapes(config)
    if config["model_type"] == "bloom":
        return bloom_shapes(config)
    shapes = {}
    if config["model_type"] in ("gpt2", "gpt_bigcode"):
        bigcode = config["model_type"] == "gpt_bigcode"
        c, f = config["n_embd"], config["n_inner"] or 4 * config["n_embd"]
        shapes["transformer.wte.weight"] = (config["vocab_size"], c)
        shapes["transformer.wpe.weight"] = (config["n_positions"], c)
        for i in range(config["n_layer"]):
            h = f"transformer.h.{i}."
            for norm in ("ln_1", "ln_2"):
                shapes |= {f"{h}{norm}.weight": (c,), f"{h}{norm}.bias": (c,)}
            qkv = c + 2 * c // config["n_head"] if bigcode else 3 * c
            for name, (rows, columns) in {"attn.c_attn": (c, qkv), "attn.c_proj": (c, c), "mlp.c_fc": (c, f),
                                          "mlp.c_proj": (f, c)}.items():
                shapes |= {f"{h}{name}.weight": (columns, rows) if bigcode else (rows, columns), f"{h}{name}.bias": (columns,)}
        return shapes | {"transformer.ln_f.weight": (c,), "transformer.ln_f.bias": (c,)}
    c, f = config["hidden_size"], config["intermediate_size"]
    d = config.get("head_dim") or c // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes["model.embed_tokens.weight"] = (config["vocab_size"], c)
    for i in range(config["num_hidden_layers"]):
        h = f"model.layers.{i}."
        shapes |= {f"{h}{norm}.weight": (c,) for norm in layer_norms(config)}
        if norms_heads(config):
            shapes |= {f"{h}self_attn.{x}_norm.weight": (d,) for x in "qk"}
        shapes |= {f"{h}input_layernorm.weight": (c,),
                   f"{h}self_attn.q_proj.weight": (q, c), f"{h}self_attn.k_proj.weight": (kv, c),
                   f"{h}self_attn.v_proj.weight": (kv, c), f"{h}self_attn.o_proj.weight": (c, q)}
        if config["model_type"] == "starcoder2":
            shapes |= {f"{h}mlp.c_fc.weight": (f, c), f"{h}mlp.c_proj.weight": (c, f)}
        else:
            shapes |= {f"{h}mlp.gate_proj.weight": (f, c), f"{h}mlp.up_proj.weight": (f, c), f"{h}mlp.down_proj.weight": (c, f)}
    shapes["model.norm.weight"] = (c,)
    if config["model_type"] == "starcoder2":  # every linear and every norm has a bias
        shapes |= {key.removesuffix("weight") + "bias": shape[:1] for key, shape in shapes.items() if ".embed_" not in key}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], c)
    return shapes


def write_model(folder: Path, name: str) -> None:
    """A Hugging Face folder with random weights: norms near 1, the rest wide enough to make every path matter."""
    config = MODELS[name]
    random = np.random.RandomState(7)
    weights = {}
    for key, shape in sorted(weight_shapes(config).items()):
        values = random.standard_normal(shape) * 0.08
        is_norm_scale = len(shape) == 1 and key.endswith("weight")
        weights[key] = (values + (1.0 if is_norm_scale and not is_gemma(config) else 0.0)).astype(np.float32)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def make_batch(kind: str, index: int, vocab: int = 211, batch: int = 3, length: int = 37, config: dict = GPT2) -> dict:
    """tokens, labels and what `kind` adds: plain, padded (left and right), packed (several documents a sample); for BERT also
    segments, and labels of pairs for its binary head."""
    random = np.random.RandomState(100 + index)
    tokens = random.randint(0, vocab, (batch, length)).astype(np.int32)
    labels = random.randint(0, vocab, (batch, length)).astype(np.int32)
    labels[0, 5:8] = -100
    result = {"tokens": tokens, "labels": labels}
    if is_t5(config):
        return t5_batch(kind, result, random, vocab)
    if kind == "padded":
        begin, end = np.array([0, 9, 0], np.int32), np.array([length, length, 20], np.int32)
        positions = np.arange(length)[None, :] - begin[:, None]
        real = (positions >= 0) & (np.arange(length)[None, :] < end[:, None])
        labels[~real] = -100
        result |= {"key_begin": begin, "key_end": end,
                   "position_ids": np.where(real, positions, 0).astype(np.int32)}
    if kind == "packed":
        starts = [[0, 11, 12], [0], [0, 30]]
        documents, positions = np.zeros_like(tokens), np.zeros_like(tokens)
        for row, begins in enumerate(starts):
            for number, begin in enumerate(begins):
                documents[row, begin:] = number
                positions[row, begin:] = np.arange(length - begin)
                if begin > 0:
                    labels[row, begin - 1] = -100
        result |= {"document_ids": documents, "position_ids": positions}
    if is_bert(config):
        result["token_types"] = np.sort(random.randint(0, config["type_vocab_size"], (batch, length)).astype(np.int32), axis=1)
        labels[random.rand(batch, length) > 0.4] = -100  # masked tokens are few
    if has_binary_head(config):
        result["sample_labels"] = np.array([index % 2, 1, -100], np.int32)
    if classifies(config):
        del result["labels"]
        result["sample_labels"] = np.array([index % len(config["id2label"]), -100, 2], np.int32)
    return result


def t5_batch(kind: str, result: dict, random: np.random.RandomState, vocab: int) -> dict:
    """An encoder's sequence longer than the decoder's; padded: both are, on either side. `packed`: the shortest there are (of one
    token the gradient of a bias is zero)."""
    labels = result["labels"][:, :2] if kind == "packed" else result["labels"]
    batch, length = labels.shape[0], 2 if kind == "packed" else 53
    result = {"encoder_tokens": random.randint(0, vocab, (batch, length)).astype(np.int32)}
    if kind == "padded":
        result |= {"encoder_key_begin": np.array([0, 9, 0], np.int32), "encoder_key_end": np.array([53, 53, 31], np.int32)}
        labels[1, 30:] = labels[2, :4] = -100
        result |= {"key_begin": np.array([0, 0, 4], np.int32), "key_end": np.array([37, 30, 37], np.int32)}
    # Shifted to the right; the start token is 0.
    tokens = np.concatenate([np.zeros((batch, 1), np.int32), np.maximum(labels[:, :-1], 0)], axis=1)
    return result | {"tokens": tokens, "labels": labels}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def architecture_of(folder: Path) -> str:
    return config_of(folder)["architectures"][0]


def write_batches(path: Path, batches: list) -> None:
    save_file({f"{key}_{i}": np.ascontiguousarray(value) for i, batch in enumerate(batches) for key, value in batch.items()},
              path)


def valid_rows(batch: dict) -> np.ndarray:
    """Positions that hold real tokens: what the others compute is nobody's business. Of classes of samples: all samples."""
    return np.ones(len(batch["tokens"]), bool) if "labels" not in batch else real_tokens(batch)


def real_tokens(batch: dict) -> np.ndarray:
    length = batch["tokens"].shape[1]
    if "key_begin" not in batch:
        return np.ones(batch["tokens"].shape, bool)
    position = np.arange(length)[None, :]
    return (position >= batch["key_begin"][:, None]) & (position < batch["key_end"][:, None])


def to_tessera_names(config: dict, tensors: dict) -> dict:
    """Tensors by Transformers' names to Tessera's: Conv1D turned, q, k, v and gate, up stacked."""
    if is_bert(config):
        return bert_to_tessera(config, tensors)
    if is_t5(config):
        return t5_to_tessera(config, tensors)
    if mixtures.has(config):
        return mixtures.to_tessera(config, tensors)
    if second_tier.has(config):
        return second_tier.to_tessera(config, tensors)
    if config["model_type"] == "gpt_neox":
        return neox_to_tessera(config, tensors)
    if config["model_type"] == "bloom":
        return bloom_to_tessera(config, tensors)
    result = {}
    if config["model_type"] in ("gpt2", "gpt_bigcode"):
        plain = {"transformer.wte.weight": "embedding.word_embeddings.weight",
                 "transformer.wpe.weight": "embedding.position_embeddings.weight",
                 "transformer.ln_f.weight": "decoder.final_layernorm.weight",
                 "transformer.ln_f.bias": "decoder.final_layernorm.bias"}
        inner = {"ln_1": "input_layernorm", "ln_2": "pre_mlp_layernorm", "attn.c_attn": "self_attention.linear_qkv",
                 "attn.c_proj": "self_attention.linear_proj", "mlp.c_fc": "mlp.linear_fc1", "mlp.c_proj": "mlp.linear_fc2"}
        for i in range(config["n_layer"]):
            for theirs, ours in inner.items():
                for kind in ("weight", "bias"):
                    plain[f"transformer.h.{i}.{theirs}.{kind}"] = f"decoder.layers.{i}.{ours}.{kind}"
        for theirs, ours in plain.items():
            turned = config["model_type"] == "gpt2" and ".c_" in theirs and theirs.endswith("weight")
            result[ours] = tensors[theirs].T if turned else tensors[theirs]
        return result
    starcoder = config["model_type"] == "starcoder2"
    first, second = (("c_fc",), "c_proj") if starcoder else (("gate_proj", "up_proj"), "down_proj")
    result["embedding.word_embeddings.weight"] = tensors["model.embed_tokens.weight"]
    for kind in ("weight", "bias") if starcoder else ("weight",):
        for i in range(config["num_hidden_layers"]):
            theirs, ours = f"model.layers.{i}.", f"decoder.layers.{i}."
            result[f"{ours}input_layernorm.{kind}"] = tensors[f"{theirs}input_layernorm.{kind}"]
            for norm, name in layer_norms(config).items():
                result[f"{ours}{name}.{kind}"] = tensors[f"{theirs}{norm}.{kind}"]
            if norms_heads(config):
                result |= {f"{ours}self_attention.{x}_layernorm.{kind}": tensors[f"{theirs}self_attn.{x}_norm.{kind}"] for x in "qk"}
            result[f"{ours}self_attention.linear_qkv.{kind}"] = np.concatenate(
                [tensors[f"{theirs}self_attn.{x}_proj.{kind}"] for x in "qkv"])
            result[f"{ours}self_attention.linear_proj.{kind}"] = tensors[f"{theirs}self_attn.o_proj.{kind}"]
            result[f"{ours}mlp.linear_fc1.{kind}"] = np.concatenate([tensors[f"{theirs}mlp.{x}.{kind}"] for x in first])
            result[f"{ours}mlp.linear_fc2.{kind}"] = tensors[f"{theirs}mlp.{second}.{kind}"]
        result[f"decoder.final_layernorm.{kind}"] = tensors[f"model.norm.{kind}"]
    if not config["tie_word_embeddings"]:
        result["output_layer.weight"] = tensors["lm_head.weight"]
    return result
