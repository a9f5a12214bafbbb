"""The quickstart's corpus: the Python standard library's own sources, one file a document.

`make` writes it as JSONL; `baseline` says how well byte frequencies and byte pairs alone predict its validation part,
which is what a trained model has to beat.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Iterator, List, Optional, Sequence, Tuple

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload", "_bundled"}
END = 256  # the byte tokenizer's end of document


def sources(root: Path) -> List[str]:
    """Relative paths of the library's modules, ordered by the hash of their names: the same on every run, and mixed,
    so that a split by position takes documents of all kinds."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith("config-")]
        found += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return sorted(found, key=lambda name: hashlib.sha256(name.encode()).hexdigest())


def documents(root: Path) -> Iterator[Tuple[str, str]]:
    for name in sources(root):
        try:
            text = (root / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield name, text


def make(output: Path, root: Path) -> Tuple[int, int]:
    """Writes the JSONL (to a temporary name first) and returns (documents, bytes of text)."""
    output.parent.mkdir(parents=True, exist_ok=True)
    count = size = 0
    handle, temporary = tempfile.mkstemp(dir=output.parent, prefix=output.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            for name, text in documents(root):
                file.write(json.dumps({"text": text, "path": name}, ensure_ascii=False) + "\n")
                count += 1
                size += len(text.encode())
        os.chmod(temporary, 0o644)
        os.replace(temporary, output)
    except BaseException:
        os.unlink(temporary)
        raise
    return count, size


def split_bounds(split: str, count: int) -> List[int]:
    """The documents at which train, validation and test begin and end, by Megatron's rule for a split string."""
    weights = [float(part) for part in split.replace("/", ",").split(",")]
    weights = (weights + [0.0, 0.0])[:3]
    cumulative = [sum(weights[:part]) / sum(weights) for part in range(4)]
    return [int(round(fraction * count)) for fraction in cumulative]


def baseline(training: Sequence[bytes], validation: Sequence[bytes]) -> Tuple[float, float]:
    """Nats per byte of the validation documents, end markers included, under the training documents' byte frequencies
    and under their byte pairs (both with one imagined occurrence of each of the 257 tokens)."""
    pairs = [[1] * (END + 1) for _ in range(END + 1)]
    single = [1] * (END + 1)
    for document in training:
        previous = END
        for token in document:
            single[token] += 1
            pairs[previous][token] += 1
            previous = token
        single[END] += 1
        pairs[previous][END] += 1
    log_total = math.log(sum(single))
    single_cost = [log_total - math.log(count) for count in single]
    pair_cost = []
    for row in pairs:
        log_row = math.log(sum(row))
        pair_cost.append([log_row - math.log(count) for count in row])

    cost_single = cost_pair = 0.0
    tokens = 0
    for document in validation:
        previous = END
        for token in (*document, END):
            cost_single += single_cost[token]
            cost_pair += pair_cost[previous][token]
            previous = token
        tokens += len(document) + 1
    return cost_single / tokens, cost_pair / tokens


def _read(corpus: Path) -> List[bytes]:
    with open(corpus, encoding="utf-8") as file:
        return [json.loads(line)["text"].encode() for line in file]


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tessera.data.corpus", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    making = actions.add_parser("make", help="write the corpus as JSONL")
    making.add_argument("output", type=Path)
    making.add_argument("--root", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    measuring = actions.add_parser("baseline", help="print {unigram, bigram} nats per byte of the validation part")
    measuring.add_argument("corpus", type=Path)
    measuring.add_argument("--split", required=True, help="data.split of the config, e.g. 95,5,0")
    options = parser.parse_args(argv)

    if options.action == "make":
        count, size = make(options.output, options.root)
        if count == 0:
            print(f"error: no Python sources under {options.root}", file=sys.stderr)
            return 1
        print(f"{count} documents, {size / 1e6:.1f} MB from {options.root}")
        return 0
    texts = _read(options.corpus)
    bounds = split_bounds(options.split, len(texts))
    if bounds[1] == bounds[0] or bounds[2] == bounds[1]:
        print(f"error: the split {options.split} leaves no training or no validation documents", file=sys.stderr)
        return 1
    single, pair = baseline(texts[bounds[0]:bounds[1]], texts[bounds[1]:bounds[2]])
    print(json.dumps({"unigram": round(single, 4), "bigram": round(pair, 4), "training_documents": bounds[1],
                      "validation_documents": bounds[2] - bounds[1]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
