"""What checkpoints cost a run: saved in the background, saved while training waits, and not at all.

    ENVIRONMENT/bin/python tests/bench/compare_saves.py --build build/tests --folder build/saves

Each turn trains the same GPT-2 (161 million parameters, 1.9 GB of weights and moments) three times, one after the other. The time of a
step is that between two lines of metrics.jsonl, watched from outside, so that all a save holds up counts. After the first steps come two
intervals that begin with a save each; what a run writes at its end is not counted."""

import argparse
import json
import random
import shutil
import statistics
import struct
import subprocess
import time
from pathlib import Path

MODEL = {"family": "gpt2", "num_layers": 12, "hidden_size": 896, "num_heads": 14, "vocab_size": 50257, "max_positions": 1024, "dropout": 0.0}
WAYS = {"none": ["checkpoint.every=0"], "background": ["checkpoint.async=true"], "waiting": ["checkpoint.async=false"]}


def write_corpus(prefix, tokens=200_000):
    """One document of random tokens."""
    chance = random.Random(1)
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{tokens}H", *(chance.randrange(50257) for _ in range(tokens))))
    prefix.with_suffix(".idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2) + struct.pack("<i", tokens) +
                                           struct.pack("<q", 0) + struct.pack("<2q", 0, 1))


def write_config(folder, options):
    every, tokens = options.steps, options.tokens
    sections = {"model": MODEL, "optimizer": {"lr": 1e-4}, "lr_schedule": {"style": "constant", "warmup_steps": 0},
                "training": {"steps": 3 * every, "seq_length": tokens, "micro_batch_size": 1, "global_batch_size": options.processes,
                             "eval_interval": 0, "precision": options.precision},
                "data": {"path": str(folder / "corpus"), "split": "100,0,0", "tokenizer": "bytes", "cache_dir": str(folder / "cache")},
                "checkpoint": {"every": every, "keep": 1}, "logging": {"every": 1},
                "device": {"type": "cpu", "threads": options.threads}, "parallel": {"zero_stage": 1}}
    path = folder / "run.yaml"
    path.write_text("\n".join(f"{name}: {json.dumps(values)}" for name, values in sections.items()) + "\n")
    return path


def watch(path, process):
    """When each line came, by step."""
    times, read = {}, 0
    while True:
        ended = process.poll() is not None
        text = path.read_bytes() if path.exists() else b""
        whole = text[:text.rfind(b"\n") + 1]
        for line in whole[read:].splitlines():
            times[json.loads(line)["step"]] = time.monotonic()
        read = len(whole)
        if ended:
            return times
        time.sleep(0.003)


def train(options, config, folder, way):
    """Seconds from step to step: number n is what came between the ends of steps n and n + 1."""
    shutil.rmtree(folder / "job", ignore_errors=True)
    words = [options.program, "train", config, f"logging.dir={folder / 'job'}", *WAYS[way]]
    if options.processes > 1:
        words = [options.program, "launch", "--num_processes", str(options.processes), "--cpu", *words]
    process = subprocess.Popen([str(word) for word in words], stdout=subprocess.DEVNULL, stderr=open(folder / "errors.txt", "w"))
    times = watch(folder / "job/metrics.jsonl", process)
    if process.returncode:
        raise SystemExit((folder / "errors.txt").read_text())
    shutil.rmtree(folder / "job")
    return {step: times[step + 1] - times[step] for step in range(1, 3 * options.steps)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True)
    parser.add_argument("--folder", required=True, type=Path, help="on the disk to save to")
    parser.add_argument("--steps", type=int, default=30, help="from one save to the next")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    options.program, every = (Path(options.build) / "tessera").resolve(), options.steps
    folder = options.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_corpus(folder / "corpus")
    config = write_config(folder, options)
    intervals = {way: [] for way in WAYS}  # seconds of each
    plain = {way: [] for way in WAYS}
    saving = {way: [] for way in WAYS}
    for _ in range(options.turns):
        for way in WAYS:
            steps = train(options, config, folder, way)
            for save in (every, 2 * every):
                intervals[way].append(sum(steps[save + i] for i in range(every) if save + i in steps))
                saving[way].append(steps[save])
            plain[way] += [seconds for step, seconds in steps.items() if step % every > every // 2]
    step = statistics.median(plain["none"])
    interval = statistics.median(intervals["none"])
    print(f"{options.processes} x {options.threads} threads, {options.precision}, {options.tokens} tokens a sample, a save every {every} steps")
    print(f"a step without saves: {step:.3f} s")
    for way in ("background", "waiting"):
        more = [seconds - statistics.median(plain[way]) for seconds in saving[way]]
        print(f"{way:10}  a step that saves takes {statistics.median(more):.2f} s more (each: {', '.join(f'{each:.2f}' for each in more)}), "
              f"tokens/s of an interval {interval / statistics.median(intervals[way]):.3f} of a run without")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
