#!/usr/bin/env python3
"""Writes the planned figures of docs/documents_claims.md: what guides to Megatron promise, as `tessera plan` counts it.

    python3 tests/claims_table.py PROGRAM [PAGE]

PROGRAM is the `tessera` program of a build. Only what stands between the two marks of the page is replaced.
"""

import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "documents_claims.md"
MARKS = ("<!-- planned: begin -->\n", "<!-- planned: end -->\n")

SEVEN_B = ("configs/llama_7b_dp8.yaml", "training.micro_batch_size=4", "training.global_batch_size=32")
# 1.3 billion parameters, which fit one GPU with all their state.
SMALL = ("configs/llama_7b.yaml", "model.num_layers=24", "model.hidden_size=2048", "model.num_heads=16", "model.ffn_hidden_size=5504",
         "training.micro_batch_size=1", "training.global_batch_size=1", "parallel.data=1",
         "training.precision=bf16", "training.recompute=none", "device.type=cpu")
# 120 layers 12288 wide, and 1.3 trillion parameters in the same form.
LARGE = "configs/gpt_218b_tp8_pp4_offload.yaml"
TRILLION = ("model.num_layers=160", "model.hidden_size=26112", "model.num_heads=192")
# 32 GPUs: of Megatron alone, of ZeRO-3 alone, of both.
SCHEMES = (("tensor 8, sequence, pipeline 4", ()),
           ("ZeRO-3 over data 32", ("parallel.tensor=1", "parallel.sequence=false", "parallel.pipeline=1", "parallel.data=32",
                                    "parallel.zero_stage=3")),
           ("tensor 8, sequence, ZeRO-3 over data 4", ("parallel.pipeline=1", "parallel.data=4", "parallel.zero_stage=3")))
MEMORY_GB = 40
STEP = 512  # lengths are multiples of it


class Planner:
    def __init__(self, program):
        self.program = program

    def plan(self, config, *overrides):
        command = [str(self.program), "plan", str(ROOT / config), "--json", *overrides]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode not in (0, 5):
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        return json.loads(done.stdout)

    def largest(self, config, *overrides):
        return max(self.plan(config, *overrides)["ranks"], key=lambda rank: rank["memory_bytes"])

    def longest(self, *overrides):
        """The longest sequence with which every rank needs at most MEMORY_GB."""
        def fits(steps):
            length = [f"{key}={steps * STEP}" for key in ("model.max_positions", "training.seq_length")]  # rotary tables count
            return self.largest(*SMALL, *length, *overrides)["memory_bytes"] <= MEMORY_GB * 1e9

        low, high = 1, 2
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low * STEP


def gigabytes(count):
    return f"{count / 1e9:.1f}"


def recompute_rows(planner):
    ranks = {what: planner.largest(*SEVEN_B, f"training.recompute={what}") for what in ("none", "selective", "full")}
    whole = {what: rank["memory_bytes"] for what, rank in ranks.items()}
    kept = {what: rank["memory"]["activations"] + rank["memory"]["temporary"] for what, rank in ranks.items()}
    for what in ranks:
        yield (what, gigabytes(whole[what]), f"{100 - 100 * whole[what] / whole['none']:.0f} %", gigabytes(kept[what]),
               f"{100 - 100 * kept[what] / kept['none']:.0f} %")


def length_rows(planner):
    layouts = [("1", "-", ()), ("4", "off", ("parallel.tensor=4",)), ("4", "on", ("parallel.tensor=4", "parallel.sequence=true"))]
    lengths = [planner.longest(*overrides) for _, _, overrides in layouts]
    for (tensor, sequence, _), length in zip(layouts, lengths):
        yield tensor, sequence, f"{length:,}", f"{length / lengths[0]:.1f}"


def state_rows(planner):
    for precision in ("fp32", "bf16"):
        for data, zero in ((1, 1), (4, 0), (4, 1)):
            rank = planner.largest(*SMALL, f"parallel.data={data}", f"training.global_batch_size={data}", f"parallel.zero_stage={zero}",
                                   f"training.precision={precision}", "training.seq_length=2048")
            yield (precision, str(data), str(zero), f"{rank['memory']['optimizer'] / rank['parameters']:.2f}",
                   f"{rank['persistent_bytes'] / rank['parameters']:.2f}")


def stage_rows(planner):
    for stages in (1, 2, 4):
        rank = planner.largest(*SMALL, f"parallel.pipeline={stages}", "training.global_batch_size=16", "training.seq_length=2048")
        yield (str(stages), gigabytes(rank["persistent_bytes"]), gigabytes(rank["memory"]["activations"]),
               gigabytes(rank["memory_bytes"]))


def scheme_rows(planner):
    full = "training.recompute=full"
    for size, model in (("218B", ()), ("1.3T", TRILLION)):
        for name, layout in SCHEMES:
            on_disk, on_gpu = (planner.largest(LARGE, full, *layout, *model, *where)
                               for where in ((), ("offload.optimizer=none", "offload.path=null")))
            yield (size, name, gigabytes(on_gpu["memory_bytes"]), gigabytes(on_disk["memory_bytes"]),
                   gigabytes(on_disk["memory"]["weights"] + on_disk["memory"]["gradients"]))


def table(heading, rows):
    lines = [f"| {' | '.join(heading)} |", f"|{'|'.join('---' for _ in heading)}|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows]) + "\n"


def planned(program):
    planner = Planner(program)
    return "\n".join([
        "**Recomputation**: LLaMA 7B on 8 data ranks, bf16, micro-batches of 4 x 2048 tokens, GB of one rank.\n",
        table(("`training.recompute`", "in all", "saved", "activations and temporary", "saved"), recompute_rows(planner)),
        f"**The longest sequence** that fits {MEMORY_GB} GB: 1.3 billion parameters, bf16, one sample at a time, nothing recomputed.\n",
        table(("tensor", "sequence", "tokens", "times the first"), length_rows(planner)),
        "**State of training**: bytes per parameter of one rank, Adam, the same model.\n",
        table(("precision", "data", "zero_stage", "optimizer", "all that stays"), state_rows(planner)),
        "**Pipeline stages**: the same model, 16 micro-batches of 2048 tokens, 1f1b, GB of the rank that needs most.\n",
        table(("pipeline", "all that stays", "activations", "in all"), stage_rows(planner)),
        "**Megatron, ZeRO-3 and both** on 32 GPUs, bf16 with split main weights, 2048 tokens, everything recomputed, GB of the rank that\n"
        "needs most, with Adam's moments on the GPU and on disk.\n",
        table(("parameters", "layout", "on the GPU", "on disk", "of these, weights and gradients"), scheme_rows(planner)),
    ])


def replaced(text, section):
    """`text` of the page with `section` between its marks."""
    begin, end = (re.escape(mark) for mark in MARKS)
    if len(re.findall(f"{begin}.*?{end}", text, re.S)) != 1:
        sys.exit(f"the page needs one section between {MARKS[0].strip()} and {MARKS[1].strip()}")
    return re.sub(f"{begin}.*?{end}", lambda _: f"{MARKS[0]}\n{section}\n{MARKS[1]}", text, flags=re.S)


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    page = pathlib.Path(sys.argv[2]) if len(sys.argv) == 3 else PAGE
    page.write_text(replaced(page.read_text(), planned(pathlib.Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
