"""`verlite show`: print samples of a run."""

from pathlib import Path
from typing import Annotated

import typer

from verlite.cli.common import fail


def show(
    run_dir: Annotated[
        str, typer.Argument(help="A run directory: the folder that contains rollouts/.")
    ],
    step: Annotated[int | None, typer.Option(help="The step. Default: the newest.")] = None,
    worst: Annotated[
        int | None,
        typer.Option(metavar="K", min=1, help="Only the K samples with the lowest scores."),
    ] = None,
    count: Annotated[int, typer.Option(metavar="K", min=1, help="At most K samples.")] = 4,
    validation: Annotated[
        bool, typer.Option("--val", help="Samples of the validation after the step.")
    ] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Do not shorten long prompts.")] = False,
) -> None:
    """Print a step's samples: turns, tool calls and results, rewards, and the trained text."""
    from verlite.files import one_line
    from verlite.report.samples import legend, lowest_scores, read_samples, render
    from verlite.terminal import console

    try:
        path, samples, unreadable = read_samples(Path(run_dir), step, validation)
    except ValueError as error:
        fail(error)
    shown = lowest_scores(samples, worst) if worst else samples[:count]
    out = console()
    out.print(f"{path}: {len(shown)} of {len(samples)} samples", legend(), highlight=False)
    if unreadable:
        out.print(f"lines that cannot be read: {unreadable}", style="yellow", highlight=False)
    for number, sample in enumerate(shown, start=1):
        try:
            rendered = render(sample, whole)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            cause = one_line(f"{type(error).__name__}: {error}")
            out.print(f"sample {number} is malformed: {cause}", style="yellow")
            continue
        out.print()
        out.print(rendered)
