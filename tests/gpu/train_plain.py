"""A short training without PyTorch, for part `python` of run_all.sh: prints the losses.

`train_plain.py TP PP`; ACCELERATE_TORCH_DEVICE says where it must run."""

import os
import sys

import numpy as np

from tessera import Accelerator, AdamW, CausalLM
from tessera.utils import MegatronLMPlugin, set_seed


def train_step(accelerator, model, optimizer, ids) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main() -> None:
    tp, pp = int(sys.argv[1]), int(sys.argv[2])
    set_seed(7)
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 128, "n_head": 2, "vocab_size": 257, "n_positions": 64,
              "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(tp_degree=tp, pp_degree=pp, num_micro_batches=2))
    model, optimizer = accelerator.prepare(CausalLM(config), AdamW(lr=1e-3, eps=1e-5))
    wanted = os.environ.get("ACCELERATE_TORCH_DEVICE", "cuda")
    assert accelerator.device.type == wanted, f"runs on {accelerator.device}, not on {wanted}"
    whole = np.random.default_rng(0).integers(0, 257, (8, 64))
    part, parts = accelerator.state.mesh.coordinates["dp"], accelerator.state.mesh.dp
    ids = whole[8 * part // parts: 8 * (part + 1) // parts]
    losses = [train_step(accelerator, model, optimizer, ids) for _ in range(6)]
    if accelerator.is_main_process:
        print("LOSSES", *losses, flush=True)


if __name__ == "__main__":
    main()
