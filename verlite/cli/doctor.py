"""`verlite doctor`: what this machine has for a run, and what is missing."""

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    folder: Annotated[
        str, typer.Argument(help="Where runs are written, for the free disk space.")
    ] = ".",
) -> None:
    """Print versions, devices, memory and limits of this machine, and what mends a problem.

    Exit code 1: a run would not start here.
    """
    from verlite.report.doctor import examine, healthy, table

    findings = examine(Path(folder))
    print(table(findings))
    if not healthy(findings):
        print("A run would not start or would fail here: see the lines that begin with problem.")
        raise typer.Exit(1)
    print("Nothing prevents a run on this machine.")
