"""A small GPT-2 trained as DeepSpeed's JSON says: DummyOptim, DummyScheduler, two micro-batches a step, a loader. Rank 0 writes what
came out beside the same with PyTorch alone over the batches of all ranks, and what is refused."""

import copy
import json
import math
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tessera import Accelerator
from tessera.errors import ConfigError
from tessera.state import AcceleratorState, GradientState
from tessera.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler, set_seed

STEPS, ACCUMULATION, BATCH, RANKS = 5, 2, 2, 2
JSON = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": "auto", "zero_optimization": {"stage": 2, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1, "betas": [0.8, 0.95], "eps": 1e-6, "torch_adam": True}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
                                                      "total_num_steps": "auto", "warmup_type": "linear"}},
}
ROWS = torch.randint(0, 64, (STEPS * ACCUMULATION * BATCH * RANKS, 16), generator=torch.Generator().manual_seed(7))


def make_model() -> GPT2LMHeadModel:
    set_seed(3)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, resid_pdrop=0, embd_pdrop=0,
                                      attn_pdrop=0))


def by_tessera(result: dict) -> None:
    # As many steps in the schedule as the script would make alone: Accelerate divides them by the processes.
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=JSON))
    model = make_model()
    optimizer = DummyOptim(model.parameters(), lr=0.01)
    scheduler = DummyScheduler(optimizer, total_num_steps=6 * RANKS, warmup_num_steps=2)
    loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in ROWS], batch_size=BATCH)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, rates = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            rate = optimizer.param_groups[0]["lr"]
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss).mean().item())
        if accelerator.sync_gradients:
            rates.append(rate)
    result.update(losses=losses, rates=rates, config=accelerator.state.deepspeed_plugin.deepspeed_config,
                  weights={name: float(value.double().abs().sum()) for name, value in accelerator.get_state_dict(model).items()})


def by_torch(result: dict) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6)
    losses, rates = [], []
    for step in range(STEPS):
        count = step - 1
        rate = 0.0 if count < 0 else 0.01 * (count / 2 if count < 2 else (6 - count) / 4)
        optimizer.param_groups[0]["lr"] = rate
        rates.append(rate)
        for part in range(ACCUMULATION):
            begin = (step * ACCUMULATION + part) * BATCH * RANKS
            rows = ROWS[begin:begin + BATCH * RANKS]
            loss = model(input_ids=rows, labels=rows).loss
            (loss / ACCUMULATION).backward()
            losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert math.isfinite(norm)
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    result.update(expected=losses, expected_rates=rates)
    result["expected_weights"] = {name: float(state[name].double().abs().sum()) for name in result["weights"]}


def refused(plugin: DeepSpeedPlugin, make_optimizer) -> str:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator, model = Accelerator(cpu=True, deepspeed_plugin=plugin), make_model()
    try:
        accelerator.prepare(model, make_optimizer(model.parameters()))
    except ConfigError as error:
        return str(error)
    return ""


def main():
    result: dict = {}
    by_tessera(result)
    result = copy.deepcopy(result)
    by_torch(result)
    result["optimizer beside the JSON's"] = refused(DeepSpeedPlugin(hf_ds_config=JSON), torch.optim.AdamW)
    result["no JSON"] = refused(DeepSpeedPlugin(), DummyOptim)
    AcceleratorState._reset_state()
    if Accelerator(cpu=True).is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
