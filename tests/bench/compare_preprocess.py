"""`tessera preprocess` beside a plain process pool over the same tokenizer, and beside independent processes of its own.

    PYTHONPATH=python ENVIRONMENT/bin/python tests/bench/compare_preprocess.py --build build/tests

The pool is what Megatron's tools/preprocess_data.py does: multiprocessing over the lines, json and one encode each, while the parent
appends tokens, lengths and ends of documents as its IndexedDatasetBuilder does. All take turns; the files must be equal."""

import argparse
import json
import multiprocessing
import os
import statistics
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
from tokenizers import ByteLevelBPETokenizer, Tokenizer

_tokenizer = None


def write_corpus(path, megabytes):
    """Source texts of Python's library, one document each, over and over."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    texts = [text for file in files if (text := file.read_text(errors="ignore")) and len(text) < 200_000]
    size = 0
    with open(path, "w") as out:
        while size < megabytes * 1e6:
            for text in texts:
                line = json.dumps({"text": text}) + "\n"
                size += out.write(line)
                if size >= megabytes * 1e6:
                    break
    return texts[:300]


def load(model):
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = Tokenizer.from_file(model)


def encode(line):
    text = json.loads(line)["text"]
    return _tokenizer.encode(text, add_special_tokens=False).ids, len(line)


def pool(model, source, prefix, workers):
    lengths, documents = [], [0]
    with multiprocessing.Pool(workers, initializer=load, initargs=(model,)) as processes, open(source, encoding="utf-8") as lines, \
            open(f"{prefix}.bin", "wb") as tokens:
        for ids, _ in processes.imap(encode, lines, 32):
            array = np.array(ids, dtype=np.uint16)
            tokens.write(array.tobytes(order="C"))
            lengths.append(array.size)
            documents.append(len(lengths))
    sizes = np.array(lengths, dtype=np.int32)
    pointers = np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64) * 2]).astype(np.int64)
    with open(f"{prefix}.idx", "wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(documents)))
        index.write(sizes.tobytes() + pointers.tobytes() + np.array(documents, dtype=np.int64).tobytes())


def tessera(program, model, sources, prefixes, workers):
    """As many processes as sources, all at once."""
    environment = os.environ | {"TESSERA_PYTHON": sys.executable}
    running = [subprocess.Popen([program, "preprocess", "--input", source, "--tokenizer-model", model, "--output-prefix", prefix,
                                 "--workers", str(workers), "--overwrite"], env=environment, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL) for source, prefix in zip(sources, prefixes)]
    if any(process.wait() for process in running):
        raise SystemExit("tessera preprocess failed")


def timed(work):
    begun = time.monotonic()
    work()
    return time.monotonic() - begun


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", required=True)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    program = str(Path(options.build) / "tessera")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, model = str(folder / "in.jsonl"), str(folder / "tokenizer.json")
        trained = ByteLevelBPETokenizer()
        trained.train_from_iterator(write_corpus(source, options.megabytes), vocab_size=16000, show_progress=False)
        trained.save(model)
        lines = Path(source).read_text().splitlines(keepends=True)
        parts = [str(folder / f"part{i}.jsonl") for i in range(options.workers)]
        for i, part in enumerate(parts):
            Path(part).write_text("".join(lines[i::options.workers]))
        ways = {
            "pool": lambda: pool(model, source, folder / "pool", options.workers),
            "tessera": lambda: tessera(program, model, [source], [str(folder / "ours")], options.workers),
            "independent": lambda: tessera(program, model, parts, [str(folder / f"part{i}") for i in range(len(parts))], 1)}
        times = {way: [] for way in ways}
        for _ in range(options.turns):
            for way, work in ways.items():
                times[way].append(timed(work))
        for suffix in ("idx", "bin"):
            if (folder / f"pool.{suffix}").read_bytes() != (folder / f"ours_text_document.{suffix}").read_bytes():
                raise SystemExit(f"the .{suffix} differ")
        size = Path(source).stat().st_size / 1e6
        for way, seconds in times.items():
            print(f"{way:12} {statistics.median(seconds):7.2f} s  {size / statistics.median(seconds):6.1f} MB/s  "
                  f"({', '.join(f'{second:.2f}' for second in seconds)})")
        ratios = {way: statistics.median(a / b for a, b in zip(times[way], times["tessera"])) for way in ("pool", "independent")}
        print(f"{options.workers} workers: {ratios['pool']:.2f}x the pool, {ratios['independent']:.2f} of independent processes")


if __name__ == "__main__":
    main()
