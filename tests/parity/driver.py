"""Runs Tessera's side of a parity test."""

import subprocess
from pathlib import Path

import models
from safetensors.numpy import load_file

# 20 AdamW updates with clipping, warm-up and cosine decay. eps 1e-5: with 1e-8 the exactly zero gradient of GPT-2's key
# biases makes two correct programs differ.
TRAINING = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1, "clip_grad": 0.5, "steps": 20,
            "warmup_steps": 5, "min_lr": 3e-4}


def training_overrides() -> list:
    t = TRAINING
    return [f"training.steps={t['steps']}", f"optimizer.lr={t['lr']}", f"optimizer.betas=[{t['betas'][0]}, {t['betas'][1]}]",
            f"optimizer.eps={t['eps']}", f"optimizer.weight_decay={t['weight_decay']}",
            f"optimizer.clip_grad={t['clip_grad']}", "lr_schedule.style=cosine",
            f"lr_schedule.warmup_steps={t['warmup_steps']}", f"lr_schedule.min_lr={t['min_lr']}"]


def run_tessera(build: Path, folder: Path, model: str, batches: list, overrides: list) -> dict:
    """Loss, logits, gradients of the first batch and the weights after training, as numpy arrays by name."""
    models.write_model(folder / "model", model)
    models.write_batches(folder / "batches.safetensors", batches)
    out = folder / "out.safetensors"
    done = subprocess.run([build / "tests/parity_driver", folder / "model", folder / "batches.safetensors", out, *overrides],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return load_file(out)
