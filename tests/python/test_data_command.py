"""`tessera data` and `tessera preprocess` from outside: other forms of input, restarts, datasets of the older layout, lists in files."""

import gzip
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time

import pytest
from cli_support import run, text_documents, write_config, write_corpus

PYTHON = {"TESSERA_PYTHON": sys.executable}


def package(source_dir):
    return PYTHON | {"PYTHONPATH": str(source_dir / "python")}


def write_old_corpus(prefix, documents):
    """The layout of "cached" and "lazy" datasets (TNTIDX), byte by byte."""
    sizes = [len(document) for document in documents]
    count = len(sizes)
    index = b"TNTIDX\x00\x00" + struct.pack("<6Q", 1, 8, 2, count, count, count + 1)
    index += struct.pack(f"<{count + 1}q", *range(count + 1))
    index += struct.pack(f"<{count + 1}q", *(sum(sizes[:i]) for i in range(count + 1)))
    index += struct.pack(f"<{count}q", *sizes) + struct.pack(f"<{count + 1}q", *range(count + 1))
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(b"".join(struct.pack(f"<{len(d)}H", *d) for d in documents))
    return prefix


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_old_datasets_and_loaders_train_the_same(tessera_program, tmp_path):
    documents = text_documents()
    new, old = write_corpus(tmp_path / "new", documents), write_old_corpus(tmp_path / "old", documents)
    assert "format TNTIDX, tokens as uint16" in run(tessera_program, "data", "info", old).stdout
    run(tessera_program, "data", "upgrade", old, "--output-prefix", tmp_path / "upgraded")
    assert (tmp_path / "upgraded.idx").read_bytes() == new.with_suffix(".idx").read_bytes()
    seen = {}
    for name, corpus, loader in (("mmap", new, "mmap"), ("cached", old, "cached"), ("lazy", new, "lazy")):
        config = write_config(tmp_path, corpus, name, data__loader=loader, training__steps=3)
        said = run(tessera_program, "train", config).stderr
        seen[name] = losses(tmp_path / name)
        assert ("of index and tokens in memory" in said) == (loader == "cached")
    assert seen["mmap"] == seen["cached"] == seen["lazy"] and len(seen["mmap"]) == 3


def test_lists_in_files_are_what_they_say(tessera_program, tmp_path):
    a, b = write_corpus(tmp_path / "a", text_documents(30)), write_corpus(tmp_path / "b", text_documents(25)[5:])
    blend = [[0.7, str(a)], [0.3, str(b)]]
    (tmp_path / "blend.txt").write_text(f"0.7 {a}\n0.3 {b}\n")
    (tmp_path / "splits.json").write_text(json.dumps({"train": ["0.7", str(a), 0.3, str(b)], "valid": str(b), "test": None}))
    configs = {
        "blend": {"data__path": blend}, "file": {"data__path": None, "data__args_path": str(tmp_path / "blend.txt")},
        "splits": {"data__path": None, "data__train_path": blend, "data__valid_path": str(b)},
        "json": {"data__path": None, "data__per_split_args_path": str(tmp_path / "splits.json")}}
    seen = {}
    for name, keys in configs.items():
        run(tessera_program, "train", write_config(tmp_path, a, name, training__steps=3, data__split="1,0,0",
                                                   training__eval_interval=3 if "data__path" in keys and not keys["data__path"] else 0,
                                                   training__eval_iters=1, **keys))
        seen[name] = losses(tmp_path / name)
        assert "args_path: null" in (tmp_path / name / "config.yaml").read_text()
    assert seen["blend"] == seen["file"] == seen["splits"] == seen["json"]

    (tmp_path / "sized.txt").write_text(f"{a} {b}")
    for name, keys in {"sized": {"data__path": [str(a), str(b)]}, "named": {"data__args_path": str(tmp_path / "sized.txt")}}.items():
        run(tessera_program, "train", write_config(tmp_path, a, name, training__steps=3, data__split="1,0,0", **{"data__path": None, **keys}))
        seen[name] = losses(tmp_path / name)
    assert seen["sized"] == seen["named"] != seen["blend"]

    def refused(**keys):
        return run(tessera_program, "train", write_config(tmp_path, a, "bad", **keys), code=2).stderr

    assert "give one of them" in refused(data__train_path=str(a))
    assert "data.train_path: give it too" in refused(data__path=None, data__valid_path=str(a))
    assert "cannot be read" in refused(data__path=None, data__args_path=str(tmp_path / "absent"))
    (tmp_path / "splits.json").write_text('{"train": "x", "valid": null}')
    assert 'has no "test"' in refused(data__path=None, data__per_split_args_path=str(tmp_path / "splits.json"))
    assert "list of prefixes" in refused(data__path=[[0.5, str(a)], str(b)])
    assert not (tmp_path / "bad").exists()


