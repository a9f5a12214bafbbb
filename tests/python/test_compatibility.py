"""docs/compatibility.md and tests/documents belong together: every printed block has a row and its list of changed lines, and every row
names tests that exist, or says what is coming."""

import re
from functools import lru_cache
from pathlib import Path
from typing import List, NamedTuple

from documents_support import ROOT, blocks, changes, changes_file, places
from named_tests import has_test

PAGE = ROOT / "docs/compatibility.md"
COMING = {"DeepSpeed's and Megatron's files and flags", "FPDT", "MoE", "fp8", "multimodal", "elasticity"}
BLOCK = re.compile(r"\(\.\./tests/documents/([^)]+)\)")
PROOF = re.compile(r"`(tests/[\w/.]+)::([\w/.]+)`")


class Row(NamedTuple):
    line: int
    shown: str
    here: str
    proof: str


@lru_cache(maxsize=None)
def rows() -> List[Row]:
    found = []
    for number, line in enumerate(PAGE.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("|") and not line.startswith(("| Shown |", "|---")):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            assert len(cells) == 3, f"line {number}: {len(cells)} cells: shown, here, proof"
            found.append(Row(number, *cells))
    return found


def faults(row: Row) -> List[str]:
    """What is wrong with a row's proof."""
    coming = re.fullmatch(r"coming: (.+)", row.proof)
    if coming:
        return [f"{what} may not be coming" for what in coming.group(1).split(", ") if what not in COMING]
    left = PROOF.sub("", row.proof).replace(",", "").strip()
    tests = PROOF.findall(row.proof)
    wrong = [f"{file} has no {name}" for file, name in tests if not has_test(file, name)]
    return wrong + ([f"neither tests nor 'coming: ...': {row.proof}"] if left or not tests else [])


def test_every_row_names_tests_that_exist_or_what_is_coming():
    assert len(rows()) > 150, "docs/compatibility.md no longer has its tables"
    assert not [f"line {row.line}: {fault}" for row in rows() for fault in faults(row)]


def test_a_wrong_row_is_found():
    right = Row(0, "", "", "`tests/python/test_compatibility.py::test_a_wrong_row_is_found`")
    assert not faults(right) and not faults(right._replace(proof="coming: fp8, MoE"))
    assert not faults(right._replace(proof="`tests/engine/layout_matrix_test.cpp::LayoutMatrix.EqualsTheSerialRun`"))
    for proof in ("", "coming: everything", "see the guide", "`tests/python/test_compatibility.py::test_gone`", f"{right.proof} some day",
                  "`tests/python/test_gone.py::test_a`", "`tests/engine/layout_matrix_test.cpp::LayoutMatrix.Gone`"):
        assert faults(right._replace(proof=proof)), proof


def test_every_block_has_a_row():
    named = {block for row in rows() for block in BLOCK.findall(row.shown)}
    assert len(blocks()) > 55 and not set(blocks()) - named
    assert not [block for block in named if block not in blocks()]


def test_a_blocks_tests_run_it():
    """A row's test file, or the scripts that it runs, have the names of the row's blocks in them."""
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests/python/scripts/documents").glob("*.py"))
    unused = []
    for row in rows():
        sources = scripts + "".join((ROOT / file).read_text(encoding="utf-8") for file, _ in PROOF.findall(row.proof))
        unused += [f"line {row.line}: {block}" for block in BLOCK.findall(row.shown)
                   if not row.proof.startswith("coming") and Path(block).stem not in sources]
    assert not unused


def test_every_changed_line_is_one_of_its_block():
    assert sorted(changes_file()["blocks"]) == blocks()
    used = set()
    for block in changes_file()["blocks"]:
        for change in changes(block):
            assert places(block, change), f"{block} has no line {change.line!r}"
            assert change.becomes != change.line and change.why in changes_file()["reasons"], (block, change)
            used.add(change.why)
    assert used == set(changes_file()["reasons"])
