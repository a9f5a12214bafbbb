#!/usr/bin/env python3
"""The least time that a training step takes on one H200, from what the arithmetic needs and what the GPU was seen to do.

    python3 tests/gpu/floors.py            prints the tables of docs/performance.md
    python3 tests/gpu/floors.py --check    says whether the page has them

Matrix products take their operations at GEMM_RATE and half of their bytes at COPY_RATE (what the pipeline does not hide):
together 788 TFLOP/s at 8192 x 8192 x 8192. Operations are counted with the causal half of attention, bytes in bf16.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Dict, List

import record  # beside this file

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"

PEAK = 989.4e12  # dense bf16, of the data sheet
GEMM_RATE = 815e12
COPY_RATE = 4.3e12  # bytes read plus written per second, of a large copy
PASS_RATE = 4.0e12  # of fused element-wise kernels
# Causal attention of cuDNN, forward and backward, FLOP/s by head size and sequence length.
ATTENTION = {64: {1024: (288e12, 232e12), 2048: (371e12, 310e12), 4096: (420e12, 370e12), 8192: (460e12, 410e12)},
             128: {1024: (423e12, 280e12), 2048: (521e12, 375e12), 4096: (591e12, 474e12), 8192: (644e12, 541e12)}}


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    llama: bool
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    micro_batch: int  # tokens that pass together
    step: int  # tokens of an optimizer step
    bytes_per_parameter: int  # of an update and the norm before it, read and written; 2 fewer where main weights are split
    goal: float  # tokens/s
    over_compile: float  # tokens/s over torch.compile's in the same run, at least

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    def products(self) -> List[tuple]:
        """Inputs and outputs of a layer's matrix products."""
        width = self.hidden
        first = 2 * self.ffn if self.llama else self.ffn
        return [(width, width + 2 * self.kv), (width, width), (width, first), (self.ffn, width)]

    def layer_weights(self) -> int:
        return sum(a * b for a, b in self.products())

    def parameters(self) -> int:
        """Norms and biases left out."""
        tables = self.vocab * self.hidden * (2 if self.llama else 1) + (0 if self.llama else self.seq * self.hidden)
        return self.layers * self.layer_weights() + tables

    def flops(self) -> float:
        """Of a token, forward and backward."""
        return 6.0 * (self.layers * self.layer_weights() + self.vocab * self.hidden) + 6.0 * self.layers * self.hidden * self.seq


MODELS = [
    Model("GPT-2 124M", False, 12, 768, 12, 12, 3072, 50257, 1024, 65536, 524288, 34, 575e3, 1.35),
    Model("GPT-2 XL 1.56B", False, 48, 1600, 25, 25, 6400, 50257, 1024, 16384, 524288, 34, 57e3, 1.25),
    Model("LLaMA-7B", True, 32, 4096, 32, 32, 11008, 32000, 4096, 8192, 262144, 34, 14.5e3, 1.3),
    Model("LLaMA3-8B", True, 32, 4096, 32, 8, 14336, 128256, 8192, 8192, 262144, 32, 12.0e3, 1.3),
]


def product_seconds(tokens: int, inputs: int, outputs: int) -> float:
    """Of a token: forward, the input's gradient, the weight's gradient added to one in fp32."""
    activations = tokens * (inputs + outputs) * 2
    weights = inputs * outputs
    moved = 2 * (activations + 2 * weights) + activations + 8 * weights
    return (6.0 * weights * tokens / GEMM_RATE + 0.5 * moved / COPY_RATE) / tokens


def minimum_bytes(model: Model) -> int:
    """What a layer must read and write for a token outside matrix products and attention: two fused sums and norms, forward
    and backward; Llama's rotation, and its gate with its gradient."""
    norms = 32 * model.hidden
    if model.llama:
        return norms + 8 * (model.hidden + model.kv) + 16 * model.ffn
    return norms


