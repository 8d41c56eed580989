"""The sources of configuration values: YAML files in Hydra's defaults order, and overrides."""

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import verlite
from verlite.config.commands import PPO, Command
from verlite.config.problems import ConfigError, Problem
from verlite.masking import display, is_secret

COMMAND_LINE = "command line"
PYTHON = "Python"
TYPED = (COMMAND_LINE, PYTHON)
"""Origins where every value is the user's choice, also one that is the default."""
TYPOGRAPHIC = re.compile("[\u2010-\u2015\u2018-\u201f\u2212\u00a0]")
"""Dashes, quotes and spaces that editors and pages put in place of those of the keyboard."""
TEXT_MAPPINGS = ("cluster.component_placement", "ray_kwargs.ray_init.runtime_env.env_vars")
"""Mappings whose values are text, as typed: 0-3,6 and 1e-3 are not numbers there."""


@dataclass(frozen=True)
class Assignment:
    """One `key=value`. The key may be unknown."""

    key: str
    value: Any
    origin: str
    """"command line", "Python", or the name of the YAML file."""
    by_user: bool
    """False: from one of verlite's own files."""
    delete: bool = False
    """True for `~key`."""
    added: bool = False
    """True for `+key`."""


def conf_dir() -> Path:
    """Return the folder of verlite's own YAML files, in a checkout or an installed wheel."""
    package = Path(verlite.__file__).resolve().parent
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def from_command_line(
    overrides: Sequence[str], config_dir: str | Path | None, command: Command = PPO
) -> tuple[list[Assignment], list[str], list[Problem]]:
    """Parse overrides.

    Args:
        overrides: the arguments of the command line, without options.
        config_dir: the user's folder of YAML files.
        command: the command that takes the overrides.

    Returns:
        The assignments, the overrides that select a file of a config group in the user's folder,
        and the problems.
    """
    assignments: list[Assignment] = []
    groups: list[str] = []
    overrides, problems = _without_spaces(overrides)
    for text in overrides:
        key = text.lstrip("+~").partition("=")[0]
        if text.startswith("-"):
            problems.append(Problem(text, None, "unknown option", _option_remedy(text, command)))
        elif text.startswith(("'", '"')):
            rule = "the quotes are part of the argument"
            problems.append(Problem(text, None, rule, "Remove one level of quotes."))
        elif _is_group(key, config_dir):
            groups.append(text)
        else:
            assignment = _parse_override(text, problems, command)
            if assignment:
                assignments.append(replace(assignment, added=text.startswith("+")))
    return assignments, groups, problems


def _option_remedy(text: str, command: Command) -> str:
    key, equals, value = text.lstrip("-").partition("=")
    if command.find(key) or command.tables.new_name(key):
        return f"Write keys without dashes: {key}={value if equals else 'VALUE'}"
    return "Options are --config-name, --config-path and --help."


