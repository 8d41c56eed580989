"""The notes of a configuration as rich text."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from verlite.config.command import PPO, Command
from verlite.config.problems import Note

if TYPE_CHECKING:
    from rich.text import Text

TITLES = {
    "renamed": "renamed keys: {}",
    "ignored": "accepted without effect: {} (%s KEY says why)",
    "unused": "no effect in this run: {}",
}
"""Kind of a note -> the line that lists all notes of this kind."""


def notes_text(notes: Iterable[Note], command: Command = PPO) -> "Text":
    """Return the notes of a configuration, with those of one kind in one line."""
    from rich.text import Text

    notes = list(notes)
    lines = []
    for kind, title in TITLES.items():
        listed = "; ".join(note.short for note in notes if note.kind == kind)
        if listed:
            line = title.replace("%s", command.explain)
            lines.append(line.format(listed.replace("actor_rollout_ref.", "")))
    lines += [note.text for note in notes if note.kind == "remark"]
    return Text("\n".join(f"note: {line}" for line in lines))
