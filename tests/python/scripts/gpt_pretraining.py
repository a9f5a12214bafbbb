"""Pre-training as Accelerate's own example for Megatron-LM does it, call by call, on data made here: everything about the layout
comes from the launcher's file. Arguments: output folder [folder of a state to resume from]. Only the import lines say tessera."""

import json
import logging
import math
import os
import sys
from itertools import chain

import datasets
import torch
import transformers
from datasets import Dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, default_data_collator, get_scheduler

from tessera import Accelerator, DistributedType, init_empty_weights
from tessera.logging import get_logger
from tessera.utils import MegatronLMDummyScheduler, set_seed

logger = get_logger(__name__)
BLOCK, EPOCHS, BATCH, ACCUMULATION = 16, 2, 4, 1


def lines(count: int) -> dict:
    text = open(os.__file__, encoding="utf-8").read().splitlines()
    return {"text": [line for line in text if line.strip()][:count]}


def main() -> None:
    output, resume = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, log_with="tensorboard", project_dir=output)
    logging.basicConfig(level=logging.INFO)
    logger.info(accelerator.state, main_process_only=False)
    if accelerator.is_local_main_process:
        datasets.utils.logging.set_verbosity_warning()
        transformers.utils.logging.set_verbosity_info()
    else:
        datasets.utils.logging.set_verbosity_error()
        transformers.utils.logging.set_verbosity_error()
    set_seed(42)
    if accelerator.is_main_process:
        os.makedirs(output, exist_ok=True)
    accelerator.wait_for_everyone()

    raw = {"train": Dataset.from_dict(lines(60)), "validation": Dataset.from_dict(lines(20))}
    config = AutoConfig.for_model("gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=257, n_positions=32, resid_pdrop=0.0,
                                  embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=256, eos_token_id=256)
    if resume is None:
        model = AutoModelForCausalLM.from_config(config)
    else:
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config)
    model.resize_token_embeddings(257)

    def tokenize(examples):
        return {"input_ids": [list(text.encode()) + [256] for text in examples["text"]]}

    def group(examples):
        joined = list(chain(*examples["input_ids"]))
        blocks = [joined[i: i + BLOCK] for i in range(0, len(joined) // BLOCK * BLOCK, BLOCK)]
        return {"input_ids": blocks, "attention_mask": [[1] * BLOCK] * len(blocks), "labels": [list(block) for block in blocks]}

    with accelerator.main_process_first():
        tokenized = {name: data.map(tokenize, batched=True, remove_columns=["text"]) for name, data in raw.items()}
    with accelerator.main_process_first():
        grouped = {name: data.map(group, batched=True) for name, data in tokenized.items()}
    train_dataloader = DataLoader(grouped["train"], shuffle=True, collate_fn=default_data_collator, batch_size=BATCH)
    eval_dataloader = DataLoader(grouped["validation"], collate_fn=default_data_collator, batch_size=BATCH)

    no_decay = ["bias", "layer_norm.weight"]
    optimizer = torch.optim.AdamW([
        {"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0}], lr=3e-3)
    updates = math.ceil(len(train_dataloader) / ACCUMULATION)
    max_steps = EPOCHS * updates
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        lr_scheduler = MegatronLMDummyScheduler(optimizer=optimizer, total_num_steps=max_steps, warmup_num_steps=2)
    else:
        lr_scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=2, num_training_steps=max_steps)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler)
    if accelerator.distributed_type == DistributedType.XLA:
        raise AssertionError("there are no TPUs here")
    updates = math.ceil(len(train_dataloader) / ACCUMULATION)
    max_steps = EPOCHS * updates
    accelerator.init_trackers("clm_no_trainer", {"lr": 3e-3, "steps": max_steps})
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        total_batch_size = accelerator.state.megatron_lm_plugin.global_batch_size
    else:
        total_batch_size = BATCH * accelerator.num_processes * ACCUMULATION
    logger.info(f"  Total train batch size = {total_batch_size}")
    progress = tqdm(range(max_steps), disable=not accelerator.is_local_main_process)
    completed, first_epoch, skip = 0, 0, None
    if resume is not None:
        accelerator.print(f"Resumed from checkpoint: {resume}")
        accelerator.load_state(resume)
        name = os.path.splitext(os.path.basename(resume))[0]
        completed = int(name.replace("step_", "")) if "step" in name else (int(name.replace("epoch_", "")) + 1) * updates
        first_epoch, skip = completed // updates, completed % updates
    perplexities, losses = [], []
    for epoch in range(first_epoch, EPOCHS):
        model.train()
        total_loss = 0
        for step, batch in enumerate(train_dataloader):
            if skip and epoch == first_epoch and step < skip:
                continue
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if accelerator.sync_gradients:
                progress.update(1)
                completed += 1
                if completed in (3, updates + 2):
                    accelerator.save_state(os.path.join(output, f"step_{completed}"))
            if completed >= max_steps:
                break
        model.eval()
        evaluated = []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            loss = outputs.loss
            if accelerator.distributed_type == DistributedType.MEGATRON_LM:
                evaluated.append(loss)
            else:
                evaluated.append(accelerator.gather_for_metrics(loss.repeat(BATCH)))
        if accelerator.distributed_type == DistributedType.MEGATRON_LM:
            mean = torch.mean(torch.tensor(evaluated))
        else:
            mean = torch.mean(torch.cat(evaluated))
        perplexities.append(math.exp(mean))
        logger.info(f"epoch {epoch}: perplexity: {perplexities[-1]} eval_loss: {mean}")
        accelerator.log({"perplexity": perplexities[-1], "eval_loss": mean, "epoch": epoch, "step": completed,
                         "train_loss": total_loss.item() / len(train_dataloader)}, step=completed)
    accelerator.wait_for_everyone()
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        accelerator.save_state(output)
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(os.path.join(output, "hf"), is_main_process=accelerator.is_main_process,
                              save_function=accelerator.save)
    # Every rank writes what it knows, as the example's last lines do: all of them must know the same.
    with open(os.path.join(output, f"all_results_{accelerator.process_index}.json"), "w") as file:
        json.dump({"perplexity": perplexities, "losses": losses, "lr": lr_scheduler.get_last_lr(), "updates": updates,
                   "completed": completed, "total_batch_size": total_batch_size}, file)
    accelerator.end_training()


if __name__ == "__main__":
    main()
