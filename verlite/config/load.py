"""Build one typed, validated configuration from a command line and YAML files.

The schema provides the defaults. YAML files override them in the order of Hydra's defaults list,
then the command line in Hydra's override grammar, one key at a time. So every value is
type-checked, its origin is known, and all problems are reported together.
"""

import copy
import itertools
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf, ValueNode
from omegaconf.errors import OmegaConfBaseException

from verlite.config import translation, verl_code
from verlite.config.commands import PPO, Command
from verlite.config.keys import Key
from verlite.config.problems import ConfigError, Note, Problem, nearest
from verlite.config.schema import Config
from verlite.config.sources import (
    PYTHON,
    TYPED,
    Assignment,
    conf_dir,
    from_command_line,
    from_our_yaml,
    from_yaml,
    our_names,
)
from verlite.masking import display, is_secret

OmegaConf.register_new_resolver("not", operator.not_, replace=True)  # for conf/*.yaml

DEFAULT = "default"
C = TypeVar("C")

VERLS_MODE = "trainer.v1.trainer_mode"
ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars"

OF_TRL = (
    "beta delta epsilon epsilon_high gradient_accumulation_steps learning_rate loss_type "
    "max_completion_length max_steps num_generations num_iterations num_train_epochs "
    "per_device_train_batch_size reward_funcs reward_weights scale_rewards use_vllm vllm_mode"
).split()
"""Settings of TRL that are typed as keys."""

OPTIONS = {
    "--config-name": "--config-name",
    "-cn": "--config-name",
    "--config-path": "--config-path",
    "-cp": "--config-path",
    "--config-dir": "--config-path",
    "-cd": "--config-path",
}
"""Command-line option -> its canonical name."""


@dataclass(frozen=True)
class LoadedConfig(Generic[C]):
    """A configuration that satisfies every rule. C is the dataclass of the whole configuration."""

    config: C
    """Plain dataclasses with interpolations resolved."""
    tree: DictConfig
    """The same values as an OmegaConf tree that keeps interpolations."""
    notes: list[Note]
    """Renamed keys, keys without effect, derived values, and settings that are rarely meant."""
    provenance: dict[str, str]
    """Origin of each key's value: "default", the name of a YAML file, "command line" or
    "Python"."""
    user_keys: frozenset[str]
    """Current names of the keys that the user set, on the command line or in their own YAML."""
    lacking: tuple[Problem, ...] = ()
    """With compose(elsewhere=True): what this machine lacks for the run."""
    command: Command = PPO
    """Whose configuration it is."""
    from_home: Mapping[str, Any] = field(default_factory=dict)
    """Paths that begin with ~ in a YAML file, with this user's home in its place."""


Loaded = LoadedConfig[Config]
"""The configuration of main_ppo."""


def compose(
    config_name: str | None = None,
    overrides: Sequence[str | Mapping[str, Any]] = (),
    config_dir: str | Path | None = None,
    check: bool = True,
    elsewhere: bool = False,
    command: Command = PPO,
) -> Loaded:
    """Build the configuration.

    Args:
        config_name: name of a YAML file without its suffix. None: the command's own, for main_ppo
            ppo_trainer.
        overrides: `key=value` in Hydra's grammar. For known keys `+key=value` and `++key=value`
            mean the same. `~key` restores the default. Or mappings of keys to values, from Python
            code, where paths and tuples are taken as text and lists. Later ones count.
        config_dir: a folder of the user's YAML files. Their defaults lists may name verlite's.
        check: also apply the rules that span keys and read files. False: check only names and
            types.
        elsewhere: the run will start on other machines. What this machine lacks (data, weights,
            packages, GPUs) is in `Loaded.lacking` instead of a problem.
        command: the command that takes the configuration.

    Raises:
        ConfigError: with every problem.
    """
    builder = _Builder(command)
    arguments: list[Assignment] = []
    groups: list[str] = []
    for is_text, some in itertools.groupby(overrides, lambda one: isinstance(one, str)):
        if is_text:
            texts = [one for one in some if isinstance(one, str)]
            typed, more, problems = from_command_line(texts, config_dir, command)
            arguments += typed
            groups += more
            builder.problems += problems
            continue
        for mapping in some:
            assert isinstance(mapping, Mapping)
            arguments += [
                Assignment(key, _plain(value), PYTHON, True) for key, value in mapping.items()
            ]
    name = (config_name or command.config_name).removesuffix(".yaml")
    if name in command.verl_files and not _is_file(name, config_dir):
        _require_verls_folder(name, config_dir)
        builder.note_verls_own(config_name, config_dir)
        name, config_dir = command.config_name, None
    try:
        if config_dir is None:
            assignments = from_our_yaml(name, command)
        else:
            folder = Path(config_dir).expanduser().resolve()
            assignments = from_yaml(name, folder, groups, command)
    except ConfigError as error:
        # Without the file no rule can be checked. Names and types on the command line can.
        for assignment in arguments:
            builder.assign(assignment)
        raise ConfigError([*error.problems, *builder.problems]) from None
    given, remarks, problems = verl_code.to_own_code([*assignments, *arguments], command)
    builder.remarks += remarks
    builder.problems += problems
    builder.verls_mode = _last_value(given, VERLS_MODE)
    for assignment in given:
        builder.assign(assignment)
    return builder.finish(check, elsewhere)


