"""`verlite plan`: print the numbers that follow from a training command."""

from typing import Annotated

import typer

from verlite.cli.common import TrainingArguments, load_config


def plan(
    arguments: TrainingArguments = None,
    config: Annotated[
        bool, typer.Option("--config", help="Print every value and its origin as YAML.")
    ] = False,
) -> None:
    """Print the batch sizes, updates, engines and devices of a training command."""
    from verlite.config.load import dump
    from verlite.config.plan import make_plan
    from verlite.config.show import console

    loaded = load_config(arguments, "verlite plan")
    if config:
        print(dump(loaded), end="")
    else:
        console().print(make_plan(loaded.config).table())
