"""Helpers shared by the commands, and options that a data class declares."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

import typer

if TYPE_CHECKING:
    from verlite.config.load import Loaded
    from verlite.config.problems import ConfigError


TrainingArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="The training command's arguments, unchanged."),
]


def fail(error: object, code: int = 2) -> NoReturn:
    """Print an error to stderr and exit with `code`."""
    typer.echo(str(error), err=True)
    raise typer.Exit(code)


@contextmanager
def failing(*errors: type[Exception], code: int = 2) -> Iterator[None]:
    """End the command if the block raises one of these errors: see `fail`."""
    try:
        yield
    except errors as error:
        fail(error, code)


def refuse(error: "ConfigError") -> NoReturn:
    """Print all problems of a configuration to stderr and exit with code 2."""
    from verlite.terminal import console

    console(stderr=True).print(error.text(), soft_wrap=True, end="")
    raise typer.Exit(2)


def load_config(arguments: list[str] | None, program: str, elsewhere: bool = False) -> "Loaded":
    """Return a training command's configuration; `elsewhere` as in `compose`. Print all problems
    and exit if it is invalid."""
    from verlite.config.load import main_argv

    return main_argv(arguments or [], program, elsewhere)


def from_data_classes(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with options in place of each data class that it takes.

    A field is declared as a parameter of a command is: `name: Annotated[type, typer.Option(...)] =
    default`. One of type tuple[X, ...] may be given several times. One without Annotated is not an
    option. A parameter's own default, an object of the class, replaces the defaults of its fields.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    declared: dict[str, tuple[Any, list[str]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            options = list(_options(kind, parameter.default))
            declared[parameter.name] = kind, [option.name for option in options]
            parameters += options
        else:
            parameters.append(parameter.replace(annotation=kind, kind=parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, (kind, names) in declared.items():
            values = {each: given.pop(each) for each in names}
            given[name] = kind(**{each: _unlisted(value) for each, value in values.items()})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options(kind: Any, preset: Any) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each field that is an option."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if get_origin(hints[field.name]) is not Annotated:
            continue
        of, *extras = get_args(hints[field.name])
        default: Any = field.default
        if preset is not inspect.Parameter.empty:
            default = getattr(preset, field.name)
        if get_origin(of) is tuple:
            of, default = list[get_args(of)[0]], list(default)  # type: ignore[misc]
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=Annotated[of, *extras],
        )


def _unlisted(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
