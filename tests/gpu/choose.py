#!/usr/bin/env python3
"""Which parts of run_all.sh are worth the time there is, and how much of it each may take.

    choose.py --within SECONDS [--results FOLDER] [--gpu NAME] [--memory-gb N] [--program TESSERA] [PART...]

Prints a line `run PART SECONDS` for each, in the order to run them, and `skip PART WHY` for the others. Of the parts (all,
when none is named) those are taken first that were never measured on such a GPU, then by value; what is taken runs with
correctness before speed, the sanitizer last. A model that does not fit is skipped, with the figure of `tessera plan`."""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Set, Tuple

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "docs" / "gpu_runs"


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    stage: int  # 0 what there is, 1 correctness, 2 speed, 3 sanitizer
    least: int  # seconds without which it says nothing
    most: int
    config: str = ""  # of the model that has to fit
    case: str = ""  # of tests/bench/compare_torch.py, with what that changes of it


# By value: what would be missed most comes first.
PARTS = [
    Part("info", 0, 5, 30),
    Part("parity", 1, 20, 60),
    Part("kernels_memory", 2, 40, 150),
    Part("kernels_gemm", 2, 40, 150),
    Part("tests", 1, 90, 240),
    Part("train", 2, 40, 120),
    Part("generation", 2, 60, 240),
    Part("compare_124m", 2, 200, 480),
    Part("kernels_attention", 2, 30, 120),
    Part("layouts", 1, 90, 300),
    Part("ranks", 1, 60, 240),
    Part("offload", 2, 120, 400),
    Part("compare_xl", 2, 240, 480, "configs/gpt2_xl.yaml", "gpu_xl_bf16"),
    Part("compare_llama", 2, 240, 480, "configs/llama_7b.yaml", "gpu_llama_7b_bf16"),
    Part("compare_llama3", 2, 240, 480, "configs/llama3_8b.yaml", "gpu_llama3_8b_bf16"),
    Part("python", 1, 60, 120),
    Part("faults", 1, 30, 60),
    Part("counters", 2, 60, 240),
    Part("compare_small", 2, 120, 400),
    Part("sanitizer", 3, 60, 180),
]
BY_NAME = {part.name: part for part in PARTS}
SPARE = 10  # seconds for the summary at the end
HURRY = 20  # in a rehearsal every part gets 1 / HURRY of its time: stand-ins for minutes


def measured(gpu: str, results: Optional[Path]) -> Set[str]:
    """Parts with figures of such a GPU, in the records and in what was found so far."""
    found: Set[str] = set()
    files = sorted(RUNS.glob("*.json")) + ([results / "results.json"] if results else [])
    for path in files:
        if not path.exists():
            continue
        report = json.loads(path.read_text())
        if report["device"] != "cuda" or (report["machine"]["gpu"] or {}).get("name") != gpu:
            continue
        found |= {name for name, part in report["parts"].items() if part["outcome"] == "ok"}
    return found


def why_too_large(part: Part, memory_gb: Optional[float], program: Optional[str]) -> Optional[str]:
    """None if it fits, or if nobody can tell. What recomputes most needs least."""
    if not part.config or memory_gb is None or program is None:
        return None
    sys.path.insert(0, str(ROOT / "tests" / "bench"))
    import compare_torch  # of the standard library alone

    case = next(each for each in compare_torch.ALL_CASES if each.name == part.case)
    settings = [*case.overrides(1, "cuda"), f"training.recompute={case.tessera[-1]}", "parallel.tensor=1", "parallel.pipeline=1",
                "parallel.data=1", "device.type=cpu"]
    done = subprocess.run([program, "plan", part.config, *settings, "--memory_gb", f"{memory_gb:g}", "--json"], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    if done.returncode != 5:
        return None
    needs = float(re.search(r'"memory_bytes": *(\d+)', done.stdout).group(1)) / 1e9
    return f"{part.config} needs {needs:.1f} GB with recompute {case.tessera[-1]}, the GPU has {memory_gb:.1f} GB"


def hurried(part: Part) -> Part:
    return dataclasses.replace(part, least=max(1, part.least // HURRY), most=max(2, part.most // HURRY))


def choose(parts: List[Part], within: int, known: Set[str], too_large: Dict[str, str],
           spare: int = SPARE) -> Iterator[Tuple[str, ...]]:
    left, taken = within - spare, []
    for part in sorted(parts, key=lambda each: (each.stage > 0, each.name in known)):
        if part.name in too_large:
            yield "skip", part.name, too_large[part.name]
        elif part.least > left:
            yield "skip", part.name, f"{part.least} s at least, {max(0, left)} s are left"
        else:
            left -= part.least
            taken.append(part)
    seconds = {part.name: part.least for part in taken}
    for part in taken:  # in order of value
        more = min(left, part.most - part.least)
        seconds[part.name] += more
        left -= more
    for part in sorted(taken, key=lambda each: each.stage):
        yield "run", part.name, str(seconds[part.name])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--within", type=int, required=True, metavar="SECONDS")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--gpu", default="")
    parser.add_argument("--memory-gb", type=float)
    parser.add_argument("--program")
    parser.add_argument("--rehearse", action="store_true", help=f"a second stands for {HURRY}")
    parser.add_argument("parts", nargs="*", metavar="PART")
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in BY_NAME]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {' '.join(BY_NAME)}")
    parts = [part for part in PARTS if not options.parts or part.name in options.parts]
    too_large = {part.name: why for part in parts if (why := why_too_large(part, options.memory_gb, options.program))}
    if options.rehearse:
        parts = [hurried(part) for part in parts]
    known = measured(options.gpu, options.results)
    for line in choose(parts, options.within, known, too_large, 2 if options.rehearse else SPARE):
        print(*line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
