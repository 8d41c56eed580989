"""`verlite ls`: the runs below a folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verlite.cli.common import fail

if TYPE_CHECKING:
    from rich.text import Text

    from verlite.report.runs import RunRow

STYLES = {
    "running": "cyan",
    "done": "green",
    "validated": "green",
    "stopped": "yellow",
    "failed": "red",
    "killed": "red",
}
NOTE_CHARS = 100
"""Of a note in the table; --json has all of it."""


def ls(
    folder: Annotated[str, typer.Argument(help="The folder.")] = ".",
    depth: Annotated[int, typer.Option(min=0, help="Levels of folders to look into.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the runs below a folder, newest first: state, step, score, last checkpoint, age.

    The state is running, done, validated (ended well with steps left, as with trainer.val_only),
    stopped, failed, killed (the process recorded no end) or unknown.
    The score is that of the last validation, else that of the last step's samples; for main_sft the
    loss.
    """
    import dataclasses
    import json

    from rich.table import Table
    from rich.text import Text

    from verlite.report.runs import find_runs
    from verlite.terminal import console

    try:
        found = find_runs(Path(folder), depth)
    except ValueError as error:
        fail(error)
    for line in found.skipped:
        typer.echo(f"note: {line}", err=True)
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in found.rows], indent=1))
        return
    if not found.rows:
        fail(f"{folder} has no run directories.", code=0)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("run", overflow="fold")
    for name in ("state", "step", "score", "checkpoint", "age"):
        table.add_column(name, no_wrap=True, justify="left" if name == "state" else "right")
    table.add_column("note", overflow="fold")
    for row in found.rows:
        table.add_row(*map(Text, _name(row, folder)), *_cells(row))
    console().print(table)


def _name(row: "RunRow", folder: str) -> list[str]:
    path = Path(row.path)
    return [str(path.relative_to(folder)) if path != Path(folder) else folder]


def _cells(row: "RunRow") -> "list[Text]":
    import time

    from rich.text import Text

    from verlite.files import one_line

    planned = "" if row.total_steps is None else f"/{row.total_steps}"
    score = "" if row.score is None else f"{row.score:.4g} {_label(row.score_name)}"
    return [
        Text(row.state, style=STYLES.get(row.state, "")),
        Text("-" if row.step is None else f"{row.step}{planned}"),
        Text(score or "-"),
        Text("-" if row.checkpoint is None else str(row.checkpoint)),
        Text(age(time.time() - row.written)),
        Text(one_line(row.note, NOTE_CHARS), style="dim"),
    ]


def _label(metric: str) -> str:
    """Return what a score is: of held-out prompts or of training, a score or a loss."""
    held_out = "held out" if metric.startswith("val") else ""
    return f"{held_out} loss".strip() if metric.endswith("loss") else held_out


def age(seconds: float) -> str:
    """Return a duration in one unit: 40 s, 5 min, 3 h, 12 d."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
