"""Text on its way to a terminal or a log.

Models, data sets, services and files decide much of what verlite prints. A terminal executes some
characters: they set its title, move the cursor over earlier lines, or reorder what is read. All
output goes through `clean`: prints by `clean_output`, and rich text by `verlite.config.show`.
"""

import os
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

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
        self.raw.write(clean(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
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
