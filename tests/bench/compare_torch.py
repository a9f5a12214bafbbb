#!/usr/bin/env python3
"""Tessera's training speed and memory beside PyTorch's (eager and torch.compile), on the same shapes and threads.

Every contender is a process of its own that steps on command, and they take turns: whatever else happens on the machine
hits all of them alike. Where they do not fit into memory side by side, each is started and warmed up anew for every turn,
and one that does not fit alone computes again as little as it must. Prints medians, ratios, peak memory and the machine's
ceiling; --output writes the figures as JSON, beside it a Markdown table, anew after each case. --device cuda does the
same on one GPU; memory is then what each took of it, and clocks, power and temperature are noted before and after each
turn. Needs PyTorch and Transformers (tests/requirements-oracles.txt).
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

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
    family: str = "gpt2"
    kv_heads: int = 0  # 0: as many as heads
    ffn: int = 0
    micro_batches: int = 1  # of `batch` samples, in each step
    state: str = "autocast"  # PyTorch's in bf16; "bf16": weights in bf16 beside fp32 main weights, as Tessera's
    best: bool = False  # PyTorch with the fastest kernels it has
    turns: str = "beside"  # or "restarted"
    # What may be computed again so that it fits: the first that does.
    tessera: Sequence[str] = ("none",)
    eager: Sequence[str] = ("none",)
    compile: Sequence[str] = ("none",)
    floor_ns: float = 0  # per token, by tests/gpu/floors.py; 0: not known
    note: str = ""
    split: bool = False  # Tessera's fp32 main weights (optimizer.split_main_weights)
    decoder_seq: int = 0  # of an encoder with a decoder, whose encoder has `seq`
    keys: Sequence[str] = ()  # further ones of a Tessera configuration
    experts: int = 0  # of each layer of a Llama

    @property
    def tessera_bytes(self) -> int:
        """Per parameter: docs/architecture.md, Memory."""
        return 18 if self.precision == "bf16" and not self.split else 16

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * (self.seq + self.decoder_seq) * self.micro_batches

    def flags(self) -> List[str]:
        names = ("layers", "hidden", "heads", "vocab", "batch", "seq", "precision", "warmup")
        return [text for name in names for text in (f"--{name}", str(getattr(self, name)))]

    def torch_flags(self) -> List[str]:
        """Beside flags()."""
        flags = ["--family", self.family, "--kv-heads", str(self.kv_heads), "--ffn", str(self.ffn), "--state", self.state,
                 "--micro-batches", str(self.micro_batches), "--decoder-seq", str(self.decoder_seq),
                 "--experts", str(self.experts)]
        return flags + ["--best"] * self.best

    def overrides(self, threads: int, device: str = "cpu") -> List[str]:
        """The same model and optimizer as keys of a Tessera configuration."""
        keys = {"model.family": self.family, "model.num_layers": self.layers, "model.hidden_size": self.hidden,
                "model.num_heads": self.heads, "model.vocab_size": self.vocab, "model.max_positions": self.seq,
                "model.dropout": 0.0, "optimizer.name": "adamw", "optimizer.lr": 3e-4, "optimizer.betas": "[0.9, 0.95]",
                "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.1, "optimizer.clip_grad": 1.0,
                "training.precision": self.precision, "training.seq_length": self.seq,
                "training.micro_batch_size": self.batch,
                "training.global_batch_size": self.batch * self.micro_batches, "device.type": device}
        if self.kv_heads:
            keys["model.num_kv_heads"] = self.kv_heads
        if self.ffn:
            keys["model.ffn_hidden_size"] = self.ffn
        if self.experts:
            keys["model.num_experts"] = self.experts
        if self.state == "bf16":
            keys["training.fp32_residual"] = "false"  # as PyTorch's is
        if self.split:
            keys["optimizer.split_main_weights"] = "true"
        if self.decoder_seq:
            keys["training.decoder_seq_length"] = self.decoder_seq
        if device == "cpu":
            keys["device.threads"] = threads
        return [*(f"{key}={value}" for key, value in keys.items()), *self.keys]


CASES = [
    Case("gpt2_124m_fp32", 12, 768, 12, 50257, 1, 1024, "fp32", 7, 1, 2, 1.4, 1.25, 0.6),
    Case("gpt2_124m_bf16", 12, 768, 12, 50257, 1, 1024, "bf16", 7, 1, 2, 1.6, 1.35, 0.7),
    Case("small_fp32", 4, 256, 4, 8192, 4, 128, "fp32", 15, 4, 5, 1.5, 1.3, None),
]
# An encoder, an encoder with a decoder, and a decoder with experts; only where they are asked for by name.
OTHER_CASES = [
    Case(f"{name}_{precision}", layers, 768, 12, vocab, 1, 512, precision, 9, 2, 2, 1.4, 1.25, None, family=name, ffn=3072,
         decoder_seq=decoder, keys=keys)
    for name, layers, vocab, decoder, keys in (("bert", 12, 30522, 0, ("model.binary_head=false",)), ("t5", 24, 32128, 128, ()))
    for precision in ("fp32", "bf16")] + [
    # A token goes to two of eight experts.
    Case(f"moe_{precision}", 6, 512, 8, 8192, 2, 512, precision, 9, 2, 2, 1.4, 1.25, None, family="llama", ffn=1024, experts=8,
         keys=("model.router_topk=2",)) for precision in ("fp32", "bf16")]
EQUAL_BYTES = "Tessera adds gradients up in fp32, PyTorch in bf16; each takes 16 bytes per parameter"
GRADIENTS = "Tessera adds gradients up in fp32 (18 bytes per parameter), PyTorch in bf16 (16)"
CUDA_CASES = [
    Case("gpu_124m_bf16", 12, 768, 12, 50257, 64, 1024, "bf16", 3, 4, 4, None, 1.35, None, micro_batches=4, state="bf16",
         best=True, turns="restarted", eager=("none", "full"), compile=("none", "full"), floor_ns=1464, note=GRADIENTS),
    Case("gpu_124m_autocast", 12, 768, 12, 50257, 16, 1024, "bf16", 3, 6, 6, None, None, None, best=True,
         floor_ns=1464),
    Case("gpu_124m_fp32", 12, 768, 12, 50257, 8, 1024, "fp32", 3, 4, 5, None, None, None),
    Case("gpu_xl_bf16", 48, 1600, 25, 50257, 16, 1024, "bf16", 2, 4, 2, None, 1.25, None, micro_batches=4, state="bf16",
         best=True, turns="restarted", eager=("none", "full"), compile=("none", "full"), floor_ns=15551, note=GRADIENTS),
    Case("gpu_llama_7b_bf16", 32, 4096, 32, 32000, 2, 4096, "bf16", 2, 3, 2, None, 1.3, None, family="llama", ffn=11008,
         micro_batches=2, state="bf16", best=True, turns="restarted", tessera=("none", "selective", "full"),
         eager=("none", "full"), compile=("none", "full"), floor_ns=61981, note=GRADIENTS),
    Case("gpu_llama3_8b_bf16", 32, 4096, 32, 128256, 1, 8192, "bf16", 2, 3, 2, None, 1.3, None, family="llama", kv_heads=8,
         ffn=14336, micro_batches=2, state="bf16", best=True, turns="restarted", tessera=("selective", "full"),
         eager=("full", "full+head"), compile=("full", "full+head"), floor_ns=75025,
         note=EQUAL_BYTES, split=True),
]
# Both ways to take turns in short; only where they are asked for by name.
REHEARSAL_CASES = [
    Case("tiny_gpt2", 2, 32, 2, 257, 2, 32, "fp32", 1, 1, 1, None, None, None, best=True),
    Case("tiny_llama", 2, 32, 4, 257, 2, 32, "bf16", 2, 1, 1, None, None, None, family="llama", kv_heads=2, ffn=48,
         micro_batches=2, state="bf16", best=True, turns="restarted", tessera=("full",), eager=("full+head",), note=EQUAL_BYTES,
         split=True),
]
ALL_CASES = CASES + OTHER_CASES + CUDA_CASES + REHEARSAL_CASES
# Seconds: to start a contender, and to compile for the first time; how much slower than the floor it may be.
STARTING = {"tessera": 15, "eager": 20, "compile": 45}
COMPILING = 75
SLOWER = {"tessera": 1.6, "eager": 3.0, "compile": 2.2}


def expected_seconds(case: Case) -> float:
    """What a case on a GPU is expected to take at most, from its floor."""
    steps = case.tokens * case.floor_ns * 1e-9
    rounds = case.rounds if case.turns == "restarted" else 1
    seconds = COMPILING
    for name, starting in STARTING.items():
        failing = len(getattr(case, name)) - 1  # does not get beyond its first step
        turns = rounds * case.warmup + case.rounds * case.steps + failing
        seconds += (rounds + failing) * starting + turns * steps * SLOWER[name]
    return seconds


class BenchError(Exception):
    pass


class DoesNotFit(BenchError):
    """Not enough memory."""


def gpu_state() -> Optional[Dict[str, float]]:
    """Clocks in MHz, power in W, temperature in degrees, as the driver says."""
    names = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
    try:
        done = subprocess.run(["nvidia-smi", "-i", "0", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"],
                              capture_output=True, text=True, timeout=30, check=True)
        return dict(zip(names, map(float, done.stdout.splitlines()[0].split(","))))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def write_results(output: Optional[Path], figures: object, text: str) -> None:
    """Figures as JSON, the table beside it with the suffix .md; nothing without an output."""
    if output:
        output.write_text(json.dumps(figures, indent=1) + "\n")
        output.with_suffix(".md").write_text(text + "\n")


class Contender:
    """A process that trains when told to."""

    def __init__(self, name: str, command: List[str], environment: Dict[str, str], device: str = "cpu"):
        self.name = name
        self.seconds: List[float] = []
        self.cpu_seconds: List[float] = []  # of all threads; a turn's mean for each of its steps
        self.rss_bytes = 0
        self.loss = float("nan")
        self.device = device
        self.last_turn: Dict = {}  # whatever else it reports: allocations, page faults, parts of the step
        self.gpu: List[Dict] = []  # {"before", "after"} of each turn
        self.recompute = "none"
        self.errors = tempfile.TemporaryFile("w+")
        if name == "tessera" and "OUR_LIBRARIES" in environment:  # PyTorch finds its own, and must not find these
            environment = {**environment, "LD_LIBRARY_PATH": environment["OUR_LIBRARIES"]}
        self.process = subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.errors)

    def read(self) -> str:
        line = self.process.stdout.readline()
        if line:
            return line
        code = self.process.wait()
        self.errors.seek(0)
        said = self.errors.read().strip()
        if "out of memory" in said:
            raise DoesNotFit(f"{self.name} is out of memory: {said.splitlines()[-1]}")
        raise BenchError(f"{self.name} ended with exit code {code}\n{said[-4000:]}")

    def wait_until_ready(self) -> None:
        while self.read().strip() != "ready":
            pass

    def run(self, steps: int) -> None:
        before = gpu_state() if self.device == "cuda" else None
        self.start(steps)
        self.finish()
        if before:
            self.gpu.append({"before": before, "after": gpu_state()})

    def goes_on_from(self, earlier: "Contender") -> None:
        """Takes over the figures of earlier turns."""
        self.seconds[:0] = earlier.seconds
        self.cpu_seconds[:0] = earlier.cpu_seconds
        self.gpu[:0] = earlier.gpu
        self.rss_bytes = max(self.rss_bytes, earlier.rss_bytes)

    def start(self, steps: int) -> None:
        self.cpu_before = self.cpu_time()
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()

    def finish(self) -> None:
        answer = json.loads(self.read())
        self.seconds += answer["seconds"]
        steps = len(answer["seconds"])
        self.cpu_seconds += [(self.cpu_time() - self.cpu_before) / steps] * steps
        self.loss = answer["loss"]
        self.last_turn = {key: value for key, value in answer.items() if key not in {"seconds", "rss_bytes", "loss"}}
        self.rss_bytes = (self.device == "cpu" and self.peak_rss_bytes()) or answer["rss_bytes"]

    def cpu_time(self) -> float:
        """Seconds of processor time so far, as Linux counts them; elsewhere 0."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

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
        self.errors.close()


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


