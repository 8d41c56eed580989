"""The user's own functions and classes. Their files are read but not imported."""

import ast
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path, PurePath

from verlite.config import keys
from verlite.config.plan import program_words, scores_remotely
from verlite.config.problems import Problem
from verlite.config.rules.context import KEYS, Context
from verlite.config.schema import Config
from verlite.importing import module_file, module_path, names_a_file

PATH = "custom_reward_function.path"
NAME = "custom_reward_function.name"
CUSTOM_CLS = "data.custom_cls."
SAMPLER = "data.sampler."


def reward_function(context: Context) -> Iterator[Problem]:
    """The user's reward function exists and takes the arguments of reward_kwargs."""
    path = context.config.custom_reward_function.path
    name = context.config.custom_reward_function.name
    if path is None:
        return
    if scores_remotely(context.config.reward):
        rule = "is given, and so is reward.remote.url; only one of them can score the samples"
        yield Problem(PATH, path, rule, "Remove one of them.")
    body = yield from _file_with(PATH, path, NAME, name)
    if body is not None:
        yield from _unknown_arguments(context.config, body, name, f"{name} in {path}")


def agent_program(context: Context) -> Iterator[Problem]:
    """The agent program is on this machine, and the Python file or function that it names."""
    key, command = "agent.command", context.agent.command
    words = program_words(command)
    if len(words) == 1 and ":" in words[0]:
        place, _, name = words[0].rpartition(":")
        yield from _file_with(key, place, key, name)
    elif words and shutil.which(words[0]) is None:
        rule = f"{words[0]} is not a program on this machine's PATH"
        remedy = "Give its path."
        if Path(words[0]).is_file():
            rule = f"{words[0]} is not executable"
            remedy = f"Write 'python {words[0]}', or chmod +x it if its first line is #!."
        yield Problem(key, command, rule, remedy)
    else:
        file = next((word for word in words[1:] if word.endswith(".py")), None)
        if file and not Path(file).is_file():  # without a shell, ~ is a name
            rule = f"{file} is not there: programs start in the folder of the run's command"
            yield Problem(key, command, f"{rule}, and without a shell", "Give its path.")


def own_data(context: Context) -> Iterator[Problem]:
    """The user's data set and sampler exist."""
    data = context.config.data
    for path_key, path, name_key, name in (
        (CUSTOM_CLS + "path", data.custom_cls.path, CUSTOM_CLS + "name", data.custom_cls.name),
        (
            SAMPLER + "class_path",
            data.sampler.class_path,
            SAMPLER + "class_name",
            data.sampler.class_name,
        ),
    ):
        if path is None:
            continue
        if not name:
            yield Problem(name_key, name, f"must be given with {path_key}", "Name the class.")
        else:
            yield from _file_with(path_key, path, name_key, name)


def _file_with(
    path_key: str, path: str, name_key: str, name: str
) -> Generator[Problem, None, list[ast.stmt] | None]:
    """Check that a file defines a name, and return its statements; None: it cannot be read."""
    file = module_path(path)
    if file is None or not file.is_file():
        why = "does not exist"
        if Path(path).exists():
            what = "a folder, not" if Path(path).is_dir() else "not the name of"
            why = f"is {what} a Python file"
        yield Problem(path_key, path, why, "Give a Python file, or a module's dotted name.")
        return None
    try:
        body = _read(file)
    except (SyntaxError, ValueError) as error:
        yield Problem(path_key, path, f"is not valid Python: {error}", "Correct the file.")
        return None
    if not _may_define(body, name):
        yield Problem(name_key, name, f"{path} does not define it", _functions_of(body))
    return body


def own_functions(context: Context) -> Iterator[Problem]:
    """The user's own functions and classes exist."""
    for key in KEYS.values():
        if not key.facts.own or not context.ok(key.name):
            continue
        value = keys.get(context.config, key.name)
        for path in value if isinstance(value, list) else [value]:
            yield from _own_name(key.name, path)


def own_engine(context: Context) -> Iterator[Problem]:
    """The user's own engine has what trainer.mode=async and pipelined call. One with a base class
    may inherit it."""
    key = "actor_rollout_ref.rollout.name"
    value = context.rollout.name
    module, colon, name = value.partition(":")
    file = module_file(module) if colon and context.overlaps and context.ok(key) else None
    if file is None or file.suffix != ".py":
        return
    for node in _read(file):
        if not isinstance(node, ast.ClassDef) or node.name != name or node.bases:
            continue
        defined = _defined(node.body)
        missing = [f"no method {one}" for one in ("progress", "so_far") if one not in defined]
        adds = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "add"]
        if adds and not adds[-1].args.vararg and len(adds[-1].args.args) < 5:
            missing.append("an add without the argument so_far")
        if missing:
            yield Problem(
                key,
                value,
                f"trainer.mode={context.trainer.mode} asks an engine for the tokens of its running "
                f"requests, and goes on with them; {name} has {' and '.join(missing)}",
                "Add what is missing as in verlite.rollout.batched.Core, or use trainer.mode=sync.",
            )


def _own_name(key: str, value: str) -> Iterator[Problem]:
    """Check that "package.module:name" exists. A name without a colon is a built-in one."""
    module, colon, name = value.partition(":")
    if not colon:
        return
    file = None if names_a_file(module) else module_file(module)
    if names_a_file(module):
        remedy = (
            f"Write {PurePath(module).stem}:{name}, and start in the file's folder or add that to "
            "PYTHONPATH. Every worker must find it."
        )
        yield Problem(key, value, "names a file, but must name a module", remedy)
    elif file is None:
        remedy = (
            "Start in the folder that has it, or add that to PYTHONPATH. Every worker must find it."
        )
        yield Problem(key, value, f"module {module} was not found on the Python path", remedy)
    elif file.suffix == ".py":
        yield from _own_function(key, value, file, name)


def _own_function(key: str, value: str, file: Path, name: str) -> Iterator[Problem]:
    module = value.partition(":")[0]
    try:
        body = _read(file)
    except (SyntaxError, ValueError) as error:
        yield Problem(key, value, f"{module} is not valid Python: {error}", "Correct the file.")
        return
    if not _may_define(body, name):
        yield Problem(key, value, f"{module} does not define {name}", _functions_of(body))


def _read(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8"), file.name).body


def _defined(body: list[ast.stmt]) -> list[str]:
    """Return the names of functions and classes of a file."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [node.name for node in body if isinstance(node, kinds)]


def _functions_of(body: list[ast.stmt]) -> str:
    functions = _defined(body)
    return f"It defines {', '.join(functions)}." if functions else "It defines no function."


def _may_define(body: list[ast.stmt], name: str) -> bool:
    """Return whether a file may define a name: by def, class, import or assignment, or inside if
    and try.
    """
    found = set(_defined(body))
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            return True
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.update(alias.asname or alias.name for alias in node.names)
        if isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return name in found or "*" in found


def _unknown_arguments(
    config: Config, body: list[ast.stmt], name: str, where: str
) -> Iterator[Problem]:
    """Report entries of reward_kwargs that a function does not take.

    One not defined in `body` may take any.
    """
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            arguments = node.args
            break
    else:
        return
    if arguments.kwarg is not None:
        return
    taken = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    for key, value in config.custom_reward_function.reward_kwargs.items():
        if key not in taken:
            rule = f"{where} does not take this argument, and has no **kwargs"
            remedy = f"Its arguments: {', '.join(taken)}."
            yield Problem(f"custom_reward_function.reward_kwargs.{key}", value, rule, remedy)
