"""`verlite explain`: describe a configuration key."""

from typing import Annotated

import typer

from verlite.cli.common import fail


def explain(
    key: Annotated[
        str,
        typer.Argument(help="A key, a section, an old name, or the last part of one: optim.lr"),
    ] = "",
) -> None:
    """Print the meaning, type, default and legal values of a configuration key."""
    from verlite.config.explain import explain as explain_key

    try:
        print(explain_key(key))
    except KeyError as error:
        fail(error.args[0])
