"""Megatron-LM's own T5 against one written in PyTorch by what is known of it: pre-norm layers with biases, scores over the root of a
head's width, one table of tokens and one of learned positions for both stacks, a tied head with a bias. Transformers has none."""

import json
import math
import subprocess

import models
import numpy as np
import pytest
import torch
from driver import TRAINING, training_overrides
from oracle import arrays, learning_rate
from safetensors.numpy import load_file, save_file
from torch.nn import functional

MODEL = {"family": "megatron_t5", "num_layers": 5, "encoder_layers": 2, "hidden_size": 60, "num_heads": 3, "num_kv_heads": 3, "head_dim": 20,
         "ffn_hidden_size": 131, "vocab_size": 211, "max_positions": 60, "norm_eps": 1e-5, "dropout": 0.0, "attention_dropout": 0.0,
         "activation": "gelu_tanh", "tied_head": True, "linear_bias": True, "qkv_bias": True, "proj_bias": True}
WIDTH, HEADS, FFN = MODEL["hidden_size"], MODEL["num_heads"], MODEL["ffn_hidden_size"]


def shapes() -> dict:
    """Of every tensor by Megatron's name."""
    found = {"embedding.word_embeddings.weight": (MODEL["vocab_size"], WIDTH), "embedding.position_embeddings.weight": (MODEL["max_positions"], WIDTH),
             "output_layer.bias": (MODEL["vocab_size"],)}
    for stack, count in (("encoder", 2), ("decoder", 3)):
        products = {"self_attention.linear_qkv": (3 * WIDTH, WIDTH), "self_attention.linear_proj": (WIDTH, WIDTH), "mlp.linear_fc1": (FFN, WIDTH),
                    "mlp.linear_fc2": (WIDTH, FFN), "input_layernorm": (WIDTH,), "pre_mlp_layernorm": (WIDTH,)}
        if stack == "decoder":
            products |= {"cross_attention.linear_q": (WIDTH, WIDTH), "cross_attention.linear_kv": (2 * WIDTH, WIDTH),
                         "cross_attention.linear_proj": (WIDTH, WIDTH), "pre_cross_attn_layernorm": (WIDTH,)}
        names = {f"{stack}.layers.{i}.{name}": shape for i in range(count) for name, shape in products.items()}
        for name, shape in {**names, f"{stack}.final_layernorm": (WIDTH,)}.items():
            found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return found


def make_weights() -> dict:
    random = np.random.RandomState(11)
    return {name: (random.randn(*shape) * 0.1 + (1 if "layernorm.weight" in name else 0)).astype(np.float32) for name, shape in shapes().items()}


