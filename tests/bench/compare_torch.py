#!/usr/bin/env python3
"""Tessera's training speed and memory beside PyTorch's (eager and torch.compile), on the same shapes and threads.

Every contender is a process of its own that steps on command, and they take turns step by step: whatever else happens
on the machine hits all of them alike. Prints medians, ratios, peak memory and the machine's ceiling; --output writes
the figures as JSON, beside it a Markdown table, anew after each case. --device cuda does the same on one GPU; memory is
then what each took of it. Needs PyTorch and Transformers (tests/requirements-oracles.txt).
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Optional

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    batch: int
    seq: int
    precision: str
    rounds: int
    steps: int  # of each contender in a round
    warmup: int
    versus_eager: Optional[float]  # what we want to reach: tokens/s over PyTorch's
    versus_compile: Optional[float]
    memory: Optional[float]  # and peak memory over PyTorch eager's, at most

    def flags(self) -> List[str]:
        names = ("layers", "hidden", "heads", "vocab", "batch", "seq", "precision", "warmup")
        return [text for name in names for text in (f"--{name}", str(getattr(self, name)))]

    def overrides(self, threads: int, device: str = "cpu") -> List[str]:
        """The same model and optimizer as keys of a Tessera configuration."""
        keys = {"model.family": "gpt2", "model.num_layers": self.layers, "model.hidden_size": self.hidden,
                "model.num_heads": self.heads, "model.vocab_size": self.vocab, "model.max_positions": self.seq,
                "model.dropout": 0.0, "optimizer.name": "adamw", "optimizer.lr": 3e-4, "optimizer.betas": "[0.9, 0.95]",
                "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.1, "optimizer.clip_grad": 1.0,
                "training.precision": self.precision, "training.seq_length": self.seq,
                "training.micro_batch_size": self.batch, "training.global_batch_size": self.batch, "device.type": device}
        if device == "cpu":
            keys["device.threads"] = threads
        return [f"{key}={value}" for key, value in keys.items()]


CASES = [
    Case("gpt2_124m_fp32", 12, 768, 12, 50257, 1, 1024, "fp32", 7, 1, 2, 1.4, 1.25, 0.6),
    Case("gpt2_124m_bf16", 12, 768, 12, 50257, 1, 1024, "bf16", 7, 1, 2, 1.6, 1.35, 0.7),
    Case("small_fp32", 4, 256, 4, 8192, 4, 128, "fp32", 15, 4, 5, 1.5, 1.3, None),
]
CUDA_CASES = [
    Case("gpu_124m_bf16", 12, 768, 12, 50257, 16, 1024, "bf16", 5, 6, 8, None, None, None),
    Case("gpu_124m_fp32", 12, 768, 12, 50257, 8, 1024, "fp32", 3, 4, 5, None, None, None),
]


class BenchError(Exception):
    pass


class Contender:
    """A process that trains when told to."""

    def __init__(self, name: str, command: List[str], environment: Dict[str, str], device: str = "cpu"):
        self.name = name
        self.seconds: List[float] = []
        self.rss_bytes = 0
        self.loss = float("nan")
        self.device = device
        self.last_turn: Dict = {}  # whatever else it reports: allocations, page faults, parts of the step
        self.process = subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def read(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise BenchError(f"{self.name} ended with exit code {self.process.wait()}")
        return line

    def wait_until_ready(self) -> None:
        while self.read().strip() != "ready":
            pass

    def run(self, steps: int) -> None:
        self.start(steps)
        self.finish()

    def start(self, steps: int) -> None:
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()

    def finish(self) -> None:
        answer = json.loads(self.read())
        self.seconds += answer["seconds"]
        self.loss = answer["loss"]
        self.last_turn = {key: value for key, value in answer.items() if key not in {"seconds", "rss_bytes", "loss"}}
        self.rss_bytes = (self.device == "cpu" and self.peak_rss_bytes()) or answer["rss_bytes"]

    def peak_rss_bytes(self) -> Optional[int]:
        """Measured from outside, the same way for all."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def environment_for(threads: int) -> Dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if key not in {"OPENBLAS_CORETYPE", "PYTHONPATH"}}
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[variable] = str(threads)
    return environment


def find_program(build: Path, name: str) -> Optional[Path]:
    for folder in (build / "tests/bench", build / "tests", build):
        if os.access(folder / name, os.X_OK):
            return folder / name
    return None


def commands(case: Case, options: argparse.Namespace) -> Dict[str, List[str]]:
    shared = [*case.flags(), "--threads", str(options.threads), "--device", options.device]
    torch = [sys.executable, str(HERE / "torch_contender.py"), *shared]
    found = {"tessera": None, "eager": torch, "compile": [*torch, "--compile"]}
    program = options.program or find_program(options.build, "train_bench")
    if program:
        found["tessera"] = [str(program), str(case.batch), str(case.seq), str(case.warmup), *case.overrides(options.threads, options.device)]
    return {name: command for name, command in found.items() if name in options.contenders and command}


def run_case(case: Case, options: argparse.Namespace) -> Dict:
    contenders: List[Contender] = []
    try:
        for name, command in commands(case, options).items():
            contender = Contender(name, command, environment_for(options.threads), options.device)
            contenders.append(contender)
            contender.wait_until_ready()
        for _ in range(options.rounds or case.rounds):
            for contender in contenders:
                contender.run(case.steps)
        return {contender.name: summary(case, contender) for contender in contenders}
    finally:
        for contender in contenders:
            contender.close()


