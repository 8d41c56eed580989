"""`verlite explain`: describe a configuration key."""

from typing import Annotated

import typer

from verlite.cli.common import fail


def explain(
    key: Annotated[
        str,
        typer.Argument(help="A key, a section, an old name, or the last part of one: optim.lr"),
    ] = "",
    sft: Annotated[bool, typer.Option("--sft", help="A key of main_sft.")] = False,
    dpo: Annotated[bool, typer.Option("--dpo", help="A key of main_dpo.")] = False,
) -> None:
    """Print the meaning, type, default and legal values of a configuration key."""
    from verlite.config.command import PPO
    from verlite.config.dpo import DPO
    from verlite.config.explain import explain as explain_key
    from verlite.config.sft import SFT

    try:
        print(explain_key(key, DPO if dpo else SFT if sft else PPO))
    except KeyError as error:
        fail(error.args[0])
