"""Every silent or unclear error that was once found has tests which hold it: the table is tests/silent_errors.yaml."""

import pytest
from named_tests import ROOT, has_test

yaml = pytest.importorskip("yaml")
# No script was behind P34; a letter marks parts of one row.
# An assertion of the test; what it calls was missing; what it waits for never came; nothing was wrong there.
BEFORE = ("assertion", "missing", "hang", "was right")
ROWS = ["P0", "P0b", "P0c", *(f"P{i}" for i in range(1, 39) if i != 34), *(f"S{i}" for i in range(1, 13)), *(f"U{i}" for i in range(1, 22))]


def test_every_row_names_tests_that_exist():
    table = yaml.safe_load((ROOT / "tests/silent_errors.yaml").read_text(encoding="utf-8"))
    assert list(table) == ROWS
    for row, entry in table.items():
        assert entry["what"] and entry["tests"], row
        # How its tests fail on commit 40077c4, in which the error was found.
        assert entry["before"].partition(":")[0] in BEFORE and entry["before"].partition(": ")[2], row
        for test in entry["tests"]:
            file, _, name = test.partition("::")
            assert has_test(file, name), f"{row}: {file} has no {name}"


def test_a_test_that_is_gone_is_found():
    assert has_test("tests/python/test_silent_errors.py", "test_a_test_that_is_gone_is_found")
    assert not has_test("tests/python/test_silent_errors.py", "test_gone") and not has_test("tests/python/test_gone.py", "test_a")
