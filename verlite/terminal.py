"""Text on its way to a terminal or a log.

Models, data sets, services and files decide much of what verlite prints. A terminal executes some
characters: they set its title, move the cursor over earlier lines, or reorder what is read. All
output goes through `clean`: prints by `clean_output`, and rich text by `console`.
"""

import functools
import os
import re
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console


CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, DEL, C1
    r"\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # line separators, directions of text
    r"\ud800-\udfff]"  # bytes of file names that are not UTF-8
)
"""Characters that are shown as escapes."""


def clean(text: str) -> str:
    """Return the text with visible escapes, such as \\x1b, in place of CONTROL."""
    return CONTROL.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


class CleanStream:
    """A text stream that cleans what is written to it."""

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream

    def write(self, text: str) -> int:
        """Write the cleaned text. Return the length of the text."""
        shown = clean(text)
        try:
            self.raw.write(shown)
        except UnicodeEncodeError:
            encoding = self.raw.encoding
            self.raw.write(shown.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # click would write there if the stream takes ASCII only
            raise AttributeError(name)
        return getattr(self.raw, name)


def clean_output() -> None:
    """Clean what this process prints, from now on.

    Progress bars of libraries move the cursor, so they are turned off.
    """
    for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, CleanStream):
            setattr(sys, name, CleanStream(stream))


def raw(stream: Any) -> Any:
    """Return the stream below a `CleanStream`, for text that is clean and has colors.

    While rich shows a live line, it has its own stream in front of both.
    """
    stream = getattr(stream, "rich_proxied_file", stream)
    return stream.raw if isinstance(stream, CleanStream) else stream


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


PRINT_EVERY_S = 30.0


class Countdown:
    """A line that is updated in place on a terminal. Elsewhere it is printed every 30 s."""

    def __enter__(self) -> "Countdown":
        self._status: Any = None
        self._last_print: float | None = None
        return self

    def show(self, text: str) -> None:
        """Update the line."""
        now = time.monotonic()
        if sys.stderr.isatty():
            from rich.text import Text

            line = Text(text)  # of a str, rich would read the markup: [fe80::1] would be lost
            if self._status is None:
                self._status = console(stderr=True).status(line)
                self._status.start()
            self._status.update(line)
        elif self._last_print is None or now - self._last_print > PRINT_EVERY_S:
            self._last_print = now
            print(text, file=sys.stderr, flush=True)

    def __exit__(self, *exc: object) -> None:
        if self._status is not None:
            self._status.stop()
