"""A small GPT-2 for three steps under each plugin that says what data ranks share out; rank 0 writes losses and sums of weights."""

import json
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tessera import Accelerator
from tessera.state import AcceleratorState, GradientState
from tessera.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, set_seed

PLUGINS = {
    "none": lambda: {},
    "zero2": lambda: {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2, gradient_clipping=0)},
    "zero3": lambda: {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3, gradient_clipping=0)},
    "nvme": lambda: {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2, gradient_clipping=0, offload_optimizer_device="nvme",
                                                         offload_optimizer_nvme_path=str(Path(sys.argv[1]).parent))},
    "offload": lambda: {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3, gradient_clipping=0, offload_optimizer_device="cpu",
                                                            offload_param_device="cpu")},
    "cpu_offload": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(cpu_offload=True, activation_checkpointing=True,
                                                                          activation_checkpointing_offload=True)},
    "clipped": lambda: {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3, gradient_clipping=0.1)},
    "full_shard": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(sharding_strategy="FULL_SHARD")},
    "shard_grad_op": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP")},
    "hybrid": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD")},
    "kept": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False,
                                                                   activation_checkpointing=True)},
}


def train(plugins: dict) -> dict:
    accelerator = Accelerator(cpu=True, **plugins)
    set_seed(3)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, resid_pdrop=0,
                                       embd_pdrop=0, attn_pdrop=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + accelerator.process_index)
        tokens = torch.randint(0, 64, (4, 16), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    model.eval()
    evaluated = float(model(input_ids=tokens, labels=tokens).loss)
    weights = {name: float(value.double().abs().sum()) for name, value in accelerator.get_state_dict(model).items()}
    return {"losses": losses, "evaluated": evaluated, "weights": weights}


def main():
    results = {}
    for name, make in PLUGINS.items():
        results[name] = train(make())
        AcceleratorState._reset_state()
        GradientState._reset_state()
    if Accelerator(cpu=True).is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