def summary(case: Case, contender: Contender) -> Dict:
    median = statistics.median(contender.seconds)
    return {"step_s": median, "best_s": min(contender.seconds), "worst_s": max(contender.seconds), "steps": len(contender.seconds),
            "tokens_per_s": case.batch * case.seq / median, "rss_bytes": contender.rss_bytes, "loss": contender.loss,
            "last_turn": contender.last_turn}


def gemm_ceiling(case: Case, options: argparse.Namespace) -> Optional[Dict]:
    """{"seconds", "flop_per_s"} of one step's matrix products alone, through our own GEMM on the CPU."""
    program = find_program(options.build, "gemm_ceiling")
    if program is None or options.device != "cpu":
        return None
    result = subprocess.run([str(program), *case.flags(), "--threads", str(options.threads)],
                            env=environment_for(options.threads), capture_output=True, text=True)
    if result.returncode:
        raise BenchError(f"gemm_ceiling ended with exit code {result.returncode}: {result.stderr.strip()}")
    return json.loads(result.stdout)


def copy_bandwidth(options: argparse.Namespace) -> float:
    command = [sys.executable, str(HERE / "torch_contender.py"), "--copy-bandwidth", "--threads", str(options.threads),
               "--device", options.device]
    result = subprocess.run(command, env=environment_for(options.threads), capture_output=True, text=True, check=True)
    return json.loads(result.stdout)["bytes_per_s"]


def machine(device: str = "cpu") -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def compare(case: Case, results: Dict[str, Dict], other: str, key: str, wanted: Optional[float]) -> str:
    """'1.52× (goal ≥ 1.4)', or a dash without both figures."""
    if "tessera" not in results or other not in results:
        return "-"
    ratio = results["tessera"][key] / results[other][key]
    reached = "" if wanted is None else f" (goal {'≥' if key == 'tokens_per_s' else '≤'} {wanted})"
    return f"{ratio:.2f}×{reached}"


def table(report: Dict) -> str:
    memory = "peak RSS" if report["device"] == "cpu" else "GPU memory"
    lines = [f"{report['machine']}, {report['threads']} threads, PyTorch {report['torch']}; "
             f"copy bandwidth {report['copy_bytes_per_s'] / 1e9:.1f} GB/s", "",
             f"| case | contender | step (median) | tokens/s | {memory} | loss |", "|---|---|---|---|---|---|"]
    for name, entry in report["cases"].items():
        for contender, figures in entry["results"].items():
            lines.append(f"| {name} | {contender} | {figures['step_s'] * 1e3:.1f} ms | {figures['tokens_per_s']:.1f} | "
                         f"{figures['rss_bytes'] / 2**30:.2f} GiB | {figures['loss']:.3f} |")
    lines += ["", f"| case | vs eager | vs compile | {memory} vs eager | GEMM rate | GEMM share of the step |", "|---|---|---|---|---|---|"]
    for name, entry in report["cases"].items():
        case = Case(**entry["case"])
        results, ceiling = entry["results"], entry["ceiling"]
        rate = share = "-"
        if ceiling:
            rate = f"{ceiling['flop_per_s'] / 1e9:.0f} GF/s"
            if "tessera" in results:
                share = f"{ceiling['seconds'] / results['tessera']['step_s'] * 100:.0f} %"
        lines.append(f"| {name} | {compare(case, results, 'eager', 'tokens_per_s', case.versus_eager)} | "
                     f"{compare(case, results, 'compile', 'tokens_per_s', case.versus_compile)} | "
                     f"{compare(case, results, 'eager', 'rss_bytes', case.memory)} | {rate} | {share} |")
    return "\n".join(lines)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build/tests", help="CMake build folder (default build/tests)")
    parser.add_argument("--program", type=Path, help="Tessera's contender (default: train_bench of the build)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES + CUDA_CASES],
                        help="only this one; may be repeated (default: all of the device)")
    parser.add_argument("--contenders", default="tessera,eager,compile", help="comma-separated; default all three")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, help="turns of each contender (default: by case)")
    parser.add_argument("--output", type=Path, help="JSON file; the table goes beside it with the suffix .md")
    options = parser.parse_args()
    options.contenders = options.contenders.split(",")
    return options


def main() -> int:
    options = parse_options()
    if "tessera" in options.contenders and not (options.program or find_program(options.build, "train_bench")):
        print(f"error: no train_bench in {options.build}; configure with -DTESSERA_BENCH=ON, build, and name the folder "
              "with --build (or leave Tessera out with --contenders eager,compile)", file=sys.stderr)
        return 1
    import torch

    report = {"machine": machine(options.device), "device": options.device, "threads": options.threads,
              "torch": torch.__version__, "copy_bytes_per_s": copy_bandwidth(options), "cases": {}}
    try:
        for case in CASES + CUDA_CASES if options.case else CUDA_CASES if options.device == "cuda" else CASES:
            if options.case and case.name not in options.case:
                continue
            print(f"{case.name} ...", file=sys.stderr, flush=True)
            report["cases"][case.name] = {"case": dataclasses.asdict(case), "results": run_case(case, options),
                                          "ceiling": gemm_ceiling(case, options)}
            if options.output:
                options.output.write_text(json.dumps(report, indent=1) + "\n")
                options.output.with_suffix(".md").write_text(table(report) + "\n")
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
