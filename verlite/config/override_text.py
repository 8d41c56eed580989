"""Overrides as text that Hydra's command-line grammar reads back."""

import json
import re
from collections.abc import Mapping
from typing import Any

PLAIN = re.compile(r"[A-Za-z_./][\w./@%+:*-]*", re.ASCII)
"""Text that Hydra's grammar, YAML and a shell take as it is."""
WORDS = frozenset("true false null yes no on off none nan inf ~ y n".split())
"""Text that YAML or Hydra reads as something else."""


def override(key: str, value: Any) -> str:
    """Return an argument of verlite.main_ppo, in Hydra's grammar."""
    return f"{key}={_hydra(value)}"


def _hydra(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_hydra, value)) + "]"
    if not isinstance(value, str):
        return scalar(value)
    if is_plain(value):
        return value
    if not set(value) & set('"\\'):
        return f'"{value}"'
    escaped = re.sub(r"(\\*)'", lambda found: found[1] * 2 + "\\'", value)
    return "'" + re.sub(r"(\\+)$", lambda found: found[1] * 2, escaped) + "'"


def number(value: float) -> str:
    """Return a number as people write it: 5e-7, not 5e-07, and 1e6, not 1000000.0."""
    short = f"{value:g}"
    text = short if float(short) == value else repr(value)
    return re.sub(r"e([+-])0+", r"e\1", text).replace("e+", "e")


def scalar(value: Any) -> str:
    """Return a number, a switch or None, for Hydra and YAML alike."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return number(value) if isinstance(value, float) else str(value)


def is_plain(text: str) -> bool:
    """Return whether Hydra and YAML read a text without quotes as this text."""
    return bool(PLAIN.fullmatch(text)) and text.lower() not in WORDS and not text.endswith(":")
