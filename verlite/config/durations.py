"""Durations in the configuration: 14400, 90m, 4h, 2d, 03:50:00, 2-12:00:00."""

import re

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
NUMBER = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")
"""Slurm's form, days-hours:minutes:seconds."""


def duration_s(text: str) -> float:
    """Return a duration in seconds. Raises ValueError."""
    number = NUMBER.fullmatch(text)
    if number:
        seconds = float(number[1]) * UNITS[number[2]]
    else:
        clock = CLOCK.fullmatch(text)
        if clock is None:
            raise ValueError("is not a duration such as 14400, 90m, 4h or 2-12:00:00")
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        seconds = float(days * 86400 + hours * 3600 + minutes * 60 + rest)
    if seconds <= 0:
        raise ValueError("must be longer than 0 s")
    return seconds
