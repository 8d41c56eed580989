"""Explain keys: help, default, legal values, when they are used, and older names."""

from verlite.config import aliases, conditions, keys
from verlite.config.problems import nearest
from verlite.config.rules.values import legal_names


def explain(name: str = "") -> str:
    """Return text about a key, a section, an older name, or every key that ends in `name`.

    "" lists all sections.

    Raises:
        KeyError: the key does not exist. The message names similar keys.
    """
    table = keys.keys()
    if not name:
        return "\n".join(
            f"{key.name:<40} {key.doc}" for key in table.values() if "." not in key.name
        )
    if name in table:
        return _section(name) if table[name].section else _leaf(name)
    parent = keys.find(name)
    if parent:
        return f"{name}: an entry of {parent.name}\n\n{_leaf(parent.name)}"
    old = _old_name(name)
    if old:
        return old
    ending = [key for key in table if key.endswith("." + name)]
    if ending:
        return "\n\n".join(_section(key) if table[key].section else _leaf(key) for key in ending)
    former = [old for old in aliases.all_names() if old.endswith("." + name) and "*" not in old]
    if former:
        return "\n\n".join(filter(None, map(_old_name, former)))
    close = nearest(name, keys.leaves())
    hint = (
        f"Did you mean {' or '.join(close)}?" if close else "`verlite explain` lists the sections."
    )
    raise KeyError(f"{name}: unknown key. {hint}")


def _leaf(name: str) -> str:
    key = keys.keys()[name]
    facts = key.facts
    default = "must be given" if key.default == "???" else f"default {_written(key.default)}"
    lines = [name, f"  {key.type}; {default}", f"  {facts.help}"]
    if facts.choices:
        lines.append(f"  Legal: {legal_names(key)}.")
    if facts.bound:
        lines.append(f"  Legal: {facts.bound}.")
    if facts.unused:
        lines.append(f"  Never used: {facts.unused}.")
    if key.conditions:
        used = " and ".join(conditions.words(condition.text) for condition in key.conditions)
        lines.append(f"  Used only {used}.")
    renamed = (*aliases.RENAMED.items(), *aliases.PER_DEVICE.items())
    former = [old for old, new in renamed if new == name]
    if former:
        lines.append(f"  Older names: {', '.join(former)}.")
    return "\n".join(lines)


def _section(name: str) -> str:
    table = keys.keys()
    below = [
        key
        for key in table.values()
        if key.name.startswith(name + ".") and "." not in key.name[len(name) + 1 :]
    ]
    width = max(len(key.name) for key in below)
    rows = [
        f"  {key.name:<{width}}  {'section' if key.section else _written(key.default):<12}  "
        f"{key.doc}"
        for key in below
    ]
    return "\n".join([f"{name}: {table[name].doc}", *rows])


def _old_name(name: str) -> str | None:
    new = aliases.renamed(name)
    if new:
        return f"{name} is now called {new}\n\n{explain(new)}"
    new = aliases.lookup(aliases.PER_DEVICE, name)
    if new:
        return (
            f"{name} counts all devices; the key in use is {new}, which counts one\n\n{_leaf(new)}"
        )
    fixed = aliases.lookup(aliases.FIXED, name)
    if fixed:
        accepted = " or ".join(_written(value) for value in fixed[0])
        return f"{name}: only {accepted} is accepted, without effect: {fixed[1]}"
    refused = aliases.lookup(aliases.REFUSED, name)
    if refused:
        return f"{name}: refused. {refused}"
    why = aliases.lookup(aliases.IGNORED, name)
    return f"{name}: accepted without effect: {why}" if why else None


def _written(value: object) -> str:
    if value == "???":
        return "required"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return str(value) if value != "" else "''"
