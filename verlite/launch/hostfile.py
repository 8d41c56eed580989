"""Read a DeepSpeed hostfile: one training host and its number of devices per line."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verlite.config.problems import ConfigError, Problem

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
