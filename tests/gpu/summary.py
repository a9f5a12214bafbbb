#!/usr/bin/env python3
"""Makes results.json and results.md out of what the parts of run_all.sh left in a folder.

`summary.py FOLDER BUILD [DEVICE]`. results.json has the date, the machine, versions, the commit, and of each part its
outcome, time, lines and figures; results.md is what docs/benchmarks.md is to say about it. Needs nothing but Python."""

import ctypes
import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Optional

ROOT = Path(__file__).resolve().parents[2]
PARTS = ["info", "parity", "tests", "ranks", "layouts", "kernels_memory", "kernels_gemm", "kernels_attention", "counters", "train",
         "generation", "offload", "python", "faults", "sanitizer",
         "compare_small", "compare_124m", "compare_xl", "compare_llama", "compare_llama3"]
OUTCOMES = ("ok", "FAILED", "partly", "skipped")
PACKAGES = ("torch", "transformers", "numpy", "pybind11")


def output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def commit() -> str:
    """The bundle has it in a file."""
    stored = ROOT / "commit.txt"
    if stored.exists():
        return stored.read_text().strip()
    return output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12") or "unknown"


def gpu() -> Optional[Dict[str, str]]:
    names = ("name", "driver_version", "memory.total", "clocks.max.sm", "power.limit")
    lines = output_of("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader").splitlines()
    if not lines:
        return None
    return {**dict(zip(names, (value.strip() for value in lines[0].split(",")))), "count": str(len(lines))}


def backends(build: Path) -> Dict[str, str]:
    """What `tessera env` says: name and value in a line."""
    pairs = (line.split(None, 1) for line in output_of(str(build / "tessera"), "env").splitlines())
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


def nccl() -> Optional[str]:
    try:
        number = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def packages() -> Dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def machine(folder: Path, build: Path) -> Dict:
    """Asked once a day and folder: it takes seconds."""
    today = datetime.date.today().isoformat()
    known = folder / "machine.json"
    if known.exists():
        found = json.loads(known.read_text())
        if found["date"] == today and found["build"] == str(build):
            return found
    found = {"date": today, "commit": commit(), "gpu": gpu(), "processor": processor(), "cores": os.cpu_count(),
             "kernel": platform.release(), "backends": backends(build), "nccl": nccl(), "packages": packages(), "build": str(build)}
    known.write_text(json.dumps(found, indent=1) + "\n")
    return found


def outcome_of(code: int, lines: List[Dict[str, str]]) -> str:
    if code == 77:
        return "skipped"
    if code != 0:
        return "failed"
    found = {line["outcome"] for line in lines}
    if found == {"skipped"}:
        return "skipped"
    return "partly" if "partly" in found else "ok"


def read_part(folder: Path, name: str) -> Optional[Dict]:
    status = folder / f"{name}.status"
    if not status.exists():
        return None
    code, seconds = map(int, status.read_text().split())
    lines = []
    for line in (folder / f"{name}.txt").read_text(errors="replace").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word in OUTCOMES:
            lines.append({"outcome": word, "text": rest.strip()})
    return {"outcome": outcome_of(code, lines), "exit_code": code, "seconds": seconds, "lines": lines,
            "figures": figures(folder / name, name)}


def figures(folder: Path, name: str) -> Dict:
    readers = {"tests": tests, "parity": parity, "train": train, "offload": train, "python": beside_torch}
    readers |= {part: kernels for part in PARTS if part.startswith("kernels_")}
    readers |= {part: compared for part in PARTS if part.startswith("compare_")}
    try:
        return readers[name](folder) if name in readers else {}
    except (OSError, ValueError, KeyError, IndexError) as error:
        return {"unreadable": f"{type(error).__name__}: {error}"}


