import json

import pytest

from tessera import plot


def write_run(folder, lines):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def step_line(step, **more):
    return json.dumps({"step": step, "loss": 5.0 / step, "lr": 1e-3, "tokens_per_s": 100.0, "skipped": 0, **more})


def png_size(path):
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


@pytest.mark.parametrize("steps", [1, 2, 30, 100])
def test_draws_a_picture(tmp_path, capsys, steps):
    pytest.importorskip("matplotlib")
    lines = [step_line(step) for step in range(1, steps + 1)] + [json.dumps({"step": steps, "eval_loss": 2.5})]
    run = write_run(tmp_path / "run", lines)
    assert plot.main([str(run)]) == 0
    assert "loss.png" in capsys.readouterr().out
    width, height = png_size(run / "loss.png")
    assert width > 800 and height > 600


def test_only_losses_are_enough(tmp_path):
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "run", [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3)])
    assert plot.main([str(run), "--output", str(tmp_path / "x.png")]) == 0
    png_size(tmp_path / "x.png")


def test_series_keep_their_own_steps(tmp_path):
    run = write_run(tmp_path / "run", [step_line(1), step_line(2), '{"step": 2, "eval_loss": 3.5}', step_line(3, grad_norm=None)])
    series = plot.read_metrics(run / "metrics.jsonl")
    assert series["loss"] == ([1, 2, 3], [5.0, 2.5, 5.0 / 3])
    assert series["eval_loss"] == ([2], [3.5])
    assert "grad_norm" not in series


def test_a_not_a_number_loss_is_left_out(tmp_path):
    run = write_run(tmp_path / "run", [step_line(1), '{"step": 2, "loss": NaN}'])
    assert plot.read_metrics(run / "metrics.jsonl")["loss"] == ([1], [5.0])


def test_a_torn_last_line_is_forgiven_and_a_torn_middle_is_not(tmp_path):
    torn = write_run(tmp_path / "end", [step_line(1), '{"step": 2, "lo'])
    assert plot.read_metrics(torn / "metrics.jsonl")["loss"] == ([1], [5.0])
    broken = write_run(tmp_path / "middle", [step_line(1), '{"step": 2, "lo', step_line(3)])
    with pytest.raises(plot.PlotError, match="metrics.jsonl:2"):
        plot.read_metrics(broken / "metrics.jsonl")


def test_errors_say_what_to_do(tmp_path, capsys):
    assert plot.main([str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
    empty = write_run(tmp_path / "empty", [])
    assert plot.main([str(empty)]) == 1
    assert "no training step" in capsys.readouterr().err


def test_smoothing():
    assert plot.smooth([4.0] * 7, 3) == [4.0] * 7
    ramp = [float(value) for value in range(20)]
    assert plot.smooth(ramp, 4)[:15] == pytest.approx(ramp[:15])  # no lag on a slope
    assert plot.smooth([0.0, 3.0, 0.0, 3.0], 1) == pytest.approx([0.0, 1.0, 2.0, 1.5])
