"""Trains a T5 to say in a line what a function does, and measures it on functions it has not seen: how many bytes of their summaries
it guesses, and how near what it writes by itself comes to them (ROUGE-L).

    python examples/python/9_summarize.py
    python examples/python/9_summarize.py --model MY_T5 --steps 1000

Without --model a small T5 begins at random and reads bytes, as ByT5 does. Any folder of a T5 or mT5 with its tokenizer will do."""

import argparse

import torch
from text import functions_with_summaries
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, ByT5Tokenizer, T5Config, T5ForConditionalGeneration

from tessera import Accelerator
from tessera.utils import set_seed

READ, SAID, BATCH = 192, 48, 16


def model_and_tokenizer(folder: str) -> tuple:
    if folder:
        return AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer = ByT5Tokenizer()  # a token for each byte: it needs no files
    config = T5Config(vocab_size=len(tokenizer), d_model=64, d_kv=16, d_ff=192, num_layers=2, num_decoder_layers=2, num_heads=4,
                      dropout_rate=0.0, feed_forward_proj="gated-gelu", decoder_start_token_id=tokenizer.pad_token_id)
    return T5ForConditionalGeneration(config), tokenizer


def rows_of(pairs: list, tokenizer, start: int) -> list:
    """input_ids, attention_mask, and labels, -100 behind a summary's end; decoder_input_ids are the labels shifted right."""
    rows = []
    for code, summary in pairs:
        read = tokenizer(code, truncation=True, max_length=READ, padding="max_length", return_tensors="pt")
        said = tokenizer(summary, truncation=True, max_length=SAID, padding="max_length", return_tensors="pt")
        tokens = said.input_ids[0]
        rows.append({"input_ids": read.input_ids[0], "attention_mask": read.attention_mask[0],
                     "decoder_input_ids": torch.cat([torch.tensor([start]), tokens[:-1]]),
                     "labels": tokens.masked_fill(said.attention_mask[0] == 0, -100)})
    return rows


def rouge_l(said: str, reference: str) -> float:
    """The F measure of the longest common subsequence of words (Lin, "ROUGE: a package for automatic evaluation of summaries")."""
    ours, theirs = said.lower().split(), reference.lower().split()
    longest = [0] * (len(theirs) + 1)
    for word in ours:
        before = 0  # of one word less on both sides
        for i, other in enumerate(theirs):
            before, longest[i + 1] = longest[i + 1], before + 1 if word == other else max(longest[i], longest[i + 1])
    common = longest[-1]
    return 2 * common / (len(ours) + len(theirs)) if ours and theirs else 0.0


def written(folder: str, tokenizer, rows: list) -> list:
    """What the saved model writes by itself, by Transformers."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    batch = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return tokenizer.batch_decode(model.generate(**batch, max_new_tokens=SAID, do_sample=False), skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a Hugging Face folder with a tokenizer")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--functions", type=int, default=1000, help="how many functions are learned from")
    parser.add_argument("--held-out", type=int, default=40, help="and how many the model is measured on")
    parser.add_argument("--output", default="runs/summarizer")
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(7)
    model, tokenizer = model_and_tokenizer(args.model)
    pairs = functions_with_summaries(args.functions + args.held_out)
    unseen = pairs[-args.held_out:]
    known = rows_of(pairs[: args.functions], tokenizer, model.config.decoder_start_token_id)
    held_out_rows = rows_of(unseen, tokenizer, model.config.decoder_start_token_id)

    plugin = accelerator.state.megatron_lm_plugin
    parts = accelerator.state.mesh.dp * (plugin.num_micro_batches if plugin is not None else 1)
    rows = [known[i % len(known)] for i in range(BATCH * args.steps)]
    train = torch.utils.data.DataLoader(rows, batch_size=BATCH // parts, shuffle=True)
    held_out = torch.utils.data.DataLoader(held_out_rows, batch_size=BATCH // parts)  # the last batch is short
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
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
    right = counted = 0
    with torch.no_grad():
        for batch in held_out:
            labels = batch.pop("labels")
            logits = model(**batch).logits  # without labels a call returns logits
            guess, truth = accelerator.gather_for_metrics((logits.argmax(dim=-1), labels))
            right += ((guess == truth) & (truth != -100)).sum().item()
            counted += (truth != -100).sum().item()
    accelerator.print(f"of {counted} tokens of {len(unseen)} summaries {100 * right / counted:.2f} % are guessed right")

    accelerator.unwrap_model(model).save_pretrained(args.output)
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.output)
        summaries = written(args.output, tokenizer, held_out_rows[:8])
        scores = [rouge_l(said, reference) for said, (_, reference) in zip(summaries, unseen)]
        print(f"ROUGE-L of {len(scores)} summaries: {100 * sum(scores) / len(scores):.2f}")
        print(f"  said:    {summaries[0]!r}\n  written: {unseen[0][1]!r}")
    accelerator.print(f"the model is in {args.output}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
