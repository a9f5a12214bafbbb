"""PyTorch's side of compare_torch.py: Transformers' GPT-2, Llama, Mixtral, BERT (masked tokens) or T5 with SDPA attention where they have it,
fused AdamW, clipping at 1.0, no dropout, on random tokens.

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
from typing import Callable, Dict, List, Optional, Sequence

import torch
import torch.utils.checkpoint


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


ATTENTION = ("flash", "cudnn", "efficient")  # kernels of scaled_dot_product_attention


def allow_attention(allowed: Sequence[str]) -> None:
    """For the whole process, so that it holds for what torch.compile traces as well."""
    torch.backends.cuda.enable_flash_sdp("flash" in allowed)
    torch.backends.cuda.enable_cudnn_sdp("cudnn" in allowed)
    torch.backends.cuda.enable_mem_efficient_sdp("efficient" in allowed)
    torch.backends.cuda.enable_math_sdp(False)


def attention_seconds(options: argparse.Namespace) -> Dict[str, float]:
    """Forward and backward of one layer's attention by each kernel that can do it."""
    kv_heads, dim = options.kv_heads or options.heads, options.hidden // options.heads
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    q, k, v = (torch.randn(options.batch, options.seq, heads, dim, device=options.device, dtype=dtype, requires_grad=True)
               for heads in (options.heads, kv_heads, kv_heads))
    upstream = torch.randn_like(q).transpose(1, 2)
    found = {}
    for name in ATTENTION:
        allow_attention([name])
        try:
            for _ in range(4):  # the first one warms up, the last one counts
                synchronize(options.device)
                begin = time.perf_counter()
                torch.nn.functional.scaled_dot_product_attention(
                    *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=kv_heads != options.heads).backward(upstream)
                synchronize(options.device)
                found[name] = time.perf_counter() - begin
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            continue  # not for this device, dtype or shape
    return found


class MainWeightsAdamW:
    """AdamW on fp32 main weights of a model that is bf16 throughout: 2 + 2 bytes of weights and gradients, 4 + 8 of main
    weights and moments. A part of the parameters at a time, so that few gradients are there in fp32."""

    PART = 1 << 26  # elements

    def __init__(self, parameters: List[torch.nn.Parameter], **settings):
        self.parts, part = [], []
        for parameter in parameters:
            part.append(parameter)
            if parameter is parameters[-1] or sum(p.numel() for p in part) >= self.PART:
                mains = [p.detach().float() for p in part]
                self.parts.append((part, mains, torch.optim.AdamW(mains, **settings)))
                part = []

    @torch.no_grad()
    def step(self) -> None:
        for part, mains, adam in self.parts:
            for parameter, main in zip(part, mains):
                main.grad = parameter.grad.float()
                parameter.grad = None
            adam.step()
            adam.zero_grad(set_to_none=True)
            torch._foreach_copy_(part, mains)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """step() has done it."""


def make_model(options: argparse.Namespace) -> torch.nn.Module:
    if options.family in ("bert", "t5"):
        return make_encoder(options)
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    shared = dict(vocab_size=options.vocab, use_cache=False, bos_token_id=0, eos_token_id=0)
    if options.family == "llama":
        sizes = dict(hidden_size=options.hidden, intermediate_size=options.ffn, num_hidden_layers=options.layers,
                     num_attention_heads=options.heads, num_key_value_heads=options.kv_heads or options.heads,
                     max_position_embeddings=options.seq, **shared)
        kind = MixtralForCausalLM if options.experts else LlamaForCausalLM
        config = MixtralConfig(num_local_experts=options.experts, **sizes) if options.experts else LlamaConfig(**sizes)
    else:
        kind = GPT2LMHeadModel
        config = GPT2Config(n_positions=options.seq, n_embd=options.hidden, n_layer=options.layers, n_head=options.heads,
                            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **shared)
        if options.best:
            config.activation_function = "gelu_pytorch_tanh"  # the same in one kernel
    config._attn_implementation = "sdpa"
    with torch.device(options.device):
        return kind(config).train()


