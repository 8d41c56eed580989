"""Text on its way to a terminal or a log; numbers in words, and tables.

Models, data sets, services and files decide much of what verlite prints. A terminal executes some
characters: they set its title, move the cursor over earlier lines, or reorder what is read. All
output goes through `clean`: prints by `clean_output`, and rich text by `console`.
"""

import functools
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


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


GIB = 2**30


def size(number: float) -> str:
    """Return bytes in words: 14.2 GiB, 35 MiB, 256 bytes, 0."""
    if abs(number) >= 0.95 * GIB:
        return f"{number / GIB:,.1f} GiB"
    if abs(number) >= 0.95 * 2**20:
        return f"{number / 2**20:,.0f} MiB"
    if abs(number) >= 0.95 * 2**10:
        return f"{number / 2**10:,.0f} KiB"
    return f"{number:,.0f} bytes" if number else "0"


def amount(number: float) -> str:
    """Return a large number in words: 7.62 billion, 494.0 million, 12,345."""
    if number >= 10**9:
        return f"{number / 10**9:,.2f} billion"
    return f"{number / 10**6:,.1f} million" if number >= 10**6 else f"{number:,.0f}"


def flops(number: float) -> str:
    """Return a number of floating-point operations: 15.1 GFLOP, 377.1 PFLOP."""
    for power, unit in ((18, "EFLOP"), (15, "PFLOP"), (12, "TFLOP"), (9, "GFLOP")):
        if number >= 10**power:
            return f"{number / 10**power:,.1f} {unit}"
    return f"{number / 10**6:,.1f} MFLOP"


def counted(number: int, thing: str) -> str:
    """Return a number of things in words: 1 engine, 2 engines."""
    return f"{number} {thing}" + ("" if number == 1 else "s")


def facts_table(title: str, rows: Iterable[tuple[str, str]]) -> "Table":
    """Return a table of names and sentences, as the plan's own."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    return table


def grid(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], numbers: int) -> "Table":
    """Return a table with a head. Columns from `numbers` on are aligned to the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column, name in enumerate(head):
        side = "right" if column >= numbers else "left"
        table.add_column(Text(name), justify=side, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
