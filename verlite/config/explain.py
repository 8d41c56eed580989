"""Explain keys: help, default, legal values, when they are used, and older names."""

import re

from verlite.config.commands import PPO, Command
from verlite.config.keys import Key
from verlite.config.problems import nearest
from verlite.config.rules import declared
from verlite.config.translation import lookup


def explain(name: str = "", command: Command = PPO) -> str:
    """Return text about a key, a section, an older name, or every key that ends in `name`.

    "" lists all sections. For other words, such as "learning rate", it lists the keys that have
    them in their name or help. command: the command that has the key.

    Raises:
        KeyError: the key does not exist. The message names similar keys.
    """
    table = command.keys
    name = name.strip().lstrip("+~-").partition("=")[0]
    if not name:
        return "\n".join(
            f"{key.name:<40} {key.doc}" for key in table.values() if "." not in key.name
        )
    if name in table:
        return _section(name, command) if table[name].section else _leaf(name, command)
    parent = command.find(name)
    if parent:
        return f"{name}: an entry of {parent.name}\n\n{_leaf(parent.name, command)}"
    old = _old_name(name, command)
    if old:
        return old
    ending = [key for key in table if key.endswith("." + name)]
    if ending:
        others = _keys_named(name, command) if len(ending) == 1 else []
        listed = ["\n".join([f"Keys about {name}:", *_one_line_each(others)])] if others else []
        return "\n\n".join([*listed, *(explain(key, command) for key in ending)])
    names = command.tables.all_names()
    former = [old for old in names if old.endswith("." + name) and "*" not in old]
    if former:
        return "\n\n".join(filter(None, (_old_name(old, command) for old in former)))
    close = [] if _keys_named(name, command) else nearest(name, command.leaves)
    about = [] if close else keys_about(name, command)
    if about:
        return "\n".join([f"No key is called {name}. Keys about it:", *about])
    hint = (
        f"Did you mean {' or '.join(close)}?" if close else "`verlite explain` lists the sections."
    )
    raise KeyError(f"{name}: unknown key. {hint}")


def _keys_named(word: str, command: Command) -> list[Key]:
    """Return the keys that have the word in their name, if they are three or more."""
    keys = [key for key in command.keys.values() if word in re.split(r"[._]", key.name)]
    keys = [key for key in keys if not key.section]
    return keys if len(keys) >= 3 else []


def keys_about(words: str, command: Command = PPO) -> list[str]:
    """Return one line for each key whose name, help and legal values have all these words."""
    wanted = re.split(r"[\s_.]+", words.lower())
    found = [
        key
        for key in command.keys.values()
        if not key.section and all(word in _words(key) for word in wanted)
    ]
    return _one_line_each(found)


def _one_line_each(keys: list[Key]) -> list[str]:
    width = max((len(key.name) for key in keys), default=0)
    return [f"  {key.name:<{width}}  {key.doc.partition('. ')[0]}" for key in keys]


def _words(key: Key) -> str:
    return " ".join([key.name, key.facts.help, *key.facts.choices]).lower()


def _leaf(name: str, command: Command) -> str:
    key = command.keys[name]
    facts = key.facts
    default = "must be given" if key.default == "???" else f"default {_written(key.default)}"
    lines = [name, f"  {key.type}; {default}", f"  {facts.help}"]
    if facts.choices:
        lines.append(f"  Legal: {key.legal_names()}.")
    if facts.bound:
        lines.append(f"  Legal: {facts.bound}.")
    if facts.unused:
        lines.append(f"  Never used: {facts.unused}.")
    if key.conditions:
        used = " and ".join(declared.words(condition.text) for condition in key.conditions)
        lines.append(f"  Used only {used}.")
    renamed = (*command.tables.renamed.items(), *command.tables.per_device.items())
    former = [old for old, new in renamed if new == name]
    if former:
        lines.append(f"  Older names: {', '.join(former)}.")
    return "\n".join(lines)


def _section(name: str, command: Command) -> str:
    table = command.keys
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


def _old_name(name: str, command: Command) -> str | None:
    tables = command.tables
    new = tables.new_name(name)
    if new:
        return f"{name} is now called {new}\n\n{explain(new, command)}"
    new = lookup(tables.per_device, name)
    if new:
        text = f"{name} counts all devices; the key in use is {new}, which counts one"
        return f"{text}\n\n{_leaf(new, command)}"
    meaning = tables.meaning(name)
    if meaning == "fixed":
        fixed = lookup(tables.fixed, name)
        accepted = " or ".join(map(_written, fixed.accepts))
        return f"{name}: only {accepted} is accepted, without effect: {fixed.why}"
    if meaning == "refused":
        return f"{name}: refused. {lookup(tables.refused, name)}"
    if meaning == "ignored":
        return f"{name}: accepted without effect: {lookup(tables.ignored, name)}"
    return None


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
