"""What the examples read: the sources of Python's standard library, one token per byte, and 256 for the end of a file. So
nothing has to be downloaded, and every machine with the same Python has the same text."""

import ast
import sysconfig
from pathlib import Path
from typing import List, Tuple

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


def functions_with_summaries(count: int) -> List[Tuple[str, str]]:
    """The first `count` functions of these sources that have a docstring: (their code without it, its first line)."""
    pairs: List[Tuple[str, str]] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            told = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if not told or len(node.body) < 2:
                continue
            head, text = lines[node.lineno - 1: node.body[0].lineno - 1], lines[node.body[1].lineno - 1: node.end_lineno]
            pairs.append(("\n".join(line.strip() for line in head + text), told.splitlines()[0].strip()))
            if len(pairs) == count:
                return pairs
    raise SystemExit(f"the standard library has {len(pairs)} functions with a docstring, fewer than {count}")
