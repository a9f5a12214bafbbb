"""Pre-trains a small GPT-2 of your own on text, from random weights, and writes it as a Hugging Face folder.

    python examples/python/1_pretrain.py
    tessera launch --config_file examples/python/configs/megatron_tp2_pp2.yaml examples/python/1_pretrain.py

Both train the same model: with the launch file it is cut into 2 x 2 pieces, and the losses are the same."""

import argparse
import math

import torch
from text import END, VOCAB_SIZE, rows_of_text
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

from tessera import Accelerator
from tessera.utils import set_seed, tqdm

GLOBAL_BATCH = 16  # samples of one optimizer step, on every layout


def evaluate(model, loader) -> float:
    """The mean loss over the loader's batches."""
    model.eval()
    with torch.no_grad():
        losses = [model(**batch).loss.item() for batch in loader]
    model.train()
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--output", default="runs/pretrained", help="the folder that the model is written to")
    args = parser.parse_args()

    accelerator = Accelerator()  # the layout is the launch file's; without one it is a single process
    set_seed(7)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=VOCAB_SIZE, n_positions=args.length,
                                       bos_token_id=END, eos_token_id=END, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))

    # batch_size counts the samples of one micro-batch on one data rank.
    plugin = accelerator.state.megatron_lm_plugin
    micro_batches = plugin.num_micro_batches if plugin is not None else 1
    micro_batch = GLOBAL_BATCH // (accelerator.state.mesh.dp * micro_batches)
    rows = rows_of_text((args.steps + 1) * GLOBAL_BATCH, args.length)
    train = torch.utils.data.DataLoader(rows[:-GLOBAL_BATCH], batch_size=micro_batch, shuffle=True)
    held_out = torch.utils.data.DataLoader(rows[-GLOBAL_BATCH:], batch_size=micro_batch)

    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                                  lr=args.lr, betas=(0.9, 0.95))
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=args.steps // 10, num_training_steps=args.steps)

    model, optimizer, train, held_out, scheduler = accelerator.prepare(model, optimizer, train, held_out, scheduler)
    bar = tqdm(total=len(train))
    for step, batch in enumerate(train, start=1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        bar.update()
        if step == 1 or step % 20 == 0 or step == len(train):
            accelerator.print(f"step {step}  loss {loss.item():.6f}")

    loss = evaluate(model, held_out)
    accelerator.print(f"held-out loss {loss:.6f}, perplexity {math.exp(loss):.2f}")
    # Every rank calls it: each gives its part of the weights, and rank 0 writes.
    model.save_pretrained(args.output)
    accelerator.print(f"the model is in {args.output}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
