"""The rows of the tables: what becomes of a setting of another framework."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MODEL = "actor_rollout_ref.model."
ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
REF = "actor_rollout_ref.ref."

Act = Literal["same", "derived", "needless", "dropped", "refused"]

NOT_SET: Any = object()
"""The default of a setting that has no effect unless it is given."""

NO_DUAL_CLIP = 1e6
"""A value of actor.clip_ratio_c that no ratio reaches, for frameworks without dual clip."""


@dataclass(frozen=True)
class Row:
    """What becomes of one setting.

    name: as the other framework calls it. `*` stands for any text.
    act: "same": the keys in `to` get its value. "derived": a function of the converter computes
        the keys in `to` from it and from other settings. "needless": verlite needs no such setting,
        and nothing is lost; it is named once. "dropped": verlite has no counterpart, and training
        is the same without it; a warning says why. "refused": verlite has no counterpart,
        and training would be another; an error, unless it is at its default.
    to: verlite keys, with spaces between them.
    note: what changes its meaning ("same", "derived"), why it is dropped, or what to do instead.
    default: the other framework's own value. It is converted too, where verlite's differs.
    values: another spelling of a value: the other framework's -> verlite's.
    also: other names of the setting.
    kind: switch (on a command line: nothing follows), int, float, text, words (several),
        mapping or any.
    least: smallest number, if there is one.
    null: null is a value of this number.
    """

    name: str
    act: Act
    to: str = ""
    note: str = ""
    default: Any = NOT_SET
    values: Mapping[Any, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    kind: str = "text"
    least: float | None = None
    null: bool = False

    def misfit(self, value: Any) -> str:
        """Return why a value cannot be one of this setting, or ""."""
        if self.act not in ("same", "derived") or "*" in self.name:
            return ""
        if self.kind in ("int", "float"):
            if value is None and (self.null or not isinstance(self.default, int | float)):
                return ""
            if isinstance(value, bool) or not isinstance(value, int | float):
                return "must be a number"
            if not math.isfinite(value):
                return "must be a finite number"
            if self.least is not None and value < self.least:
                return f"must be at least {self.least:g}"
        if self.kind == "switch" and not isinstance(value, bool | None):
            return "must be true or false"
        if self.kind == "text" and isinstance(value, list | tuple | dict):
            return "must be one value"
        if self.kind == "words" and not isinstance(value, str | None):
            parts = value if isinstance(value, list | tuple) else [None]
            if not all(isinstance(part, str | int | float) for part in parts):
                return "must be a list of texts or numbers"
        if self.kind == "mapping" and not isinstance(value, dict | None):
            return "must be a mapping"
        return ""


KINDS: Mapping[type, str] = {
    bool: "switch",
    int: "int",
    float: "float",
    str: "text",
    list: "words",
    dict: "mapping",
}
"""By the type of a default. Any other type, such as that of None: "any"."""


def same(
    names: str,
    to: str,
    default: Any,
    note: str = "",
    values: Any = None,
    least: float | None = None,
) -> Row:
    """Return a row for a setting whose value goes to the keys in `to`. See `_row`."""
    return _row("same", names, to, default, note, values, least)


def derived(names: str, to: str, default: Any, note: str = "", least: float | None = None) -> Row:
    """Return a row for a setting that a formula of the converter reads. See `_row`."""
    return _row("derived", names, to, default, note, least=least)


def needless(names: str, default: Any, note: str) -> Row:
    """Return a row for a setting that verlite does not need. See `_row`."""
    return _row("needless", names, "", default, note)


def dropped(names: str, default: Any, note: str) -> Row:
    """Return a row for a setting without counterpart that changes no result. See `_row`."""
    return _row("dropped", names, "", default, note)


def refused(names: str, default: Any, note: str) -> Row:
    """Return a row for a setting without counterpart that changes training. See `_row`."""
    return _row("refused", names, "", default, note)


def _row(
    act: Act,
    names: str,
    to: str,
    default: Any,
    note: str,
    values: dict[Any, Any] | None = None,
    least: float | None = None,
) -> Row:
    """Return a row.

    Args:
        names: the setting's name, then other names of it.
        default: the other framework's default; or a type, if nothing follows from its absence.
    """
    name, *also = names.split()
    kind = default if isinstance(default, type) else type(default)
    value = NOT_SET if isinstance(default, type) else default
    return Row(name, act, to, note, value, values or {}, tuple(also), KINDS.get(kind, "any"), least)
