"""What the schema declares about a key beside its name and type: default, help, legal values, and
when it is used.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Facts:
    """Declarations of one key or section.

    They are stored in the metadata of its dataclass field.
    """

    help: str
    """What the key means. `verlite explain` prints it."""
    choices: tuple[str, ...] = ()
    """Legal names. Empty: any value of the type."""
    own: str = ""
    """Set if the user's own "package.module:name" is legal too: what the name stands for, function
    or class.
    """
    bound: str = ""
    """Legal numbers, such as ">= 1 or -1", "> 0 and <= 1" or "finite". null is legal where the type
    allows it.
    """
    remedy: str = ""
    """What to do about a number that is out of bounds."""
    hints: Mapping[str, str] = field(default_factory=dict)
    """What to add to the message about certain illegal names."""
    used_when: tuple[str, ...] = ()
    """Conditions that must all hold for the key to have an effect. Their grammar is in
    `verlite.config.rules.conditions`.
    """
    unused: str = ""
    """Why the key never has an effect in this section."""
    note: str = ""
    """What to add to the note about a key without effect."""


def key(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    own: str = "",
    bound: str = "",
    remedy: str = "",
    hints: Mapping[str, str] | None = None,
    used_when: str | tuple[str, ...] = (),
    unused: str = "",
    note: str = "",
) -> Any:
    """Declare a configuration key as a dataclass field.

    Lists and mappings as defaults are copied.
    """
    conditions = (used_when,) if isinstance(used_when, str) else used_when
    facts = Facts(help, choices, own, bound, remedy, hints or {}, conditions, unused, note)
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata={"facts": facts})
    return field(default=default, metadata={"facts": facts})


def section(
    cls: Callable[..., Any],
    help: str,
    *,
    used_when: str | tuple[str, ...] = (),
    note: str = "",
    **defaults: Any,
) -> Any:
    """Declare a section of keys. `used_when` applies to all of its keys except `enable`.

    Args:
        cls: dataclass of the section.
        help: what the section is about.
        used_when: as in Facts.
        note: as in Facts.
        defaults: values that replace the defaults of `cls`.
    """
    conditions = (used_when,) if isinstance(used_when, str) else used_when
    facts = Facts(help, used_when=conditions, note=note)
    return field(default_factory=lambda: cls(**defaults), metadata={"facts": facts})


def facts_of(declared: dataclasses.Field[Any]) -> Facts:
    """Return the declarations of a dataclass field."""
    return declared.metadata["facts"]
