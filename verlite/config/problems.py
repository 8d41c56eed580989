"""Problems and notes of a configuration as data.

Every rule reports Problem objects; all of them are shown together.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verlite.masking import display

if TYPE_CHECKING:
    from rich.text import Text


@dataclass(frozen=True)
class Problem:
    """One violated rule: the key, its value, the rule, and the remedy."""

    key: str
    value: Any
    rule: str
    remedy: str = ""
    is_local: bool = False
    """The problem is about this machine, and may not exist where the run starts."""
    is_file: bool = False
    """The problem is a missing file, so nothing can be said about its content."""

    def __str__(self) -> str:
        return f"{self.brief()}." + (f" {self.remedy}" if self.remedy else "")

    def brief(self) -> str:
        """Return key, value and rule, without the period."""
        return f"{self.typed()}: {self.rule}"

    def typed(self) -> str:
        """Return key=value as it is typed, or the key alone if there is no value."""
        return f"{self.key}={display(self.key, self.value)}" if self.value is not None else self.key


@dataclass(frozen=True)
class Note:
    """Something to know about a valid configuration. str(note) is a whole sentence.

    kind: "renamed", "ignored" (keys that verlite accepts without effect), "unused" (keys without
        effect in this configuration), or "remark".
    short: the same in an enumeration of notes of this kind; "" for remarks.
    """

    text: str
    kind: str = "remark"
    short: str = ""

    def __str__(self) -> str:
        return self.text


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


GENERIC = frozenset(
    "backend config dtype enable enabled id kwargs len mode n name path seed size strategy type "
    "value".split()
)
"""Last parts of keys that mean something only within their section."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the known dotted keys that `name` may have meant, the likeliest first.

    Their last parts are similar. If the sections differ, the last parts are nearly equal, and say
    something without the section: `optim.enabled` does not suggest `filter_groups.enable`.
    """
    section, _, last = name.rpartition(".")
    scores = {}
    for key in known:
        other_section, _, other = key.rpartition(".")
        if section in ("", other_section) or other_section.endswith(f".{section}"):
            place = 1.0
        else:
            place = _likeness(section.rpartition(".")[2], other_section.rpartition(".")[2])
        likeness = _likeness(last, other)
        is_elsewhere = place < 0.6
        if likeness < (0.85 if is_elsewhere else 0.75) or (is_elsewhere and other in GENERIC):
            continue
        scores[key] = likeness + place + _likeness(name, key) / 2
    same_section = {key: score for key, score in scores.items() if key.startswith(f"{section}.")}
    scores = same_section or scores
    best = sorted(scores, key=lambda key: scores[key], reverse=True)
    return [key for key in best if scores[key] > scores[best[0]] - 0.3][:count]


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio()


TITLES = {
    "renamed": "renamed keys: {}",
    "ignored": "accepted without effect: {} (%s KEY says why)",
    "unused": "no effect in this run: {}",
}
"""Kind of a note -> the line that lists all notes of this kind."""


def notes_text(notes: Iterable[Note], explain: str = "verlite explain") -> "Text":
    """Return the notes of a configuration as rich text, with those of one kind in one line.

    explain: the start of the command that explains a key (`Command.explain`).
    """
    from rich.text import Text

    notes = list(notes)
    lines = []
    for kind, title in TITLES.items():
        listed = "; ".join(note.short for note in notes if note.kind == kind)
        if listed:
            line = title.replace("%s", explain)
            lines.append(line.format(listed.replace("actor_rollout_ref.", "")))
    lines += [note.text for note in notes if note.kind == "remark"]
    return Text("\n".join(f"note: {line}" for line in lines))
