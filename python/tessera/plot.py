"""`tessera plot RUN`: draws the curves of a run's metrics.jsonl."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

Series = Tuple[List[int], List[float]]

INK, GRID = "#333333", "#dddddd"
TRAIN, EVAL, RATE, SPEED = "#2f6db5", "#c8442c", "#7a5195", "#3d8b6e"


class PlotError(Exception):
    """Something a user can put right; the message says what."""


def read_metrics(path: Path) -> Dict[str, Series]:
    """Every numeric key of a metrics file as (steps, values). A broken last line (a run killed while writing) is left out."""
    series: Dict[str, Series] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            step = int(record["step"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise PlotError(f"{path}:{number}: not a metrics line ({error}); remove the line and try again") from error
        for key, value in record.items():
            if key != "step" and isinstance(value, (int, float)) and math.isfinite(value):
                steps, values = series.setdefault(key, ([], []))
                steps.append(step)
                values.append(float(value))
    return series


def smooth(values: Sequence[float], reach: int) -> List[float]:
    """Mean over `reach` neighbours on either side. At the steep start the window shrinks on both sides alike, so that
    the curve does not lag; at the flat end only the missing side is left out, so that one step's noise is not drawn."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    result = []
    for place in range(len(values)):
        before = min(reach, place)
        after = min(reach, len(values) - 1 - place)
        if place < reach:
            after = min(after, before)
        result.append((sums[place + after + 1] - sums[place - before]) / (before + after + 1))
    return result


def _style(axis, label: str) -> None:
    axis.set_ylabel(label, color=INK)
    axis.grid(True, color=GRID, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(colors=INK)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _draw_loss(axis, series: Dict[str, Series]) -> None:
    steps, losses = series["loss"]
    axis.plot(steps, losses, color=TRAIN, alpha=0.25, linewidth=0.9, label="training")
    if len(losses) >= 20:
        axis.plot(steps, smooth(losses, max(2, len(losses) // 60)), color=TRAIN, linewidth=2.0, label="training, smoothed")
    if "eval_loss" in series:
        eval_steps, eval_losses = series["eval_loss"]
        axis.plot(eval_steps, eval_losses, color=EVAL, marker="o", markersize=4.5, linewidth=1.2, label="validation")
        axis.annotate(f"{eval_losses[-1]:.3f}", (eval_steps[-1], eval_losses[-1]), xytext=(0, 9),
                      textcoords="offset points", ha="center", color=EVAL, fontweight="bold")
    axis.legend(frameon=False, labelcolor=INK)
    _style(axis, "loss (nats per token)")


def draw(series: Dict[str, Series], title: str, output: Path) -> None:
    """Loss above; learning rate and speed below, where the file has them. Writes a PNG."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "matplotlib"
        what = (f"is not installed in this Python ({sys.executable}): python3 -m pip install matplotlib" if absent else
                f"this Python ({sys.executable}) has, but cannot load: {error}")
        raise PlotError(f"tessera plot needs matplotlib, which {what}") from error

    lower = [(key, label, color) for key, label, color in (
        ("lr", "learning rate", RATE), ("tokens_per_s", "tokens per second", SPEED)) if key in series]
    figure, axes = pyplot.subplots(1 + len(lower), 1, sharex=True, squeeze=False, layout="constrained",
                                   figsize=(9, 4.6 + 1.7 * len(lower)),
                                   gridspec_kw={"height_ratios": [3.2] + [1] * len(lower)})
    axes = axes[:, 0]
    _draw_loss(axes[0], series)
    axes[0].set_title(title, color=INK, loc="left", fontweight="bold")
    for axis, (key, label, color) in zip(axes[1:], lower):
        axis.plot(*series[key], color=color, linewidth=1.4)
        axis.set_ylim(bottom=0)
        _style(axis, label)
    axes[-1].set_xlabel("step", color=INK)
    figure.align_ylabels()
    figure.savefig(output, dpi=140)
    pyplot.close(figure)


def _metrics_path(run: Path) -> Path:
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise PlotError(f"{path}: no such file; name a run's folder (logging.dir of its config)")
    return path


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="tessera plot", description="Draw a run's loss curve into a PNG.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder (logging.dir), or a metrics.jsonl")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: RUN/loss.png")
    options = parser.parse_args(argv)
    try:
        path = _metrics_path(options.run)
        series = read_metrics(path)
        if "loss" not in series:
            raise PlotError(f"{path}: holds no training step yet")
        output = options.output or path.parent / "loss.png"
        draw(series, str(path.parent), output)
    except (PlotError, OSError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