def main_argv(
    argv: Sequence[str],
    program: str = "python -m verlite.main_ppo",
    elsewhere: bool = False,
    command: Command = PPO,
    usage: str | None = None,
) -> Loaded:
    """Load the configuration of a training command line; `elsewhere`, `command` as in `compose`.

    Prints problems and exits with code 2. For --help, prints the usage and exits with code 0.

    Args:
        usage: the text that --help prints in front of all keys. None: a short text about `program`.
    """
    try:
        config_name, config_dir, overrides, help_wanted = parse_argv(argv)
        if help_wanted:
            print(_help(program, command) if usage is None else _help_of_keys(usage, command))
            raise SystemExit(0)
        return compose(config_name, overrides, config_dir, elsewhere=elsewhere, command=command)
    except ConfigError as error:
        from verlite.terminal import console

        console(stderr=True).print(error.text(), soft_wrap=True, end="")
        raise SystemExit(2) from None


def parse_argv(argv: Sequence[str]) -> tuple[str | None, str | None, list[str], bool]:
    """Split a command line into (config name, folder of YAML files, overrides, help requested).

    Options may be at any position.

    Raises:
        ConfigError: an option is given twice or without a value, or the current folder was deleted.
    """
    if any(argument in ("--help", "-h") for argument in argv):
        return None, None, [], True
    try:
        os.getcwd()
    except OSError as error:
        rule = f"cannot be used: {error.strerror}"
        raise ConfigError(
            [Problem("the current folder", None, rule, "Change to a folder that exists.")]
        ) from error
    values: dict[str, str] = {}
    overrides: list[str] = []
    problems: list[Problem] = []
    arguments = iter(argv)
    for argument in arguments:
        typed, equals, value = argument.partition("=")
        option = OPTIONS.get(typed)
        if option is None:
            overrides.append(argument)
            continue
        if not equals:
            value = next(arguments, "")
        if not value:
            problems.append(Problem(typed, None, "needs a value", f"Write {typed} VALUE."))
        elif option in values:
            problems.append(Problem(typed, value, f"{option} is given twice", "Keep only one."))
        values[option] = value
    if problems:
        raise ConfigError(problems)
    return values.get("--config-name"), values.get("--config-path"), overrides, False


def dump(loaded: LoadedConfig[C]) -> str:
    """Return the resolved configuration as YAML, with secrets masked.

    A comment gives the origin of each value that is not the default.
    """
    values = OmegaConf.to_container(loaded.tree, resolve=True)
    lines = [
        "# Every value of this run. A comment gives the origin of a value that is not the default.",
        *_dump(values, "", "", loaded.provenance, loaded.command),
    ]
    return "\n".join(lines) + "\n"


def _last_value(given: Sequence[Assignment], key: str) -> Any:
    """Return the value that a key was given last, also inside a mapping; None if it was not."""
    found = None
    for assignment in given:
        if not f"{key}.".startswith(f"{assignment.key}."):
            continue
        value = assignment.value
        for name in key.removeprefix(assignment.key).split(".")[1:]:
            value = value.get(name) if isinstance(value, dict) else None
        found = value or found
    return found


def _is_file(name: str, config_dir: str | Path | None) -> bool:
    """Return whether the user's folder, or verlite's, has this YAML file."""
    folder = conf_dir() if config_dir is None else Path(config_dir).expanduser()
    return (folder / f"{name}.yaml").is_file()


def _require_verls_folder(name: str, config_dir: str | Path | None) -> None:
    """Raise ConfigError if `config_dir` exists or is absolute: it is not a folder of verl's."""
    if config_dir is None:
        return
    folder = Path(config_dir).expanduser()
    if folder.exists() or (folder.is_absolute() and folder.parts[-2:] != ("trainer", "config")):
        rule = f"{name}.yaml was not found there" if folder.is_dir() else "is not a folder"
        remedy = "Leave the option out for verlite's own configuration."
        raise ConfigError([Problem("--config-path", str(config_dir), rule, remedy)])


