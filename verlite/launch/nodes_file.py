"""Read nodes.yaml of the RLAIF layout: the master node, services and models of a run.

The keys are those of `recipes/rlaif/config/nodes.yaml`. Each becomes a setting of the run.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verlite.config.problems import ConfigError, Problem, nearest

SERVICES = ("generation", "reference")
KEYS: dict[str, type] = {
    "training.master_node": str,
    "training.master_port": int,
    **{f"training.services.{name}.url": str for name in SERVICES},
    "models.base_path": str,
    "models.train.name": str,
    "models.train.path": str,
    "models.output.path": str,
    "models.output.checkpoint_dir": str,
    "models.output.log_dir": str,
}
"""Every key of the file and its type. A service's url may also be a list of addresses."""
URL = re.compile(r"https?://(\[[0-9a-fA-F:]+\]|[\w.-]+)(:(?P<port>\d{1,5}))?/?")
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Nodes:
    """The content of nodes.yaml.

    Attributes:
        master_node: the host of Ray's head and of the driver.
        master_port: port of Ray's head.
        services: base addresses of each service that the run uses, by its name in SERVICES.
        model_path: folder of the model.
        model_name: "" if the file has none.
        checkpoints, logs: folders, relative to the project's root unless absolute.
    """

    master_node: str
    master_port: int
    services: dict[str, list[str]]
    model_path: str
    model_name: str
    checkpoints: Path
    logs: Path

    def settings(self, root: Path) -> dict[str, Any]:
        """Return the settings of the run, key -> value.

        root: the project's root, which the output folder is relative to.
        """
        values: dict[str, Any] = {
            "actor_rollout_ref.model.path": self.model_path,
            "trainer.default_local_dir": str(root / self.checkpoints),
        }
        if self.model_name:
            values["trainer.experiment_name"] = self.model_name
        if self.services.get("generation"):
            values["actor_rollout_ref.rollout.name"] = "server"
            values["actor_rollout_ref.rollout.servers"] = self.services["generation"]
        if self.services.get("reference"):
            values["actor_rollout_ref.ref.url"] = self.services["reference"]
        return values


def read_nodes(path: Path) -> Nodes:
    """Return the content of the file.

    Raises:
        ConfigError: with every unknown, missing or wrong key.
    """
    values, problems = _leaves(path)
    problems += _problems(values, path)
    if problems:
        raise ConfigError(problems)
    services = {}
    for name in SERVICES:
        urls = values.get(f"training.services.{name}.url")
        if urls:
            services[name] = [url.rstrip("/") for url in _listed(urls)]
    name = values.get("models.train.name") or ""
    model = values.get("models.train.path") or f"{values['models.base_path'].rstrip('/')}/{name}"
    output = Path(values.get("models.output.path") or "output")
    return Nodes(
        values["training.master_node"],
        values.get("training.master_port") or DEFAULT_PORT,
        services,
        model,
        name,
        output / (values.get("models.output.checkpoint_dir") or "checkpoints"),
        output / (values.get("models.output.log_dir") or "logs"),
    )


def _leaves(path: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Return the known keys of the file, with dots, and problems of all others.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        remedy = "Copy recipes/rlaif/config/nodes.yaml."
        raise ConfigError([Problem("--nodes", str(path), rule, remedy)]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        rule = f"is not YAML: {' '.join(str(error).split())}"
        raise ConfigError([Problem("--nodes", str(path), rule)]) from None
    if not isinstance(content, dict):
        remedy = "Copy recipes/rlaif/config/nodes.yaml."
        rule = "is not a mapping with the sections training and models"
        raise ConfigError([Problem("--nodes", str(path), rule, remedy)])
    values: dict[str, Any] = {}
    problems = list(_walk(content, "", path, values))
    return values, problems


def _walk(
    section: dict[Any, Any], prefix: str, path: Path, values: dict[str, Any]
) -> Iterator[Problem]:
    """Put the known keys below a section into `values`; yield a Problem for each other one."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        if key in KEYS:
            values[key] = value
        elif any(known.startswith(f"{key}.") for known in KEYS):
            if isinstance(value, dict):
                yield from _walk(value, f"{key}.", path, values)
            elif value is not None:
                keys = ", ".join(known for known in KEYS if known.startswith(f"{key}."))
                yield _problem(key, value, path, f"is a section with the keys {keys}")
        else:
            near = nearest(key, KEYS, 1)
            remedy = f"Did you mean {near[0]}? " if near else ""
            remedy += f"The keys are {', '.join(KEYS)}. Settings of the training follow --."
            yield _problem(key, value, path, "is not a key of this file", remedy)


def _problems(values: dict[str, Any], path: Path) -> list[Problem]:
    """Check the types of the known keys, and that none is missing."""
    problems: list[Problem] = []
    for key, value in values.items():
        if value is None:
            continue
        if key.endswith(".url"):
            problems += _url_problems(key, value, path)
        elif not isinstance(value, KEYS[key]) or isinstance(value, bool) or value == "":
            kind = "a whole number" if KEYS[key] is int else "text"
            problems.append(_problem(key, value, path, f"is not {kind}"))
    if not values.get("training.master_node"):
        rule = "is missing"
        remedy = "Name the line of the hostfile that Ray's head and the driver run on."
        problems.append(_problem("training.master_node", None, path, rule, remedy))
    port = values.get("training.master_port")
    if isinstance(port, int) and not 0 < port < 65536:
        problems.append(_problem("training.master_port", port, path, "is not a port"))
    if not values.get("models.train.path") and not (
        values.get("models.base_path") and values.get("models.train.name")
    ):
        remedy = "Give the model's folder, or models.base_path and models.train.name."
        problems.append(_problem("models.train.path", None, path, "is missing", remedy))
    return problems


def _url_problems(key: str, value: Any, path: Path) -> Iterator[Problem]:
    for url in _listed(value) or [value]:
        match = URL.fullmatch(url) if isinstance(url, str) else None
        if not match or not 1 <= int(match["port"] or 80) <= 65535:
            remedy = "Write http://HOST:PORT, without a path, user or password."
            yield _problem(key, url, path, "is not the address of a service", remedy)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _problem(key: str, value: Any, path: Path, rule: str, remedy: str = "") -> Problem:
    return Problem(f"{path}: {key}", value, rule, remedy)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML's safe loader, which also refuses a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        if len(mapping) != len(node.value):
            raise yaml.constructor.ConstructorError(
                None, None, "a key is given twice in one section", node.start_mark
            )
        return mapping
