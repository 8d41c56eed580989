"""The reward curve of a run, read from metrics.jsonl: as an image and as terminal characters."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verlite.terminal import clean
from verlite.trainer.tracking import MetricsLines, is_held_out

SCORE = "critic/score/mean"
LOSS = "train/loss"
"""What main_sft has in place of a score."""
MAX_SOURCES = 40
"""Data sources with a curve."""
_EIGHTHS = " ▁▂▃▄▅▆▇█"

Points = list[tuple[int, float]]
"""(step, value), in the order of steps."""


@dataclass(frozen=True)
class Curve:
    """The scores of a run over its steps."""

    training: Points
    """Mean score of each step's samples; for main_sft the loss."""
    validation: dict[str, Points]
    """Score on held-out prompts, by data source; for main_sft the loss."""
    value: str = "mean reward"
    """What the values are."""
    unreadable: int = 0
    """Lines of metrics.jsonl that cannot be read."""
    left_out: int = 0
    """Data sources beyond MAX_SOURCES."""


def read_curve(metrics_file: Path) -> Curve:
    """Return the curve of one run. Steps without a value, or with null, are left out.

    Raises:
        ValueError: the file is missing or has no score yet.
    """
    if metrics_file.parent.is_file():
        raise ValueError(f"{metrics_file.parent} is a file. Give a run directory.")
    if not metrics_file.is_file():
        raise ValueError(f"{metrics_file} does not exist. Give a run directory.")
    found = MetricsLines.read(metrics_file)
    lines = found.values()
    training = _points(lines, SCORE)
    keys = dict.fromkeys(key for line in lines for key in line)
    sources = {"/".join(key.split("/")[1:-2]): key for key in keys if is_held_out(key)}
    validation = {
        source: _points(lines, key)
        for source, key in itertools.islice(sources.items(), MAX_SOURCES)
    }
    losses = _points(lines, LOSS)
    if losses and not training:
        held_out = {"held out": _points(lines, "val/loss")}
        return Curve(losses, held_out, "loss", len(found.unreadable))
    if not training and not any(validation.values()):
        raise ValueError(
            f"{metrics_file} has no scores: no step has {SCORE} or a val-core/.../mean@N"
        )
    left_out = len(sources) - len(validation)
    return Curve(training, validation, unreadable=len(found.unreadable), left_out=left_out)


def _points(lines: list[dict[str, Any]], key: str) -> Points:
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def draw(curve: Curve, picture: Path, title: str = "") -> None:
    """Write the curve as an image. The suffix of `picture` selects the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if curve.training:
        steps, values = zip(*curve.training, strict=True)
        axes.plot(
            steps,
            values,
            color="#8aa4c8",
            linewidth=1.5,
            label="training" if curve.value == "loss" else "training, sampled",
        )
    for number, (source, points) in enumerate(curve.validation.items(), start=1):
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        name = f"held out, {clean(source)}" if len(curve.validation) > 1 else "held out"
        color = f"C{number}"
        axes.plot(steps, values, label=name, color=color, linewidth=2, marker="o", markersize=4)
    axes.set(xlabel="training step", ylabel=curve.value)
    axes.set_title(clean(title), parse_math=False)  # $ in a path is not a formula
    curves = [curve.training, *curve.validation.values()]
    low, high = _axis_range([value for points in curves for _, value in points])
    margin = 0.03 * (high - low)
    axes.set_ylim(low - margin, high + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    for text in axes.legend(frameon=False, loc="best").get_texts():
        text.set_parse_math(False)
    figure.savefig(picture)


def plot(points: Sequence[tuple[int, float]], width: int = 60, height: int = 8) -> str:
    """Return the points as an area chart of characters, with both axes.

    The chart has at most `width` columns and `height` rows; each row has eight levels. A column is
    the mean of its points. A column without points is interpolated linearly.
    """
    first = points[0][0]
    last = points[-1][0]
    width = min(width, 2 * (last - first) + 1)
    columns = _columns(points, width)
    low, high = _axis_range(columns)
    levels = [round((value - low) / (high - low) * 8 * height) for value in columns]
    labels = {height - 1: f"{high:.3g}", 0: f"{low:.3g}"}
    margin = max(map(len, labels.values()))
    rows = []
    for row in reversed(range(height)):
        area = "".join(_EIGHTHS[min(8, max(0, level - 8 * row))] for level in levels)
        rows.append(f"{labels.get(row, ''):>{margin}} │{area}".rstrip())
    steps = str(first)
    if last != first:
        space = max(len(str(last)) + 1, width - len(steps))
        steps += f"{last:>{space}}"
    rows.append(f"{'':>{margin}} └{'─' * width}")
    rows.append(f"{'':>{margin}}  {steps} step")
    return "\n".join(rows)


def _axis_range(values: list[float]) -> tuple[float, float]:
    """Return the ends of the vertical axis: [0, 1] if it contains all values, else their range.

    The range is never empty.
    """
    low = min(values)
    high = max(values)
    if 0 <= low and high <= 1:
        return 0.0, 1.0
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _columns(points: Sequence[tuple[int, float]], width: int) -> list[float]:
    """Return one value for each of `width` columns."""
    first = points[0][0]
    last = points[-1][0]
    scale = (width - 1) / max(1, last - first)
    binned: dict[int, list[float]] = {}
    for step, value in points:
        binned.setdefault(round((step - first) * scale), []).append(value)
    means = sorted((column, math.fsum(values) / len(values)) for column, values in binned.items())
    columns = [means[0][1]]
    for (start, left), (end, right) in zip(means, means[1:], strict=False):
        slope = (right - left) / (end - start)
        columns += [left + slope * (column - start) for column in range(start + 1, end + 1)]
    columns += [means[-1][1]] * (width - len(columns))
    return columns
