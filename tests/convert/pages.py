"""Write the key maps of docs/migration: `python -m tests.convert.pages`.

The text between two markers of a page is generated from the converter's table; the rest is written
by hand.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from verlite.config.override_text import number
from verlite.convert import openrlhf, trl
from verlite.convert.rlinf import KEYS
from verlite.convert.rows import NOT_SET, Row

PAGES = Path(__file__).parents[2] / "docs" / "migration"
START, END = "<!-- generated: python -m tests.convert.pages -->", "<!-- end -->"
SHORT = {
    "actor_rollout_ref.actor.": "actor.",
    "actor_rollout_ref.rollout.": "rollout.",
    "actor_rollout_ref.ref.": "ref.",
    "actor_rollout_ref.model.": "model.",
}
TITLES = {
    "dropped": "Not converted, with a warning. Training is the same without it.",
    "refused": "Refused unless at the default: training would be another.",
    "needless": "Not needed.",
}


def tables() -> dict[str, str]:
    """Return the generated text of each page."""
    fields = {
        "GRPO": "grpo",
        "GRPO and RLOO": "online",
        "RLOO": "rloo",
        "PPO": "ppo",
        "SFT": "sft",
        "DPO": "dpo",
        "SFT and DPO": "tuning",
        "All, with transformers' TrainingArguments": "common",
    }
    flags = {
        "train_ppo_ray": "train_ppo_ray",
        "train_sft": "train_sft",
        "train_dpo": "train_dpo",
        "train_sft and train_dpo": "tuning",
    }
    return {
        "openrlhf": _titled({name: openrlhf.DIALECT.sections[flags[name]] for name in flags}, "--"),
        "rlinf": key_map(KEYS),
        "trl": _titled({name: trl.DIALECT.sections[fields[name]] for name in fields}),
    }


def _titled(tables: dict[str, tuple[Row, ...]], dashes: str = "") -> str:
    return "\n\n".join(f"### {name}\n\n{key_map(rows, dashes)}" for name, rows in tables.items())


def key_map(rows: Sequence[Row], dashes: str = "") -> str:
    """Return a table of the rows with a counterpart, and lists of the others."""
    lines = ["| setting | verlite | default there | note |", "|---|---|---|---|"]
    for row in rows:
        if row.act in ("same", "derived"):
            names = ", ".join(f"`{dashes}{name}`" for name in dict.fromkeys((row.name, *row.also)))
            keys = ", ".join(f"`{_short(key)}`" for key in row.to.split()) or "-"
            lines.append(f"| {names} | {keys} | {_default(row)} | {_cell(row.note)} |")
    for act, title in TITLES.items():
        chosen = [row for row in rows if row.act == act]
        if chosen:
            lines += ["", f"{title}", ""]
            lines += _by_note(chosen, dashes)
    return "\n".join(lines)


def _by_note(rows: Sequence[Row], dashes: str) -> list[str]:
    grouped: dict[str, list[str]] = {}
    for row in rows:
        grouped.setdefault(row.note, []).append(f"`{dashes}{row.name}`")
    return [f"- {', '.join(names)}: {note}" for note, names in grouped.items()]


def _default(row: Row) -> str:
    if row.default is NOT_SET:
        return "-"
    if row.default is None or isinstance(row.default, bool):
        return {None: "none", True: "on", False: "off"}[row.default]
    values = row.default if isinstance(row.default, list) else [row.default]
    return f"`{' '.join(number(v) if isinstance(v, float) else str(v) for v in values)}`"


def _short(key: str) -> str:
    for long, short in SHORT.items():
        if key.startswith(long):
            return short + key.removeprefix(long)
    return key


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def filled(page: str, table: str) -> str:
    """Return a page with its table replaced."""
    pattern = re.escape(START) + ".*?" + re.escape(END)
    return re.sub(pattern, lambda _: f"{START}\n\n{table}\n\n{END}", page, flags=re.DOTALL)


def main() -> None:
    for name, table in tables().items():
        path = PAGES / f"{name}.md"
        path.write_text(filled(path.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main()
