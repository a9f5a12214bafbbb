"""Loss, logits, every gradient and 20 updates against Transformers' models on PyTorch."""

import mixtures
import models
import numpy as np
import oracle
import pytest
from driver import run_tessera, training_overrides


@pytest.fixture
def later_with_time(name, long_run):
    """Later families have test_stored.py; with --long they are compared here too."""
    if name in models.LATER + models.WHOLE and not long_run:
        pytest.skip("--long")


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def gradients(result: dict) -> dict:
    return {name: value for name, value in result.items() if name.startswith("grad.")}


@pytest.mark.parametrize("threads,micro", [(1, 3), (2, 2)])
@pytest.mark.parametrize("name, kind", models.ALL_CASES)
def test_fp32_agrees(later_with_time, build_dir, tmp_path, name, kind, threads, micro):
    config = models.MODELS[name]
    batches = [models.make_batch(kind, i, config=models.MODELS[name]) for i in range(4)]
    ours = run_tessera(build_dir, tmp_path, name, batches,
                       [*training_overrides(), f"device.threads={threads}", f"training.micro_batch_size={micro}",
                        f"training.global_batch_size={micro}"])
    theirs = oracle.first_step(tmp_path / "model", config, batches[0])
    assert abs(ours["loss"][0] - theirs["loss"]) <= 1e-6 * abs(theirs["loss"])
    rows = models.valid_rows(batches[0])
    assert distance(ours["logits"][rows], theirs["logits"][rows]) <= 1e-5
    assert gradients(ours).keys() == gradients(theirs).keys()
    for key, gradient in gradients(theirs).items():
        assert distance(ours[key], gradient) <= 1e-5, key

    trained = oracle.train(tmp_path / "model", config, batches)
    assert np.abs(ours["losses"] / trained["losses"] - 1).max() <= 1e-5
    assert np.abs(ours["grad_norms"] / trained["grad_norms"] - 1).max() <= 1e-4
    for key, weight in trained.items():
        if key.startswith("weight."):
            assert distance(ours[key], weight) <= 5e-5, key


@pytest.mark.parametrize("name, kind", models.ALL_CASES)
def test_bf16_is_as_close_to_fp32_as_autocast(later_with_time, build_dir, tmp_path, name, kind):
    """Both sides err at random: their errors are compared summed over a few batches."""
    config = models.MODELS[name]
    if mixtures.has(config):
        pytest.skip("a router whose logits are rounded sends some tokens to other experts, on either side")
    squares = {}
    for index in range(4):
        folder = tmp_path / str(index)
        folder.mkdir()
        batch = models.make_batch(kind, index, config=config)
        ours = run_tessera(build_dir, folder, name, [batch],
                           ["training.precision=bf16", "training.steps=1", "device.threads=2"])
        exact = oracle.first_step(folder / "model", config, batch)
        autocast = oracle.first_step(folder / "model", config, batch, autocast=True)
        few = "labels" not in batch or batch["labels"].size < 10  # of so few targets rounding does not average out
        assert abs(ours["loss"][0] - exact["loss"]) <= (4e-3 if few else 1e-3) * abs(exact["loss"])
        for key, gradient in gradients(exact).items():
            errors = [np.sum((side[key] - gradient) ** 2, dtype=np.float64) for side in (ours, autocast)]
            squares[key] = squares.get(key, 0) + np.array(errors)
    for key, (our_square, their_square) in squares.items():
        few = exact[key].size < 8  # of so few values one side may err more by chance
        assert np.sqrt(our_square / their_square) <= (3 if few else 1.5), key
    together = np.sum(list(squares.values()), axis=0)
    assert np.sqrt(together[0] / together[1]) <= 1.1
