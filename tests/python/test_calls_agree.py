"""Ranks that come apart are told so, all of them, at once, with both places named."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

SCRIPT = Path(__file__).parent / "scripts" / "calls_agree.py"
APART = "InvalidArgument: ranks called different things: "
# What the odd rank calls, and the others.
CALLS = {
    "saves_alone": ("model.save_pretrained() at calls_agree.py:", "wait_for_everyone() at calls_agree.py:"),
    "skips_backward": ("model(...) in training mode at calls_agree.py:", "loss.backward() at calls_agree.py:"),
    "skips_a_step": ("model(...) in training mode at ", "optimizer.step() at "),
    "evaluates_instead": ("model(...) in eval mode at ", "model(...) in training mode at "),
    "gathers_alone": ("check_trigger() at ", "wait_for_everyone() at "),
}
VALUES = {
    "another_rate": "InvalidArgument: optimizer.step() with different values: lr of parameter group 0 is 0.1 on rank 0 and 0.2 on rank ",
    "another_factor": "InvalidArgument: ranks backwarded the same loss with different factors: rank 0: 1",
    "another_norm": "InvalidArgument: ranks clip the same gradient to different norms: rank 0: 1",
}
BATCHES = {"another_token": "tokens", "another_token_without_labels": "tokens", "another_label": "labels",
           "another_length": "shape", "another_mask": "attention_mask"}


@pytest.mark.parametrize("processes, layouts", [(2, ["1,1", "2,1", "1,2"]), (4, ["2,2", "2,1"])])
def test_whoever_comes_apart_is_named_on_every_rank(python_build, tmp_path, processes, layouts):
    output = tmp_path / "result.json"
    python_build.run(SCRIPT, output, *layouts, launcher=python_build.launcher("--num_processes", processes))
    results = json.loads(output.read_text())
    last = processes - 1
    for layout in layouts:
        found = results[layout]
        for name, (odd, others) in CALLS.items():
            assert len(found[name]) == processes
            for text in found[name]:
                assert text.startswith(APART), (layout, name, text)
                assert f"rank {last} called {odd}" in text and f" called {others}" in text, (layout, name, text)
        others = "rank 1" if last == 1 else "ranks 1, 2 and 3"
        for text in found["main_saves_alone"]:
            assert text.startswith(APART + "rank 0 called model.save_pretrained() at calls_agree.py:"), (layout, text)
            assert f"; {others} called wait_for_everyone() at calls_agree.py:" in text, (layout, text)
        for name, start in VALUES.items():
            assert all(text.startswith(start) and f"rank {last}" in text for text in found[name]), (layout, name, found[name])
        bad = found["a_label_beyond_the_vocabulary"]
        assert bad[last].startswith("DataError: batch: sample ") and "label 97" in bad[last]
        assert all(text.startswith(f"CommunicationError: rank {last} failed: batch: sample ") for text in bad[:last]), bad
        peers = layout != "1,1"
        for name, field in BATCHES.items():
            for text in found[name]:
                told = "DataError: ranks " in text and f"They differ in {'shape tokens labels' if field == 'shape' else ''}" in text
                assert (told and field in text and f"and {last} were given different batches" in text) == peers, (layout, text)
        if peers:
            assert found["losses"] == found["expected"], layout
