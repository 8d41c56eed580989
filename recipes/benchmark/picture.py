"""The benchmarks' pictures, as SVG text that follows from results.json alone: where a step's seconds go, and steps side by side."""

from typing import Any

from report import PAGE, read
from tables import STAGES, measured_steps

WIDTH, LEFT, BAR, GAP, FONT = 760, 150, 26, 14, 13
PIXELS = WIDTH - LEFT - 90  # of the longest bar; behind it stands its figure
COLOURS = ("#4e79a7", "#9c755f", "#bab0ac", "#f28e2b", "#59a14f", "#d3d3d3")


def step_picture(results: dict[str, Any]) -> str:
    """One bar a workload, each as long as its own step: every stage, and what is left."""
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
    legend = [(stage, colour) for stage, colour in zip((*STAGES, "rest"), COLOURS, strict=True)]
    return _drawn("Where a step's time goes", bars, legend)


def comparison_picture(results: dict[str, Any]) -> str:
    """Three bars a workload, in shares of its longest: verlite, TRL, and the floor by FLOPs."""
    bars = []
    for part, step in measured_steps(results["parts"]):
        sides = {
            "verlite": step["seconds"],
            "TRL": step["trl_seconds"],
            "floor": step["floor_seconds"],
        }
        for number, (side, taken) in enumerate(sides.items()):
            empty = [("", 0.0)] * number  # so that each side has its own colour
            bars.append(
                (f"{part}, {side}", [*empty, (side, taken / max(sides.values()))], f"{taken:.2f} s")
            )
    return _drawn("Seconds of a step", bars, [])


def _drawn(
    title: str, bars: list[tuple[str, list[tuple[str, float]], str]], legend: list[tuple[str, str]]
) -> str:
    """Bars of pieces, each (name, share of the full width), under a title; the figure stands behind the bar."""
    lines = [_text(LEFT, 24, title, weight="bold")]
    x = LEFT
    for name, colour in legend:
        lines += [_box(x, 38, 12, 12, colour, name), _text(x + 17, 48, name)]
        x += 30 + 8 * len(name)
    y = 66 if legend else 42
    for label, pieces, figure in bars:
        lines.append(_text(LEFT - 8, y + BAR - 8, label, anchor="end"))
        x = float(LEFT)
        for (name, share), colour in zip(pieces, COLOURS, strict=False):
            lines.append(_box(x, y, share * PIXELS, BAR, colour, f"{name} {share:.0%}"))
            if share > 0.08 and len(pieces) == len(COLOURS):
                lines.append(
                    _text(x + share * PIXELS / 2, y + BAR - 8, f"{share:.0%}", anchor="middle")
                )
            x += share * PIXELS
        lines.append(_text(x + 8, y + BAR - 8, figure))
        y += BAR + GAP
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" '
        f'font-family="sans-serif" font-size="{FONT}">\n<rect width="{WIDTH}" height="{y}" fill="white"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{text}</text>'
    )


def _box(x: float, y: float, width: float, height: float, colour: str, name: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"><title>{name}</title></rect>'


PICTURES = {"benchmark_step.svg": step_picture, "benchmark_comparison.svg": comparison_picture}


def main() -> None:
    for name, picture in PICTURES.items():
        (PAGE.parent / name).write_text(picture(read()), encoding="utf-8")


if __name__ == "__main__":
    main()
