"""One training script, by Tessera or by PyTorch alone: what compare_python.py puts beside the C++ loop.

The contenders' protocol of compare_torch.py: says `ready` after its warm-up steps; then, for each line `N` on standard
input, trains N steps and answers with one line of JSON {"seconds": [of each step], "rss_bytes": peak so far, "loss": of
the last}. A step is the whole of what a script does: the loader's next batch, forward, backward, clipping, optimizer,
schedule, and the loss as a number.
"""

import argparse
import contextlib
import sys

import torch
from torch_contender import contender_parser, take_orders
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler


class RandomTokens(torch.utils.data.Dataset):
    def __init__(self, samples: int, seq: int, vocab: int):
        self.rows = torch.randint(vocab, (samples, seq))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Loop:
    """A script's training loop, step by step."""

    def __init__(self, options: argparse.Namespace):
        torch.manual_seed(1234)
        model = GPT2LMHeadModel(GPT2Config(
            vocab_size=options.vocab, n_positions=options.seq, n_embd=options.hidden, n_layer=options.layers, n_head=options.heads,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0))
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
        loader = torch.utils.data.DataLoader(RandomTokens(64 * options.batch, options.seq, options.vocab), batch_size=options.batch)
        scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=10, num_training_steps=10_000)
        self.autocast = contextlib.nullcontext
        if options.tessera:
            from tessera import Accelerator

            self.accelerator = Accelerator(mixed_precision="bf16" if options.precision == "bf16" else "no")
            model, optimizer, loader, scheduler = self.accelerator.prepare(model, optimizer, loader, scheduler)
        elif options.precision == "bf16":
            self.autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
        self.tessera = options.tessera
        self.model, self.optimizer, self.loader, self.scheduler = model, optimizer, loader, scheduler
        self.batches = iter(loader)

    def next_batch(self) -> dict:
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches)

    def step(self) -> float:
        batch = self.next_batch()
        with self.autocast():
            loss = self.model(**batch).loss
        if self.tessera:
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()


def main() -> int:
    parser = contender_parser(__doc__)
    parser.add_argument("--tessera", action="store_true", help="with the lines that Tessera takes; otherwise PyTorch alone")
    parser.set_defaults(device="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    take_orders(Loop(options).step, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
