"""A script of the shape of run_clm_no_trainer.py, on local files, with the document's changes where a line "# block" stands."""

import argparse
import logging
import math
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, default_data_collator, get_scheduler

from tessera import Accelerator, DistributedType
from tessera.logging import get_logger

logger = get_logger(__name__)
parser = argparse.ArgumentParser()
for name in ("config_name", "tokenizer_name", "dataset_name", "dataset_config_name", "report_to", "output_dir", "data_path", "splits_string"):
    parser.add_argument(f"--{name}")
for name in ("block_size", "per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "max_train_steps"):
    parser.add_argument(f"--{name}", type=int)
parser.add_argument("--learning_rate", type=float)
parser.add_argument("--with_tracking", action="store_true")
parser.add_argument("--custom_train_step", action="store_true")
args = parser.parse_args()
args.num_warmup_steps, args.gradient_accumulation_steps, args.lr_scheduler_type = 0, 1, "linear"

accelerator = Accelerator(log_with=args.report_to, project_dir=args.output_dir) if args.with_tracking else Accelerator()
logging.basicConfig(format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", level=logging.INFO)
tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_name)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.config_name))


def samples(name: str) -> list:
    ids = tokenizer((Path(args.dataset_name) / args.dataset_config_name / f"{name}.txt").read_text())["input_ids"]
    rows = [ids[i:i + args.block_size] for i in range(0, len(ids) - args.block_size + 1, args.block_size)]
    return [{"input_ids": row, "labels": list(row)} for row in rows]


train_dataset = samples("train")
train_dataloader = DataLoader(train_dataset, shuffle=True, collate_fn=default_data_collator, batch_size=args.per_device_train_batch_size)
eval_dataloader = DataLoader(samples("validation"), collate_fn=default_data_collator, batch_size=args.per_device_eval_batch_size)
no_decay = ["bias", "layer_norm.weight"]
optimizer = torch.optim.AdamW([
    {"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], "weight_decay": 0.1},
    {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0}], lr=args.learning_rate)
args.max_train_steps = args.num_train_epochs * math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)

# block 004/scheduler.py
if args.custom_train_step:
    # block 004/custom_train_step.py
    main()
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler)
args.max_train_steps = args.num_train_epochs * math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
# block 004/total_batch_size.py
if args.with_tracking:
    accelerator.init_trackers("clm_no_trainer", vars(args))
logger.info("***** Running training *****")
logger.info(f"  Num examples = {len(train_dataset)}")
logger.info(f"  Total train batch size (w. parallel, distributed & accumulation) = {total_batch_size}")
logger.info(f"  Total optimization steps = {args.max_train_steps}")
completed_steps, evaluated = 0, []
for epoch in range(args.num_train_epochs):
    model.train()
    for batch in train_dataloader:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        completed_steps += accelerator.sync_gradients
    model.eval()
    losses = []
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**batch)
        loss = outputs.loss
        # block 004/eval_losses.py 1
    # block 004/eval_losses.py 2
    evaluated.append(torch.mean(losses).item())
    logger.info(f"epoch {epoch}: perplexity: {math.exp(evaluated[-1])} eval_loss: {evaluated[-1]}")
    if args.with_tracking:
        accelerator.log({"eval_loss": evaluated[-1], "epoch": epoch, "step": completed_steps}, step=completed_steps)
accelerator.wait_for_everyone()
# block 004/save_state.py
accelerator.end_training()
told = {"steps": completed_steps, "total_batch_size": total_batch_size, "evaluated": evaluated, "lr": lr_scheduler.get_last_lr()}
