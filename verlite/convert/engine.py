"""Apply a table of another framework's settings to what a user has set."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verlite.config import rules
from verlite.config.commands import PPO, Command
from verlite.config.load import compose
from verlite.config.override_text import override
from verlite.config.problems import ConfigError, Problem
from verlite.convert.rows import NOT_SET, Row
from verlite.convert.text import Conversion, Warned
from verlite.masking import display


@dataclass
class Draft:
    """A conversion under way: what the user has set, and what follows from it.

    source: the other framework's name.
    table: its settings. `given` may only have names of the table.
    given: name -> value.
    typed: how a setting is written in messages, such as "--zero_stage".
    keep: keep given settings in the command if they have verlite's default, too.
    command: the command of verlite.
    own_key: its name of a key of main_ppo; "" if it has none.
    """

    source: str
    table: Sequence[Row]
    given: Mapping[str, Any]
    typed: Callable[[str], str] = str
    keep: bool = True
    command: Command = PPO
    own_key: Callable[[str], str] = str
    values: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    warnings: list[Warned] = field(default_factory=list)
    needless: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    explicit: set[str] = field(default_factory=set)
    """Keys that stay in the command."""

    @functools.cached_property
    def rows(self) -> dict[str, Row]:
        """Name -> its row."""
        return {row.name: row for row in self.table}

    def __getitem__(self, name: str) -> Any:
        """Return the value of a setting, or its default; None if it has none."""
        value = self.given.get(name, self.rows[name].default)
        return None if value is NOT_SET else value

    def has(self, *names: str) -> bool:
        """Return whether the user has given one of these settings."""
        return any(name in self.given for name in names)

    def set(self, key: str, value: Any, comment: str = "", explicit: bool | None = None) -> None:
        """Set verlite keys, with spaces between them.

        explicit: keep the key in the command if it has verlite's default, too. None: as `keep`.
        """
        for name in filter(None, map(self.own_key, key.split())):
            self.values[name] = value
            if comment:
                self.comments[name] = comment
            if self.keep if explicit is None else explicit:
                self.explicit.add(name)

    def choice(self, name: str, options: Mapping[Any, Any], value: Any = None) -> Any:
        """Return what a setting's value is called in verlite; None, and a problem, if nothing.

        value: None: the setting's own.
        """
        value = self[name] if value is None else value
        if value in options:
            return options[value]
        remedy = f"verlite has {', '.join(map(str, options))}."
        self.refuse(name, "has no counterpart in verlite", remedy)
        return None

    def warn(self, name: str, text: str) -> None:
        """Report a setting that has no counterpart or needs attention."""
        self.warn_typed(self._shown(name), text)

    def warn_typed(self, typed: str, text: str) -> None:
        """Report a setting, given as it was typed."""
        self.warnings.append(Warned(typed, text))

    def refuse(self, name: str, rule: str, remedy: str = "") -> None:
        """Report why there is no command."""
        value = self.given.get(name)
        shown = None if value is None or value is True else _plain(value)
        self.problems.append(Problem(self.typed(name), shown, rule, remedy))

    def _shown(self, name: str) -> str:
        value = self.given.get(name, True)
        if value is True or value is None:
            return self.typed(name)
        return f"{self.typed(name)}={display(name, _plain(value))}"

    def finish(self) -> Conversion:
        """Order the keys as the schema does, leave out verlite's defaults, and apply its rules."""
        known = self.command.keys
        order = {name: place for place, name in enumerate(known)}

        def place(name: str) -> tuple[int, str]:
            key = self.command.find(name)
            return (order[key.name] if key else len(order), name)

        kept = {
            name: self.values[name]
            for name in sorted(self.values, key=place)
            if name in self.explicit
            or name in self.comments
            or name not in known
            or self.values[name] != known[name].default
        }
        problems = self.problems or broken_rules(kept, self.command)
        comments = {name: self.comments[name] for name in kept if name in self.comments}
        before = list(dict.fromkeys(self.before))
        return Conversion(
            self.source,
            kept,
            comments,
            self.warnings,
            self.needless,
            before,
            problems,
            command=self.command,
        )


def apply(draft: Draft, formulas: Sequence[Callable[[Draft], None]]) -> Conversion:
    """Convert what a user has set. `formulas` are functions for the "derived" rows.

    Raises:
        ConfigError: a value is of another kind than its setting.
    """
    given, typed = draft.given, draft.typed
    wrong = [
        Problem(typed(row.name), _plain(given[row.name]), rule)
        for row in draft.table
        if row.name in given and (rule := row.misfit(given[row.name]))
    ]
    if wrong:
        raise ConfigError(wrong)
    for row in draft.table:
        value = given.get(row.name, row.default)
        is_empty = value is NOT_SET or (row.default is NOT_SET and value in (None, ""))
        if row.act == "same" and not is_empty:
            _copy(draft, row, value)
        elif row.name in given and value != row.default:
            if row.act == "needless":
                draft.needless.append(typed(row.name))
            elif row.act == "dropped":
                draft.warn(row.name, row.note)
            elif row.act == "refused":
                draft.refuse(row.name, "has no counterpart in verlite", sentence(row.note))
    for formula in formulas:
        formula(draft)
    return draft.finish()


def _copy(draft: Draft, row: Row, value: Any) -> None:
    is_given = row.name in draft.given
    if row.values:
        if value not in row.values:
            legal = ", ".join(map(str, row.values))
            draft.refuse(row.name, "verlite has no such value", f"It has those of {legal}.")
            return
        value = row.values[value]
    draft.set(row.to, value, row.note if is_given else "", explicit=is_given and draft.keep)


def broken_rules(values: Mapping[str, Any], command: Command = PPO) -> list[Problem]:
    """Return what `verlite check` would refuse, besides files and devices of this machine."""
    try:
        overrides = [override(key, value) for key, value in values.items()]
        loaded = compose(None, overrides, check=False, command=command)
    except ConfigError as error:
        return error.problems
    if command is PPO:
        found = rules.check(loaded.config, loaded.user_keys, files=False)
    else:
        found = list(command.rules(loaded.config, loaded.user_keys))
    return [p for p in found if not p.is_local and (command is PPO or p.key not in command.paths)]


def sentence(note: str) -> str:
    """Return a note as a sentence. Names of settings keep their first letter."""
    first = note.split(" ", 1)[0]
    is_word = first.isalpha() and first != "verlite"
    return f"{note[0].upper() if is_word else note[0]}{note[1:]}."


def _plain(value: Any) -> Any:
    """Return a value as a user types it: a list with spaces between its items."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value
