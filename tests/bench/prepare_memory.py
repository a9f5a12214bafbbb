#!/usr/bin/env python3
"""What `prepare()` of a Hugging Face folder takes in host memory: a GPT-2 of 1.56 billion parameters (XL with
20 heads, which two ranks can share) under tensor parallel 2.

Writes a folder of random bf16 weights, then starts two processes whose model is made under `init_empty_weights`, and
prints, for each rank: what it holds after `prepare()`, and how far above that memory went while it ran (goal: at most
10 %). `--differ`: each process has a folder of its own with other weights, so that rank 0 sends all of its. Needs the
package, PyTorch and Transformers; 14 GiB of memory and 4 GB of disk (8 to differ) at full size.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOAL = 1.10
SIZES = {"xl": dict(n_layer=48, n_embd=1600, n_head=20, vocab_size=50257, n_positions=1024),
         "small": dict(n_layer=12, n_embd=768, n_head=12, vocab_size=50257, n_positions=1024)}


def memory(field: str) -> int:
    """Bytes of this process by /proc: VmRSS now, VmHWM at its highest."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def write_folder(folder: Path, sizes: dict, seed: int) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(**sizes)).to(torch.bfloat16)
    model.save_pretrained(folder)


def rank(folders: list, result: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tessera import Accelerator, init_empty_weights
    from tessera.utils import MegatronLMPlugin

    folder = folders[int(os.environ["RANK"]) % len(folders)]
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(tp_degree=2, gradient_clipping=0.0))
    # No state of its own: what is held is weights and gradients.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = sum(parameter.numel() for parameter in model.parameters())
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    model, optimizer = accelerator.prepare(model, optimizer)
    figures = {"rank": accelerator.process_index, "parameters": count, "held_bytes": memory("VmRSS") - before,
               "peak_bytes": memory("VmHWM") - before}
    (result / f"rank_{accelerator.process_index}.json").write_text(json.dumps(figures))
    accelerator.end_training()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="xl")
    parser.add_argument("--build", type=Path, default=ROOT / "build/tests", help="where the tessera program is (default build/tests)")
    parser.add_argument("--package", type=Path, default=ROOT / "python", help="what goes onto PYTHONPATH (default python)")
    parser.add_argument("--differ", action="store_true", help="other weights on each rank")
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank[1:], Path(options.rank[0]))
        return 0
    with tempfile.TemporaryDirectory(prefix="prepare-memory-") as made:
        folders = [str(Path(made) / f"model_{seed}") for seed in range(2 if options.differ else 1)]
        for seed, folder in enumerate(folders):
            write_folder(Path(folder), SIZES[options.size], seed)
        environment = {**os.environ, "PYTHONPATH": str(options.package), "TESSERA_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        subprocess.run([str(options.build / "tessera"), "launch", "--num_processes", "2", __file__, "--rank", made, *folders],
                       env=environment, check=True, stdin=subprocess.DEVNULL)
        worst = 0.0
        for path in sorted(Path(made).glob("rank_*.json")):
            figures = json.loads(path.read_text())
            ratio = figures["peak_bytes"] / figures["held_bytes"]
            worst = max(worst, ratio)
            print(f"rank {figures['rank']}: {figures['parameters'] / 1e9:.2f} billion parameters over 2 ranks, "
                  f"{figures['held_bytes'] / 2**30:.2f} GiB held after prepare(), {figures['peak_bytes'] / 2**30:.2f} GiB at its "
                  f"peak ({ratio:.3f} of it, goal ≤ {GOAL})")
    return 0 if worst <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
