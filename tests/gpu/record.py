#!/usr/bin/env python3
"""Keeps what a run on a GPU has found, and says in docs/performance.md what was measured.

    record.py RESULTS    docs/gpu_runs/DATE_GPU_COMMIT.json and .md out of RESULTS/results.json and .md, then the page
    record.py            the page alone

The page's last column has the best figure of each model, by the run it is from; docs/performance.md is for the H200, so
only its runs count."""

import json
import re
import sys
from pathlib import Path
from typing import Dict, List, Optional, Tuple

ROOT = Path(__file__).resolve().parents[2]
RUNS, PAGE = ROOT / "docs" / "gpu_runs", ROOT / "docs" / "performance.md"
# The page's rows, and the case of tests/bench/compare_torch.py that measures each.
CASES = {"GPT-2 124M": "gpu_124m_bf16", "GPT-2 XL 1.56B": "gpu_xl_bf16", "LLaMA-7B": "gpu_llama_7b_bf16",
         "LLaMA3-8B": "gpu_llama3_8b_bf16"}
NOTHING = "not measured"


def file_name(report: Dict) -> str:
    machine = report["machine"]
    words = [machine["date"], machine["gpu"]["name"], machine["commit"]]
    return "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", word).strip("-") for word in words)


def keep(results: Path) -> Path:
    """Errors: SystemExit unless the results are those of a GPU."""
    report = json.loads((results / "results.json").read_text())
    if report["device"] != "cuda" or not report["machine"]["gpu"]:
        sys.exit(f"{results}/results.json is a rehearsal: nothing there was measured on a GPU")
    RUNS.mkdir(parents=True, exist_ok=True)
    target = RUNS / f"{file_name(report)}.json"
    target.write_text(json.dumps(report, indent=1) + "\n")
    target.with_suffix(".md").write_text((results / "results.md").read_text())
    return target


def figures(runs: Path, gpu: str) -> Dict[str, Tuple[float, Optional[float], str]]:
    """By case: tokens/s, those over torch.compile's, and the run."""
    best: Dict[str, Tuple[float, Optional[float], str]] = {}
    for path in sorted(runs.glob("*.json")):
        report = json.loads(path.read_text())
        if gpu not in (report["machine"]["gpu"] or {}).get("name", ""):
            continue
        for part in report["parts"].values():
            for case, entry in part.get("figures", {}).get("cases", {}).items():
                results = entry["results"]
                if "tessera" not in results:
                    continue
                rate = results["tessera"]["tokens_per_s"]
                over = rate / results["compile"]["tokens_per_s"] if "compile" in results else None
                if case not in best or rate > best[case][0]:
                    best[case] = (rate, over, path.stem)
    return best


def measured(model: str, runs: Path = RUNS, gpu: str = "H200") -> str:
    """The cell of a row of the page."""
    found = figures(runs, gpu).get(CASES[model])
    if found is None:
        return NOTHING
    rate, over, run = found
    beside = f", {over:.2f}× torch.compile" if over else ""
    return f"{rate / 1e3:.4g}k{beside} ([run](gpu_runs/{run}.md))"


def page_with(table: str, page: str) -> str:
    """The page with the rows of `table` in place of those it has."""
    rows: Dict[str, str] = {line.split("|")[1]: line for line in table.splitlines()[2:]}
    lines: List[str] = [rows.get(line.split("|")[1], line) if line.startswith("| ") and line.count("|") == 13 else line
                        for line in page.splitlines()]
    return "\n".join(lines) + "\n"


def main() -> int:
    if len(sys.argv) > 1:
        print(keep(Path(sys.argv[1])))
    import floors  # beside this file

    PAGE.write_text(page_with(floors.budget_table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