def make_encoder(options: argparse.Namespace) -> torch.nn.Module:
    """An encoder, or an encoder with a decoder, which have `layers` together."""
    from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

    if options.family == "bert":
        kind, config = BertForMaskedLM, BertConfig(
            vocab_size=options.vocab, hidden_size=options.hidden, num_hidden_layers=options.layers, num_attention_heads=options.heads,
            intermediate_size=options.ffn, max_position_embeddings=options.seq, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    else:
        kind, config = T5ForConditionalGeneration, T5Config(
            vocab_size=options.vocab, d_model=options.hidden, d_kv=options.hidden // options.heads, d_ff=options.ffn,
            num_layers=options.layers // 2, num_heads=options.heads, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0)
    config._attn_implementation = "sdpa" if kind._supports_sdpa else "eager"
    with torch.device(options.device):
        return kind(config).train()


class Trainer:
    CHUNK = 1024  # rows of logits at a time where these are computed again

    def __init__(self, options: argparse.Namespace):
        torch.manual_seed(1234)
        self.options = options
        self.about: Dict = {"recompute": options.recompute}
        self.device = options.device
        if options.best:
            self.choose_attention()
        self.model = make_model(options)
        self.bf16 = options.precision == "bf16"
        if options.recompute != "none":
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if options.state == "bf16":
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.parameters = list(self.model.parameters())
        optimizer = MainWeightsAdamW if options.state == "bf16" else torch.optim.AdamW
        self.optimizer = optimizer(self.parameters, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
        # Under autocast, copies of all matrices in bf16 live from forward to backward.
        self.about["bytes_per_parameter"] = 18 if self.bf16 and options.state == "autocast" else 16
        self.forward = self.loss_by_parts if options.recompute == "full+head" else self.loss
        if options.compile:
            self.forward = torch.compile(self.forward)
        if "RANK" in os.environ:
            torch.distributed.init_process_group("gloo")
            parallel = torch.nn.parallel.DistributedDataParallel(self.model)
            self.forward = lambda tokens: parallel(input_ids=tokens, labels=tokens).loss

    def choose_attention(self) -> None:
        seconds = attention_seconds(self.options)
        best = min(seconds, key=seconds.get)
        allow_attention([best])
        self.about |= {"attention": best, "attention_s": seconds}

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.options.family == "bert":  # some 15 % of the tokens are guessed
            return self.model(input_ids=tokens, labels=tokens.masked_fill(tokens % 7 > 0, -100)).loss
        if self.options.family == "t5":
            return self.model(input_ids=tokens, labels=tokens[:, :self.options.decoder_seq].contiguous()).loss
        return self.model(input_ids=tokens, labels=tokens).loss

    def loss_by_parts(self, tokens: torch.Tensor) -> torch.Tensor:
        """The same without ever having all logits."""
        hidden = self.model.base_model(input_ids=tokens).last_hidden_state[:, :-1].flatten(0, 1)
        labels = tokens[:, 1:].flatten()

        def part(rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.model.lm_head(rows).float(), wanted, reduction="sum")

        sums = [torch.utils.checkpoint.checkpoint(part, rows, wanted, use_reentrant=False)
                for rows, wanted in zip(hidden.split(self.CHUNK), labels.split(self.CHUNK))]
        return torch.stack(sums).sum() / labels.numel()

    def step(self) -> float:
        shape, count = (self.options.batch, self.options.seq), self.options.micro_batches
        autocast = self.bf16 and self.options.state == "autocast"
        for _ in range(count):
            tokens = torch.randint(self.options.vocab, shape, device=self.device)
            with torch.autocast(self.device, dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
                loss = self.forward(tokens)
            (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def contender_parser(description: str) -> argparse.ArgumentParser:
    """With the flags of compare_torch.py's Case."""
    parser = argparse.ArgumentParser(description=description)
    for name in ("layers", "hidden", "heads", "vocab", "seq", "batch", "threads", "warmup"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    return parser


def take_orders(step: Callable[[], float], options: argparse.Namespace, about: Optional[Dict] = None) -> None:
    """The contenders' protocol, with a `step` that trains and returns the loss; `about` goes into every answer."""
    for _ in range(options.warmup):
        loss = step()
    print("ready", flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            loss = step()
            seconds.append(time.perf_counter() - begin)
        print(json.dumps({"seconds": seconds, "rss_bytes": peak_bytes(options.device), "loss": loss, **(about or {})}), flush=True)


def main() -> int:
    parser = contender_parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--family", choices=["gpt2", "llama", "bert", "t5"], default="gpt2")
    for name in ("kv-heads", "ffn", "decoder-seq", "experts"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--micro-batches", type=int, default=1, help="of --batch samples, in each step")
    parser.add_argument("--state", choices=["autocast", "bf16"], default="autocast", help="bf16: MainWeightsAdamW")
    parser.add_argument("--recompute", choices=["none", "full", "full+head"], default="none")
    parser.add_argument("--best", action="store_true", help="PyTorch's fastest kernels for GELU and attention")
    parser.add_argument("--copy-bandwidth", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.copy_bandwidth:
        print(json.dumps({"bytes_per_s": copy_bandwidth(options.device)}))
        return 0

    try:
        trainer = Trainer(options)
        take_orders(trainer.step, options, trainer.about)
    except torch.OutOfMemoryError as error:
        print(f"out of memory: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