class Reference:
    def __init__(self, weights: dict):
        self.w = {name: torch.from_numpy(value.copy()).requires_grad_() for name, value in weights.items()}

    def linear(self, name: str, x):
        return functional.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def norm(self, name: str, x):
        return functional.layer_norm(x, (WIDTH,), self.w[f"{name}.weight"], self.w[f"{name}.bias"], MODEL["norm_eps"])

    def attend(self, name: str, q, k, v, seen):
        """`seen`: [batch, queries, keys]. A row that sees nothing reaches no loss: it sees all."""
        seen = seen | ~seen.any(dim=2, keepdim=True)
        q, k, v = (each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in (q, k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(WIDTH // HEADS)
        mixed = scores.masked_fill(~seen[:, None], -1e9).softmax(dim=3) @ v
        return self.linear(f"{name}.linear_proj", mixed.transpose(1, 2).flatten(2))

    def embed(self, tokens):
        return self.w["embedding.word_embeddings.weight"][tokens] + self.w["embedding.position_embeddings.weight"][: tokens.shape[1]]

    def stack(self, name: str, x, seen, memory=None, read=None):
        for i in range(2 if memory is None else 3):
            layer = f"{name}.layers.{i}"
            qkv = self.linear(f"{layer}.self_attention.linear_qkv", self.norm(f"{layer}.input_layernorm", x)).chunk(3, dim=2)
            x = x + self.attend(f"{layer}.self_attention", *qkv, seen)
            if memory is not None:
                q = self.linear(f"{layer}.cross_attention.linear_q", self.norm(f"{layer}.pre_cross_attn_layernorm", x))
                x = x + self.attend(f"{layer}.cross_attention", q, *self.linear(f"{layer}.cross_attention.linear_kv", memory).chunk(2, dim=2), read)
            h = functional.gelu(self.linear(f"{layer}.mlp.linear_fc1", self.norm(f"{layer}.pre_mlp_layernorm", x)), approximate="tanh")
            x = x + self.linear(f"{layer}.mlp.linear_fc2", h)
        return self.norm(f"{name}.final_layernorm", x)

    def forward(self, batch: dict):
        tokens, read = (torch.from_numpy(batch[name]).long() for name in ("tokens", "encoder_tokens"))
        there, said = real(batch, "encoder_", read.shape), real(batch, "", tokens.shape)
        memory = self.stack("encoder", self.embed(read), there[:, None, :].expand(-1, read.shape[1], -1))
        seen = said[:, None, :] & torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        x = self.stack("decoder", self.embed(tokens), seen, memory, there[:, None, :].expand(-1, tokens.shape[1], -1))
        logits = functional.linear(x, self.w["embedding.word_embeddings.weight"], self.w["output_layer.bias"])
        return functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch["labels"]).long().flatten(), ignore_index=-100), logits


def real(batch: dict, of: str, shape) -> torch.Tensor:
    at = torch.arange(shape[1])[None]
    if f"{of}key_begin" not in batch:
        return torch.ones(shape, dtype=torch.bool)
    return (at >= torch.from_numpy(batch[f"{of}key_begin"])[:, None]) & (at < torch.from_numpy(batch[f"{of}key_end"])[:, None])


def trained(weights: dict, batches: list) -> tuple:
    model = Reference(weights)
    groups = [{"params": [p for p in model.w.values() if (p.ndim > 1) == matrix], "weight_decay": TRAINING["weight_decay"] if matrix else 0.0}
              for matrix in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=TRAINING["betas"], eps=TRAINING["eps"])
    losses = []
    for step in range(TRAINING["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss, _ = model.forward(batches[step % len(batches)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.w.values(), TRAINING["clip_grad"])
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(zip(model.w, arrays((n, p) for n, p in model.w.items()).values()))


def distance(ours, theirs) -> float:
    assert ours.shape == theirs.shape
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.mark.parametrize("kind", ["plain", "padded"])
def test_fp32_agrees(build_dir, tmp_path, kind):
    weights = make_weights()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tessera.json").write_text(json.dumps({"format": "tessera-model", "format_version": 1, "tessera_version": "test",
                                                     "model": {**MODEL, "hf_model_type": None}, "source": None}))
    save_file(weights, folder / "model.safetensors")
    batches = [models.make_batch(kind, i, config=models.MODELS["t5"]) for i in range(4)]
    models.write_batches(tmp_path / "batches.safetensors", batches)
    done = subprocess.run([build_dir / "tests/parity_driver", folder, tmp_path / "batches.safetensors", tmp_path / "out.safetensors",
                           *training_overrides(), "training.micro_batch_size=3", "training.global_batch_size=3", "device.threads=2"],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ours = load_file(tmp_path / "out.safetensors")
    reference = Reference(weights)
    loss, logits = reference.forward(batches[0])
    loss.backward()
    expected = loss.item()
    assert abs(ours["loss"][0] - expected) <= 1e-6 * expected
    rows = models.valid_rows(batches[0])
    assert distance(ours["logits"][rows], logits.detach().numpy()[rows]) <= 1e-5
    assert {name.removeprefix("grad.") for name in ours if name.startswith("grad.")} == set(weights)
    for name, value in reference.w.items():
        assert distance(ours[f"grad.{name}"], value.grad.numpy()) <= 1e-5, name
    losses, after = trained(weights, batches)
    assert np.abs(ours["losses"] / np.array(losses) - 1).max() <= 1e-5
    for name, value in after.items():
        assert distance(ours[f"weight.{name}"], value) <= 5e-5, name
