"""Problems of a configuration as data.

Every rule reports Problem objects; all of them are shown together.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

SECRET = re.compile(
    r"(token|secret|password|passwd|pwd|passphrase|credential|authorization|bearer|key)s?$"
    r"|(secret|private|access)_?key_?(id|path)$",
    re.IGNORECASE,
)
"""Last parts of names whose text values are masked: hf_token, serper_key, AWS_SECRET_ACCESS_KEY."""
COLUMN = re.compile(
    r"(^|_)(prompt|image|images|video|videos|audio|reward|reward_fn|teacher|student|label|text|"
    r"response|messages|question|answer|input|output|tools|data|source|group|column|sort)_keys?$"
    r"|(^|_)(pad|eos|bos|unk|stop|mask|image|special|added|max|min|num|new)_tokens?$"
    r"|monkeys?$",
    re.IGNORECASE,
)
"""Names that only look like secrets: columns of a data set and special tokens, such as
image_key."""
NUMBER_SECRET = re.compile(r"(secret|password|passwd|pwd|passphrase)s?$", re.IGNORECASE)
"""Names whose numbers are masked too."""
URL_SECRET = re.compile(
    r"(://(?:[^/:@\s]*:)?)[^/@\s]+(?=@)"
    r"|([?&](?:api_?key|key|(?:\w+_)?token|secret|password|sig|signature)=)[^&\s]+",
    re.IGNORECASE,
)
"""Passwords and tokens inside a URL."""


@dataclass(frozen=True)
class Problem:
    """One violated rule: the key, its value, the rule, and the remedy."""

    key: str
    value: Any
    rule: str
    remedy: str = ""
    is_local: bool = False
    """The problem is about this machine, and may not exist where the run starts."""

    def __str__(self) -> str:
        return f"{self.typed()}: {self.rule}." + (f" {self.remedy}" if self.remedy else "")

    def typed(self) -> str:
        """Return key=value as it is typed, or the key alone if there is no value."""
        return f"{self.key}={display(self.key, self.value)}" if self.value is not None else self.key


class ConfigError(ValueError):
    """The configuration is invalid. `problems` contains every violation."""

    def __init__(self, problems: Iterable[Problem], notes: Iterable[str] = ()):
        self.problems = list(problems)
        self.notes = list(notes)
        super().__init__(
            f"{self._title()}:\n" + "\n".join(f"  {problem}" for problem in self.problems)
        )

    def _title(self) -> str:
        count = len(self.problems)
        return f"{count} problem{'s' if count != 1 else ''} in the configuration"

    def text(self):
        """Return rich Text for the terminal: key and value of each problem, and below them rule and
        remedy.
        """
        from rich.text import Text

        text = Text.assemble((self._title(), "bold red"), "\n")
        for problem in self.problems:
            text.append(f"\n  {problem.typed()}\n", "bold").append(f"    {problem.rule}.\n")
            if problem.remedy:
                text.append(f"    {problem.remedy}\n", "green")
        return text


def is_secret(key: str, value: Any) -> bool:
    """Return whether a value is a secret, judged by its key. Only for keys outside the schema."""
    name = key.rsplit(".", 1)[-1]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(NUMBER_SECRET.search(name))
    if not isinstance(value, str) or COLUMN.search(name):
        return False
    return bool(SECRET.search(name))


def display(key: str, value: Any, known: bool = False) -> str:
    """Return the value as it is typed, with secrets masked.

    Args:
        key: the dotted key.
        value: its value.
        known: the key belongs to the schema, so the value is not a secret.
    """
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{display(f'{key}.{k}', v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(display(key, item, known) for item in value) + "]"
    if not known and is_secret(key, value):
        return "***"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return URL_SECRET.sub(lambda found: f"{found[1] or found[2]}***", str(value))


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the known dotted keys most similar to `name`, as a whole or in their last part."""
    known = list(known)
    last = name.rsplit(".", 1)[-1]
    by_last: dict[str, list[str]] = {}
    for key in known:
        by_last.setdefault(key.rsplit(".", 1)[-1], []).append(key)
    similar = [
        key
        for part in difflib.get_close_matches(last, by_last, n=count, cutoff=0.75)
        for key in by_last[part]
    ]
    candidates = by_last.get(last) or [
        *similar,
        *difflib.get_close_matches(name, known, n=count, cutoff=0.7),
    ]

    def score(key: str) -> float:
        likeness = difflib.SequenceMatcher(None, name, key).ratio()
        if key.endswith("." + name):
            return likeness + 1
        return likeness + 0.5 if key in similar else likeness

    return sorted(dict.fromkeys(candidates), key=score, reverse=True)[:count]
