"""Build one typed, validated configuration from a command line and YAML files.

The schema provides the defaults. YAML files override them in the order of Hydra's defaults list,
then the command line in Hydra's override grammar, one key at a time. So every value is
type-checked, its origin is known, and all problems are reported together.
"""

import copy
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verlite.config import aliases, keys
from verlite.config.problems import ConfigError, Problem, display, is_secret, nearest
from verlite.config.schema import Config
from verlite.config.sources import (
    COMMAND_LINE,
    Assignment,
    from_command_line,
    from_our_yaml,
    from_yaml,
    our_names,
)

DEFAULT = "default"

PATHS = (
    "data.train_files",
    "data.val_files",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.tokenizer_path",
    "critic.model.path",
    "custom_reward_function.path",
    "trainer.default_local_dir",
    "trainer.resume_from_path",
)
"""Keys whose leading ~ means the home folder. A shell does not expand it after an = sign."""

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
class Loaded:
    """A configuration that satisfies every rule."""

    config: Config
    """Plain dataclasses with interpolations resolved."""
    tree: DictConfig
    """The same values as an OmegaConf tree that keeps interpolations."""
    notes: list[str]
    """Notes for the user, each printed once: renamed keys, keys without effect, derived values."""
    provenance: dict[str, str]
    """Origin of each key's value: "default", the name of a YAML file, or "command line"."""
    user_keys: frozenset[str]
    """Current names of the keys that the user set, on the command line or in their own YAML."""
    lacking: tuple[str, ...] = ()
    """With compose(elsewhere=True): what this machine lacks for the run."""


def compose(
    config_name: str | None = None,
    overrides: Sequence[str] = (),
    config_dir: str | Path | None = None,
    check: bool = True,
    elsewhere: bool = False,
) -> Loaded:
    """Build the configuration.

    Args:
        config_name: name of a YAML file without its suffix. None: ppo_trainer.
        overrides: `key=value` in Hydra's grammar. For known keys `+key=value` and `++key=value`
            mean the same. `~key` restores the default.
        config_dir: a folder of the user's YAML files. Their defaults lists may name verlite's.
        check: also apply the rules that span keys and read files. False: check only names and
            types.
        elsewhere: the run will start on other machines. What this machine lacks (data, weights,
            packages, GPUs) is in `Loaded.lacking` instead of a problem.

    Raises:
        ConfigError: with every problem.
    """
    builder = _Builder()
    arguments, groups, builder.problems = from_command_line(overrides, config_dir)
    name = (config_name or "ppo_trainer").removesuffix(".yaml")
    try:
        if config_dir is None:
            assignments = from_our_yaml(name)
        else:
            assignments = from_yaml(name, Path(config_dir).expanduser().resolve(), groups)
    except ConfigError as error:
        # Without the file no rule can be checked. Names and types on the command line can.
        for assignment in arguments:
            builder.assign(assignment)
        raise ConfigError([*error.problems, *builder.problems]) from None
    for assignment in [*assignments, *arguments]:
        builder.assign(assignment)
    return builder.finish(check, elsewhere)


def main_argv(
    argv: Sequence[str], program: str = "python -m verlite.main_ppo", elsewhere: bool = False
) -> Loaded:
    """Load the configuration of a training command line; `elsewhere` as in `compose`.

    Prints problems and exits with code 2. For --help, prints the usage and exits with code 0.
    """
    try:
        config_name, config_dir, overrides, help_wanted = parse_argv(argv)
        if help_wanted:
            print(_help(program))
            raise SystemExit(0)
        return compose(config_name, overrides, config_dir, elsewhere=elsewhere)
    except ConfigError as error:
        from verlite.config.show import console

        console(stderr=True).print(error.text(), soft_wrap=True, end="")
        raise SystemExit(2) from None


def parse_argv(argv: Sequence[str]) -> tuple[str | None, str | None, list[str], bool]:
    """Split a command line into (config name, folder of YAML files, overrides, help requested).

    Options may be at any position.

    Raises:
        ConfigError: an option is given twice or without a value.
    """
    if any(argument in ("--help", "-h") for argument in argv):
        return None, None, [], True
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