def commands(case: Case, options: argparse.Namespace) -> Dict[str, Dict[str, List[str]]]:
    """Of each contender, by what it computes again."""
    shared = [*case.flags(), "--threads", str(options.threads), "--device", options.device]
    torch = [sys.executable, str(HERE / "torch_contender.py"), *shared, *case.torch_flags(), "--recompute"]
    found = {"eager": {what: [*torch, what] for what in case.eager},
             "compile": {what: [*torch, what, "--compile"] for what in case.compile}}
    program = options.program or find_program(options.build, "train_bench")
    if program:
        tessera = [str(program), str(case.batch * case.micro_batches), str(case.seq), str(case.warmup),
                   *case.overrides(options.threads, options.device)]
        found = {"tessera": {what: [*tessera, f"training.recompute={what}"] for what in case.tessera}, **found}
    return {name: command for name, command in found.items() if name in options.contenders}


def start_fitting(name: str, rungs: Dict[str, List[str]], environment: Dict[str, str], device: str) -> Contender:
    """The first of the commands that fits into memory, warmed up. Those that do not are taken out of `rungs`."""
    while True:
        what = next(iter(rungs))
        contender = Contender(name, rungs[what], environment, device)
        contender.recompute = what
        try:
            contender.wait_until_ready()
            return contender
        except DoesNotFit:
            contender.close()
            if len(rungs) == 1:
                raise
            del rungs[what]
        except BaseException:
            contender.close()
            raise


