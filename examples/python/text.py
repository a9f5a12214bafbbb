"""What the examples read: the sources of Python's standard library, one token per byte, and 256 for the end of a file. So
nothing has to be downloaded, and every machine with the same Python has the same text."""

import sysconfig
from pathlib import Path
from typing import List

import torch

VOCAB_SIZE = 257
END = 256


def rows_of_text(count: int, length: int) -> List[dict]:
    """`count` samples {"input_ids", "labels"}, int64 [length] each."""
    tokens: List[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        tokens += [*path.read_bytes(), END]
        if len(tokens) >= count * length:
            break
    else:
        raise SystemExit(f"the standard library has {len(tokens)} bytes, fewer than {count} samples of {length}")
    rows = torch.tensor(tokens[: count * length]).reshape(count, length)
    return [{"input_ids": row, "labels": row} for row in rows]