def _without_spaces(overrides: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Return the overrides without those written as `key = value`, and a problem for each of those.

    A shell splits `key = value` into up to three arguments.
    """
    kept: list[str] = []
    problems: list[Problem] = []
    position = 0
    while position < len(overrides):
        words = _spaced_override(overrides[position:])
        if words is None:
            kept.append(overrides[position])
            position += 1
            continue
        key, _, value = "".join(words).partition("=")
        key = key.strip()
        shown = display(key, value.strip(), key in PPO.keys)
        rule = "there are spaces around the = sign"
        problems.append(Problem(f"{key} = {shown}", None, rule, f"Write {key}={shown}"))
        position += len(words)
    return kept, problems


def _spaced_override(words: Sequence[str]) -> Sequence[str] | None:
    """Return the first arguments if they are one override with spaces around its = sign."""
    first = words[0]
    following = words[1] if len(words) > 1 else ""
    if "=" not in first and following == "=":
        return words[:3]
    if "=" not in first and following.startswith("="):
        return words[:2]
    is_value = following and "=" not in following and following[0] not in "-~+"
    if first.endswith("=") and is_value:
        return words[:2]
    if first.partition("=")[0].endswith(" "):
        return words[:1]
    return None


def _is_group(key: str, config_dir: str | Path | None) -> bool:
    """Return whether a key names a config group: a subfolder of the user's folder."""
    if not config_dir or not re.fullmatch(r"[\w/]+(@[\w.]+)?", key):
        return False
    return (Path(config_dir) / key.split("@")[0]).is_dir()


@functools.cache
def _parser() -> Any:
    """Return Hydra's parser of overrides. Making one costs half as much as an override."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


def _parse_override(text: str, problems: list[Problem], command: Command) -> Assignment | None:
    """Return the assignment of one override, or report a problem and return None."""
    from hydra.errors import HydraException

    key, equals, raw = text.lstrip("+~").partition("=")
    known = command.find(command.tables.new_name(key) or key)
    if not equals and not text.startswith("~"):
        remedy = "Write overrides as key=value."
        if text.strip() == "\\":
            remedy = "Remove the spaces behind it: a backslash continues only at the end of a line."
        problems.append(Problem(key or text, None, "is not an override", remedy))
        return None
    # Hydra's grammar rejects or changes text such as ~/data, /runs/lr=1e-6 or 0-3,6. Values of
    # text keys are therefore taken literally.
    takes_text = known is not None and (
        known.type.startswith("text") or known.name in TEXT_MAPPINGS
    )
    any_type = known is not None and known.any_type
    is_hidden = is_secret(key, raw) and key not in command.keys
    shown = "***" if is_hidden else raw
    try:
        override = _parser().parse_override(text)
        if not override.is_sweep_override():
            value = override.value()
            if (takes_text or any_type) and isinstance(value, bool | int | float):
                # The name 2024_11 is not a number, and 1e-6 would be printed differently.
                value = raw.strip()
            return Assignment(
                override.key_or_group, value, COMMAND_LINE, True, override.is_delete()
            )
        rule = "a comma outside brackets starts a sweep of several runs"
        remedy = f"Write a list as {key}=[{shown}]."
        if known is not None and "number" in known.type and re.fullmatch(r"\d{1,3}(,\d{3})+", raw):
            rule = "a comma does not separate thousands"
            remedy = f"Write {key}={raw.replace(',', '')}."
        problem = Problem(key, shown, rule, remedy)
    except HydraException as error:
        takes_text = takes_text or any_type
        rule = "cannot be parsed"
        if not is_hidden:
            rule += f": {str(error).splitlines()[0]}"
        problem = Problem(key, shown, rule, f"Quote the value: '{key}=\"...\"'.")
        typographic = TYPOGRAPHIC.search(text)
        if text.startswith("\\"):
            remedy = "Remove the spaces behind it: a backslash continues only at the end of a line."
            problem = Problem(text, None, "begins with a backslash", remedy)
        elif typographic and not takes_text:
            rule = f"contains {typographic[0]}, a typographic character"
            remedy = "Type dashes and quotes again: text that was copied may have others."
            problem = Problem(key, shown, rule, remedy)
    is_template = raw.startswith(("{%", "{{", "{#"))
    if takes_text and raw and (is_template or raw[0] not in "[{'\""):
        return Assignment(key, raw, COMMAND_LINE, True)
    if known is not None and known.free and raw.startswith("{"):
        # Hydra's grammar has no quoted keys. YAML and JSON do.
        mapping = _flow_mapping(raw)
        if mapping is not None:
            return Assignment(key, mapping, COMMAND_LINE, True)
    problems.append(problem)
    return None


def _flow_mapping(text: str) -> dict[str, Any] | None:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    return value if isinstance(value, dict) else None


@functools.cache
def from_our_yaml(name: str, command: Command = PPO) -> list[Assignment]:
    """Return `from_yaml` of one of verlite's own files. These do not change during a process."""
    return from_yaml(name, None, (), command)


def our_names(command: Command = PPO) -> tuple[str, ...]:
    """Return the names of verlite's own YAML files that fit a command's schema."""
    names = []
    for file in sorted(conf_dir().glob("*.yaml")):
        used = set(yaml.safe_load(file.read_text(encoding="utf-8")))
        if used - {"defaults", "hydra"} <= command.sections:
            names.append(file.stem)
    return tuple(names)


def from_yaml(
    name: str, config_dir: Path | None, groups: Iterable[str], command: Command = PPO
) -> list[Assignment]:
    """Return the assignments of a configuration's YAML files, in the order of the defaults list.

    Args:
        name: the file's name without its suffix.
        config_dir: the user's folder; it takes precedence over verlite's.
        groups: overrides that select files of config groups.
        command: the command that takes the configuration.

    Raises:
        ConfigError: a file is missing or cannot be parsed.
    """
    own = conf_dir()
    folders = [own] if config_dir is None else [config_dir, own]
    if not folders[0].is_dir():
        rule = "is a file, not a folder" if folders[0].is_file() else "does not exist"
        remedy = "Give the folder of your YAML files; --config-name names the file."
        raise ConfigError([Problem("--config-path", str(config_dir), rule, remedy)])
    home = next((folder for folder in folders if (folder / f"{name}.yaml").is_file()), None)
    if home is None:
        available = set(our_names(command))
        for folder in folders[:-1]:
            available.update(file.stem for file in folder.glob("*.yaml"))
        rule = f"{name}.yaml was not found in {' or '.join(map(str, folders))}"
        remedy = f"Available: {', '.join(sorted(available))}."
        raise ConfigError([Problem("--config-name", name, rule, remedy)])
    folders.sort(key=lambda folder: folder != home)
    assignments = []
    for path, package in _defaults_list(name, folders, groups):
        file = next(folder / path for folder in folders if (folder / path).is_file())
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=False) or {}
        if not isinstance(content, dict):
            raise ConfigError([Problem(str(file), None, "must contain keys and values")])
        prefix = f"{package}." if package else ""
        for key, value in _without_verls_compile(content).items():
            if key not in ("defaults", "hydra"):
                by_user = file.parent != own
                assignments.append(Assignment(prefix + str(key), value, path, by_user))
    return assignments


