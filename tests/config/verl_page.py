"""Generate docs/verl_keys.md: `python -m tests.config.verl_page`.

The page says what verlite does with every key of verl's published configurations.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verlite.config import translation
from verlite.config.commands import PPO, SFT, Command
from verlite.masking import display

PAGE = Path(__file__).parents[2] / "docs" / "verl_keys.md"
HEAD = """\
# Every key of verl, and what verlite does with it

`python -m tests.config.verl_page` writes this page from the schema, the tables of other names
([`aliases.toml`](../verlite/config/aliases.toml),
[`sft_aliases.toml`](../verlite/config/sft_aliases.toml)) and verl's published defaults
([`verl_defaults.json`](../verlite/config/verl_defaults.json): version 0.5 to August 2026, without
the engines that are not FSDP).

Each key is in one list:

- **same**: the same name, unit and meaning. Defaults that differ are listed; YAML files of
  [`conf/`](../conf) set some of them.
- **renamed**: verlite's name. verl's is accepted with a note.
- **without effect**: accepted with a note, for the reason given.
- **one choice**: accepted without effect at the values shown, and at verl's own default. Other
  values are errors.
- **refused**: accepted only at verl's own default; otherwise an error that says what the table
  says.

`NAME.*` stands for all keys below NAME, with their number; "other `NAME.*`" for those that are in
no other list. Names are those below the heading. verl's `_target_` keys, which name its Python
classes, are accepted without effect and left out here.
"""
SECTIONS = {
    "main_ppo": (
        "data",
        "actor_rollout_ref.model",
        "actor_rollout_ref.actor",
        "actor_rollout_ref.ref",
        "actor_rollout_ref.rollout",
        "critic",
        "reward",
        "reward_model",
        "custom_reward_function",
        "algorithm",
        "trainer",
        "ray_kwargs",
    ),
    "main_sft": ("data", "model", "engine", "optim", "trainer"),
}
COMMANDS = {"main_ppo": PPO, "main_sft": SFT}


@dataclass(frozen=True)
class Outcome:
    """What happens to a key: one of KINDS, and the name, values or reason."""

    kind: str
    text: str = ""


KINDS = {
    "same": ("same", ""),
    "renamed": ("renamed", "verlite's key"),
    "ignored": ("without effect", "why"),
    "fixed": ("one choice", "values and reason"),
    "refused": ("refused", "what to do"),
}
"""Kind of an outcome -> the heads of its table."""


def outcome(name: str, command: Command) -> Outcome:
    """Return what a command does with a key of verl's."""
    tables = command.tables
    new = tables.new_name(name)
    known = command.find(name)
    if known and not known.section:
        return Outcome("same")
    if new and command.find(new):
        return Outcome("renamed", f"`{new}`")
    meaning = command.meaning(new or name)
    name = new or name
    if meaning == "per device":
        size = translation.lookup(tables.per_device, name)
        return Outcome("renamed", f"`{size}`: the value divided by the devices")
    if meaning == "fixed":
        values, why, _ = translation.lookup(tables.fixed, name)
        shown = ", ".join(f"`{display(name, value)}`" for value in values)
        pair = tables.targets(name, True)
        more = f"; `true` sets {' and '.join(f'`{one}`' for one in pair)}" if pair else ""
        return Outcome("fixed", f"{shown}: {why}{more}")
    if meaning == "ignored":
        return Outcome("ignored", translation.lookup(tables.ignored, name))
    if meaning == "refused":
        return Outcome("refused", translation.lookup(tables.refused, name))
    raise LookupError(f"{name} has no meaning: add it to the tables of other names")


def other_default(name: str, values: list[Any], command: Command) -> tuple[str, str] | None:
    """Return verl's newest default and verlite's, if both are known and differ."""
    known = command.keys.get(name)
    theirs = values[-1]
    if known is None or "${" in str(theirs):
        return None
    ours = known.default
    if command.tables.spelled(name, theirs) == ours or "${" in str(ours):
        return None
    return shown(theirs), shown(ours)


def shown(value: Any) -> str:
    return "must be given" if value == "???" else f"`{display('', value)}`"


def shortened(
    names: Iterable[str], everything: Iterable[str], others: bool = True
) -> Iterator[str]:
    """Yield names, with "prefix.* (n)" for those that are all keys below a prefix.

    others: also with "other prefix.* (n)" for those that are most of them.
    """
    names, everything = set(names), list(everything)
    while names:
        name = min(names)
        parts = name.split(".")
        for end in range(1, len(parts)):
            prefix = ".".join(parts[:end]) + "."
            below = {one for one in everything if one.startswith(prefix)}
            here = below & names
            is_most = others and len(here) > 4 and len(here) > len(below) / 2
            if len(below) > 1 and (here == below or is_most):
                yield f"{'' if here == below else 'other '}`{prefix}*` ({len(here)})"
                names -= here
                break
        else:
            yield f"`{name}`"
            names.remove(name)


def section_of(name: str, sections: Iterable[str]) -> str:
    return next((one for one in sections if name.startswith(f"{one}.")), "")


def section(title: str, outcomes: dict[str, Outcome], defaults: list[str]) -> Iterator[str]:
    """Yield the lines of one section. The keys are those below the title."""
    yield f"### {title}\n"
    same = [name for name, one in outcomes.items() if one.kind == "same"]
    if same:
        yield f"Same ({len(same)}): {', '.join(shortened(same, outcomes, others=False))}.\n"
    if defaults:
        yield "| same, with another default | verl | verlite |\n|---|---|---|"
        yield from defaults
        yield ""
    for kind, heads in KINDS.items():
        by_text: dict[str, list[str]] = defaultdict(list)
        for name, one in outcomes.items():
            if one.kind == kind != "same":
                by_text[one.text].append(name)
        if by_text:
            yield f"| {heads[0]} | {heads[1]} |\n|---|---|"
            for text, names in by_text.items():
                yield f"| {', '.join(shortened(names, outcomes))} | {text.replace('|', '')} |"
            yield ""


def page() -> str:
    """Return the whole page."""
    lines = [HEAD]
    for program, command in COMMANDS.items():
        table = command.verl_defaults()
        found = {name: outcome(name, command) for name in table}
        counts = ", ".join(
            f"{sum(one.kind == kind for one in found.values())} {heads[0]}"
            for kind, heads in KINDS.items()
        )
        lines.append(f"## {program}\n\n{len(found)} keys: {counts}.\n")
        for title in (*SECTIONS[program], ""):
            names = [
                name
                for name in found
                if section_of(name, SECTIONS[program]) == title and not name.endswith("_target_")
            ]
            short = {name.removeprefix(f"{title}."): found[name] for name in names}
            defaults = []
            for name in names:
                differing = other_default(name, table[name], command)
                if differing:
                    defaults.append(
                        f"| `{name.removeprefix(f'{title}.')}` | {differing[0]} | {differing[1]} |"
                    )
            lines += section(f"`{title}`" if title else "Other keys", short, defaults)
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE} has {len(page().splitlines())} lines")


if __name__ == "__main__":
    main()