def floors(model: Model) -> Dict[str, float]:
    """Seconds per token by kind of work."""
    products = sum(product_seconds(model.micro_batch, a, b) for a, b in model.products())
    if not model.llama:
        # GELU in the epilogue writes its input, its gradient's reads it.
        products += 0.5 * 4 * model.ffn / COPY_RATE
    forward, backward = ATTENTION[model.head_dim][model.seq]
    scores = 2.0 * model.seq * model.hidden  # FLOPs of a token's forward pass, the causal half
    return {
        "GEMM": model.layers * products,
        "head": product_seconds(model.micro_batch, model.hidden, model.vocab),
        "attention": model.layers * (scores / forward + 2.5 * scores / backward),
        "element-wise": model.layers * minimum_bytes(model) / PASS_RATE,
        "cross-entropy": (4 * model.vocab + 8 * model.hidden) / PASS_RATE,  # with the embedding and the last norm
        "optimizer": model.bytes_per_parameter * model.parameters() / model.step / PASS_RATE,
    }


def budget_table() -> str:
    kinds = list(floors(MODELS[0]))
    lines = ["| model, sequence | " + " | ".join(kinds) + " | sum, ns/token | limit, tokens/s (MFU) | goal, tokens/s (MFU) | "
             "over torch.compile | measured |", "|---|" + "---:|" * (len(kinds) + 4) + "---|"]
    for model in MODELS:
        seconds = floors(model)
        whole = sum(seconds.values())
        share = model.flops() / PEAK
        cells = [f"{value * 1e9:.0f}" for value in seconds.values()]
        lines.append(f"| {model.name}, {model.seq} | " + " | ".join(cells) + f" | {whole * 1e9:.0f} | {1e-3 / whole:.1f}k "
                     f"({share / whole * 100:.0f} %) | {model.goal / 1e3:g}k ({share * model.goal * 100:.0f} %) | "
                     f"≥ {model.over_compile}× | {record.measured(model.name)} |")
    return "\n".join(lines)


# Passes over activations by the kernels of kernels/api, bf16, without dropout: bytes per layer and token in units of the
# hidden size C, of the keys' width K and of the inner width F (GPT-2: 4 C). tests/python/test_performance_page.py counts
# them in a profile.
PASSES = {
    "gpt2": {"add_norm_forward": "16 C", "add_norm_gradients": "16 C", "activation_forward": "4 F"},
    "llama": {"add_norm_forward": "16 C", "add_norm_gradients": "16 C", "rope": "8 C + 8 K", "swiglu_forward": "12 F",
              "swiglu_backward": "10 F"},
}
NOTES = {
    "add_norm_forward": "reads stream and branch, writes their sum and its norm, twice a layer",
    "add_norm_gradients": "reads two gradients and the sum, writes the sum's gradient, twice a layer",
    "activation_forward": "in backward, as its output is not kept; in forward a product makes it",
    "rope": "in place, in both directions",
    "swiglu_forward": "once in each direction, as its output is not kept",
    "swiglu_backward": "reads gate, up and the gradient, writes two",
}


def bytes_of(text: str, hidden: int, kv: int, ffn: int) -> int:
    """Of an entry of PASSES."""
    sizes = {"C": hidden, "K": kv, "F": ffn}
    return sum(int(number) * sizes[size] for number, size in (term.split() for term in text.split(" + ")))


def passes_table() -> str:
    lines = ["| kernel | GPT-2 | Llama | |", "|---|---|---|---|"]
    for kernel, note in NOTES.items():
        lines.append(f"| `{kernel}` | {PASSES['gpt2'].get(kernel, '')} | {PASSES['llama'].get(kernel, '')} | {note} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if not options.check:
        print(budget_table(), passes_table(), sep="\n\n")
        return 0
    page = PAGE.read_text(encoding="utf-8")
    missing = [line for line in (budget_table() + "\n" + passes_table()).splitlines() if line not in page.splitlines()]
    for line in missing:
        print(f"docs/performance.md lacks: {line}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
