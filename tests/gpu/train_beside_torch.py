"""The same GPT-2 trained by PyTorch and by Tessera on one device, for part `python` of run_all.sh: compares the losses.

`train_beside_torch.py [DEVICE]`. In fp32 they must agree to 1e-4, with the model's loss and with one made of its logits,
which stay on the device. In bf16 Tessera must be about as close to PyTorch's fp32 as PyTorch's bf16 is."""

import copy
import json
import sys
from typing import Callable, List

import torch
import transformers
from train_plain import train_step

from tessera import Accelerator
from tessera.state import AcceleratorState, GradientState

STEPS, BATCH, LENGTH, VOCAB = 10, 8, 128, 503
FP32_LIMIT, BF16_SLACK, BF16_FLOOR = 1e-4, 2.0, 1e-3


def make_model() -> torch.nn.Module:
    torch.manual_seed(3)
    config = transformers.GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=VOCAB, n_positions=LENGTH, resid_pdrop=0.0,
                                     embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config).train()


def make_batches() -> List[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator) for _ in range(STEPS)]


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)


def train_torch(model: torch.nn.Module, device: str, bf16: bool) -> List[float]:
    model = model.to(device)
    optimizer, losses = make_optimizer(model), []
    for ids in make_batches():
        ids = ids.to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=bf16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def step_with_own_loss(accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer,
                       ids: torch.Tensor) -> float:
    logits = model(input_ids=ids).logits
    assert logits.device == ids.device, f"logits on {logits.device}, the batch on {ids.device}"
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train_tessera(model: torch.nn.Module, device: str, bf16: bool, step: Callable = train_step) -> List[float]:
    accelerator = Accelerator(mixed_precision="bf16" if bf16 else "no")
    assert accelerator.device.type == device, f"runs on {accelerator.device}, not on {device}"
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    losses = [step(accelerator, model, optimizer, ids.to(accelerator.device)) for ids in make_batches()]
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return losses


def error(losses: List[float], expected: List[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected))


def main() -> int:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = make_model()
    expected = train_torch(copy.deepcopy(model), device, False)
    known = error(train_torch(copy.deepcopy(model), device, True), expected)
    rows = {"fp32": (error(train_tessera(copy.deepcopy(model), device, False), expected), FP32_LIMIT),
            "own loss": (error(train_tessera(copy.deepcopy(model), device, False, step_with_own_loss), expected), FP32_LIMIT),
            "bf16": (error(train_tessera(copy.deepcopy(model), device, True), expected), BF16_SLACK * known + BF16_FLOOR)}
    failed = False
    for precision, (found, limit) in rows.items():
        bad = not found <= limit
        failed = failed or bad
        print(f"{'FAILED  ' if bad else 'ok      '} {precision}: losses of {STEPS} steps differ from PyTorch's fp32 by {found:.1e} "
              f"(limit {limit:.1e})", flush=True)
    print("FIGURES " + json.dumps({"errors": {name: found for name, (found, _) in rows.items()}, "torch_bf16": known}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
