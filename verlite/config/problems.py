"""What is wrong with a configuration, as data: every rule reports a Problem, and all of them are shown together."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

SECRET = re.compile(r"(?i)(token|secret|password|passwd|passphrase|credential|key)s?$")
URL_PASSWORD = re.compile(
    r"(://[^/:@\s]*:)[^/@\s]+(?=@)|([?&](?:api_?key|key|token|secret|password)=)[^&\s]+",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Problem:
    """One violated rule: the key as typed, its value, the rule, and what to type in its place."""

    key: str
    value: Any
    rule: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.typed()}: {self.rule}." + (f" {self.remedy}" if self.remedy else "")

    def typed(self) -> str:
        """key=value as one types it; the key alone where there is no value."""
        return f"{self.key}={display(self.key, self.value)}" if self.value is not None else self.key


class ConfigError(ValueError):
    """The configuration cannot run. `problems` holds every violation, not only the first."""

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
        """For the terminal, as rich Text: key and value of each problem as one types them, below them the rule and the remedy."""
        from rich.text import Text

        text = Text.assemble((self._title(), "bold red"), "\n")
        for problem in self.problems:
            text.append(f"\n  {problem.typed()}\n", "bold").append(f"    {problem.rule}.\n")
            if problem.remedy:
                text.append(f"    {problem.remedy}\n", "green")
        return text


def is_secret(key: str, value: Any) -> bool:
    """True for a text value whose key says that it is a secret. Meant for keys outside the schema: `prompt_key` is none."""
    return isinstance(value, str) and bool(SECRET.search(key.rsplit(".", 1)[-1]))


def display(key: str, value: Any, known: bool = False) -> str:
    """The value as one would type it, with secrets masked. `known`: the key belongs to the schema, so its name is no hint."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{display(f'{key}.{k}', v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(display(key, item, known) for item in value) + "]"
    if not known and is_secret(key, value) and not key.endswith(("prompt_key", "reward_fn_key")):
        return "***"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return URL_PASSWORD.sub(lambda found: f"{found[1] or found[2]}***", str(value))


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known dotted keys that a person most likely meant: by whole path, and by last part for keys in the wrong section."""
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
        return likeness + (1 if key.endswith("." + name) else 0.5 if key in similar else 0)

    return sorted(dict.fromkeys(candidates), key=score, reverse=True)[:count]
