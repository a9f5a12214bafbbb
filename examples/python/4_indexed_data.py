"""Trains on Megatron's indexed data, as `tessera preprocess` writes it.

    tessera preprocess --input docs/*.md docs/guides/*.md --append-eod --output-prefix data/docs
    python examples/python/4_indexed_data.py --data data/docs_text_document
    tessera launch --config_file examples/python/configs/megatron_tp2_pp2.yaml examples/python/4_indexed_data.py \\
        --data data/docs_text_document

Samples, their order and their number are those of Megatron-LM for the same files, split and seed."""

import argparse

import torch
from text import END, VOCAB_SIZE
from transformers import GPT2Config, GPT2LMHeadModel

from tessera import Accelerator
from tessera.utils import MegatronLMDummyDataLoader, MegatronLMDummyScheduler, MegatronLMPlugin, set_seed

LENGTH = 64
EVAL_ITERS = 2  # batches of an evaluation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="prefix of an .idx/.bin pair of bytes")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    args = parser.parse_args()

    # Layout, micro-batches and clipping come from the launch file.
    plugin = MegatronLMPlugin(train_iters=args.steps, eval_iters=EVAL_ITERS, eval_interval=50, seq_length=LENGTH,
                              lr_decay_style="cosine", lr_warmup_fraction=0.1, min_lr=1e-4,
                              other_megatron_args={"seed": 1234, "eos_token_id": END})
    accelerator = Accelerator(megatron_lm_plugin=plugin)
    set_seed(7)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=VOCAB_SIZE, n_positions=LENGTH,
                                       bos_token_id=END, eos_token_id=END, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    scheduler = MegatronLMDummyScheduler(optimizer)  # the plugin says what the rates are
    micro_batch = 16 // (accelerator.state.mesh.dp * plugin.num_micro_batches)
    data = MegatronLMDummyDataLoader(data_path=args.data, seq_length=LENGTH, micro_batch_size=micro_batch, split="80,10,10")
    # The same one three times: it becomes training, validation and test.
    model, optimizer, scheduler, train, valid, test = accelerator.prepare(model, optimizer, scheduler, data, data, data)

    def evaluate(batches) -> float:
        model.eval()
        with torch.no_grad():
            losses = [model(**next(batches)).loss.item() for _ in range(EVAL_ITERS)]
        model.train()
        return sum(losses) / len(losses)

    model.train()
    for step in range(1, args.steps + 1):
        batch = next(train)  # {"text": [samples, LENGTH + 1]}: the labels are the tokens one place on
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step == 1 or step % 20 == 0 or step == args.steps:
            accelerator.print(f"step {step}  loss {loss.item():.6f}  lr {scheduler.get_last_lr()[0]:.2e}")
        if step % plugin.eval_interval == 0:
            accelerator.print(f"validation loss {evaluate(valid):.6f}")
    accelerator.print(f"test loss {evaluate(test):.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