def tests(folder: Path) -> Dict:
    """Seconds and counts of each test program."""
    found = {}
    for path in sorted(folder.glob("*.gtest.json")):
        report = json.loads(path.read_text())
        cases = [case for suite in report["testsuites"] for case in suite["testsuite"]]
        found[path.name.split(".")[0]] = {"tests": len(cases), "failures": report["failures"], "time": report["time"],
                                          "skipped": sum(case.get("result") == "SKIPPED" for case in cases)}
    return found


def parity(folder: Path) -> Dict:
    return {f"{row['model']} {row['precision']}": row["errors"] for row in json.loads((folder / "parity.json").read_text())}


def kernels(folder: Path) -> Dict:
    """The lines of each bench that name a rate."""
    return {path.stem: [line.rstrip() for line in path.read_text().splitlines() if re.search(r"[GT](B|FLOP)/s", line)]
            for path in sorted(folder.glob("cuda_*.txt"))}


def train(folder: Path) -> Dict:
    found = {}
    for path in sorted([*folder.glob("train_*.txt"), *folder.glob("offload_*.txt")]):
        lines = [line for line in path.read_text().splitlines() if line.startswith("{")]
        if lines:
            turn = json.loads(lines[-1])
            found[path.stem] = {**turn, "step_s": statistics.median(turn["seconds"])}
    return found


def compared(folder: Path) -> Dict:
    report = folder / "compare_torch.json"
    return json.loads(report.read_text()) if report.exists() else {}


def beside_torch(folder: Path) -> Dict:
    text = (folder.parent / "python.txt").read_text(errors="replace")
    found = re.findall(r"^FIGURES (.*)$", text, re.MULTILINE)
    return json.loads(found[-1]) if found else {}


def headline(report: Dict) -> str:
    m = report["machine"]
    where = f"{m['gpu']['name']}, driver {m['gpu']['driver_version']}" if m["gpu"] else f"no GPU, {m['processor']}"
    versions = [f"{name} {value}" for name, value in m["backends"].items() if name in ("cuda", "cublasLt", "cudnn")]
    versions += [f"NCCL {m['nccl']}"] if m["nccl"] else []
    versions += [f"PyTorch {m['packages']['torch']}"] if "torch" in m["packages"] else []
    return f"{m['date']}, {', '.join([where, *versions])} (commit {m['commit']})"


def table_of_parts(report: Dict) -> List[str]:
    lines = ["| part | outcome | seconds | what it says |", "|---|---|---|---|"]
    for name, part in report["parts"].items():
        said = [line for line in part["lines"] if line["outcome"] != "ok"] or part["lines"][-1:]
        text = "; ".join(f"{line['outcome']}: {line['text']}" for line in said[:6]).replace("|", "/")
        lines.append(f"| {name} | {part['outcome']} | {part['seconds']} | {text} |")
    return lines


def block_of_kernels(report: Dict) -> List[str]:
    lines = [line for name, part in report["parts"].items() if name.startswith("kernels_")
             for rows in part["figures"].values() for line in rows]
    return ["", "Kernels, beside the rate of a copy or of a matrix product:", "", "```", *lines, "```"] if lines else []


def paragraph(folder: Path, report: Dict) -> str:
    rehearsal = [] if report["device"] == "cuda" else ["A rehearsal on the CPU: no figure here is that of a GPU.", ""]
    tables = [path.read_text().strip() for part in PARTS if (path := folder / part / "compare_torch.md").exists()]
    training = ["", "Training beside PyTorch, which takes turns with it:", *(line for text in tables for line in ("", text))] if tables else []
    return "\n".join([f"{headline(report)}:", "", *rehearsal, *table_of_parts(report), *training, *block_of_kernels(report)]) + "\n"


def main() -> int:
    folder, build = Path(sys.argv[1]), Path(sys.argv[2])
    parts = {name: part for name in PARTS if (part := read_part(folder, name))}
    report = {"device": sys.argv[3] if len(sys.argv) > 3 else "cuda", "machine": machine(folder, build), "parts": parts}
    (folder / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "results.md").write_text(paragraph(folder, report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
