"""A script of the shape of megatron_gpt2_generation.py, on local files, with the document's blocks where a line "# block" stands. The
folder it resumes from has vocab.json, merges.txt and config.json."""

import argparse
import json
import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Tokenizer, default_data_collator

from tessera import Accelerator
from tessera.utils import MegatronLMDummyScheduler, MegatronLMPlugin, set_seed

parser = argparse.ArgumentParser()
for name in ("resume_from_checkpoint", "train_file", "written"):
    parser.add_argument(f"--{name}")
for name, default in (("block_size", 32), ("per_device_train_batch_size", 4), ("num_train_epochs", 2)):
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--learning_rate", type=float, default=1e-3)
args = parser.parse_args()

# block 004/generate.py 1
accelerator = Accelerator(megatron_lm_plugin=megatron_lm_plugin)
set_seed(7)
tokenizer = GPT2Tokenizer.from_pretrained(args.resume_from_checkpoint)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.resume_from_checkpoint))
ids = tokenizer(Path(args.train_file).read_text())["input_ids"]
rows = [ids[i:i + args.block_size] for i in range(0, len(ids) - args.block_size + 1, args.block_size)]
train_dataloader = DataLoader([{"input_ids": row, "labels": list(row)} for row in rows], collate_fn=default_data_collator,
                              batch_size=args.per_device_train_batch_size)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
lr_scheduler = MegatronLMDummyScheduler(optimizer=optimizer, total_num_steps=args.num_train_epochs * len(train_dataloader), warmup_num_steps=0)
model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(model, optimizer, train_dataloader, lr_scheduler)
losses = []
for epoch in range(args.num_train_epochs):
    model.train()
    for batch in train_dataloader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())

model.eval()
written = []
say, accelerator.print = accelerator.print, lambda texts: (written.append(texts), say(texts))
# block 004/generate.py 2
# block 004/generate.py 3
# block 004/generate.py 4
# block 004/generate.py 5
# block 004/generate.py 6

# the likeliest words
batch_texts = ["Are you human?", "The purpose of life is", "The", "How are you doing these days? " * 3]
batch_encodings = tokenizer(batch_texts, return_tensors="pt", padding=True)
generated_tokens = model.megatron_generate(
    batch_encodings["input_ids"], batch_encodings["attention_mask"], max_new_tokens=max_new_tokens, top_k=1)
accelerator.print(tokenizer.batch_decode(generated_tokens.cpu().numpy()))
every_rank = accelerator.gather(generated_tokens[None])
assert all(torch.equal(each, generated_tokens) for each in every_rank), "ids differ between ranks"
if accelerator.is_main_process:
    Path(args.written).write_text(json.dumps({"losses": losses, "written": written}))
accelerator.end_training()
