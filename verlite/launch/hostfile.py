"""Read the two files of `verlite launch hostfile`.

A DeepSpeed hostfile has one training host and its number of devices per line. nodes.yaml of the
RLAIF layout names the master node, services and models of a run. Its keys are those of
`recipes/rlaif/config/nodes.yaml`; each becomes a setting of the run.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verlite.config.problems import ConfigError, Problem, nearest

LINE = re.compile(r"(?P<host>\S+)(?P<rest>.*)")
HOST = re.compile(r"(?:[\w.-]+@)?[\w.:%-]+")
"""HOST or USER@HOST, as ssh takes it: a name, an alias of ssh's configuration or an address."""
MAX_SLOTS = 1024


@dataclass(frozen=True)
class Host:
    """One line of a hostfile.

    Attributes:
        target: HOST or USER@HOST, for ssh.
        slots: devices of the host.
        line: its number in the file, from 1.
    """

    target: str
    slots: int
    line: int

    @property
    def name(self) -> str:
        """The host without the user."""
        return self.target.rpartition("@")[2]


def read_hostfile(path: Path) -> list[Host]:
    """Return the hosts of a file in its order.

    A line is `HOST slots=N` or `USER@HOST slots=N`. Text after # and empty lines are left out.

    Raises:
        ConfigError: with every wrong line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        remedy = "Write one line per training host: gpu007 slots=8."
        raise ConfigError(
            [Problem("--hostfile", str(path), f"cannot be read: {error.strerror}", remedy)]
        ) from None
    except UnicodeDecodeError:
        problem = Problem("--hostfile", str(path), "is not a text file in UTF-8")
        raise ConfigError([problem]) from None
    hosts: list[Host] = []
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        parsed = _parse(content, number, path)
        if isinstance(parsed, Host):
            hosts.append(parsed)
        else:
            problems.append(parsed)
    problems += _across_lines(hosts, path)
    if not hosts and not problems:
        rule = "names no host"
        remedy = "Write one line per training host: gpu007 slots=8."
        problems.append(Problem("--hostfile", str(path), rule, remedy))
    if problems:
        raise ConfigError(problems)
    return hosts


def _parse(content: str, number: int, path: Path) -> Host | Problem:
    """Return the host of a line without its comment, or what is wrong with the line."""
    where = f"{path}, line {number}"
    found = LINE.fullmatch(content)
    assert found is not None  # the content is not empty
    host, rest = found["host"], found["rest"].split()
    if host.startswith("-") or not HOST.fullmatch(host):
        rule = f"{host!r} is not HOST or USER@HOST"
        return Problem(where, None, rule, "For other ports and keys use ~/.ssh/config.")
    if len(rest) != 1 or not rest[0].startswith("slots="):
        rule = f"{content!r} is not of the form HOST slots=N"
        return Problem(where, None, rule, f"Such as: {host} slots=8. Comments begin with #.")
    slots = rest[0].removeprefix("slots=")
    if not slots.isascii() or not slots.isdecimal() or not 0 < int(slots[:8]) <= MAX_SLOTS:
        rule = f"slots={slots} is not a number of devices from 1 to {MAX_SLOTS}"
        return Problem(where, None, rule, "slots is the number of GPUs of the host.")
    return Host(host, int(slots), number)


def _across_lines(hosts: list[Host], path: Path) -> Iterator[Problem]:
    """Check that hosts differ and have the same number of devices."""
    first: dict[str, Host] = {}
    for host in hosts:
        if host.name in first:
            rule = f"{host.name} is already on line {first[host.name].line}"
            remedy = "Give each host one line, with all of its devices."
            yield Problem(f"{path}, line {host.line}", None, rule, remedy)
        first.setdefault(host.name, host)
    if len({host.slots for host in hosts}) > 1:
        sizes = ", ".join(f"{host.name} slots={host.slots}" for host in hosts)
        rule = f"hosts have different numbers of slots: {sizes}"
        smallest = min(host.slots for host in hosts)
        remedy = (
            "A run uses the same number of devices on each host: write the smallest, "
            f"slots={smallest}, on every line, or leave a host out."
        )
        yield Problem("--hostfile", str(path), rule, remedy)


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
