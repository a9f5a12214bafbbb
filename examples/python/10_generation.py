"""Trains a GPT-2 on the words of text with a tokenizer made here, and lets it write: the likeliest words, drawn ones, and the best of
several by beam search. On any layout the likeliest and the best are the same.

    python examples/python/10_generation.py
    examples/python/10_generation.sh"""

import argparse

import torch
from text import lines_of_text
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tessera import Accelerator
from tessera.utils import set_seed

LENGTH, GLOBAL_BATCH, END = 64, 16, "<|endoftext|>"
PROMPTS = ["def __init__(self", "return", "if not isinstance(", "import"]


def make_tokenizer(lines: list, words: int) -> PreTrainedTokenizerFast:
    """Byte pairs of these lines: the same on every rank."""
    bytes_to_words = ByteLevelBPETokenizer()
    bytes_to_words.train_from_iterator(lines, vocab_size=words, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bytes_to_words._tokenizer, eos_token=END, pad_token=END, bos_token=END,
                                   padding_side="right")


def rows_of(lines: list, tokenizer, count: int) -> list:
    """`count` samples {"input_ids", "labels"} of the lines one after the other, each ended."""
    ids = [token for line in lines for token in [*tokenizer(line)["input_ids"], tokenizer.eos_token_id]]
    rows = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).reshape(-1, LENGTH)
    return [{"input_ids": rows[i % len(rows)], "labels": rows[i % len(rows)]} for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--lines", type=int, default=5000, help="lines of text to read")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(7)
    lines = lines_of_text(args.lines)
    tokenizer = make_tokenizer(lines, 1000)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=len(tokenizer), n_positions=LENGTH,
                                       bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id))
    plugin = accelerator.state.megatron_lm_plugin
    parts = accelerator.state.mesh.dp * (plugin.num_micro_batches if plugin is not None else 1)
    train = torch.utils.data.DataLoader(rows_of(lines, tokenizer, GLOBAL_BATCH * args.steps), batch_size=GLOBAL_BATCH // parts, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, train = accelerator.prepare(model, optimizer, train)
    for step, batch in enumerate(train, start=1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 20 == 0 or step == len(train):
            accelerator.print(f"step {step}  loss {loss.item():.6f}")

    prompts = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    one = tokenizer(PROMPTS[:1], return_tensors="pt")
    common = dict(max_new_tokens=args.max_new_tokens)
    # Every rank calls, with the same prompts, and gets all ids.
    for way, given, options in (("the likeliest", prompts, dict(top_k=1)),
                                ("top-p", prompts, dict(top_p=0.8, top_p_decay=0.5, temperature=0.9)),
                                ("top-k", prompts, dict(top_k=50, temperature=0.9)),
                                ("top-k after a first token", prompts, dict(top_k=50, temperature=0.9, add_BOS=True)),
                                ("beam search", one, dict(num_beams=20, length_penalty=1.5))):
        ids = model.megatron_generate(given["input_ids"], given["attention_mask"], **common, **options)
        for text in tokenizer.batch_decode(ids.cpu().numpy(), skip_special_tokens=True):
            accelerator.print(f"{way}: {text!r}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
