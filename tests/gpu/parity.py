#!/usr/bin/env python3
"""The same models on the CPU and on a GPU: logits, loss, every gradient, then losses of training.

`parity.py PARITY_DRIVER FOLDER [DEVICE]` (tests/parity/parity_driver.cpp does the work; DEVICE cuda at first). In fp32
they must agree to 1e-5, tensors relative to their norm. In bf16 each must be about as close to the CPU's fp32 as the
CPU's bf16 is. Needs nothing but Python."""

import array
import json
import math
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

VOCAB, LENGTH, BATCH = 211, 64, 3
GPT2 = {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 128, "n_head": 2, "n_layer": 2, "n_positions": LENGTH,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0, "tie_word_embeddings": True}
LLAMA = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
         "head_dim": 64, "num_hidden_layers": 2, "intermediate_size": 160, "max_position_embeddings": LENGTH,
         "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
         "attention_bias": False, "mlp_bias": False}
MODELS = {"gpt2": GPT2, "llama": LLAMA}
TRAINING = ["training.steps=10", "optimizer.lr=1e-3", "optimizer.eps=1e-5", "optimizer.clip_grad=1.0",
            "lr_schedule.style=constant"]
FP32_LIMIT = 1e-5
TRAINED_LIMIT = 1e-4  # of losses after updates, which add up what rounding did to the weights
BF16_SLACK, BF16_FLOOR = 2.0, 1e-3

Tensors = Dict[str, array.array]


def shapes_of(config: dict) -> Dict[str, Tuple[int, ...]]:
    if config["model_type"] == "gpt2":
        c = config["n_embd"]
        shapes = {"transformer.wte.weight": (VOCAB, c), "transformer.wpe.weight": (LENGTH, c)}
        for i in range(config["n_layer"]):
            for name, shape in {"ln_1": (c,), "ln_2": (c,), "attn.c_attn": (c, 3 * c), "attn.c_proj": (c, c),
                                "mlp.c_fc": (c, 4 * c), "mlp.c_proj": (4 * c, c)}.items():
                shapes[f"transformer.h.{i}.{name}.weight"] = shape
                shapes[f"transformer.h.{i}.{name}.bias"] = shape[-1:]
        return {**shapes, "transformer.ln_f.weight": (c,), "transformer.ln_f.bias": (c,)}
    c, f = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens.weight": (VOCAB, c), "model.norm.weight": (c,), "lm_head.weight": (VOCAB, c)}
    for i in range(config["num_hidden_layers"]):
        for name, shape in {"input_layernorm": (c,), "post_attention_layernorm": (c,), "self_attn.q_proj": (c, c),
                            "self_attn.k_proj": (kv, c), "self_attn.v_proj": (kv, c), "self_attn.o_proj": (c, c),
                            "mlp.gate_proj": (f, c), "mlp.up_proj": (f, c), "mlp.down_proj": (c, f)}.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    return shapes


def write_tensors(path: Path, tensors: Dict[str, Tuple[str, Tuple[int, ...], array.array]]) -> None:
    header, at = {}, 0
    for name, (dtype, shape, values) in tensors.items():
        size = len(values) * values.itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(values.tobytes() for _, _, values in tensors.values()))


def read_tensors(path: Path) -> Tensors:
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    found = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            found[name] = array.array("f", data[8 + size + begin:8 + size + end])
    return found


def write_model(folder: Path, config: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    source, tensors = random.Random(7), {}
    for name, shape in sorted(shapes_of(config).items()):
        middle = 1.0 if len(shape) == 1 and name.endswith("weight") else 0.0
        values = array.array("f", (source.gauss(middle, 0.08) for _ in range(math.prod(shape))))
        tensors[name] = ("F32", shape, values)
    write_tensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))


def write_batches(path: Path) -> None:
    source, tensors = random.Random(8), {}
    for i in range(2):
        tokens = array.array("i", (source.randrange(VOCAB) for _ in range(BATCH * LENGTH)))
        labels = array.array("i", (-100 if source.random() < 0.1 else source.randrange(VOCAB) for _ in tokens))
        tensors[f"tokens_{i}"] = ("I32", (BATCH, LENGTH), tokens)
        tensors[f"labels_{i}"] = ("I32", (BATCH, LENGTH), labels)
    write_tensors(path, tensors)


def run(driver: str, folder: Path, model: str, device: str, precision: str) -> Tensors:
    out = folder / f"{model}-{precision}-{device}.safetensors"
    subprocess.run([driver, str(folder / model), str(folder / "batches.safetensors"), str(out), *TRAINING,
                    f"training.precision={precision}", f"device.type={device}"], check=True, timeout=240)
    return read_tensors(out)


def error(found: Sequence[float], expected: Sequence[float]) -> float:
    """Norm of the difference, relative to the norm of what was expected."""
    if len(found) != len(expected) or not all(map(math.isfinite, found)):
        return math.inf
    return math.dist(found, expected) / max(math.hypot(*expected), 1e-20)


def errors(found: Tensors, expected: Tensors) -> Dict[str, float]:
    """The largest error of each kind: logits, loss, gradient, weight, losses of training."""
    worst: Dict[str, float] = {}
    for name, values in expected.items():
        kind = {"grad": "gradient"}.get(name.split(".")[0], name.split(".")[0])
        worst[kind] = max(worst.get(kind, 0.0), error(found[name], values))
    return worst


def compare(driver: str, folder: Path, model: str, device: str) -> List[dict]:
    write_model(folder / model, MODELS[model])
    reference = run(driver, folder, model, "cpu", "fp32")
    single = errors(run(driver, folder, model, device, "fp32"), reference)
    limits = {"logits": FP32_LIMIT, "loss": FP32_LIMIT, "gradient": FP32_LIMIT, "losses": TRAINED_LIMIT}
    rows = [{"model": model, "precision": "fp32", "errors": single, "limits": limits}]
    known = errors(run(driver, folder, model, "cpu", "bf16"), reference)
    half = errors(run(driver, folder, model, device, "bf16"), reference)
    limits = {kind: BF16_SLACK * known[kind] + BF16_FLOOR for kind in ("logits", "loss", "gradient", "losses")}
    return [*rows, {"model": model, "precision": "bf16", "errors": half, "limits": limits}]


def main() -> int:
    driver, folder = sys.argv[1], Path(sys.argv[2])
    device = sys.argv[3] if len(sys.argv) > 3 else "cuda"
    folder.mkdir(parents=True, exist_ok=True)
    write_batches(folder / "batches.safetensors")
    rows, failed = [], False
    for model in MODELS:
        for row in compare(driver, folder, model, device):
            bad = [kind for kind, limit in row["limits"].items() if not row["errors"][kind] <= limit]
            failed = failed or bool(bad)
            figures = ", ".join(f"{kind} {row['errors'][kind]:.1e} (limit {limit:.0e})" for kind, limit in row["limits"].items())
            print(f"{'FAILED  ' if bad else 'ok      '} {model} {row['precision']}, {device} against cpu: {figures}", flush=True)
            rows.append(row)
            (folder / "parity.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
