"""The keys on docs/metrics.md, to compare them with those that runs and functions write.

A key is in the first column of a table whose head says `key`, and complete: `{a,b}` are two keys,
`<name>` stands for any text.
"""

import functools
import itertools
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
PLACEHOLDER = re.compile(r"<[^<>]+>")


@functools.cache
def keys() -> list[str]:
    """Return the page's keys, with placeholders, in its order."""
    found = []
    in_table = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cell = line.removeprefix("|").partition("|")[0].strip()
        in_table = line.startswith("|") and (in_table or cell == "key")
        if in_table:
            found += [key for name in re.findall(r"`([^`]+)`", cell) for key in expand(name)]
    return found


def expand(name: str) -> list[str]:
    """Return the keys of a name with braces: `a/{b,c}` has two."""
    parts = [part.split(",") for part in re.split(r"[{}]", name)]
    # Text between braces is every second part; a comma elsewhere belongs to the key.
    choices = [part if i % 2 else [",".join(part)] for i, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


@functools.cache
def _pattern() -> re.Pattern[str]:
    def escaped(key: str) -> str:
        return ".+".join(map(re.escape, PLACEHOLDER.split(key)))

    return re.compile("|".join(map(escaped, keys())))


@functools.cache
def is_on_page(key: str) -> bool:
    """Say whether the page has this key."""
    return _pattern().fullmatch(key) is not None


def documented(line: dict[str, Any]) -> dict[str, Any]:
    """Return metrics, such as a line of metrics.jsonl. Fail if the page does not have a key."""
    missing = [key for key in line if key not in ("step", "time") and not is_on_page(key)]
    assert not missing, f"docs/metrics.md does not describe {', '.join(missing)}"
    return line
