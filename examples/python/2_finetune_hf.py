"""Fine-tunes a Hugging Face model: the answers count, the questions and the padding do not.

    python examples/python/1_pretrain.py --output runs/pretrained
    python examples/python/2_finetune_hf.py --model runs/pretrained

The task is to write a word backwards. Any folder of a type that Tessera reads will do for --model if it has a token for
each byte; one with a tokenizer of its own needs its own encode()."""

import argparse
import random

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tessera import Accelerator, init_empty_weights
from tessera.utils import set_seed

LENGTH = 24


def encode(question: str, answer: str) -> dict:
    """Both as tokens; labels are -100 where nothing is to be learned."""
    asked, told = list(question.encode()), list(answer.encode())
    padding = LENGTH - len(asked) - len(told)
    return {"input_ids": torch.tensor(asked + told + [0] * padding),
            "attention_mask": torch.tensor([1] * (LENGTH - padding) + [0] * padding),
            "labels": torch.tensor([-100] * len(asked) + told + [-100] * padding)}


def examples(count: int) -> list:
    draw = random.Random(3)
    words = ["".join(draw.choice("abcdef") for _ in range(draw.randint(2, 6))) for _ in range(count)]
    return [encode(f"{word} -> ", f"{word[::-1]}\n") for word in words]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/pretrained", help="a Hugging Face folder")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--output", default="runs/finetuned")
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(7)
    # No weights are read here: prepare() lets every rank read its own part from the folder.
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
    # With split_batches=True batch_size would be the whole step's; this is the micro-batch of one data rank.
    plugin = accelerator.state.megatron_lm_plugin
    parts = accelerator.state.mesh.dp * (plugin.num_micro_batches if plugin is not None else 1)
    loader = torch.utils.data.DataLoader(examples(16 * args.steps), batch_size=16 // parts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for step, batch in enumerate(loader, start=1):
        loss = model(**batch).loss  # the mean over the tokens of all answers, whichever rank has them
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 20 == 0 or step == len(loader):
            accelerator.print(f"step {step}  loss {loss.item():.6f}")

    accelerator.unwrap_model(model).save_pretrained(args.output, is_main_process=accelerator.is_main_process,
                                                    save_function=accelerator.save)
    accelerator.print(f"the model is in {args.output}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
