"""Tests that pages and tables name."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def has_test(file: str, name: str) -> bool:
    """Whether the file, of Python or of C++, has a test of that name (C++: SUITE.CASE)."""
    path = ROOT / file
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return re.search(rf"^def {name}\(", text, flags=re.M) is not None
    suite, _, case = name.partition(".")
    return re.search(rf"\b(TYPED_)?TEST(_F|_P)?\(\s*{suite},\s*{case}\)", text) is not None