def test_merge_split_and_sample(tessera_program, tmp_path):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"document {i} é"}) + "\n" for i in range(20)))
    run(tessera_program, "preprocess", "--input", tmp_path / "text.jsonl", "--append-eod", "--output-prefix", tmp_path / "d")
    whole = tmp_path / "d_text_document"
    told = run(tessera_program, "data", "split", whole, "--parts", 3, "--output-prefix", tmp_path / "p").stdout
    assert told.count("documents") == 3
    (tmp_path / "parts").mkdir()
    for file in tmp_path.glob("p_*"):
        file.rename(tmp_path / "parts" / file.name)
    run(tessera_program, "data", "merge", tmp_path / "parts", "--output-prefix", tmp_path / "m")
    for suffix in (".idx", ".bin"):
        assert (tmp_path / f"m{suffix}").read_bytes() == whole.with_name(whole.name + suffix).read_bytes()
    assert "is there already" in run(tessera_program, "data", "merge", whole, "--output-prefix", tmp_path / "m", code=2).stderr
    text = run(tessera_program, "data", "sample", tmp_path / "m", "--documents", 7).stdout
    assert text == f"document 7, 14 tokens\n  {' '.join(map(str, 'document 7 é'.encode()))} 256\ndocument 7 é\n"
    assert run(tessera_program, "data", "sample", tmp_path / "m", "--count", 4).stdout.count("document ") == 8
    assert "20 documents" in run(tessera_program, "data", "info", tmp_path / "m", "--check-ids").stdout
    assert "has 20" in run(tessera_program, "data", "sample", tmp_path / "m", "--documents", 20, code=2).stderr


def test_parquet_is_read_as_its_rows(tessera_program, source_dir, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [f"row {i} \n\"é\" " * (i % 7) for i in range(1500)]
    columns = {"text": pyarrow.array(texts), "n": pyarrow.array(range(1500)), "title": pyarrow.array(["t"] * 1500).dictionary_encode()}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet", compression="zstd", row_group_size=400)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text, "title": "t"}) + "\n" for text in texts)

    def preprocess(name, output, *more, code=0, env=None):
        return run(tessera_program, "preprocess", "--input", tmp_path / name, "--output-prefix", tmp_path / output, *more, code=code,
                   env=env or package(source_dir))

    for name, output in (("a.parquet", "p"), ("a.jsonl.gz", "j")):
        preprocess(name, output, "--json-keys", "text", "title")
    for key in ("text", "title"):
        for suffix in ("idx", "bin"):
            assert (tmp_path / f"p_{key}_document.{suffix}").read_bytes() == (tmp_path / f"j_{key}_document.{suffix}").read_bytes()
    assert "no column 'body'" in preprocess("a.parquet", "x", "--json-keys", "body", code=4).stderr
    assert "'n' holds int64, not strings" in preprocess("a.parquet", "x", "--json-keys", "n", code=4).stderr
    parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "null.parquet")
    assert "null.parquet:2" in preprocess("null.parquet", "x", code=4).stderr
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(data[:-100])
    assert "cut.parquet: cannot be read as Parquet" in preprocess("cut.parquet", "x", code=4).stderr
    without = tmp_path / "without/pyarrow"
    without.mkdir(parents=True)
    (without / "__init__.py").write_text("raise ImportError('not here')\n")
    env = package(source_dir)
    said = preprocess("a.parquet", "x", code=2, env=env | {"PYTHONPATH": f"{without.parent}:{env['PYTHONPATH']}"}).stderr
    assert "'pyarrow' is missing" in said and "pip install pyarrow" in said
    assert not list(tmp_path.glob("x_*"))


def test_a_killed_call_is_gone_on_with(tessera_program, source_dir, tmp_path):
    """By SIGKILL at moments that chance chooses, with a tokenizer in processes of its own."""
    pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(500)} | {"</s>": 500}
    (tmp_path / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}))
    draw = random.Random(7)
    with gzip.open(tmp_path / "in.jsonl.gz", "wt", compresslevel=1) as file:
        for _ in range(20000):
            file.write(json.dumps({"text": " ".join(f"w{draw.randrange(500)}" for _ in range(draw.randrange(40)))}) + "\n")
    command = [str(tessera_program), "preprocess", "--input", str(tmp_path / "in.jsonl.gz"), "--append-eod", "--tokenizer-model",
               str(tmp_path / "tokenizer.json"), "--workers"]
    env = os.environ | package(source_dir)
    begun = time.monotonic()
    subprocess.run(command + ["2", "--output-prefix", str(tmp_path / "whole")], env=env, check=True, capture_output=True)
    took = time.monotonic() - begun
    for turn in range(3):
        process = subprocess.Popen(command + [str(1 + turn), "--output-prefix", str(tmp_path / "killed")], env=env,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(draw.uniform(0.2, 0.6) * took)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command + ["3", "--output-prefix", str(tmp_path / "killed")], env=env, check=True, capture_output=True)
    for suffix in (".idx", ".bin"):
        assert (tmp_path / f"killed_text_document{suffix}").read_bytes() == (tmp_path / f"whole_text_document{suffix}").read_bytes()
    assert not list(tmp_path.glob("*.unfinished"))
