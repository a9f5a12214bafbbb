"""Checkpoints as Megatron-LM saved them, of every age, written with PyTorch from a model of Transformers.

Made from what is known of Megatron's formats (names, orders of query, key and value, how ranks share tensors), not from
Tessera's reader or writer: rows are placed one by one."""

import argparse
import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Tuple

import torch

NAMES = {
    # stack, first norm, qkv, projection, second norm, fc1, fc2, final norm
    "oldest": ("transformer", "input_layernorm.", "attention.query_key_value.", "attention.dense.", "post_attention_layernorm.",
               "mlp.dense_h_to_4h.", "mlp.dense_4h_to_h.", "final_layernorm."),
    "2021": ("encoder", "input_layernorm.", "self_attention.query_key_value.", "self_attention.dense.", "post_attention_layernorm.",
             "mlp.dense_h_to_4h.", "mlp.dense_4h_to_h.", "final_layernorm."),
    "2023": ("encoder", "input_norm.", "self_attention.query_key_value.", "self_attention.dense.", "post_attention_norm.",
             "mlp.dense_h_to_4h.", "mlp.dense_4h_to_h.", "final_norm."),
    "te": ("encoder", "self_attention.layernorm_qkv.layer_norm_", "self_attention.layernorm_qkv.", "self_attention.proj.",
           "layernorm_mlp.layer_norm_", "layernorm_mlp.fc1_", "layernorm_mlp.fc2_", "final_layernorm."),
    "core local": ("decoder", "input_layernorm.", "self_attention.linear_qkv.", "self_attention.linear_proj.", "pre_mlp_layernorm.",
                   "mlp.linear_fc1.", "mlp.linear_fc2.", "final_layernorm."),
    "core te": ("decoder", "self_attention.linear_qkv.layer_norm_", "self_attention.linear_qkv.", "self_attention.linear_proj.",
                "mlp.linear_fc1.layer_norm_", "mlp.linear_fc1.", "mlp.linear_fc2.", "final_layernorm."),
}


