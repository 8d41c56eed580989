"""Where values come from: YAML files in the order of Hydra's defaults lists, and overrides in Hydra's grammar."""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import verlite
from verlite.config import aliases, keys
from verlite.config.problems import ConfigError, Problem, is_secret

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Assignment:
    """One `key=value`, before it is known whether the key exists."""

    key: str
    value: Any
    origin: str
    """"command line", or the YAML file's name."""
    by_user: bool
    """Not from one of verlite's own files."""
    delete: bool = False
    """`~key`."""


def conf_dir() -> Path:
    """The folder of verlite's own YAML files, in a checkout or in an installed wheel."""
    package = Path(verlite.__file__).resolve().parent
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def from_command_line(
    overrides: Iterable[str],
    config_dir: str | Path | None,
    schema_keys: dict[str, keys.Key] | None = None,
) -> tuple[list[Assignment], list[str], list[Problem]]:
    """(assignments, overrides that choose a file of a config group in the user's folder, what cannot be read).

    schema_keys: another schema's `keys.table`; None: the training loop's.
    """
    assignments: list[Assignment] = []
    groups: list[str] = []
    problems: list[Problem] = []
    for text in overrides:
        key, equals, _ = text.lstrip("+~").partition("=")
        if text.startswith("-"):
            problems.append(
                Problem(
                    text,
                    None,
                    "there is no such option",
                    "Options are --config-name, --config-path and --help.",
                )
            )
        elif (
            config_dir
            and re.fullmatch(r"[\w/]+(@[\w.]+)?", key)
            and (Path(config_dir) / key.split("@")[0]).is_dir()
        ):
            groups.append(text)
        else:
            assignment = _parse_override(text, problems, schema_keys)
            if assignment:
                assignments.append(assignment)
    return assignments, groups, problems


def _parse_override(
    text: str, problems: list[Problem], schema_keys: dict[str, keys.Key] | None
) -> Assignment | None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, raw = text.lstrip("+~").partition("=")
    known = keys.find(key if schema_keys else aliases.renamed(key) or key, schema_keys)
    if not equals and not text.startswith("~"):
        problems.append(Problem(key, None, "is no override", "Overrides are written key=value."))
        return None
    # Text such as ~/data, /runs/lr=1e-6 or 0-3,6 has no reading in Hydra's grammar, or another one: it is taken as it stands.
    of_text = known is not None and (
        known.type.startswith("text") or known.name == "cluster.component_placement"
    )
    any_type = known is not None and known.any_type
    hidden = is_secret(key, raw) and not keys.is_plain(key)
    shown = "***" if hidden else raw
    try:
        override = OverridesParser.create().parse_override(text)
        if not override.is_sweep_override():
            value = override.value()
            if (of_text or any_type) and isinstance(value, bool | int | float):
                value = (
                    raw.strip()
                )  # the name 2024_11 is no number, and 1e-6 would be written otherwise
            return Assignment(
                override.key_or_group, value, COMMAND_LINE, True, override.is_delete()
            )
        problem = Problem(
            key,
            shown,
            "a comma outside brackets asks for several runs",
            f"A list is written {key}=[{shown}].",
        )
    except HydraException as error:
        of_text = of_text or any_type
        reason = (
            "the value cannot be read"
            if hidden
            else f"cannot be read: {str(error).splitlines()[0]}"
        )
        problem = Problem(key, shown, reason, f"Quote the value: '{key}=\"...\"'.")
    if of_text and raw and raw[0] not in "[{'\"":
        return Assignment(key, raw, COMMAND_LINE, True)
    if known is not None and known.free and raw.startswith("{"):
        mapping = _flow_mapping(
            raw
        )  # as one writes it in YAML or JSON, with quoted keys, which Hydra's grammar lacks
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
def from_our_yaml(name: str, sections: frozenset[str] | None = None) -> list[Assignment]:
    """`from_yaml` for verlite's own files, which do not change while a process runs."""
    return from_yaml(name, None, (), sections)


def our_names(sections: frozenset[str] | None = None) -> list[str]:
    """Names of verlite's own YAML files that fit a schema with these top-level names; None: the training loop's."""
    known = sections or frozenset(name for name in keys.keys() if "." not in name)
    tops = {
        file.stem: set(yaml.safe_load(file.read_text(encoding="utf-8")))
        for file in conf_dir().glob("*.yaml")
    }
    return sorted(name for name, top in tops.items() if top - {"defaults", "hydra"} <= known)


def from_yaml(
    name: str,
    config_dir: Path | None,
    groups: Iterable[str],
    sections: frozenset[str] | None = None,
) -> list[Assignment]:
    """The YAML files of a configuration, first to last, as assignments. ConfigError: a file that is missing or cannot be read.

    sections: the top-level names of another schema; None: the training loop's.
    """
    own = conf_dir()
    folders = [own] if config_dir is None else [config_dir, own]
    if not folders[0].is_dir():
        raise ConfigError([Problem("--config-path", str(config_dir), "is no folder")])
    home = next((folder for folder in folders if (folder / f"{name}.yaml").is_file()), None)
    if home is None:
        theirs = {
            file.stem for folder in folders if folder != own for file in folder.glob("*.yaml")
        }
        available = ", ".join(sorted(theirs.union(our_names(sections))))
        where = " or ".join(map(str, folders))
        raise ConfigError(
            [
                Problem(
                    "--config-name", name, f"no {name}.yaml in {where}", f"There are: {available}."
                )
            ]
        )
    folders.sort(key=lambda folder: folder != home)
    assignments = []
    for path, package in _defaults_list(name, folders, groups):
        file = next(folder / path for folder in folders if (folder / path).is_file())
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=False) or {}
        if not isinstance(content, dict):
            raise ConfigError([Problem(str(file), None, "must hold keys and values")])
        for key, value in content.items():
            if key not in ("defaults", "hydra"):
                prefix = f"{package}." if package else ""
                assignments.append(Assignment(prefix + str(key), value, path, file.parent != own))
    return assignments


def _defaults_list(
    name: str, folders: list[Path], groups: Iterable[str]
) -> list[tuple[str, str | None]]:
    """(file, package) of every YAML file that `name` is made of, in the order in which they are laid over each other."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode

    search = (
        [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders[1:])}]"]
        if folders[1:]
        else []
    )
    try:
        with initialize_config_dir(str(folders[0]), version_base="1.3"):
            order = (
                GlobalHydra.instance()
                .config_loader()
                .compute_defaults_list(name, [*search, *groups], RunMode.RUN)
                .defaults
            )
    except yaml.YAMLError as error:
        raise ConfigError([Problem("--config-name", name, f"is no YAML: {error}")]) from error
    except (HydraException, OmegaConfBaseException) as error:
        remedy = "Check the defaults list at the top of the file."
        raise ConfigError(
            [Problem("--config-name", name, str(error).splitlines()[0], remedy)]
        ) from error
    paths = [(f"{entry.config_path}.yaml", entry.package) for entry in order if entry.config_path]
    return [
        (path, package)
        for path, package in paths
        if any((folder / path).is_file() for folder in folders)
    ]
