"""`verlite bugreport`: what a maintainer asks for about a run."""

from pathlib import Path
from typing import Annotated

import typer

from verlite.cli.common import fail


def bugreport(
    run_dir: Annotated[str, typer.Argument(help="The run directory.")],
    output: Annotated[
        str, typer.Option("-o", "--output", help="The zip file to write.")
    ] = "bugreport.zip",
) -> None:
    """Write a zip file with what a maintainer asks for about a run.

    In it: the output of `verlite doctor`, settings, the last metrics, the error, the ends of logs.

    Secrets are masked. Samples (rollouts/) and weights are left out. Look into it before you send
    it: logs may quote single samples.
    """
    from verlite.files import size_text
    from verlite.report.bugreport import write

    target = Path(output)
    if target.is_dir():
        fail(f"--output={target} is a folder. Give the name of the zip file to write.")
    try:
        written = write(Path(run_dir), target)
    except (ValueError, OSError) as error:
        fail(error)
    for name, size in written:
        print(f"{size_text(size):>10}  {name}")
    print(f"wrote {target} ({size_text(target.stat().st_size)})")
