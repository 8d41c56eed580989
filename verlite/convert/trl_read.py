"""Read the settings of a TRL script or YAML file. A script is parsed, never executed."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from verlite.config.problems import ConfigError, Problem

TRAINERS = {"GRPO": "grpo", "RLOO": "rloo", "PPO": "ppo"}
PPO_FIELDS = ("num_ppo_epochs", "kl_coef", "cliprange", "response_length", "total_episodes")
CALLS = tuple(f"{name}{part}" for name in TRAINERS for part in ("Config", "Trainer"))

CONFIGS = tuple(name for name in CALLS if name.endswith("Config"))

Settings = dict[str, Any]


class Computed(str):
    """The text of an expression whose value only running the script would give."""


def read(file: Path) -> tuple[str, Settings]:
    """Return the trainer (grpo, rloo or ppo) and the settings of a script (.py) or YAML file.

    Arguments of LoraConfig have its name in front, such as LoraConfig.r.

    Raises:
        ConfigError: the file cannot be read, or has no configuration, or several.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(file, str(error)) from error
    return _script(file, text) if file.suffix == ".py" else _yaml(file, text)


def _yaml(file: Path, text: str) -> tuple[str, Settings]:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _unreadable(file, str(error).splitlines()[0]) from error
    if not isinstance(content, dict):
        raise _unreadable(file, "it must contain keys and values")
    settings = {str(key): _number(value) for key, value in content.items()}
    is_ppo = any(name in settings for name in PPO_FIELDS)
    return "ppo" if is_ppo else "grpo", settings


def _number(value: Any) -> Any:
    """Return a number for text such as 1e-6, which YAML does not take for one."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _script(file: Path, text: str) -> tuple[str, Settings]:
    try:
        tree = ast.parse(text)
        calls, constants = list(_calls(tree)), _constants(tree)
        changed = dict(_changed_later(tree))
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        raise _unreadable(file, f"{where}{error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise _unreadable(file, f"it is not a script: {error}") from error
    names = {name for name, _ in calls} & set(CALLS)
    trainers = {TRAINERS[name.removesuffix("Config").removesuffix("Trainer")] for name in names}
    configs = [call.lineno for name, call in calls if name in CONFIGS]
    if not trainers:
        remedy = "Scripts that take their settings from the command line: write these as YAML."
        rule = f"calls none of {', '.join(CALLS)}"
        raise ConfigError([Problem(str(file), None, rule, remedy)])
    if len(trainers) > 1 or len(configs) > 1:
        lines = ", ".join(map(str, configs))
        rule = f"has several configurations (lines {lines}): keep one"
        raise ConfigError([Problem(str(file), None, rule)])
    settings: Settings = {}
    for name, call in calls:
        prefix = "LoraConfig." if name == "LoraConfig" else ""
        settings |= {prefix + key: value for key, value in _arguments(name, call, constants)}
    return trainers.pop(), settings | changed


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield (name, call) of each configuration and trainer, in the order of the lines."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rsplit(".", 1)[-1]
            if name in CALLS or name == "LoraConfig":
                found.append((node.lineno, name, node))
    for _, name, node in sorted(found, key=lambda item: item[0]):
        yield name, node


def _constants(tree: ast.AST) -> Settings:
    """Return the literals of variables that are bound once in the file, by an assignment."""
    assigned: Settings = {}
    bound: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                assigned[ast.unparse(target)] = _value(node.value, {})
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            bound.append(ast.unparse(node))
        elif isinstance(node, ast.arg):
            bound.append(node.arg)
    return {
        name: value
        for name, value in assigned.items()
        if bound.count(name) == 1 and not isinstance(value, Computed)
    }


def _changed_later(tree: ast.AST) -> Iterator[tuple[str, Computed]]:
    """Yield (field, text) of each `config.field = ...`, where `config` is a configuration."""
    configs = {
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if ast.unparse(node.value.func).rsplit(".", 1)[-1] in CONFIGS
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in configs:
                yield node.attr, Computed(f"{ast.unparse(node)} = ...")


def _arguments(name: str, call: ast.Call, constants: Settings) -> Iterator[tuple[str, Any]]:
    positional = {"Config": ("output_dir",), "Trainer": ("model", "reward_funcs", "args")}
    kinds = next((names for end, names in positional.items() if name.endswith(end)), ())
    for field, node in [
        *zip(kinds, call.args, strict=False),
        *((None, arg.value) for arg in call.args if isinstance(arg, ast.Starred)),
        *((k.arg, k.value) for k in call.keywords),
    ]:
        if isinstance(node, ast.Starred):
            continue
        if field is None:
            yield "**", Computed(ast.unparse(node))
        elif field != "args":
            yield field, _value(node, constants)


def _value(node: ast.expr, constants: Settings) -> Any:
    text = ast.unparse(node)
    if text in constants:
        return constants[text]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return Computed(text)


def _unreadable(file: Path, why: str) -> ConfigError:
    return ConfigError([Problem(str(file), None, f"cannot be read: {why}")])
