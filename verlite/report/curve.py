"""The reward curve of a run, from its metrics.jsonl: as a picture, and as characters for a terminal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verlite.trainer.tracking import read_lines

SCORE = "critic/score/mean"
_EIGHTHS = " ▁▂▃▄▅▆▇█"

Points = list[tuple[int, float]]
"""(step, value), in the order of steps."""


@dataclass(frozen=True)
class Curve:
    """What a run earned over its steps."""

    training: Points
    """Mean score of each step's samples."""
    validation: dict[str, Points]
    """For each data source, the score on held-out prompts."""


def read_curve(metrics_file: Path) -> Curve:
    """The curve of one run. Steps without a value, or with NaN written as null, are left out.

    Raises ValueError when the file is missing or has no score yet.
    """
    lines = read_lines(metrics_file)
    training = _points(lines, SCORE)
    keys = dict.fromkeys(
        key for line in lines for key in line if key.startswith("val-core/") and "/mean@" in key
    )
    validation = {"/".join(key.split("/")[1:-2]): _points(lines, key) for key in keys}
    if not training and not any(validation.values()):
        raise ValueError(
            f"{metrics_file} has no scores: no step has {SCORE} or a val-core/.../mean@N"
        )
    return Curve(training, validation)


def _points(lines: list[dict], key: str) -> Points:
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def draw(curve: Curve, picture: Path, title: str = "") -> None:
    """Write the curve as an image in the format that the picture's name ends with."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if curve.training:
        axes.plot(
            *zip(*curve.training, strict=True),
            color="#8aa4c8",
            linewidth=1.5,
            label="training, sampled",
        )
    for number, (source, points) in enumerate(curve.validation.items()):
        name = f"held out, {source}" if len(curve.validation) > 1 else "held out"
        axes.plot(
            *zip(*points, strict=True),
            color=f"C{1 + number}",
            linewidth=2,
            marker="o",
            markersize=4,
            label=name,
        )
    axes.set(xlabel="training step", ylabel="mean reward", title=title)
    low, high = _span(
        [value for points in (curve.training, *curve.validation.values()) for _, value in points]
    )
    axes.set_ylim(low - 0.03 * (high - low), high + 0.03 * (high - low))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    figure.savefig(picture)


def plot(points: Sequence[tuple[int, float]], width: int = 60, height: int = 8) -> str:
    """Points as an area of characters with both axes, at most `width` columns by `height` rows, each row of eight levels.

    A column shows the mean of the points that fall into it, or lies between its neighbours when none does.
    """
    first, last = points[0][0], points[-1][0]
    width = min(width, 2 * (last - first) + 1)
    columns = _columns(points, width)
    low, high = _span(columns)
    levels = [round((value - low) / (high - low) * 8 * height) for value in columns]
    labels = {height - 1: f"{high:.3g}", 0: f"{low:.3g}"}
    margin = max(map(len, labels.values()))
    rows = []
    for row in reversed(range(height)):
        area = "".join(_EIGHTHS[min(8, max(0, level - 8 * row))] for level in levels)
        rows.append(f"{labels.get(row, ''):>{margin}} │{area}".rstrip())
    steps = (
        str(first)
        if first == last
        else f"{first}{last:>{max(len(str(last)) + 1, width - len(str(first)))}}"
    )
    return "\n".join([*rows, f"{'':>{margin}} └{'─' * width}", f"{'':>{margin}}  {steps} step"])


def _span(values: list[float]) -> tuple[float, float]:
    """Ends of the vertical axis: 0 to 1 for what lies there, else the values' own range; never empty."""
    low, high = min(values), max(values)
    if 0 <= low and high <= 1:
        return 0.0, 1.0
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _columns(points: Sequence[tuple[int, float]], width: int) -> list[float]:
    """One value for each of `width` columns."""
    first, last = points[0][0], points[-1][0]
    scale = (width - 1) / max(1, last - first)
    held: dict[int, list[float]] = {}
    for step, value in points:
        held.setdefault(round((step - first) * scale), []).append(value)
    known = sorted((column, math.fsum(values) / len(values)) for column, values in held.items())
    columns = [known[0][1]]
    for (a, left), (b, right) in zip(known, known[1:], strict=False):
        columns += [
            left + (right - left) * (column - a) / (b - a) for column in range(a + 1, b + 1)
        ]
    return columns + [known[-1][1]] * (width - len(columns))
