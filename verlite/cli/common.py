"""Helpers shared by the commands."""

from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from verlite.config.load import Loaded

TrainingArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="The training command's arguments, unchanged."),
]


def fail(error: object, code: int = 2) -> NoReturn:
    """Print an error to stderr and exit with `code`."""
    typer.echo(str(error), err=True)
    raise typer.Exit(code)


def load_config(arguments: list[str] | None, program: str, elsewhere: bool = False) -> "Loaded":
    """Return a training command's configuration; `elsewhere` as in `compose`. Print all problems
    and exit if it is invalid."""
    from verlite.config.load import main_argv

    return main_argv(arguments or [], program, elsewhere)
