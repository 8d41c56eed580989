"""The benchmarks' charts as SVG, computed from results.json: the stages of a step, and a comparison
of steps."""

from typing import Any

from report import PAGE, read
from tables import STAGES, measured_steps

WIDTH, LEFT, BAR, GAP, FONT = 760, 150, 26, 14, 13
PIXELS = WIDTH - LEFT - 90  # of the longest bar; its figure follows
COLORS = ("#4e79a7", "#9c755f", "#bab0ac", "#f28e2b", "#59a14f", "#d3d3d3")


def step_picture(results: dict[str, Any]) -> str:
    """Draw one bar per workload with the stages of its step and the remainder."""
    bars = []
    for part, step in measured_steps(results["parts"]):
        stages = {stage: step["stages"][stage] for stage in STAGES}
        stages["rest"] = max(0.0, step["seconds"] - sum(stages.values()))
        bars.append(
            (
                part,
                [(name, taken / step["seconds"]) for name, taken in stages.items()],
                f"{step['seconds']:.2f} s",
            )
        )
    legend = [(stage, color) for stage, color in zip((*STAGES, "rest"), COLORS, strict=True)]
    return _drawn("Where a step's time goes", bars, legend)


def comparison_picture(results: dict[str, Any]) -> str:
    """Draw three bars per workload, relative to the longest: verlite, TRL, and the lower bound by
    FLOPs."""
    bars = []
    for part, step in measured_steps(results["parts"]):
        sides = {
            "verlite": step["seconds"],
            "TRL": step["trl_seconds"],
            "floor": step["floor_seconds"],
        }
        for number, (side, taken) in enumerate(sides.items()):
            empty = [("", 0.0)] * number  # so that each side has its own color
            bars.append(
                (f"{part}, {side}", [*empty, (side, taken / max(sides.values()))], f"{taken:.2f} s")
            )
    return _drawn("Seconds of a step", bars, [])


def _drawn(
    title: str, bars: list[tuple[str, list[tuple[str, float]], str]], legend: list[tuple[str, str]]
) -> str:
    """Draw bars of pieces (name, fraction of the full width) under a title, each followed by its
    figure."""
    lines = [_text(LEFT, 24, title, weight="bold")]
    x = LEFT
    for name, color in legend:
        lines += [_box(x, 38, 12, 12, color, name), _text(x + 17, 48, name)]
        x += 30 + 8 * len(name)
    y = 66 if legend else 42
    for label, pieces, figure in bars:
        lines.append(_text(LEFT - 8, y + BAR - 8, label, anchor="end"))
        x = float(LEFT)
        for (name, share), color in zip(pieces, COLORS, strict=False):
            lines.append(_box(x, y, share * PIXELS, BAR, color, f"{name} {share:.0%}"))
            if share > 0.08 and len(pieces) == len(COLORS):
                lines.append(
                    _text(x + share * PIXELS / 2, y + BAR - 8, f"{share:.0%}", anchor="middle")
                )
            x += share * PIXELS
        lines.append(_text(x + 8, y + BAR - 8, figure))
        y += BAR + GAP
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" '
        f'width="{WIDTH}" height="{y}" font-family="sans-serif" font-size="{FONT}">\n'
        f'<rect width="{WIDTH}" height="{y}" fill="white"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{text}</text>'
    )


def _box(x: float, y: float, width: float, height: float, color: str, name: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{color}"><title>{name}</title></rect>'
    )


PICTURES = {"benchmark_step.svg": step_picture, "benchmark_comparison.svg": comparison_picture}


def main() -> None:
    for name, picture in PICTURES.items():
        (PAGE.parent / name).write_text(picture(read()), encoding="utf-8")


if __name__ == "__main__":
    main()
