"""Print to the terminal."""

import functools
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

from verlite.config.command import PPO, Command
from verlite.config.problems import Note
from verlite.terminal import CONTROL, clean, raw

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

TITLES = {
    "renamed": "renamed keys: {}",
    "ignored": "accepted without effect: {} (%s KEY says why)",
    "unused": "no effect in this run: {}",
}
"""Kind of a note -> the line that lists all notes of this kind."""


def console(stderr: bool = False, file: TextIO | None = None, record: bool = False) -> "Console":
    """Return a rich Console with the terminal's width, or 160 columns in a log or a pipe.

    Rich's default of 80 columns would wrap every message there. Text is cleaned
    (`verlite.terminal`), and neither markup nor names of emojis in it count.

    Args:
        stderr: print to standard error.
        file: print to this stream instead.
        record: keep what is printed, for `export_text`.
    """
    made = functools.partial(
        _console_class(),
        file=file or raw(sys.stderr if stderr else sys.stdout),
        record=record,
        markup=False,
        emoji=False,
    )
    plain = made()
    return plain if plain.is_terminal else made(width=160)


@functools.cache
def _console_class() -> "type[Console]":
    """Return the class of the consoles. rich is imported only where something is printed."""
    from rich.console import Console

    class CleanConsole(Console):
        def render(self, renderable: Any, options: Any = None) -> Any:
            for segment in super().render(renderable, options):
                is_clean = segment.control or not CONTROL.search(segment.text)
                yield segment if is_clean else segment._replace(text=clean(segment.text))

    return CleanConsole


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
