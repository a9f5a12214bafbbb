"""Fine-tunes a pre-trained BERT to tell kinds of lines of source code apart, and measures it on lines it has not seen.

    python examples/python/7_masked_lm.py --output runs/masked_lm
    python examples/python/8_classify.py --model runs/masked_lm

Any folder of a BERT or a Megatron-BERT with its tokenizer will do for --model; its head for tokens is left out, and the one for
classes begins at random, as Transformers says when it reads the folder."""

import argparse

import torch
from text import lines_of_text
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tessera import Accelerator
from tessera.utils import set_seed

KINDS = ["comment", "import", "definition", "other"]


def kind_of(line: str) -> int:
    if line.startswith("#"):
        return 0
    if line.startswith(("import ", "from ")):
        return 1
    return 2 if line.startswith(("def ", "class ", "@")) else 3


def even_lines(count: int) -> tuple:
    """`count` lines to learn from, as many of each kind, and 400 that are none of these."""
    lines = list(dict.fromkeys(lines_of_text(80_000)))  # each once
    by_kind = [[line for line in lines if kind_of(line) == number] for number in range(len(KINDS))]
    held_out = [line for some in by_kind for line in some[:100]]
    train = [some[100:] for some in by_kind]
    return [train[i % len(KINDS)][i // len(KINDS) % len(train[i % len(KINDS)])] for i in range(count)], held_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/masked_lm", help="a Hugging Face folder with a tokenizer")
    parser.add_argument("--steps", type=int, default=250, help="optimizer steps")
    parser.add_argument("--output", default="runs/classifier")
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(7)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=len(KINDS))
    lines, unseen = even_lines(32 * args.steps)

    def rows(some: list) -> list:
        encoded = [tokenizer(line, truncation=True, max_length=32, padding="max_length", return_tensors="pt") for line in some]
        return [{"input_ids": each.input_ids[0], "attention_mask": each.attention_mask[0], "labels": torch.tensor(kind_of(line))}
                for each, line in zip(encoded, some)]

    plugin = accelerator.state.megatron_lm_plugin
    parts = accelerator.state.mesh.dp * (plugin.num_micro_batches if plugin is not None else 1)
    train = torch.utils.data.DataLoader(rows(lines), batch_size=32 // parts, shuffle=True)
    held_out = torch.utils.data.DataLoader(rows(unseen), batch_size=32 // parts)  # the last batch is short
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    model, optimizer, train, held_out = accelerator.prepare(model, optimizer, train, held_out)

    model.train()
    for step, batch in enumerate(train, start=1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 20 == 0 or step == len(train):
            accelerator.print(f"step {step}  loss {loss.item():.6f}")

    model.eval()
    guesses, truths = [], []
    with torch.no_grad():
        for batch in held_out:
            outputs = model(**batch)  # in eval mode a classifier returns logits beside the loss
            guess, truth = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
            guesses.append(guess)  # each sample once, also of the short batch
            truths.append(truth)
    guess, truth = torch.cat(guesses), torch.cat(truths)
    accelerator.print(f"of {len(truth)} lines {100 * (guess == truth).float().mean().item():.2f} % are told right")
    for number, kind in enumerate(KINDS):
        found = (guess[truth == number] == number).float()
        accelerator.print(f"  {kind}: {int(found.sum())} of {len(found)}")

    model.save_pretrained(args.output)
    accelerator.print(f"the model is in {args.output}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
