"""Numbers that users compare with Accelerate's and PyTorch's where the last batch is short, on every kind of layout."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SCRIPT = Path(__file__).parent / "scripts" / "compared_numbers.py"
# Kind, tp, pp, micro-batches. Starting Python costs more than the cases: they share it.
LAYOUTS = {
    1: ["metrics,1,1,1", "metrics,1,1,2", "logits,1,1,1", "returned,1,1,2", "steps,1,1,2", "broken,1,1,1"],
    2: ["metrics,1,1,1", "metrics,1,1,2", "metrics,2,1,1", "metrics,1,2,1", "metrics,1,2,2", "logits,1,1,1", "logits,2,1,1",
        "logits,1,2,2", "returned,1,1,1", "returned,1,2,2", "steps,1,1,1", "steps,1,1,2", "steps,1,2,2", "broken,1,1,1",
        "broken,2,1,1", "broken,1,2,2"],
}


@pytest.fixture(scope="module", params=LAYOUTS)
def results(request, python_build, tmp_path_factory):
    """What each layout of so many processes found, by its kind."""
    output = tmp_path_factory.mktemp("numbers") / "results.json"
    python_build.run(SCRIPT, output, *LAYOUTS[request.param], launcher=python_build.launcher("--num_processes", request.param))
    found = json.loads(output.read_text())
    assert len(found) == len(LAYOUTS[request.param])
    return list(zip(LAYOUTS[request.param], found))


def of_kind(results, kind):
    return [(layout, each) for layout, each in results if layout.startswith(kind)]


def test_gather_for_metrics_keeps_what_accelerate_keeps(results):
    for layout, case in of_kind(results, "metrics"):
        found, expected = case["found"], case["expected"]
        assert found["predictions"] == expected["predictions"] and found["objects"] == expected["objects"], layout
        assert sum(found["mixed"]) == sum(expected["mixed"]) == 17
        for name in ("repeated", "own repeated"):
            assert len(found[name]) == len(expected[name]) == 17, (layout, name)
            assert sum(found[name]) == pytest.approx(sum(expected[name]), rel=1e-5), (layout, name)
        if case["same steps"]:
            assert found["flat"] == expected["flat"] and len(found["scalar"]) == 5
            for name in ("repeated", "own repeated", "scalar"):
                assert found[name] == pytest.approx(expected[name], rel=1e-5), (layout, name)


@pytest.mark.parametrize("kind", ["logits", "returned", "steps"])
def test_uneven_data_ranks_and_micro_batches_are_weighed_by_samples(results, kind):
    for layout, apart in of_kind(results, kind):
        assert max(apart.values()) <= 1e-5, (layout, apart)


def test_a_loss_that_is_not_finite_is_reported_once_and_ends_the_run(results):
    for layout, case in of_kind(results, "broken"):
        assert case["skipped"] and case["steps"] == 19 and "not finite 20 steps in a row" in case["end"], case
        loss, step = case["warnings"]
        assert f"the loss of step 1 is nan: so it is in 1 of the 4 samples of data rank {case['data rank']} (the first" in loss
        assert "is number 2)" in loss and "step 1 was skipped" in step and "norm nan" in step, layout
