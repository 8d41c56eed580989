"""`verlite supervise`: start a training command again after failures that may pass."""

import shlex
from typing import Annotated

import typer

from verlite.cli.common import fail


def supervise(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="What to run.")],
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Restarts in a row without a new checkpoint.")
    ] = 10,
    same_step: Annotated[
        int,
        typer.Option(min=0, help="Give up after this many failures at one step. 0: no limit."),
    ] = 3,
) -> None:
    """Run a training command, and start it again after a stop or a failure that may pass.

    verlite supervise -- python -m verlite.main_ppo key=value ...

    Exit codes 75 and 76, and a process that was killed, lead to a restart, after a growing pause.
    Signals are passed on to the command, and there is no restart after them. docs/failures.md
    """
    from verlite.files import tolerate_full_disk
    from verlite.launch.supervise import supervise as run
    from verlite.terminal import clean_output

    tolerate_full_disk()  # nor a closed terminal
    clean_output()  # again, for the streams of the line above
    try:
        code = run(
            command,
            max_restarts,
            same_step,
            lambda text: typer.echo(f"supervise: {text}", err=True),
        )
    except OSError as error:
        fail(f"cannot run {shlex.join(command)}: {error.strerror}")
    raise typer.Exit(code)