class Model:
    """A GPT-2, Llama or Megatron-BERT of Transformers by Megatron's whole tensors: q, k, v apart, gate and up apart."""

    def __init__(self, model: Any) -> None:
        c, state = model.config, model.state_dict()
        self.gpt2, self.bert = c.model_type == "gpt2", c.model_type == "megatron-bert"
        self.layers, self.heads, self.width = c.num_hidden_layers, c.num_attention_heads, c.hidden_size
        self.groups = self.heads if self.gpt2 or self.bert else c.num_key_value_heads
        self.head_dim = self.width // self.heads
        self.vocabulary, self.positions = c.vocab_size, c.max_position_embeddings
        self.ffn = 4 * self.width if self.gpt2 else c.intermediate_size
        self.types: Any = None
        self.tied = bool(c.tie_word_embeddings)
        self.config = c
        if self.bert:
            return self._read_bert(state)
        prefix = "transformer." if self.gpt2 else "model."
        self.embedding = state[prefix + ("wte.weight" if self.gpt2 else "embed_tokens.weight")]
        self.learned = state["transformer.wpe.weight"] if self.gpt2 else None
        self.head = state["lm_head.weight"]
        self.final = self.values(state, prefix + ("ln_f." if self.gpt2 else "norm."))
        self.layer = [self._layer(state, i) for i in range(self.layers)]

    def _read_bert(self, state: Dict[str, torch.Tensor]) -> None:
        self.embedding = state["bert.embeddings.word_embeddings.weight"]
        self.learned = state["bert.embeddings.position_embeddings.weight"]
        self.types = state["bert.embeddings.token_type_embeddings.weight"]
        self.head = self.embedding
        self.final = self.values(state, "bert.encoder.ln.")
        self.layer = []
        for i in range(self.layers):
            names = f"bert.encoder.layer.{i}."
            three = [self.values(state, f"{names}attention.self.{part}.") for part in ("query", "key", "value")]
            self.layer.append([self.values(state, names + "attention.ln."), {kind: [each[kind] for each in three] for kind in ("weight", "bias")},
                               self.values(state, names + "attention.output.dense."), self.values(state, names + "ln."),
                               {kind: [value] for kind, value in self.values(state, names + "intermediate.dense.").items()},
                               self.values(state, names + "output.dense.")])
        self.pooler = self.values(state, "bert.pooler.dense.")
        self.transform = self.values(state, "cls.predictions.transform.dense.")
        self.transform_norm = self.values(state, "cls.predictions.transform.LayerNorm.")
        self.head_bias = state["cls.predictions.bias"]
        self.binary = self.values(state, "cls.seq_relationship.")

    def bert_heads(self, rank: int, ranks: int, padded: int, norm: str) -> Dict[str, Any]:
        """What follows the language model on the last stage."""
        bias = torch.cat([self.head_bias, torch.full((padded - self.vocabulary,), -2.5)])
        lm_head = {"bias": bias.chunk(ranks)[rank]}
        lm_head |= {"dense." + kind: value for kind, value in self.transform.items()}
        lm_head |= {f"{norm}.{kind}": value for kind, value in self.transform_norm.items()}
        return {"lm_head": lm_head} | ({"binary_head": self.binary} if self.binary else {})

    def core_heads(self, rank: int, ranks: int, padded: int, module: str) -> Dict[str, Any]:
        """The same in Megatron Core's names."""
        heads = self.bert_heads(rank, ranks, padded, "layer_norm")
        bias = heads["lm_head"].pop("bias")
        out = {f"{module}lm_head.{name}": value for name, value in heads["lm_head"].items()} | {f"{module}output_layer.bias": bias}
        if self.binary:
            out |= {f"{module}binary_head.{kind}": value for kind, value in self.binary.items()}
            out |= {f"{module}pooler.dense.{kind}": value for kind, value in self.pooler.items()}
        return out

    @staticmethod
    def values(state: Dict[str, torch.Tensor], name: str) -> Dict[str, torch.Tensor]:
        return {kind: state[name + kind] for kind in ("weight", "bias") if name + kind in state}

    def _layer(self, state: Dict[str, torch.Tensor], i: int) -> List[Dict[str, Any]]:
        if not self.gpt2:
            names = f"model.layers.{i}."
            def parts(*each):
                return {"weight": [state[f"{names}{name}.weight"] for name in each]}
            return [self.values(state, names + "input_layernorm."), parts("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                    self.values(state, names + "self_attn.o_proj."), self.values(state, names + "post_attention_layernorm."),
                    parts("mlp.gate_proj", "mlp.up_proj"), self.values(state, names + "mlp.down_proj.")]
        names = f"transformer.h.{i}."
        def linear(name):
            return {"weight": state[names + name + ".weight"].T, "bias": state[names + name + ".bias"]}
        qkv = {kind: list(value.split(self.width)) for kind, value in linear("attn.c_attn").items()}
        return [self.values(state, names + "ln_1."), qkv, linear("attn.c_proj"), self.values(state, names + "ln_2."),
                {kind: [value] for kind, value in linear("mlp.c_fc").items()}, linear("mlp.c_proj")]

    def qkv(self, parts: List[torch.Tensor], rank: int, ranks: int, version: int) -> torch.Tensor:
        q, k, v = parts
        hn, per_group = self.head_dim, self.heads // self.groups
        groups = range(rank * self.groups // ranks, (rank + 1) * self.groups // ranks)
        heads = range(groups.start * per_group, groups.stop * per_group)
        if version == 0:  # [3, heads, hn]
            rows = [part[h * hn + d] for part in (q, k, v) for h in heads for d in range(hn)]
        elif version == 1:  # [heads, hn, 3]
            rows = [part[h * hn + d] for h in heads for d in range(hn) for part in (q, k, v)]
        else:  # [groups, (queries, key, value), hn]
            rows = []
            for g in groups:
                rows += [q[(g * per_group + j) * hn + d] for j in range(per_group) for d in range(hn)]
                rows += [part[g * hn + d] for part in (k, v) for d in range(hn)]
        return torch.stack(rows)


def split_rows(parts: List[torch.Tensor], rank: int, ranks: int) -> torch.Tensor:
    return torch.cat([part.chunk(ranks)[rank] for part in parts])


def arguments(m: Model, tp: int, pp: int, vpp: int, padded: int, **more: Any) -> Dict[str, Any]:
    gelu = getattr(m.config, "activation_function", getattr(m.config, "hidden_act", ""))
    plain = m.gpt2 or m.bert
    return {"num_layers": m.layers, "hidden_size": m.width, "num_attention_heads": m.heads, "ffn_hidden_size": m.ffn,
            "max_position_embeddings": m.positions, "padded_vocab_size": padded, "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp, "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
            "bias_gelu_fusion": gelu == "gelu_fast", "openai_gelu": gelu == "gelu_new", "swiglu": not plain,
            "num_query_groups": m.groups if m.groups != m.heads else 1, "group_query_attention": m.groups != m.heads,
            "add_bias_linear": plain, "normalization": "LayerNorm" if plain else "RMSNorm",
            "position_embedding_type": "learned_absolute" if plain else "rope", "layernorm_epsilon": 1e-5,
            "untie_embeddings_and_output_weights": not m.tied, "hidden_dropout": 0.1, "attention_dropout": 0.1, "num_experts": None,
            "params_dtype": torch.float32, **more}


def rank_states(model: Any, *, era: str = "2021", version: int = 3, tp: int = 1, pp: int = 1, vpp: int = 1, divisor: int = 8,
                namespace: Any = argparse.Namespace, iteration: int = 7, module: str = "", vocabulary: bool = True,
                **more: Any) -> Dict[Tuple[int, int], Dict[str, Any]]:
    """What each rank's file holds, by its tensor rank and its stage."""
    m = Model(model)
    stack, *names, final = NAMES[era]
    core = era.startswith("core")
    padded = -(-m.vocabulary // (divisor * tp)) * divisor * tp
    def pad(table: torch.Tensor) -> torch.Tensor:
        return torch.cat([table, torch.full((padded - m.vocabulary, m.width), 3.25)])
    table, head = pad(m.embedding), pad(m.head)
    args = arguments(m, tp, pp, vpp, padded, **more)
    if vocabulary:
        args["orig_vocab_size"] = m.vocabulary
    per_piece = m.layers // (pp * vpp)
    states = {}
    for r in range(tp):
        for p in range(pp):
            state: Dict[str, Any] = {"args": namespace(**args), "iteration": iteration, "rng_state": [{"random": (3, (1, 2), None)}],
                                     "optimizer": {"step": 5}}
            if version:
                state["checkpoint_version"] = float(version)
            for v in range(vpp):
                first = (v * pp + p) * per_piece
                flat: Dict[str, Any] = {}
                for i in range(per_piece):
                    one, qkv, proj, two, fc1, fc2 = m.layer[first + i]
                    parts = [one, {kind: m.qkv(each, r, tp, version) for kind, each in qkv.items()},
                             {kind: each.chunk(tp, 1)[r].contiguous() if kind == "weight" else each for kind, each in proj.items()}, two,
                             {kind: split_rows(each, r, tp) for kind, each in fc1.items()},
                             {kind: each.chunk(tp, 1)[r] if kind == "weight" else each for kind, each in fc2.items()}]
                    for name, values in zip(names, parts):
                        flat.update({f"layers.{i}.{name}{kind}": value for kind, value in values.items()})
                    if "te" in era:
                        flat[f"layers.{i}.{'self_attention.layernorm_qkv' if era == 'te' else 'self_attention.linear_qkv'}._extra_state"] = None
                begins, ends = p == 0 and v == 0, p == pp - 1 and v == vpp - 1
                if ends:
                    flat.update({final + kind: value for kind, value in m.final.items()})
                embedding = {"word_embeddings": {"weight": table.chunk(tp)[r]}}
                if m.learned is not None:
                    embedding["position_embeddings"] = {"weight": m.learned}
                if m.types is not None:
                    embedding["tokentype_embeddings"] = {"weight": m.types}
                own_head = head.chunk(tp)[r]
                if core:
                    tables = embedding if begins else {}
                    chunk: Dict[str, Any] = {f"{module}embedding.{name}.weight": value["weight"] for name, value in tables.items()}
                    chunk |= {f"{module}{'encoder' if m.bert else 'decoder'}.{name}": value for name, value in flat.items()}
                    if ends and m.bert:
                        chunk |= m.core_heads(r, tp, padded, module)
                    if ends and (not m.tied or pp > 1):
                        chunk[f"{module}output_layer.weight"] = own_head
                else:
                    language: Dict[str, Any] = ({"embedding": embedding} if begins else {}) | {stack: flat}
                    if ends and not m.tied:
                        language["output_layer"] = {"weight": own_head}
                    if ends and m.bert and m.binary:
                        language["pooler"] = {"dense." + kind: value for kind, value in m.pooler.items()}
                    chunk = {"language_model": language}
                    if ends and m.bert:
                        chunk |= m.bert_heads(r, tp, padded, "norm" if era == "2023" else "layernorm")
                    if ends and m.tied and pp > 1:
                        chunk["word_embeddings_for_head"] = {"weight": own_head}
                state["model" if vpp == 1 else f"model{v}"] = chunk
            states[r, p] = state
    return states


def save(folder: Path, states: Dict[Tuple[int, int], Dict[str, Any]], iteration: int) -> Path:
    """FOLDER/iter_0000007/mp_rank_.../model_optim_rng.pt, and the file that names it."""
    stages = max(p for _, p in states) > 0
    for (r, p), state in states.items():
        path = folder / f"iter_{iteration:07d}" / (f"mp_rank_{r:02d}" + (f"_{p:03d}" if stages else "")) / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save(state, path)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def write(folder: Path, model: Any, *, iteration: int = 7, change: Any = None, **options: Any) -> Path:
    """A checkpoint of weights. `change(state, tp, pp)` may change a rank's dictionary."""
    states = rank_states(model, iteration=iteration, **options)
    for (r, p), state in states.items():
        states[r, p] = state = copy.deepcopy(state)  # what ranks have in common is one tensor
        if change:
            change(state, r, p)
    return save(folder, states, iteration)