def dump(loaded: Any, schema_keys: dict[str, keys.Key] | None = None) -> str:
    """Return the resolved configuration as YAML, with secrets masked.

    A comment gives the origin of each value that is not the default.

    Args:
        loaded: an object with `tree` and `provenance`, such as `Loaded`.
        schema_keys: the `keys.table` of another schema. None: main_ppo's.
    """
    known = keys.keys() if schema_keys is None else schema_keys
    values = OmegaConf.to_container(loaded.tree, resolve=True)
    lines = [
        "# Every value of this run. A comment gives the origin of a value that is not the default.",
        *_dump(values, "", "", loaded.provenance, known),
    ]
    return "\n".join(lines) + "\n"


class _Builder:
    """Collects assignments into the schema's tree, with the notes and problems they cause."""

    def __init__(self) -> None:
        self.tree: DictConfig = copy.deepcopy(_schema())
        self.problems: list[Problem] = []
        self.provenance: dict[str, str] = dict.fromkeys(keys.leaves(), DEFAULT)
        self.user_keys: set[str] = set()
        self.old_names: dict[str, str] = {}
        self.derived: dict[str, str] = {}
        self.ignored: dict[str, str] = {}
        self.per_device: dict[str, Assignment] = {}
        self.given: dict[tuple[str, str], list[Assignment]] = {}
        """(origin, current name) -> every assignment to the key there, under any of its names."""
        self.broken: set[str] = set()

    def assign(self, assignment: Assignment) -> None:
        """Set one key. If the value is a mapping, set every key below it."""
        key = assignment.key
        known = keys.keys().get(key)
        if assignment.delete:
            self._reset(assignment)
        elif isinstance(assignment.value, dict) and (known or not aliases.renamed(key)):
            self._assign_mapping(assignment)
        elif known and known.section:
            remedy = f"List its keys: verlite explain {key}."
            self._problem(assignment, "is a section of keys and takes no value", remedy)
        else:
            self._assign_leaf(assignment)

    def _assign_mapping(self, assignment: Assignment) -> None:
        key = assignment.key
        value = assignment.value
        known = keys.find(key)
        if known and not known.section and not known.free:
            self._problem(assignment, f"expected {known.type}, got a mapping")
        elif known and known.free and not value:
            self._set(assignment, key)
        elif known or any(_meaning(name) for name in _leaf_names(key, value)):
            for name, entry in value.items():
                self.assign(replace(assignment, key=f"{key}.{name}", value=entry))
        else:
            self._unknown(assignment)

    def _assign_leaf(self, assignment: Assignment) -> None:
        typed = assignment.key
        key = typed if keys.find(typed) else aliases.renamed(typed) or typed
        meaning = _meaning(key)
        if meaning == "schema":
            if key != typed:
                self.old_names[typed] = key
                if assignment.value is None:
                    assignment = replace(assignment, value=aliases.NULL_MEANS.get(key))
            if self._wins(assignment, key):
                self._set(assignment, key)
        elif meaning == "per device":
            self.per_device[key] = assignment
        elif meaning == "fixed":
            self._assign_fixed(assignment, key)
        elif meaning == "ignored":
            self.ignored[typed] = aliases.lookup(aliases.IGNORED, key)
        elif meaning == "refused":
            remedy = aliases.lookup(aliases.REFUSED, key)
            self._problem(assignment, "this key is not supported", remedy)
        else:
            self._unknown(assignment)

    def _assign_fixed(self, assignment: Assignment, key: str) -> None:
        """Accept one of the legal values of a key that has no choice here."""
        accepted, reason = aliases.lookup(aliases.FIXED, key)
        if any(_same(assignment.value, legal) for legal in accepted):
            self.ignored[assignment.key] = reason
            return
        legal = " or ".join(display(key, value) for value in accepted)
        rule = f"only {legal} is accepted here: {reason}"
        self._problem(assignment, rule, f"Remove the key, or use {legal}.")

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
        known = keys.owner(key)
        value = _as_list(assignment.value, known)
        if key in PATHS:
            if self._has_shell_variable(assignment):
                return
            value = [_expand(item) for item in value] if isinstance(value, list) else _expand(value)
        try:
            if known.free and OmegaConf.select(self.tree, known.name) is None:
                OmegaConf.update(self.tree, known.name, {}, merge=False)
            OmegaConf.update(self.tree, key, value, merge=False, force_add=known.free)
        except (OmegaConfBaseException, ValueError, TypeError):
            hint = "Write null in lower case." if value in ("None", "Null", "none") else ""
            expected = known.type if not known.free or key == known.name else "text"
            self._problem(assignment, f"expected {expected}, got {_kind(value)}", hint)
            self.broken.add(key)
            return
        # A YAML file may repeat defaults for documentation. On the command line every value counts.
        is_choice = assignment.origin == COMMAND_LINE or value != known.default
        for name in {key, known.name}:
            self.provenance[name] = assignment.origin
            if assignment.by_user and is_choice:
                self.user_keys.add(name)

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
        known = keys.find(key)
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
            for name in keys.leaves():
                if name == key or name.startswith(key + "."):
                    self._to_default(name)
                    self.given.pop((assignment.origin, name), None)
                    self.provenance[name] = DEFAULT
                    self.user_keys.discard(name)

    def _unknown(self, assignment: Assignment) -> None:
        close = nearest(assignment.key, keys.leaves())
        self.broken.update(close[:1])
        remedy = f"Did you mean {' or '.join(close)}?" if close else "List keys: verlite explain."
        self._problem(assignment, "unknown key", remedy)

    def _problem(self, assignment: Assignment, rule: str, remedy: str = "") -> None:
        key = assignment.key
        shown = key if assignment.origin == COMMAND_LINE else f"{key} ({assignment.origin})"
        value = None if assignment.delete else display(key, assignment.value, keys.is_plain(key))
        self.problems.append(Problem(shown, value, rule, remedy))
        self.broken.add(key)

    def finish(self, check: bool, elsewhere: bool = False) -> Loaded:
        """Convert old micro-batch sizes, resolve the tree, and apply the rules."""
        self._divide_per_device()
        for name in keys.leaves():
            self._resolve(name)
        for name in sorted(OmegaConf.missing_keys(self.tree)):
            if name not in self.broken:
                self.problems.append(Problem(name, None, "must be given", keys.keys()[name].doc))
            self.broken.add(name)
            OmegaConf.update(self.tree, name, "")
        config: Config = OmegaConf.to_object(self.tree)  # type: ignore[assignment]
        without_effect: dict[str, str] = {}
        remarks: list[str] = []
        lacking: list[str] = []
        if check:
            from verlite.config import ineffective, rules

            for problem in rules.check(config, self.user_keys):
                if problem.key in self.broken:
                    continue
                problem = replace(problem, key=self._as_typed(problem.key))
                if elsewhere and problem.is_local:
                    lacking.append(f"{problem.typed()}: {problem.rule}")
                else:
                    self.problems.append(problem)
            if not self.problems:
                without_effect = ineffective.keys_without_effect(config, self.user_keys)
                remarks = ineffective.remarks(config, self.old_names)
        notes = [*self._notes(without_effect), *remarks]
        if self.problems:
            raise ConfigError(self.problems, notes)
        return Loaded(
            config,
            self.tree,
            notes,
            self.provenance,
            frozenset(self.user_keys),
            tuple(lacking),
        )

    def _notes(self, without_effect: dict[str, str]) -> Iterator[str]:
        """Yield one note per key that was renamed, derived, set twice, or has no effect.

        Notes use the name that was typed.
        """
        for old, new in self.old_names.items():
            if new not in without_effect:
                yield self.derived.get(old) or f"{old} is now called {new}"
        for (origin, key), given in self.given.items():
            typed = given[0].key
            same_name = [one for one in given if one.key == typed]
            values = [display(key, one.value, keys.is_plain(key)) for one in same_name]
            if len(set(values)) > 1:
                times = f"{typed} is given {len(values)} times ({origin})"
                yield f"{times}: {', '.join(values)}; the last one is used"
        by_reason: dict[str, list[str]] = {}
        for key, reason in self.ignored.items():
            by_reason.setdefault(reason, []).append(key)
        for key, reason in without_effect.items():
            by_reason.setdefault(reason, []).append(self._as_typed(key))
        for reason, names in by_reason.items():
            verb = "has" if len(names) == 1 else "have"
            yield f"{', '.join(names)} {verb} no effect: {reason}"

    def _as_typed(self, key: str) -> str:
        """Return the old name under which a key or its parent mapping was set, else `key`."""
        for old, new in self.old_names.items():
            if key == new or key.startswith(new + "."):
                return old + key.removeprefix(new)
        return key

    def _divide_per_device(self) -> None:
        """Convert old micro-batch sizes, which count samples on all devices, to one device."""
        for old, assignment in self.per_device.items():
            if assignment.value is not None:
                self._divide(old, assignment)

    def _divide(self, old: str, assignment: Assignment) -> None:
        new = aliases.PER_DEVICE[old]
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
        if self.provenance[new] == COMMAND_LINE and assignment.origin != COMMAND_LINE:
            return
        n_devices = self._actor_devices()
        size = max(1, value // n_devices)
        self._set(replace(assignment, value=size), new)
        rounded = " (rounded)" if value % n_devices else ""
        self.old_names[old] = new
        division = f"{value} / {n_devices} devices{rounded}"
        self.derived[old] = f"{old} counts all devices; {division} gives {new}={size}"

    def _actor_devices(self) -> int:
        from verlite.config.placement import devices

        trainer = self.tree.trainer
        n_devices = max(1, trainer.nnodes * trainer.n_gpus_per_node)
        for names, text in (self.tree.cluster.component_placement or {}).items():
            if "actor" in [name.strip() for name in names.split(",")]:
                try:
                    return len(devices(str(text), n_devices))
                except ValueError:
                    break  # the rules report it
        return n_devices

    def _resolve(self, name: str) -> None:
        """Report an interpolation that cannot be resolved and restore the default.

        With the default the other rules can still be checked.
        """
        parent, _, last = name.rpartition(".")
        section = OmegaConf.select(self.tree, parent) if parent else self.tree
        if OmegaConf.is_missing(section, last):
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

    def _to_default(self, name: str) -> None:
        parent, _, last = name.rpartition(".")
        defaults = OmegaConf.select(_schema(), parent) if parent else _schema()
        section = OmegaConf.select(self.tree, parent) if parent else self.tree
        section._set_item_impl(last, copy.deepcopy(defaults._get_node(last)))


@functools.cache
def _schema() -> DictConfig:
    """Return the schema as a tree to copy. Copying takes a quarter of the time of building it."""
    return OmegaConf.structured(Config)


def _meaning(name: str) -> str | None:
    """Return the table that contains a key: "schema", "renamed", another alias table, or None."""
    known = keys.find(name)
    if known:
        return None if known.section else "schema"
    if aliases.renamed(name):
        return "renamed"
    tables: dict[str, dict[str, Any]] = {
        "per device": aliases.PER_DEVICE,
        "fixed": aliases.FIXED,
        "refused": aliases.REFUSED,
        "ignored": aliases.IGNORED,
    }
    for meaning, table in tables.items():
        if aliases.lookup(table, name) is not None:
            return meaning
    return None


def _leaf_names(prefix: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, entry in value.items():
            yield from _leaf_names(f"{prefix}.{name}", entry)
    else:
        yield prefix


def _as_list(value: Any, known: keys.Key) -> Any:
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
    node: Any, prefix: str, indent: str, provenance: dict[str, str], known: dict[str, keys.Key]
) -> Iterator[str]:
    for name, value in node.items():
        key = f"{prefix}{name}"
        written = yaml.safe_dump(str(name), width=10**6).splitlines()[0]
        if isinstance(value, dict) and value:
            yield f"{indent}{written}:"
            yield from _dump(value, key + ".", indent + "  ", provenance, known)
            continue
        owner = keys.find(key, known)
        assert owner is not None
        if owner.free and is_secret(key, value):
            value = "***"
        elif isinstance(value, str):
            value = display(key, value, known=True)
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
        text = text.removesuffix("...\n").strip()
        origin = provenance.get(key, provenance.get(owner.name, DEFAULT))
        comment = f"  # {origin}" if origin != DEFAULT else ""
        yield f"{indent}{written}: {text}{comment}"


def _help(program: str) -> str:
    return f"""\
usage: {program} [--config-name NAME] [--config-path FOLDER] [key=value ...]

NAME is one of {", ".join(our_names())}, or a YAML file of FOLDER. Its defaults list may name these.
Overrides may be at any position:
  key=value, +key=value, ++key=value set a key; ~key restores its default.

verlite check <the same arguments>   finds all problems without starting the run
verlite explain <key>                describes a key"""
