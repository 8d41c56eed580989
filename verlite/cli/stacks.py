"""`verlite stacks`: what every process of a running job is doing."""

from pathlib import Path
from typing import Annotated

import typer

from verlite.cli.common import fail


def stacks(
    run_dir: Annotated[
        str, typer.Argument(help="The run directory (trainer.default_local_dir) of a running job.")
    ],
    wait: Annotated[
        float, typer.Option(metavar="S", min=1, help="How many seconds to wait for the driver.")
    ] = 60.0,
) -> None:
    """Print the Python stacks of the driver and of all workers of a running job.

    Works on any machine that sees the run directory, and while workers hang in native code. Exit
    code 1: a worker did not answer.
    """
    from verlite.controller.stack_text import render
    from verlite.report.stacks import StacksError, ask

    try:
        answer = ask(Path(run_dir), wait)
    except StacksError as error:
        fail(error)
    typer.echo(render(answer))
    if not all(worker["stacks"] for worker in answer["workers"]):
        raise typer.Exit(1)