def _without_verls_compile(content: Any) -> Any:
    """Leave out `use_torch_compile: true` beside a `_target_` of verl: a copy of its files.

    It is verl's default and compiles the entropy. verlite's key compiles the model's layers.
    """
    if not isinstance(content, dict):
        return content
    is_verls = str(content.get("_target_", "")).startswith("verl.")
    return {
        key: _without_verls_compile(value)
        for key, value in content.items()
        if not (is_verls and key == "use_torch_compile" and value is True)
    }


def _defaults_list(
    name: str, folders: list[Path], groups: Iterable[str]
) -> Iterator[tuple[str, str | None]]:
    """Yield (file, package) of every YAML file of a configuration. Later files override earlier."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode

    overrides = list(groups)
    if folders[1:]:
        search = ",".join(f"file://{folder}" for folder in folders[1:])
        overrides.insert(0, f"hydra.searchpath=[{search}]")
    try:
        with initialize_config_dir(str(folders[0]), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            order = loader.compute_defaults_list(name, overrides, RunMode.RUN).defaults
    except yaml.YAMLError as error:
        rule = f"is not valid YAML: {error}"
        raise ConfigError([Problem("--config-name", name, rule)]) from error
    except (HydraException, OmegaConfBaseException) as error:
        remedy = "Check the defaults list at the top of the file."
        problem = Problem("--config-name", name, str(error).splitlines()[0], remedy)
        raise ConfigError([problem]) from error
    for entry in order:
        path = f"{entry.config_path}.yaml"
        if entry.config_path and any((folder / path).is_file() for folder in folders):
            yield path, entry.package
