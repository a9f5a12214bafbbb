"""What the command-line tests share: a corpus, configurations, runs of the program."""

import json
import os
import struct
import subprocess
import time
from pathlib import Path

import pytest

MODEL = {"family": "gpt2", "num_layers": 2, "hidden_size": 48, "num_heads": 3, "vocab_size": 257, "max_positions": 48,
         "dropout": 0.1, "attention_dropout": 0.1}
SECTIONS = {
    "model": MODEL,
    "optimizer": {"lr": 2e-3, "clip_grad": 1.0},
    "lr_schedule": {"style": "cosine", "warmup_steps": 3},
    "training": {"steps": 6, "seq_length": 48, "micro_batch_size": 2, "global_batch_size": 4, "eval_interval": 0},
    "data": {"split": "90,10,0", "tokenizer": "bytes"},
    "checkpoint": {"every": 3},
    "device": {"threads": 1},
}


def write_corpus(prefix: Path, documents: list) -> Path:
    """PREFIX.idx and .bin with uint16 tokens, byte by byte as Megatron lays them out."""
    sizes = [len(document) for document in documents]
    pointers = [2 * sum(sizes[:i]) for i in range(len(sizes))]
    count = len(documents)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1)
    index += struct.pack(f"<{count}i", *sizes) + struct.pack(f"<{count}q", *pointers)
    index += struct.pack(f"<{count + 1}q", *range(count + 1))
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(b"".join(struct.pack(f"<{len(d)}H", *d) for d in documents))
    return prefix


def text_documents(count: int = 40, end: bool = True) -> list:
    words = ["def", "return", "for", "in", "range", "x", "y", "= 1", "+ 2", "if", "not", "print(x)", "class", "self"]
    documents = []
    for i in range(count):
        text = " ".join(words[(i * 7 + j * j) % len(words)] for j in range(20 + i % 9))
        documents.append(list(text.encode()) + ([256] if end else []))
    return documents


def write_config(folder: Path, corpus: Path, run: str = "run", **changes) -> Path:
    """A YAML file for a run in folder/run; `changes` as section_key=value with two underscores: training__steps=3."""
    sections = {name: dict(values) for name, values in SECTIONS.items()}
    sections["data"] |= {"path": str(corpus), "cache_dir": str(folder / "cache")}
    sections["logging"] = {"dir": str(folder / run), "every": 1}
    for name, value in changes.items():
        section, key = name.split("__")
        sections.setdefault(section, {})[key] = value
    path = folder / f"{run}.yaml"
    lines = []
    for section, values in sections.items():
        lines.append(f"{section}:")
        lines += [f"  {key}: {json.dumps(value)}" for key, value in values.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def environment(**more) -> dict:
    clean = {k: v for k, v in os.environ.items()
             if not k.startswith("TESSERA_") and k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    return clean | more


def run(program: Path, *args, code: int = 0, env: dict = {}, timeout: float = 120, **options) -> subprocess.CompletedProcess:
    """Runs the program, which must end with `code` and without the marks of a crash."""
    done = subprocess.run([program, *map(str, args)], capture_output=True, text=True, timeout=timeout,
                          env=environment(**env), **options)
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    for mark in ("terminate called", "Traceback", "Segmentation", "what():"):
        assert mark not in done.stderr, done.stderr
    return done


def metrics(run_folder: Path) -> list:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def shards(run_folder: Path) -> dict:
    """The newest checkpoint's tensor files, byte for byte."""
    newest = sorted((run_folder / "checkpoints").glob("step-*"))[-1]
    return {file.name: file.read_bytes() for file in newest.glob("*.safetensors")} | {"step": newest.name}


def start(program, config, *overrides):
    return subprocess.Popen([program, "train", config, *overrides], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=environment())


def wait_for_lines(process, run_folder, count):
    """Until the run has written `count` steps."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        file = run_folder / "metrics.jsonl"
        if file.exists() and file.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.002)
    process.kill()
    pytest.fail(f"never came to step {count}: {process.communicate()}")
