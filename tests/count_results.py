#!/usr/bin/env python3
"""Adds up what a test run left in a folder and prints its closing line.

*.gtest.json is GoogleTest's report, *.junit.xml pytest's, *.status one line "passed|failed|skipped" of a script.
A program that ended badly without a report has left a .status, so that nothing is lost. Exit code 1 when anything
failed, or when no test ran at all."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Tuple

Counts = Tuple[int, int, int]  # passed, failed, skipped


def count_gtest(path: Path) -> Counts:
    passed = failed = skipped = 0
    for suite in json.loads(path.read_text())["testsuites"]:
        for test in suite["testsuite"]:
            if test.get("result") == "SKIPPED" or test.get("status") == "NOTRUN":
                skipped += 1
            elif test.get("failures"):
                failed += 1
            else:
                passed += 1
    return passed, failed, skipped


def count_junit(path: Path) -> Counts:
    passed = failed = skipped = 0
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def count_status(path: Path) -> Counts:
    word = path.read_text().strip()
    return word == "passed", word not in {"passed", "skipped"}, word == "skipped"


def count(folder: Path) -> Counts:
    total = [0, 0, 0]
    readers = {"*.gtest.json": count_gtest, "*.junit.xml": count_junit, "*.status": count_status}
    for pattern, reader in readers.items():
        for path in sorted(folder.glob(pattern)):
            try:
                counts = reader(path)
            except (ValueError, KeyError, ElementTree.ParseError) as error:
                print(f"{path}: unreadable test report ({error})")
                counts = (0, 1, 0)
            total = [have + more for have, more in zip(total, counts)]
    return total[0], total[1], total[2]


def main() -> int:
    totals = [count(Path(folder)) for folder in sys.argv[1:]]
    passed, failed, skipped = (sum(column) for column in zip(*totals)) if totals else (0, 0, 0)
    if passed + failed == 0:
        print("no test ran")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
