import json
import math

import pytest

from tessera.data import corpus as corpora


def make_library(root):
    texts = {"abc.py": "import sys\n", "json/tool.py": "x = 'ä'\n", "json/__init__.py": "", "test/test_abc.py": "no\n",
             "site-packages/pip/a.py": "no\n", "config-3.11/b.py": "no\n", "notes.txt": "no\n", "idlelib/idle_test/c.py": "no\n"}
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (root / "latin.py").write_bytes(b"# \xe9\n")


def test_corpus_takes_the_library_and_nothing_else(tmp_path):
    make_library(tmp_path / "lib")
    count, size = corpora.make(tmp_path / "out/corpus.jsonl", tmp_path / "lib")
    records = [json.loads(line) for line in (tmp_path / "out/corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {record["path"]: record["text"] for record in records} == {"abc.py": "import sys\n", "json/tool.py": "x = 'ä'\n"}
    assert (count, size) == (2, 11 + 9)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["corpus.jsonl"]


def test_corpus_is_the_same_every_time(tmp_path):
    make_library(tmp_path / "lib")
    make_library(tmp_path / "copy")
    corpora.make(tmp_path / "a", tmp_path / "lib")
    corpora.make(tmp_path / "b", tmp_path / "copy")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("split, count, bounds", [
    ("95,5,0", 730, [0, 694, 730, 730]),
    ("98,1,1", 100, [0, 98, 99, 100]),
    ("969,30,1", 10, [0, 10, 10, 10]),
    ("90,10", 7, [0, 6, 7, 7]),
])
def test_split_by_documents(split, count, bounds):
    assert corpora.split_bounds(split, count) == bounds


def test_baseline_equals_counting_by_hand():
    # Training "ab": tokens a, b, end; pairs end-a, a-b, b-end; one more of each of 257 (257^2 for pairs).
    single, pair = corpora.baseline([b"ab"], [b"a"])
    assert single == pytest.approx(math.log(260 / 2))  # a and end: each counted once, plus one
    assert pair == pytest.approx((math.log(258 / 2) + math.log(258 / 1)) / 2)  # end-a seen, a-end not


def test_command_line(tmp_path, capsys):
    make_library(tmp_path / "lib")
    corpus = tmp_path / "corpus.jsonl"
    assert corpora.main(["make", str(corpus), "--root", str(tmp_path / "lib")]) == 0
    assert "2 documents" in capsys.readouterr().out
    assert corpora.main(["baseline", str(corpus), "--split", "50,50,0"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["training_documents"] == 1 and result["bigram"] > 0
    assert corpora.main(["baseline", str(corpus), "--split", "100,0,0"]) == 1
    assert corpora.main(["make", str(corpus), "--root", str(tmp_path / "nothing")]) == 1
