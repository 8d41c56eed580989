"""The `verlite` command. Each file of this package has the commands of one subject.

Commands import their dependencies when they run, so `verlite --help` starts quickly.
"""

import os
import sys
from typing import Annotated

import typer

from verlite import __version__
from verlite.cli import before_run, cluster, convert, launch, own, runs, serve
from verlite.cli.common import fail
from verlite.cli.simulate import simulate
from verlite.terminal import clean_output

PASS_THROUGH = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": ["--help"],
}
"""Settings of the commands that take a training command's arguments."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Reinforcement learning for language models. "
    "To train, run `python -m verlite.main_ppo key=value ...`.",
)
app.command(context_settings=PASS_THROUGH)(before_run.check)
app.command(context_settings=PASS_THROUGH)(before_run.plan)
app.command(context_settings=PASS_THROUGH)(simulate)
app.command()(before_run.explain)
app.command()(own.data)
app.command(context_settings=PASS_THROUGH)(own.tasks)
app.command()(runs.ls)
app.command()(runs.export)
app.command()(runs.curve)
app.command()(runs.show)
app.command()(runs.report)
app.command()(runs.stacks)
app.command()(before_run.doctor)
app.command()(runs.bugreport)
app.command()(launch.supervise)
app.command()(own.contract)
app.add_typer(serve.app, name="serve")
app.add_typer(cluster.app, name="cluster")
app.add_typer(launch.app, name="launch")
app.add_typer(convert.app, name="convert")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"verlite {__version__}")
        raise typer.Exit


@app.callback()
def prepare(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Clean the output, and make modules in the working directory importable, as `python -m`
    does."""
    clean_output()
    try:
        folder = os.getcwd()
    except OSError as error:
        fail(f"the current folder cannot be used: {error.strerror}. Change to one that exists.")
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)


def program() -> None:
    """Run the command and end the process. Python would need a second to free torch's modules."""
    try:
        app(prog_name="verlite")
    except SystemExit as stop:
        if "torch" not in sys.modules or not isinstance(stop.code, int):
            raise
        from verlite.trainer.stop import leave

        leave(stop.code)
