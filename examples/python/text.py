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


def lines_of_text(count: int) -> List[str]:
    """The first `count` lines of these sources that are not empty, without indentation."""
    lines: List[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        lines += [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        if len(lines) >= count:
            return lines[:count]
    raise SystemExit(f"the standard library has {len(lines)} lines that are not empty, fewer than {count}")