def take_turns(case: Case, rounds: Optional[int], commands: Dict[str, List[str]], environment: Dict[str, str],
               device: str = "cpu") -> Dict[str, Contender]:
    """Contenders by name, after their last turn."""
    contenders: List[Contender] = []
    try:
        for name, command in commands.items():
            contenders.append(start_fitting(name, {"none": command}, environment, device))
        for _ in range(rounds or case.rounds):
            for contender in contenders:
                contender.run(case.steps)
        return {contender.name: contender for contender in contenders}
    finally:
        for contender in contenders:
            contender.close()


def take_turns_alone(case: Case, rounds: int, commands: Dict[str, Dict[str, List[str]]], environment: Dict[str, str],
                     device: str, seconds: float = float("inf")) -> Tuple[Dict[str, Contender], Dict[str, str]]:
    """The same with one process at a time, started and warmed up anew for each turn; and why others have no turn: they do
    not fit. After `seconds` no further round begins that would last as long as the longest."""
    contenders: Dict[str, Contender] = {}
    failed: Dict[str, str] = {}
    begin, longest = time.monotonic(), 0.0
    for _ in range(rounds):
        round_begin = time.monotonic()
        if round_begin - begin + longest > seconds:
            break
        for name, rungs in commands.items():
            if name in failed:
                continue
            try:
                contender = start_fitting(name, rungs, environment, device)
            except DoesNotFit as error:
                failed[name] = str(error)
                continue
            with contextlib.closing(contender):
                contender.run(case.steps)
            if name in contenders:
                contender.goes_on_from(contenders[name])
            contenders[name] = contender
        longest = max(longest, time.monotonic() - round_begin)
    return contenders, failed


def run_case(case: Case, options: argparse.Namespace) -> Dict:
    """{"results": figures by contender, "failed": why others have none, "turns": how they took them}."""
    found, environment = commands(case, options), environment_for(options.threads)
    rounds, turns, failed = options.rounds or case.rounds, options.turns or case.turns, {}
    if turns == "beside":
        first = {name: next(iter(rungs.values())) for name, rungs in found.items()}
        contenders = take_turns(case, rounds, first, environment, options.device)
        for name, contender in contenders.items():
            contender.recompute = next(iter(found[name]))
    else:
        contenders, failed = take_turns_alone(case, rounds, found, environment, options.device, options.seconds)
    if "tessera" in contenders:
        contenders["tessera"].last_turn["bytes_per_parameter"] = case.tessera_bytes
    return {"results": {name: summary(case, contender, options.clock) for name, contender in contenders.items()}, "failed": failed,
            "turns": turns}


def summary(case: Case, contender: Contender, clock: str = "seconds") -> Dict:
    seconds = getattr(contender, clock)
    median = statistics.median(seconds)
    return {"step_s": median, "best_s": min(seconds), "worst_s": max(seconds), "steps": len(seconds),
            "tokens_per_s": case.tokens / median, "rss_bytes": contender.rss_bytes, "loss": contender.loss,
            "recompute": contender.recompute, "gpu": contender.gpu, "last_turn": contender.last_turn}


def how(figures: Dict) -> str:
    """What a contender did that others may not have done."""
    told = figures["last_turn"]
    words = [f"{told['attention']} attention"] if "attention" in told else []
    words += [f"{told['bytes_per_parameter']} bytes per parameter"] if "bytes_per_parameter" in told else []
    words += [f"recompute {figures['recompute']}"] if figures["recompute"] != "none" else []
    return ", ".join(words) or "-"


def gpu_range(figures: Dict) -> str:
    """The lowest and the highest of what was noted."""
    noted = [state for turn in figures["gpu"] for state in turn.values() if state]
    if not noted:
        return "-"
    spans = [(min(values), max(values)) for values in ([state[key] for state in noted] for key in
                                                       ("clocks.sm", "power.draw", "temperature.gpu"))]
    return ", ".join(f"{low:.0f}-{high:.0f} {unit}" for (low, high), unit in zip(spans, ("MHz", "W", "°C")))


def gemm_ceiling(case: Case, options: argparse.Namespace) -> Optional[Dict]:
    """{"seconds", "flop_per_s"} of one step's matrix products alone, through our own GEMM on the CPU."""
    program = find_program(options.build, "gemm_ceiling")
    if program is None or options.device != "cpu" or case.family != "gpt2":
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
    lines = [f"{report['machine']}, {report['threads']} threads, {report.get('clock', 'seconds')}, PyTorch {report['torch']}; "
             f"copy bandwidth {report['copy_bytes_per_s'] / 1e9:.1f} GB/s", "",
             f"| case | contender | step (median) | tokens/s | {memory} | loss | how | GPU |", "|---|---|---|---|---|---|---|---|"]
    for name, entry in report["cases"].items():
        for contender, figures in entry["results"].items():
            lines.append(f"| {name} | {contender} | {figures['step_s'] * 1e3:.1f} ms | {figures['tokens_per_s']:.1f} | "
                         f"{figures['rss_bytes'] / 2**30:.2f} GiB | {figures['loss']:.3f} | {how(figures)} | {gpu_range(figures)} |")
        lines += [f"| {name} | {contender} | does not fit | - | - | - | - | - |" for contender in entry["failed"]]
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
    lines.append("")
    for name, entry in report["cases"].items():
        note = f" {entry['case']['note']}." if entry["case"]["note"] else ""
        ways = {"beside": "all at once, turn by turn", "restarted": "one at a time, started anew for each turn"}
        lines.append(f"- {name}: {ways[entry['turns']]}.{note}")
    return "\n".join(lines)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build/tests", help="CMake build folder (default build/tests)")
    parser.add_argument("--program", type=Path, help="Tessera's contender (default: train_bench of the build)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--case", action="append", choices=[case.name for case in ALL_CASES],
                        help="only this one; may be repeated (default: all of the device)")
    parser.add_argument("--contenders", default="tessera,eager,compile", help="comma-separated; default all three")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--clock", choices=["seconds", "cpu_seconds"], default="seconds",
                        help="cpu_seconds, with --threads 1: what others do to the machine counts less")
    parser.add_argument("--rounds", type=int, help="turns of each contender (default: by case)")
    parser.add_argument("--turns", choices=["beside", "restarted"], help="how contenders take turns (default: by case)")
    parser.add_argument("--seconds", type=float, default=float("inf"),
                        help="of a case whose contenders are restarted: no round begins that would last longer")
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
              "clock": options.clock, "torch": torch.__version__, "copy_bytes_per_s": copy_bandwidth(options), "cases": {}}
    try:
        for case in ALL_CASES if options.case else CUDA_CASES if options.device == "cuda" else CASES:
            if options.case and case.name not in options.case:
                continue
            print(f"{case.name} ...", file=sys.stderr, flush=True)
            report["cases"][case.name] = {"case": dataclasses.asdict(case), **run_case(case, options),
                                          "ceiling": gemm_ceiling(case, options)}
            write_results(options.output, report, table(report))
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
