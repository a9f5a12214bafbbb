"""tessera train with logging.profile: timelines a viewer can open, a table that adds up."""

import json
from collections import Counter

import pytest
from cli_support import metrics, run, text_documents, write_config, write_corpus

KINDS = ["GEMM", "attention", "element-wise", "optimizer", "exposed communication", "data", "host, idle", "TOTAL"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus", text_documents())


def events_of(file, rank):
    """The events of a timeline: complete ones, on each thread nested or apart, threads named."""
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {rank}
    assert {event["ph"] for event in events} == {"M", "X"}
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    open_ends = {}
    for event in events:
        if event["ph"] == "M":
            continue
        begin = round(event["ts"] * 1e3)
        end = begin + round(event["dur"] * 1e3)
        ends = open_ends.setdefault(event["tid"], [])
        while ends and ends[-1] <= begin:
            ends.pop()
        assert end >= begin and (not ends or end <= ends[-1]), event
        ends.append(end)
    assert set(open_ends) <= set(named)
    return [event | {"thread": named[event["tid"]]} for event in events if event["ph"] == "X"]


def milliseconds(table):
    """Kind -> time per step, of rank 0's table."""
    first = table.split("\n\n")[1]
    rows = {kind: line[len(kind):].split() for line in first.splitlines() for kind in KINDS if line.startswith(f"{kind} ")}
    return {kind: float(words[0] if kind == "host, idle" or len(words) == 4 else words[1]) for kind, words in rows.items()}


def test_one_process(tessera_program, tmp_path, corpus):
    config = write_config(tmp_path, corpus)
    run(tessera_program, "train", config, f"logging.dir={tmp_path / 'plain'}")
    done = run(tessera_program, "train", config, "logging.profile=[2,4]")
    folder = tmp_path / "run/profile"
    assert sorted(file.name for file in folder.iterdir()) == ["steps.txt", "trace_rank0.json"]
    assert [line["loss"] for line in metrics(tmp_path / "run")] == [line["loss"] for line in metrics(tmp_path / "plain")]
    assert not (tmp_path / "plain/profile").exists()

    events = events_of(folder / "trace_rank0.json", 0)
    assert [event["name"] for event in events if event["thread"] == "steps"] == ["step 2", "step 3"]
    names = Counter(event["name"] for event in events if event["thread"] == "host")
    assert names["launch step 2"] == names["finish step 3"] == 1
    assert names["F0"] == names["B1"] == names["adam"] == names["next batch"] == 2
    # Two layers, two micro-batches, two steps.
    assert names["attention_forward"] == names["attention_backward"] == 8
    assert all(event["args"]["flops"] > 0 for event in events if event["cat"] == "GEMM")

    table = (folder / "steps.txt").read_text()
    assert table in done.stderr
    times = milliseconds(table)
    assert list(times) == KINDS
    step = sum(line["step_ms"] for line in metrics(tmp_path / "run")[1:3]) / 2
    assert times["TOTAL"] == pytest.approx(step, rel=0.03)
    assert sum(times.values()) - times["TOTAL"] == pytest.approx(step, rel=0.03)
    assert min(times.values()) >= 0


def test_two_processes(tessera_program, tmp_path, corpus):
    config = write_config(tmp_path, corpus, model__num_heads=4, parallel__tensor=2, logging__profile=[3, 4])
    run(tessera_program, "train", config)
    folder = tmp_path / "run/profile"
    for rank in range(2):
        events = events_of(folder / f"trace_rank{rank}.json", rank)
        threads = {event["thread"] for event in events}
        assert {"steps", "host", "communication tp"} <= threads
        sums = [event for event in events if event["name"] == "all_reduce tp" and event["thread"].startswith("communication tp")]
        assert sums and all(event["args"]["bytes"] > 0 for event in sums)
        assert {"start all_reduce tp", "wait all_reduce tp"} <= {event["name"] for event in events if event["thread"] == "host"}
    tables = (folder / "steps.txt").read_text()
    assert "rank 0 of 2" in tables and "rank 1 of 2" in tables


def test_windows_that_cannot_be(tessera_program, tmp_path, corpus):
    config = write_config(tmp_path, corpus)
    for window, reason in [("[3,3]", "holds no step"), ("[5,9]", "ends with step 8, but training.steps is 6"),
                           ("[0,2]", "element must be at least 1"), ("[2]", "must be two steps, [START, STOP], not 1")]:
        error = run(tessera_program, "train", config, f"logging.profile={window}", code=2).stderr
        assert reason in error
    assert not (tmp_path / "run").exists()
