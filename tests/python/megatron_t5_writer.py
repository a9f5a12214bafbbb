"""Megatron-LM's own T5, as it saved it in its ranks' files: whole tensors by Tessera's names, and what each tensor rank has of them.

Made from what is known of Megatron's formats, not from Tessera's reader or writer: rows are placed one by one."""

import argparse
from pathlib import Path
from typing import Any, Dict

import torch

WIDTH, HEADS, FFN, VOCABULARY, POSITIONS, ENCODER, DECODER = 24, 4, 40, 61, 16, 2, 3
HEAD = WIDTH // HEADS
MODEL = {"family": "megatron_t5", "num_layers": ENCODER + DECODER, "encoder_layers": ENCODER, "hidden_size": WIDTH, "num_heads": HEADS,
         "num_kv_heads": HEADS, "head_dim": HEAD, "ffn_hidden_size": FFN, "vocab_size": VOCABULARY, "max_positions": POSITIONS,
         "norm_eps": 1e-5, "dropout": 0.0, "attention_dropout": 0.0, "activation": "gelu_tanh", "tied_head": True, "linear_bias": True,
         "qkv_bias": True, "proj_bias": True}
# By a layer's norms and products: what Megatron-LM calls them.
SELF = {"input_layernorm": "input_layernorm", "self_attention.linear_qkv": "self_attention.query_key_value",
        "self_attention.linear_proj": "self_attention.dense", "mlp.linear_fc1": "mlp.dense_h_to_4h", "mlp.linear_fc2": "mlp.dense_4h_to_h"}
ENCODER_NAMES = SELF | {"pre_mlp_layernorm": "post_attention_layernorm"}
DECODER_NAMES = SELF | {"pre_cross_attn_layernorm": "post_attention_layernorm", "pre_mlp_layernorm": "post_inter_attention_layernorm",
                        "cross_attention.linear_q": "inter_attention.query", "cross_attention.linear_kv": "inter_attention.key_value",
                        "cross_attention.linear_proj": "inter_attention.dense"}
IN_ORDER = ("input_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj", "pre_cross_attn_layernorm", "cross_attention.linear_q",
            "cross_attention.linear_kv", "cross_attention.linear_proj", "pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2")


def weights(seed: int = 5) -> Dict[str, torch.Tensor]:
    """All queries, all keys, all values; of an attention to the encoder all keys, all values."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding.word_embeddings.weight": (VOCABULARY, WIDTH), "embedding.position_embeddings.weight": (POSITIONS, WIDTH)}
    rows = {"linear_qkv": 3 * WIDTH, "linear_proj": WIDTH, "linear_q": WIDTH, "linear_kv": 2 * WIDTH, "linear_fc1": FFN, "linear_fc2": WIDTH}
    for stack, layers, names in (("encoder", ENCODER, ENCODER_NAMES), ("decoder", DECODER, DECODER_NAMES)):
        for i in range(layers):
            for name in (name for name in IN_ORDER if name in names):
                kind = name.split(".")[-1]
                out = rows.get(kind, WIDTH)
                into = () if kind not in rows else (FFN if kind == "linear_fc2" else WIDTH,)
                shapes |= {f"{stack}.layers.{i}.{name}.weight": (out, *into), f"{stack}.layers.{i}.{name}.bias": (out,)}
        shapes |= {f"{stack}.final_layernorm.weight": (WIDTH,), f"{stack}.final_layernorm.bias": (WIDTH,)}
    shapes["output_layer.bias"] = (VOCABULARY,)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def by_head(whole: torch.Tensor, kinds: int, rank: int, ranks: int, version: int) -> torch.Tensor:
    heads = range(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
    places = {0: [(k, h, d) for k in range(kinds) for h in heads for d in range(HEAD)],
              1: [(k, h, d) for h in heads for d in range(HEAD) for k in range(kinds)]}
    order = places.get(version, [(k, h, d) for h in heads for k in range(kinds) for d in range(HEAD)])
    return torch.stack([whole[k * WIDTH + h * HEAD + d] for k, h, d in order])


def part(name: str, whole: torch.Tensor, rank: int, ranks: int, version: int, padded: int) -> torch.Tensor:
    if "word_embeddings" in name or name == "output_layer.bias":
        rest = torch.full((padded - VOCABULARY, *whole.shape[1:]), 2.5)
        return torch.cat([whole, rest]).chunk(ranks)[rank].clone()
    if "linear_qkv" in name or "linear_kv" in name:
        return by_head(whole, 3 if "qkv" in name else 2, rank, ranks, version)
    if "linear_q." in name or "linear_fc1" in name:
        return whole.chunk(ranks)[rank].clone()
    if name.endswith("linear_proj.weight") or name.endswith("linear_fc2.weight"):
        return whole.chunk(ranks, 1)[rank].clone()
    return whole


def rank_model(tensors: Dict[str, torch.Tensor], rank: int, ranks: int, version: int = 3, divisor: int = 8) -> Dict[str, Any]:
    """What the file of a rank has under `model`."""
    padded = -(-VOCABULARY // (divisor * ranks)) * divisor * ranks
    own = {name: part(name, whole, rank, ranks, version, padded) for name, whole in tensors.items()}
    language: Dict[str, Any] = {"embedding": {"word_embeddings": {"weight": own["embedding.word_embeddings.weight"]},
                                              "position_embeddings": {"weight": own["embedding.position_embeddings.weight"]}}}
    for stack, layers, names in (("encoder", ENCODER, ENCODER_NAMES), ("decoder", DECODER, DECODER_NAMES)):
        flat = {}
        for i in range(layers):
            for name in (name for name in IN_ORDER if name in names):
                flat |= {f"layers.{i}.{names[name]}.{kind}": own[f"{stack}.layers.{i}.{name}.{kind}"] for kind in ("weight", "bias")}
        language[stack] = flat | {f"final_layernorm.{kind}": own[f"{stack}.final_layernorm.{kind}"] for kind in ("weight", "bias")}
    return {"language_model": language, "lm_head": {"bias": own["output_layer.bias"]}}


def arguments(ranks: int, **more: Any) -> argparse.Namespace:
    return argparse.Namespace(**{
        "num_layers": ENCODER, "encoder_num_layers": ENCODER, "decoder_num_layers": DECODER, "hidden_size": WIDTH, "num_attention_heads": HEADS,
        "ffn_hidden_size": FFN, "max_position_embeddings": POSITIONS, "orig_vocab_size": VOCABULARY, "tensor_model_parallel_size": ranks,
        "pipeline_model_parallel_size": 1, "bias_gelu_fusion": False, "openai_gelu": True, "add_bias_linear": True, "layernorm_epsilon": 1e-5,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "num_experts": None, "params_dtype": torch.float32} | more)


def write(folder: Path, tensors: Dict[str, torch.Tensor], ranks: int = 1, version: int = 3, change: Any = None, iteration: int = 7, **more: Any) -> Path:
    for rank in range(ranks):
        state = {"args": arguments(ranks, **more), "iteration": iteration, "model": rank_model(tensors, rank, ranks, version)}
        if version:
            state["checkpoint_version"] = float(version)
        if change:
            change(state)
        path = folder / f"iter_{iteration:07d}/mp_rank_{rank:02d}/model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save(state, path)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder
