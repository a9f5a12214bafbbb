#!/usr/bin/env python3
"""What jobs get of cores that they share: one job alone, two jobs at once, and more threads than cores.

By default libgomp's threads spin at a barrier for whole time slices, which another job's threads need; Tessera's spin for
some 50 microseconds, then sleep (GOMP_SPINCOUNT, docs/benchmarks.md). Contenders take turns in rounds; every figure is the
median over the rounds, every ratio is taken within a round. Needs nothing but the build. --output writes JSON.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/python"))
from cli_support import write_corpus  # noqa: E402

LIBGOMPS_OWN = "300000"  # what libgomp takes where nobody says anything
MODELS = {
    "quickstart": [],
    "small": ["model.num_layers=2", "model.hidden_size=64", "model.num_heads=2", "model.max_positions=64", "training.seq_length=64",
              "training.micro_batch_size=4", "training.global_batch_size=4"],
}
ENDLESS = ["training.steps=1000000", "training.eval_interval=0", "checkpoint.every=0", "data.split=100,0,0", "logging.every=1000000"]
GOALS = {"alone": 0.98, "two at once": 0.9, "4 x 2": 0.8}


class Job:
    """A run that goes on until stop()."""

    def __init__(self, program: Path, folder: Path, corpus: Path, words: List[str], spin: str):
        self.run = folder / f"run-{time.monotonic_ns()}"
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "TESSERA_"))}
        if spin:
            environment["GOMP_SPINCOUNT"] = spin
        command = [program, "train", ROOT / "configs/quickstart.yaml", f"logging.dir={self.run}", f"data.path={corpus}", *ENDLESS,
                   *words]
        self.process = subprocess.Popen([str(word) for word in command], env=environment, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def lines(self) -> List[str]:
        try:
            text = (self.run / "metrics.jsonl").read_text()
        except OSError:
            return []
        return text[:text.rfind("\n") + 1].splitlines()

    def wait_for_steps(self) -> None:
        end = time.monotonic() + 120
        while len(self.lines()) < 3:
            if self.process.poll() is not None or time.monotonic() > end:
                sys.exit(f"a run did not start:\n{self.process.communicate()[1].decode()}")
            time.sleep(0.05)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=120)

    def rate(self, first: int, last: int) -> float:
        """Tokens per second of these steps."""
        steps = [json.loads(line) for line in self.lines()[first - 1:last]]
        return (steps[-1]["tokens"] - steps[0]["tokens"]) / sum(step["step_ms"] / 1e3 for step in steps[1:])


def measure(jobs: List[Job], seconds: float) -> List[float]:
    """Tokens per second of each, over the same seconds, in which all of them run."""
    for job in jobs:
        job.wait_for_steps()
    first = [len(job.lines()) for job in jobs]
    end = time.monotonic() + seconds
    while time.monotonic() < end or any(len(job.lines()) < 2 + begin for job, begin in zip(jobs, first)):
        time.sleep(0.05)
        assert time.monotonic() < end + 300, "a run makes no steps"
    last = [len(job.lines()) for job in jobs]
    for job in jobs:
        job.stop()
    rates = [job.rate(a, b) for job, a, b in zip(jobs, first, last)]
    for job in jobs:
        shutil.rmtree(job.run, ignore_errors=True)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build/tests", help="the CMake build folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=7, help="of each measurement")
    parser.add_argument("--spin", default="", help="GOMP_SPINCOUNT of Tessera's jobs, to try another than the program's own")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    program = (options.build / "tessera").resolve()
    random.seed(1)
    results: Dict[str, Dict[str, List[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = write_corpus(folder / "corpus", [[random.randrange(256) for _ in range(20000)] for _ in range(20)])

        def turn(words: List[str], jobs: int, spin: str) -> List[float]:
            return measure([Job(program, folder, corpus, words, spin) for _ in range(jobs)], options.seconds)

        def note(case: str, name: str, value: float) -> None:
            results.setdefault(case, {}).setdefault(name, []).append(value)

        for _ in range(options.rounds):
            for model, words in MODELS.items():
                (before,), (alone,) = turn(words, 1, LIBGOMPS_OWN), turn(words, 1, options.spin)
                two = turn(words, 2, options.spin)
                note(model, "alone, libgomp's own spinning", before)
                note(model, "alone", alone)
                note(model, "two at once, the slower one", min(two))
                note(model, "ratio: alone", alone / before)
                note(model, "ratio: two at once", min(two) / (before / 2))
            (few,) = turn(["parallel.data=2", "device.threads=1", "training.micro_batch_size=4"], 1, options.spin)
            (many,) = turn(["parallel.data=4", "device.threads=2", "training.micro_batch_size=4"], 1, options.spin)
            note("ranks", "2 ranks x 1 thread", few)
            note("ranks", "4 ranks x 2 threads", many)
            note("ranks", "ratio: 4 x 2", many / few)
    for case, figures in results.items():
        print(case)
        for name, values in figures.items():
            each = ", ".join(f"{value:.3f}" if "ratio" in name else f"{value:.0f}" for value in values)
            goal = GOALS.get(name.removeprefix("ratio: "))
            unit = f" (goal {goal})" if "ratio" in name else " tokens/s"
            print(f"  {name}: {statistics.median(values):.3f}{unit}   [{each}]" if "ratio" in name
                  else f"  {name}: {statistics.median(values):.0f}{unit}   [{each}]")
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
