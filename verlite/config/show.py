"""How configurations and what is to be said about them reach the terminal."""

from collections.abc import Iterable


def console(stderr: bool = False):
    """A rich Console: the terminal's width, or 160 columns in a log or a pipe, where the default of 80 would break every message."""
    from rich.console import Console

    plain = Console(stderr=stderr)
    return plain if plain.is_terminal else Console(stderr=stderr, width=160)


def notes_text(notes: Iterable[str]):
    """The notes of a configuration, one per line, as rich Text."""
    from rich.text import Text

    return Text("\n".join(f"note: {note}" for note in notes))