class _Builder:
    """Collects assignments into the schema's tree, with the notes and problems they cause."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.tables = command.tables
        self.tree = command.new_tree()
        self.problems: list[Problem] = []
        self.provenance: dict[str, str] = dict.fromkeys(command.leaves, DEFAULT)
        self.user_keys: set[str] = set()
        self.from_home: dict[str, Any] = {}
        self.old_names: dict[str, str] = {}
        self.derived: dict[str, str] = {}
        self.ignored: dict[str, str] = {}
        self.remarks: list[str] = []
        self.refused: dict[str, dict[str, int]] = {}
        """Remedy of refused keys -> the given ones; the first one's value is the place of their
        problem in `problems`."""
        self.at_verls_default: list[str] = []
        """Keys that verlite does not have, with the value that they have in verl anyway."""
        self.n_verls_own = 0
        """Number of such keys in the user's YAML files."""
        self.verls_own: dict[str, Assignment] = {}
        """Current name -> such an assignment; it is made if the key has no other value."""
        self.foreign: list[str] = []
        """Names that the user gave and the schema does not have."""
        self.chosen: set[str] = set()
        """Keys that the user set to any value."""
        self.per_device: dict[str, Assignment] = {}
        self.setting: dict[str, tuple[Assignment, dict[str, Any]]] = {}
        """Old key that sets others -> its assignment, and the values of the others."""
        self.given: dict[tuple[str, str], list[Assignment]] = {}
        """(origin, current name) -> every assignment to the key there, under any of its names."""
        self.broken: set[str] = set()
        self.verls_mode: str | None = None
        """verl's asynchronous trainer that the user chose (VERLS_MODE)."""

    def note_verls_own(self, config_name: str | None, config_dir: str | Path | None) -> None:
        """Note, or report, options that name a file of verl's own configuration."""
        typed = " ".join(
            f"{option}={value}"
            for option, value in (("--config-path", config_dir), ("--config-name", config_name))
            if value is not None
        )
        own = self.command.config_name
        why = self.command.verl_files[(config_name or own).removesuffix(".yaml")]
        if why:
            remedy = f"Leave these options out: verlite's own {own} is the default."
            self.problems.append(Problem(typed, None, why, remedy))
        else:
            self.remarks.append(f"{typed} names a file of verl's; verlite's own {own} is used")
            self.foreign.append(typed)

    def assign(self, assignment: Assignment) -> None:
        """Set one key. If the value is a mapping, set every key below it."""
        key = assignment.key
        known = self.command.keys.get(key)
        if assignment.value == MISSING and assignment.origin not in TYPED:
            return
        if assignment.delete:
            self._reset(assignment)
        elif isinstance(assignment.value, dict) and (known or not self._moves(key)):
            self._assign_mapping(assignment)
        elif known and known.section and key in self.tables.fixed:
            self._assign_fixed(assignment, key)
        elif known and known.section:
            remedy = f"List its keys: verlite explain {key}."
            self._problem(assignment, "is a section of keys and takes no value", remedy)
        else:
            self._assign_leaf(assignment)

    def _moves(self, key: str) -> bool:
        """Return whether a mapping under this name is the value of a key with a newer name."""
        new = self.tables.new_name(key)
        return bool(new and self.command.find(new))

    def _assign_mapping(self, assignment: Assignment) -> None:
        key = assignment.key
        value = assignment.value
        known = self.command.find(key)
        if known and not known.section and not known.free:
            self._problem(assignment, f"expected {known.type}, got a mapping")
        elif known and known.free and (not value or _has_dots(value)):
            self._set(replace(assignment, value=_plain(value)), key)
        elif known or any(self.command.meaning(name) for name in _leaf_names(key, value)):
            for name, entry in value.items():
                self.assign(replace(assignment, key=f"{key}.{name}", value=entry))
        else:
            self._unknown(assignment)

    def _assign_leaf(self, assignment: Assignment) -> None:
        typed = assignment.key
        if assignment.by_user and not self.command.find(typed):
            self.foreign.append(typed)
            if assignment.origin not in TYPED and self._is_verls_default(assignment):
                self._assign_verls_own(assignment)
                return
        of_mode = re.fullmatch(r"trainer\.v1\.(\w+_async)\..+", typed)
        if of_mode and self.verls_mode not in (None, of_mode[1]):
            self.ignored[typed] = f"verl reads it with {VERLS_MODE}={of_mode[1]}"
            return
        key = typed if self.command.find(typed) else self.tables.new_name(typed) or typed
        meaning = self.command.meaning(key)
        targets = self.tables.targets(key, assignment.value)
        self.setting.pop(key, None)
        if targets:
            self.setting[key] = (assignment, targets)
            return
        if meaning in ("fixed", "refused", None) and self._is_verls_default(assignment):
            self.at_verls_default.append(typed)
            return
        if meaning == "schema":
            if key != typed:
                self.old_names[typed] = key
                if assignment.value is None:
                    assignment = replace(assignment, value=self.tables.null_means.get(key))
            if self._wins(assignment, key):
                self._set(assignment, key)
        elif meaning == "per device":
            self.per_device[key] = assignment
        elif meaning == "fixed":
            self._assign_fixed(assignment, key)
        elif meaning == "ignored":
            self.ignored[typed] = translation.lookup(self.tables.ignored, key)
        elif meaning == "refused":
            self._refuse(assignment, key)
        else:
            self._unknown(assignment)

    def _assign_verls_own(self, assignment: Assignment) -> None:
        """Leave out a name that is not in the schema, with verl's default, in a YAML file.

        A copy of verl's files has defaults under all names that a key has in verl. So this one
        counts only if no other name is given.
        """
        self.n_verls_own += 1
        key = self.tables.new_name(assignment.key)
        known = self.command.keys.get(key or "")
        has_value = known and known.default is not None and "${" not in str(assignment.value)
        if key and has_value and key in self.command.verl_defaults():
            self.verls_own[key] = assignment

    def _refuse(self, assignment: Assignment, key: str) -> None:
        """Report an unsupported key. All keys with one remedy are one problem."""
        pattern = translation.matching(self.tables.refused, key)
        assert pattern is not None
        remedy = self.tables.refused[pattern]
        if remedy not in self.refused:
            self.refused[remedy] = {assignment.key: len(self.problems)}
            self._problem(assignment, "this key is not supported", remedy)
            return
        names = self.refused[remedy]
        names.setdefault(assignment.key, len(names))
        self.broken.add(assignment.key)
        first, place = next(iter(names.items()))
        if len(names) > 1:
            others = f"{first} and {len(names) - 1} more"
            if "*" in pattern and all(translation.matching([pattern], name) for name in names):
                others += f" of {pattern}"
            self.problems[place] = Problem(others, None, "these keys are not supported", remedy)

    def _is_verls_default(self, assignment: Assignment) -> bool:
        key = assignment.key
        if key in self.tables.typed and assignment.origin in TYPED:
            return False
        if key.endswith("._target_") and assignment.origin not in TYPED:
            return True
        return translation.is_default(key, assignment.value, self.command.verl_defaults())

    def _assign_fixed(self, assignment: Assignment, key: str) -> None:
        """Accept one of the legal values of a key that has no choice here."""
        fixed = translation.lookup(self.tables.fixed, key)
        if any(_same(assignment.value, legal) for legal in fixed.accepts):
            self.ignored[assignment.key] = fixed.why
            return
        legal = " or ".join(display(key, value) for value in fixed.accepts)
        rule = f"only {legal} is accepted here: {fixed.why}"
        self._problem(assignment, rule, fixed.remedy or f"Remove the key, or use {legal}.")

    def _wins(self, assignment: Assignment, key: str) -> bool:
        """Return whether to use this value for `key`.

        The key may already be set in the same place under another of its names.
        """
        given = self.given.setdefault((assignment.origin, key), [])
        other = next((one for one in reversed(given) if one.key != assignment.key), None)
        given.append(assignment)
        if other is None or other.value == assignment.value:
            return True
        if key == "actor_rollout_ref.rollout.n" and 1 in (assignment.value, other.value):
            return assignment.value != 1  # Search-R1 multiplies n and n_agent
        old, new = (assignment, other) if assignment.key != key else (other, assignment)
        setting = f"{new.key}={display(new.key, new.value, True)}"
        rule = f"{setting} is set too, and is the same key"
        self._problem(old, rule, f"Keep only {key}.")
        return False

    def _set(self, assignment: Assignment, key: str) -> None:
        known = self.command.owner(key)
        value = _as_list(assignment.value, known)
        if known.name == ENV_VARS and key != ENV_VARS and isinstance(value, bool | float):
            # YAML has read it already: 1e-3 would become 0.001, and true True.
            self._problem(assignment, f"expected text, got {_kind(value)}", "Quote the value.")
            return
        value = self.tables.spelled(key, self._without_implied(key, value))
        if value is None and not _takes_null(known) and self._is_verls_default(assignment):
            if assignment.origin in TYPED:
                default = display(key, known.default, True)
                self.ignored[assignment.key] = f"null is verl's default; verlite uses {default}"
            return
        takes_list = known.type.startswith("list of") or key in self.command.paths
        if isinstance(assignment.value, str) and takes_list and _is_quoted_list(assignment.value):
            shown = re.sub(r"['\" ]", "", assignment.value)
            rule = "the quotes around the brackets make it a text, not a list"
            self._problem(assignment, rule, f"Write {assignment.key}={shown}")
            self.broken.add(key)
            return
        if key in self.command.paths:
            if self._has_shell_variable(assignment):
                return
            written = value
            value = [_expand(item) for item in value] if isinstance(value, list) else _expand(value)
            if value != written and assignment.origin not in TYPED:
                self.from_home[key] = value
        try:
            if known.free and OmegaConf.select(self.tree, known.name) is None:
                OmegaConf.update(self.tree, known.name, {}, merge=False)
            merge = isinstance(value, dict) and bool(value)
            OmegaConf.update(self.tree, key, value, merge=merge, force_add=known.free)
        except (OmegaConfBaseException, ValueError, TypeError):
            hint = _type_remedy(assignment.value, known)
            expected = known.type if not known.free or key == known.name else "text"
            got = _kind(assignment.value)
            if isinstance(assignment.value, list) and known.type.startswith("list of numbers"):
                wrong = [item for item in assignment.value if not isinstance(item, int | float)]
                got += "".join(f" with {display(key, item)}" for item in wrong[:1])
            if isinstance(value, list) and not isinstance(assignment.value, list):
                hint = "Write a list as [a,b], without quotes inside."
            self._problem(assignment, f"expected {expected}, got {got}", hint)
            self.broken.add(key)
            return
        # A YAML file may repeat defaults, or be verl's. On the command line every value counts.
        is_repeated = value == known.default or self._is_verls_default(assignment)
        is_choice = assignment.origin in TYPED or not is_repeated
        for name in {key, known.name}:
            self.provenance[name] = assignment.origin
            if assignment.by_user:
                self.chosen.add(name)
            if assignment.by_user and is_choice:
                self.user_keys.add(name)
            elif name == known.name == key:
                self.user_keys.discard(name)

    def _without_implied(self, key: str, value: Any) -> Any:
        """Return a list without the items that verlite has anyway, and note them."""
        implied = self.tables.implied.get(key, {})
        if not implied or not isinstance(value, list):
            return value
        for item in value:
            if item in implied:
                self.ignored[f"{key}={item}"] = implied[item]
        return [item for item in value if item not in implied]

    def _has_shell_variable(self, assignment: Assignment) -> bool:
        """Report a path that contains an environment variable the shell did not expand."""
        found = re.search(r"\$\w+", str(assignment.value))
        if not found or Path(str(assignment.value)).exists():
            return False
        rule = f"contains {found[0]}, which was not expanded"
        remedy = (
            "Use double quotes instead of single quotes on the command line, "
            f"or write ${{oc.env:{found[0][1:]}}}."
        )
        self._problem(assignment, rule, remedy)
        return True

    def _reset(self, assignment: Assignment) -> None:
        """Handle `~key` (restore the schema's default) and `~mapping.entry` (remove the entry)."""
        key = assignment.key
        known = self.command.find(key)
        if known is None:
            self._unknown(assignment)
        elif known.free and key != known.name:
            parent, _, last = key.rpartition(".")
            node = OmegaConf.select(self.tree, parent)
            if node is None or last not in node:
                self._problem(assignment, "this entry does not exist")
            else:
                del node[last]
        else:
            for name in self.command.leaves:
                if name == key or name.startswith(key + "."):
                    self._to_default(name)
                    self.given.pop((assignment.origin, name), None)
                    self.provenance[name] = DEFAULT
                    self.user_keys.discard(name)

    def _unknown(self, assignment: Assignment) -> None:
        close = nearest(assignment.key, self.command.leaves)
        self.broken.update(close[:1])
        remedy = f"Did you mean {' or '.join(close)}?" if close else self.command.list_keys
        if assignment.key in OF_TRL:
            remedy = f"TRL has such a setting. docs/migration/trl.md has its key here. {remedy}"
        self._problem(assignment, "unknown key", remedy)

    def _problem(self, assignment: Assignment, rule: str, remedy: str = "") -> None:
        key = assignment.key
        shown = key if assignment.origin in TYPED else f"{key} ({assignment.origin})"
        known = key in self.command.keys
        value = None if assignment.delete else display(key, assignment.value, known)
        self.problems.append(Problem(shown, value, rule, remedy))
        self.broken.add(key)

    def finish(self, check: bool, elsewhere: bool = False) -> Loaded:
        """Convert old micro-batch sizes, resolve the tree, and apply the rules."""
        for old, assignment in self.per_device.items():
            if assignment.value is not None:
                self._divide(old, assignment)
        self._set_others()
        for name, assignment in self.verls_own.items():
            if name not in self.chosen:
                self._set(assignment, name)
        self._take_defaults()
        for name in self.command.leaves:
            self._resolve(name)
        for name in sorted(self.command.required | self.user_keys & set(self.command.leaves)):
            missing = self._missing(name)
            if missing and name not in self.broken:
                doc = self.command.keys[name].doc
                self.problems += [Problem(key, None, "must be given", doc) for key in missing]
            if missing:
                self.broken.add(name)
                if name in self.command.required:
                    OmegaConf.update(self.tree, name, "")
                else:
                    self._to_default(name)
        self._turn_on()
        config: Any = OmegaConf.to_object(self.tree)
        without_effect: dict[str, str] = {}
        remarks: list[str] = []
        lacking: list[Problem] = []
        if check:
            for problem in self.command.rules(config, self.user_keys):
                if problem.key in self.broken:
                    continue
                problem = replace(problem, key=self._as_typed(problem.key))
                if elsewhere and problem.is_local:
                    lacking.append(problem)
                else:
                    self.problems.append(problem)
            if not self.problems:
                without_effect, remarks = self.command.effects(
                    config, self.user_keys, self.old_names
                )
        notes = [*self._notes(without_effect), *map(Note, [*self.remarks, *remarks])]
        if self.problems:
            raise ConfigError(self.problems, map(str, notes))
        return LoadedConfig(
            config,
            self.tree,
            notes,
            self.provenance,
            frozenset(self.user_keys),
            tuple(lacking),
            self.command,
            {k: v for k, v in self.from_home.items() if OmegaConf.select(self.tree, k) == v},
        )

    def _notes(self, without_effect: dict[str, str]) -> Iterator[Note]:
        """Yield the notes on keys that were renamed, derived, set twice, or have no effect.

        They use the name that was typed.
        """
        for old, new in self.old_names.items():
            if new in without_effect:
                continue
            if old in self.derived:
                yield Note(self.derived[old])
            else:
                yield Note(f"{old} is now called {new}", "renamed", f"{old} -> {new}")
        for (origin, key), given in self.given.items():
            typed = given[0].key
            same_name = [one for one in given if one.key == typed]
            values = [display(key, one.value, key in self.command.keys) for one in same_name]
            if len(set(values)) > 1 and origin != PYTHON:
                times = f"{typed} is given {len(values)} times ({origin})"
                yield Note(f"{times}: {', '.join(values)}; the last one is used")
        if self.n_verls_own:
            yield Note(
                f"{self.n_verls_own} keys of your YAML files are verl's at verl's defaults, and "
                "verlite does not have them: they have no effect"
            )
        ignored = dict.fromkeys(
            self.at_verls_default, "this is verl's default, and verlite has no such choice"
        )
        yield from _without_effect(ignored | self.ignored, "ignored")
        unused = {self._as_typed(key): reason for key, reason in without_effect.items()}
        yield from _without_effect(unused, "unused")

    def _as_typed(self, key: str) -> str:
        """Return the old name under which a key or its parent mapping was set, else `key`."""
        for old, new in self.old_names.items():
            if key == new or key.startswith(new + "."):
                return old + key.removeprefix(new)
        return key

    def _divide(self, old: str, assignment: Assignment) -> None:
        """Convert an old micro-batch size, which counts samples on all devices, to one device."""
        new = self.tables.per_device[old]
        value = assignment.value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            rule = f"expected a whole number >= 1, got {_kind(value)}"
            self._problem(assignment, rule, f"Use {new}.")
            self.broken.add(new)
            return
        current = self.given.get((assignment.origin, new))
        if current and current[-1].value is not None:
            rule = f"{new}={current[-1].value} is set too; both set the same size"
            self._problem(assignment, rule, f"Keep only {new}.")
            return
        if self.provenance[new] in TYPED and assignment.origin not in TYPED:
            return
        n_devices = self._actor_devices()
        size = max(1, value // n_devices)
        self._set(replace(assignment, value=size), new)
        rounded = " (rounded)" if value % n_devices else ""
        self.old_names[old] = new
        division = f"{value} / {n_devices} devices{rounded}"
        self.derived[old] = f"{old} counts all devices; {division} gives {new}={size}"

    def _set_others(self) -> None:
        """Set the keys that old keys set. They count more than any value of these, as in verl."""
        for assignment, values in self.setting.values():
            typed, shown = assignment.key, []
            for name, value in values.items():
                given = OmegaConf.select(self.tree, name)
                differs = name in self.user_keys and given != value
                instead = f" in place of {display(name, given)}" if differs else ""
                shown.append(f"{name}={display(name, value)}{instead}")
                self._set(replace(assignment, value=value), name)
            sets = f"{typed}={display(typed, assignment.value)} sets {' and '.join(shown)}"
            self.derived[typed] = sets
            self.old_names[typed] = next(iter(values))

    def _take_defaults(self) -> None:
        """Give the keys that the user did not set the defaults of the command whose names they
        used."""
        project, name = self.tables.style(self.foreign)
        if not project:
            return
        defaults = self.tables.styles[project].defaults
        taken = {key: value for key, value in defaults.items() if key not in self.chosen}
        for key, value in taken.items():
            self._set(Assignment(key, value, project, False), key)
        differing = [
            f"{key}={display(key, value)}"
            for key, value in taken.items()
            if value != self.command.keys[key].default
        ]
        if differing:
            self.remarks.append(
                f"{name} is a name of {project}, so its defaults apply: "
                f"{', '.join(differing)}. Give a key to choose otherwise"
            )

    def _turn_on(self) -> None:
        """Set the keys that others turn on, unless they are given."""
        for key, (other, value) in self.tables.turns_on.items():
            given = OmegaConf.select(self.tree, key)
            if key in self.user_keys - self.broken and other not in self.user_keys and given > 0:
                OmegaConf.update(self.tree, other, value)
                self.provenance[other] = self.provenance[key]
                self.remarks.append(
                    f"{self._as_typed(key)}={display(key, given)} sets {other}="
                    f"{display(other, value)}, as newer versions of verl do; give {other} to "
                    "choose otherwise"
                )

    def _actor_devices(self) -> int:
        from verlite.config.placement import Shape, parse, read_groups, role_names

        nodes = max(1, self.tree.trainer.nnodes)
        shape = Shape(nodes, max(1, self.tree.trainer.n_gpus_per_node))
        try:
            cluster: Any = OmegaConf.to_container(self.tree.cluster, resolve=True)
            groups = read_groups(cluster["node_groups"], nodes).nodes
            spec = cluster["component_placement"] or {"actor": "all"}
            own = {names: spec[names] for names in spec if "actor" in role_names(names)}
            return len(parse(own, replace(shape, groups=groups))["actor"])
        except (ValueError, OmegaConfBaseException):
            return shape.devices  # the rules report it

    def _resolve(self, name: str) -> None:
        """Report an interpolation that cannot be resolved and restore the default.

        With the default the other rules can still be checked.
        """
        section, last = self._place(name)
        node: Any = section._get_node(last, validate_access=False)
        if not node._is_interpolation() and (isinstance(node, ValueNode) or node._is_missing()):
            return
        try:
            value = section[last]
            if OmegaConf.is_config(value):
                OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            text = str(section._get_node(last))
            rule = str(error).splitlines()[0]
            self.problems.append(Problem(name, text, rule, _interpolation_remedy(text)))
            self.broken.add(name)
            self._to_default(name)

    def _missing(self, name: str) -> list[str]:
        """Return what is ??? of a key: its name, or entries of the list or mapping."""
        section, last = self._place(name)
        if OmegaConf.is_missing(section, last):
            return [name]
        value = section[last]
        return sorted(OmegaConf.missing_keys(value)) if OmegaConf.is_config(value) else []

    def _place(self, name: str, tree: DictConfig | None = None) -> tuple[DictConfig, str]:
        """Return the section of a tree, by default of this one, and the key's name in it."""
        *parents, last = name.split(".")
        section: Any = self.tree if tree is None else tree
        for parent in parents:
            section = section._get_node(parent, validate_access=False)
        return section, last

    def _to_default(self, name: str) -> None:
        defaults, last = self._place(name, self.command.tree)
        section, _ = self._place(name)
        section._set_item_impl(last, copy.deepcopy(defaults._get_node(last)))


def _takes_null(known: Key) -> bool:
    return "null" in known.type or known.free or known.any_type


def _without_effect(reasons: dict[str, str], kind: str) -> Iterator[Note]:
    """Yield one note for each reason, with all keys that have it."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in reasons.items():
        by_reason.setdefault(reason, []).append(key)
    for reason, names in by_reason.items():
        listed = ", ".join(names)
        verb = "has" if len(names) == 1 else "have"
        short = listed if kind == "ignored" else f"{listed} ({reason})"
        yield Note(f"{listed} {verb} no effect: {reason}", kind, short)


def _leaf_names(prefix: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, entry in value.items():
            yield from _leaf_names(f"{prefix}.{name}", entry)
    else:
        yield prefix


def _has_dots(value: Any) -> bool:
    """Return whether a mapping has a name with dots, at any depth: gpt-4.1."""
    return isinstance(value, dict) and any(
        "." in str(name) or _has_dots(entry) for name, entry in value.items()
    )


def _is_quoted_list(text: str) -> bool:
    return text.startswith("[") and text.endswith("]") and not Path(text).exists()


def _type_remedy(value: Any, known: Key) -> str:
    """Return how to write a value of the wrong type; "" if that is not known."""
    wanted = known.type
    if value in ("None", "Null", "none"):
        return "Write null in lower case."
    if value == "":
        return "Give a value after the = sign, or leave the key out."
    if isinstance(value, float) and "whole number" in wanted and value.is_integer():
        return f"Write {int(value)}."
    if known.facts.choices:
        return f"Legal: {known.legal_names()}."
    if not isinstance(value, str) or "number" not in wanted:
        return ""
    percent = re.fullmatch(r"([\d.]+)%", value)
    if percent:
        return f"Write the fraction {float(percent[1]) / 100:g}."
    if re.fullmatch(r"[\d._]+[kKmM]", value):
        factor = 1000 if value[-1] in "kK" else 10**6
        number = float(value[:-1].replace("_", "")) * factor
        return f"Write all digits, such as {number:.0f}."
    return ""


def _plain(value: Any) -> Any:
    """Return a Python value as YAML would have it. Numbers of NumPy and torch are numbers."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist") and not isinstance(value, type):
        return value.tolist()
    return str(value) if isinstance(value, Path) else value


