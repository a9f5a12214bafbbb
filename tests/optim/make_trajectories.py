#!/usr/bin/env python3
"""Writes trajectories.inc: what torch.optim does to three small tensors. Run by hand; the C++ test needs no Python.
Weights and gradients are exact binary fractions made from integers, so that both sides start from the same numbers."""

from pathlib import Path

import torch

SHAPES = {"layer.weight": (3, 7), "layer.bias": (5,), "other.weight": (2, 2)}
STEPS = 7

# name, optimizer, lr, betas, eps, weight decay, momentum, nesterov, clip; lr falls by a twentieth of itself a step
CASES = [
    ("adamw", "adamw", 1e-2, (0.9, 0.999), 1e-8, 0.1, 0.0, False, 0.0),
    ("adamw_clipped", "adamw", 3e-2, (0.9, 0.95), 1e-5, 0.3, 0.0, False, 0.75),
    ("adamw_no_decay", "adamw", 1e-3, (0.8, 0.99), 1e-8, 0.0, 0.0, False, 100.0),
    ("adam_l2", "adam", 1e-2, (0.9, 0.999), 1e-8, 0.05, 0.0, False, 0.0),
    ("adam_l2_clipped", "adam", 2e-2, (0.5, 0.9), 1e-3, 0.2, 0.0, False, 1.5),
    ("sgd_plain", "sgd", 1e-1, (0.0, 0.0), 1e-8, 0.01, 0.0, False, 0.0),
    ("sgd_momentum", "sgd", 5e-2, (0.0, 0.0), 1e-8, 0.1, 0.9, False, 1.0),
    ("sgd_nesterov", "sgd", 2e-2, (0.0, 0.0), 1e-8, 0.0, 0.7, True, 0.0),
]


def weight(k, n):
    return torch.tensor([((i * 53 + 7 * k) % 89 - 44) / 128 for i in range(n)], dtype=torch.float64)


def gradient(k, step, n):
    return torch.tensor([((i * 37 + k * 59 + step * 101 + 11) % 97 - 48) / 64 for i in range(n)], dtype=torch.float64)


def run(case):
    _, kind, lr, betas, eps, decay, momentum, nesterov, clip = case
    params = [torch.nn.Parameter(weight(k, torch.Size(s).numel()).reshape(s)) for k, s in enumerate(SHAPES.values())]
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if kind == "sgd":
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov)
    else:
        optimizer = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[kind](groups, lr=lr, betas=betas, eps=eps)
    norms = []
    for step in range(STEPS):
        for k, p in enumerate(params):
            p.grad = gradient(k, step, p.numel()).reshape(p.shape)
        # An infinite bound multiplies by 1: it only reports the norm.
        norms.append(torch.nn.utils.clip_grad_norm_(params, clip if clip > 0 else float("inf")).item())
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / 20)
        optimizer.step()
    return norms, [p.detach().flatten().tolist() for p in params]


def main():
    names = {"adamw": "OptimizerName::adamw", "adam": "OptimizerName::adam", "sgd": "OptimizerName::sgd"}
    lines = [f"// torch.optim {torch.__version__.split('+')[0]} in double precision; written by make_trajectories.py."]
    for case in CASES:
        name, kind, lr, betas, eps, decay, momentum, nesterov, clip = case
        norms, weights = run(case)
        numbers = lambda values: "{" + ", ".join(f"{v:.10g}" for v in values) + "}"
        lines.append(f'{{"{name}", {names[kind]}, {lr}, {{{betas[0]}, {betas[1]}}}, {eps}, {decay}, {momentum}, '
                     f"{str(nesterov).lower()}, {clip}, {numbers(norms)},")
        lines.append(" {" + ",\n  ".join(numbers(w) for w in weights) + "}},")
    Path(__file__).with_name("trajectories.inc").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
