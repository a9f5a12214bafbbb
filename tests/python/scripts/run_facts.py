"""Prepares a model in two calls, as a script that logs at level INFO."""

import logging

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tessera import Accelerator
from tessera.utils import MegatronLMPlugin

logging.basicConfig(level=logging.INFO)
plugin = MegatronLMPlugin(tp_degree=2, num_micro_batches=2, use_distributed_optimizer=True)
accelerator = Accelerator(megatron_lm_plugin=plugin)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.arange(16).repeat(24, 1)
loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
scheduler = accelerator.prepare(torch.optim.lr_scheduler.LinearLR(optimizer.optimizer))
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    break
