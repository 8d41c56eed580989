"""`verlite convert`: the training command of another framework as a verlite command."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verlite.cli.common import fail, refuse

if TYPE_CHECKING:
    from verlite.convert.text import Conversion

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Convert the training command of another framework. Prints a verlite command. "
    "Exit code 2 if a setting has no counterpart and training would be another without it.",
)

Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write a YAML file for --config-name instead.")
]
Version = Annotated[
    str | None,
    typer.Option(
        "--source-version",
        help="Version of the other framework that the command was written for. Its defaults apply "
        "to what is not given. Default: the newest known one; the output names it.",
    ),
]


@app.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]})
def openrlhf(
    flags: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND-LINE", help="OpenRLHF's command line.")
    ],
    output: Output = None,
    version: Version = None,
) -> None:
    """Convert a command line of OpenRLHF's train_ppo_ray, train_sft or train_dpo.

    Flags have dots, underscores or hyphens. Write `--` before the command line. Everything up to
    the program is left out, so a whole `ray job submit ...` or `deepspeed --module ...` command
    may follow. Flags alone are those of train_ppo_ray.
    """
    from verlite.convert import openrlhf

    show(lambda: openrlhf.convert(flags, version), output)


@app.command()
def rlinf(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="A YAML file of RLinf.")],
    output: Output = None,
) -> None:
    """Convert a YAML file of RLinf's math and reasoning examples."""
    from verlite.convert import rlinf as source

    show(lambda: source.convert(file), output)


@app.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]})
def trl(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[FILE] [-- COMMAND-LINE]", help="A .py or YAML file, or a command line."
        ),
    ],
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes of the training: TRL's batch sizes are for each. Default: what the "
            "command line of accelerate, torchrun or deepspeed says, else 8.",
        ),
    ] = None,
    trainer: Annotated[
        str | None, typer.Option(help="grpo, rloo, ppo, sft or dpo. Default: what the file says.")
    ] = None,
    output: Output = None,
    version: Version = None,
) -> None:
    """Convert a script, YAML file or command line of TRL. Scripts are read, never executed.

    The literal arguments of GRPOConfig(...), GRPOTrainer(...) and LoraConfig(...) count. A script
    with a parser is converted with the command line after `--`, or the first one in its docstring:
    `verlite convert trl train.py -- --learning_rate 1e-6`,
    `verlite convert trl -- trl grpo --model_name_or_path MODEL ...`.
    """
    from verlite.convert import trl as source

    if trainer is not None and trainer not in source.TABLES:
        fail(f"--trainer={trainer} is not one of {', '.join(source.TABLES)}.")
    has_file = words[0].endswith((".py", ".yaml", ".yml")) and not words[0].startswith("-")
    file = Path(words[0]) if has_file else None
    rest = words[1:] if has_file else words
    show(lambda: source.convert(file, gpus, trainer, version, rest), output)


def show(convert: "Callable[[], Conversion]", output: Path | None) -> None:
    """Print a conversion, or write it to a YAML file. Exits with code 2 if it has problems."""
    from verlite.config.problems import ConfigError
    from verlite.convert import text

    try:
        conversion = convert()
    except ConfigError as error:
        refuse(error)
    except RecursionError:
        fail("the file cannot be converted: its values are nested too deeply, or without end.")
    if conversion.problems:
        refuse(ConfigError(conversion.problems))
    if output is None:
        typer.echo(text.command(conversion), nl=False)
        return
    path = output.with_suffix(".yaml")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text.yaml_text(conversion))
    except FileExistsError:
        fail(f"{path} exists. Remove it, or choose another name.")
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}.")
    folder, name = path.parent.resolve(), path.stem
    typer.echo(f"{path} written. Check it, then train:")
    name_of = text.program(conversion)
    check = "verlite check" + f" {name_of}" * (name_of != "main_ppo")
    for program in (check, f"{conversion.launch} verlite.{name_of}"):
        typer.echo(f"  {program} --config-path {folder} --config-name {name}")
