#!/usr/bin/env python3
"""Adds up what a test run left in a folder and prints its closing line.

*.gtest.json is GoogleTest's report, *.junit.xml pytest's, *.status one line "passed|failed|skipped" of a script.
A program that ended badly without a report has left a .status, so that nothing is lost. Exit code 1 when anything
failed, or when no test ran at all.

What failed is run once more, alone (scripts/testing.sh): NAME.again.gtest.json and NAME.again.junit.xml. A test that
passes then has passed, and is named: it is unsteady, and a defect of its own.

`count_results.py --failed NAME.gtest.json` prints the filter that picks that report's failed tests."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

Result = Tuple[str, str]  # a test's name; passed, failed or skipped


def read_gtest(path: Path) -> Iterator[Result]:
    for suite in json.loads(path.read_text())["testsuites"]:
        for test in suite["testsuite"]:
            name = f'{suite["name"]}.{test["name"]}'
            if test.get("result") == "SKIPPED" or test.get("status") == "NOTRUN":
                yield name, "skipped"
            else:
                yield name, "failed" if test.get("failures") else "passed"


def read_junit(path: Path) -> Iterator[Result]:
    for case in ElementTree.parse(path).iter("testcase"):
        name = f'{case.get("classname")}::{case.get("name")}'
        if case.find("failure") is not None or case.find("error") is not None:
            yield name, "failed"
        else:
            yield name, "skipped" if case.find("skipped") is not None else "passed"


READERS = {".gtest.json": read_gtest, ".junit.xml": read_junit}


def read(path: Path, suffix: str) -> List[Result]:
    try:
        return list(READERS[suffix](path))
    except (ValueError, KeyError, ElementTree.ParseError) as error:
        print(f"{path}: unreadable test report ({error})")
        return [(str(path), "failed")]


def count(folder: Path) -> Tuple[Dict[str, int], List[str]]:
    """How many passed, failed and were skipped, and the names of those that passed on their second try only."""
    totals = {"passed": 0, "failed": 0, "skipped": 0}
    unsteady = []
    for path in sorted(folder.glob("*.status")):
        word = path.read_text().strip()
        totals[word if word in totals else "failed"] += 1
    for suffix in READERS:
        for path in sorted(folder.glob(f"*{suffix}")):
            stem = path.name[: -len(suffix)]
            if stem.endswith(".again"):
                continue
            second = folder / f"{stem}.again{suffix}"
            again = dict(read(second, suffix)) if second.exists() else {}
            for name, word in read(path, suffix):
                if word == "failed" and again.get(name) == "passed":
                    unsteady.append(f"{stem} {name}")
                    word = "passed"
                elif word == "failed":
                    print(f"failed: {stem} {name}")
                totals[word] += 1
    return totals, unsteady


def main() -> int:
    if sys.argv[1:2] == ["--failed"]:
        print(":".join(name for name, word in read_gtest(Path(sys.argv[2])) if word == "failed"))
        return 0
    totals = {"passed": 0, "failed": 0, "skipped": 0}
    for folder in sys.argv[1:]:
        counted, unsteady = count(Path(folder))
        totals = {word: totals[word] + counted[word] for word in totals}
        for name in unsteady:
            print(f"unsteady: {name} failed, and passed when it was run once more alone")
    if totals["passed"] + totals["failed"] == 0:
        print("no test ran")
    print(", ".join(f"{number} {word}" for word, number in totals.items()))
    return 1 if totals["failed"] or totals["passed"] == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
