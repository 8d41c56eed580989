"""Apply a table of another framework's settings to what a user has set."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verlite.config import rules
from verlite.config.command import PPO, Command
from verlite.config.load import compose
from verlite.config.problems import ConfigError, Problem
from verlite.convert.rows import NOT_SET, Row
from verlite.convert.values import override
from verlite.masking import display


@dataclass(frozen=True)
class Warned:
    """A setting without counterpart, or one that must be looked at. `typed` is as it was given."""

    typed: str
    text: str


@dataclass(frozen=True)
class Conversion:
    """The result.

    source: the other framework's name.
    values: verlite keys in the schema's order.
    comments: key -> what changed its meaning.
    needless: settings that verlite does not need.
    before: shell commands to run once before the training command.
    problems: why there is no command.
    defaults: whose defaults apply to the settings that were not given.
    command: the command of verlite that the keys are for.
    launch: the program that starts its module.
    """

    source: str
    values: dict[str, Any]
    comments: dict[str, str]
    warnings: list[Warned]
    needless: list[str]
    before: list[str]
    problems: list[Problem]
    defaults: str = ""
    command: Command = PPO
    launch: str = "python -m"

    @property
    def overrides(self) -> list[str]:
        """Return the arguments of the command."""
        return [override(key, value) for key, value in self.values.items()]


class Draft:
    """A conversion under way: what the user has set, and what follows from it.

    typed: how a setting is written in messages, such as "--zero_stage".
    keep: keep keys in the command that have verlite's default.
    command: the command of verlite.
    own_key: its name of a key of main_ppo; "" if it has none.
    """

    def __init__(
        self,
        table: Sequence[Row],
        given: Mapping[str, Any],
        typed: Callable[[str], str] = lambda name: name,
        keep: bool = True,
        command: Command = PPO,
        own_key: Callable[[str], str] = lambda key: key,
    ) -> None:
        self.command = command
        self._own_key = own_key
        self.given = dict(given)
        self.typed = typed
        self.values: dict[str, Any] = {}
        self.comments: dict[str, str] = {}
        self.warnings: list[Warned] = []
        self.needless: list[str] = []
        self.before: list[str] = []
        self.problems: list[Problem] = []
        self.names = {row.name for row in table}
        self._defaults = {row.name: row.default for row in table}
        self._explicit: set[str] = set()
        self._keep = keep

    def __getitem__(self, name: str) -> Any:
        """Return the value of a setting, or its default; None if it has none."""
        value = self.given.get(name, self._defaults[name])
        return None if value is NOT_SET else value

    def has(self, *names: str) -> bool:
        """Return whether the user has given one of these settings."""
        return any(name in self.given for name in names)

    def set(self, key: str, value: Any, comment: str = "", explicit: bool | None = None) -> None:
        """Set verlite keys, with spaces between them.

        explicit: keep the key in the command if it has verlite's default, too. None: as `keep`.
        """
        for name in filter(None, map(self._own_key, key.split())):
            self.values[name] = value
            if comment:
                self.comments[name] = comment
            if self._keep if explicit is None else explicit:
                self._explicit.add(name)

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

    def finish(self, source: str) -> Conversion:
        """Order the keys as the schema does, leave out verlite's defaults, and apply its rules."""
        known = self.command.keys
        order = {name: place for place, name in enumerate(known)}

        def place(name: str) -> tuple[int, str]:
            key = self.command.find(name)
            return (order[key.name] if key else len(order), name)

        kept = {
            name: self.values[name]
            for name in sorted(self.values, key=place)
            if name in self._explicit
            or name in self.comments
            or name not in known
            or self.values[name] != known[name].default
        }
        problems = self.problems or broken_rules(kept, self.command)
        comments = {name: self.comments[name] for name in kept if name in self.comments}
        before = list(dict.fromkeys(self.before))
        return Conversion(
            source,
            kept,
            comments,
            self.warnings,
            self.needless,
            before,
            problems,
            command=self.command,
        )


def apply(
    source: str,
    table: Sequence[Row],
    given: Mapping[str, Any],
    formulas: Sequence[Callable[[Draft], None]],
    typed: Callable[[str], str] = lambda name: name,
    keep_given: bool = True,
    command: Command = PPO,
    own_key: Callable[[str], str] = lambda key: key,
) -> Conversion:
    """Convert what a user has set.

    Args:
        source: the other framework's name.
        table: its settings. `given` may only have names of the table.
        given: name -> value.
        formulas: functions for the "derived" rows.
        typed: how a setting is written in messages.
        keep_given: keep a given setting in the command if it has verlite's default, too.
        command, own_key: see `Draft`.

    Raises:
        ConfigError: a value is of another kind than its setting.
    """
    wrong = [
        Problem(typed(row.name), _plain(given[row.name]), rule)
        for row in table
        if row.name in given and (rule := row.misfit(given[row.name]))
    ]
    if wrong:
        raise ConfigError(wrong)
    draft = Draft(table, given, typed, keep_given, command, own_key)
    for row in table:
        value = draft.given.get(row.name, row.default)
        if row.act == "same" and value is not NOT_SET:
            _copy(draft, row, value, keep_given)
        elif row.name in draft.given and value != row.default:
            if row.act == "needless":
                draft.needless.append(typed(row.name))
            elif row.act == "dropped":
                draft.warn(row.name, row.note)
            elif row.act == "refused":
                draft.refuse(row.name, "has no counterpart in verlite", sentence(row.note))
    for formula in formulas:
        formula(draft)
    return draft.finish(source)


def _copy(draft: Draft, row: Row, value: Any, keep_given: bool) -> None:
    is_given = row.name in draft.given
    if row.values:
        if value not in row.values:
            legal = ", ".join(map(str, row.values))
            draft.refuse(row.name, "verlite has no such value", f"It has those of {legal}.")
            return
        value = row.values[value]
    draft.set(row.to, value, row.note if is_given else "", explicit=is_given and keep_given)


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
