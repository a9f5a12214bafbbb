"""PyTorch's side of compare_torch.py: Transformers' GPT-2 with SDPA attention, fused AdamW, clipping at 1.0, no dropout.

Speaks the contenders' protocol: says `ready` after its warm-up steps; then, for each line `N` on standard input, trains
N steps and answers with one line of JSON {"seconds": [of each step], "rss_bytes": peak so far, "loss": of the last}.
Under a launcher's environment (RANK and the rest) it is one rank of a DistributedDataParallel job over Gloo; --batch is
then that rank's part. With --copy-bandwidth it prints {"bytes_per_s": ...} (read plus written) instead and ends. With
--device cuda all of it happens on a GPU, and rss_bytes is the memory that PyTorch took there.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch


def peak_rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def peak_bytes(device: str) -> int:
    return torch.cuda.max_memory_reserved() if device == "cuda" else peak_rss_bytes()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def copy_bandwidth(device: str) -> float:
    """Best of several copies of 512 MB, far beyond the caches."""
    source = torch.ones(128 * 1024 * 1024, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(8):
        synchronize(device)
        begin = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = max(best, 2 * source.numel() * source.element_size() / (time.perf_counter() - begin))
    return best


class Trainer:
    def __init__(self, options: argparse.Namespace):
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(1234)
        config = GPT2Config(vocab_size=options.vocab, n_positions=options.seq, n_embd=options.hidden, n_layer=options.layers,
                            n_head=options.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
                            bos_token_id=0, eos_token_id=0)
        config._attn_implementation = "sdpa"
        self.device = options.device
        self.model = GPT2LMHeadModel(config).train().to(self.device)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
        self.forward = torch.compile(self.model) if options.compile else self.model
        if "RANK" in os.environ:
            torch.distributed.init_process_group("gloo")
            self.forward = torch.nn.parallel.DistributedDataParallel(self.model)
        self.bf16 = options.precision == "bf16"
        self.shape = (options.batch, options.seq)
        self.vocab = options.vocab

    def step(self) -> float:
        tokens = torch.randint(self.vocab, self.shape, device=self.device)
        autocast = torch.autocast(self.device, dtype=torch.bfloat16) if self.bf16 else contextlib.nullcontext()
        with autocast:
            loss = self.forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("layers", "hidden", "heads", "vocab", "seq", "batch", "threads", "warmup"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--copy-bandwidth", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.copy_bandwidth:
        print(json.dumps({"bytes_per_s": copy_bandwidth(options.device)}))
        return 0

    trainer = Trainer(options)
    for _ in range(options.warmup):
        loss = trainer.step()
    print("ready", flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            loss = trainer.step()
            seconds.append(time.perf_counter() - begin)
        print(json.dumps({"seconds": seconds, "rss_bytes": peak_bytes(options.device), "loss": loss}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