def _as_list(value: Any, known: Key) -> Any:
    """Return a list with one item for text given to a key that takes a list."""
    is_literal = isinstance(value, str) and not value.startswith("${")
    return [value] if is_literal and known.type.startswith("list of") else value


def _same(value: Any, legal: Any) -> bool:
    """Return whether two values are equal; true and 1 are different."""
    return value == legal and isinstance(value, bool) == isinstance(legal, bool)


def _interpolation_remedy(text: str) -> str:
    variable = re.search(r"\$\{(\w+)\}", text)
    if not variable:
        return "Check the ${...} in the value."
    name = variable[1]
    return f"For an environment variable write ${{oc.env:{name}}}, or let the shell expand ${name}."


def with_home(overrides: Sequence[str]) -> list[str]:
    """Return overrides in which ~ before a / is this user's home, for a run on other machines."""
    home = str(Path.home())
    return [re.sub(r"(?<=[=\[,])~(?=/)", lambda _: home, text) for text in overrides]


def _expand(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("~"):
        return str(Path(value).expanduser())
    return value


def _kind(value: Any) -> str:
    names = {
        bool: "true/false",
        int: "a whole number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "a mapping",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)


def _dump(
    node: Any, prefix: str, indent: str, provenance: dict[str, str], command: Command
) -> Iterator[str]:
    for name, value in node.items():
        key = f"{prefix}{name}"
        written = yaml.safe_dump(str(name), width=10**6).splitlines()[0]
        if isinstance(value, dict) and value:
            yield f"{indent}{written}:"
            yield from _dump(value, key + ".", indent + "  ", provenance, command)
            continue
        owner = command.owner(key)
        if owner.free and is_secret(key, value):
            value = "***"
        elif isinstance(value, str):
            value = display(key, value, known=True)
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
        text = text.removesuffix("...\n").strip()
        origin = provenance.get(key, provenance.get(owner.name, DEFAULT))
        comment = f"  # {origin}" if origin != DEFAULT else ""
        yield f"{indent}{written}: {text}{comment}"


def _help(program: str, command: Command) -> str:
    names = ", ".join(our_names(command))
    return f"""\
usage: {program} [--config-name NAME] [--config-path FOLDER] [key=value ...]

NAME is one of {names}, or a YAML file of FOLDER. Its defaults list may name these.
Overrides may be at any position:
  key=value, +key=value, ++key=value set a key; ~key restores its default.

verlite check <the same arguments>   finds all problems without starting the run
verlite explain <key>                describes a key"""


def _help_of_keys(usage: str, command: Command) -> str:
    """Return the usage and a description of every key."""
    lines = [usage.strip(), ""]
    for key in command.keys.values():
        if not key.section:
            default = "" if key.default == "???" else f" (default {key.default})"
            lines.append(f"{key.name}: {key.type}{default}")
            lines.append(f"    {key.doc}")
    return "\n".join(lines)
