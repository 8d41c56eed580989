"""Print to the terminal."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def console(stderr: bool = False) -> "Console":
    """Return a rich Console with the terminal's width, or 160 columns in a log or a pipe.

    Rich's default of 80 columns would wrap every message there.
    """
    from rich.console import Console

    plain = Console(stderr=stderr)
    return plain if plain.is_terminal else Console(stderr=stderr, width=160)


def notes_text(notes: Iterable[str]) -> "Text":
    """Return the notes of a configuration, one per line."""
    from rich.text import Text

    return Text("\n".join(f"note: {note}" for note in notes))
