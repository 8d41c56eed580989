"""From a command line and YAML files to one typed, checked configuration.

The schema is the base. YAML files are laid over it in the order of Hydra's defaults list, then the command line in Hydra's
override grammar, one key at a time. So every value is type-checked, its origin is known, and nothing stops at the first error.
"""

import copy
import functools
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
"""Keys whose leading ~ stands for the home folder: a shell does not expand it after an = sign."""


@dataclass(frozen=True)
class Loaded:
    """A configuration that passed every rule."""

    config: Config
    """Plain dataclasses, interpolations resolved."""
    tree: DictConfig
    """The same as an OmegaConf tree, interpolations kept."""
    notes: list[str]
    """What the user should know: renamed keys, keys without effect, derived values. Each said once."""
    provenance: dict[str, str]
    """Where each key's value comes from: "default", a YAML file's name, or "command line"."""
    user_keys: frozenset[str]
    """Keys that the user set, by the command line or a YAML file of their own, under their present names."""


def compose(
    config_name: str | None = None,
    overrides: Sequence[str] = (),
    config_dir: str | Path | None = None,
    check: bool = True,
) -> Loaded:
    """Build the configuration. ConfigError lists everything wrong with it.

    config_name: a YAML file's name without its ending; None is ppo_trainer.
    overrides: `key=value` in Hydra's grammar; `+key=value`, `++key=value` mean the same for known keys, `~key` is the default again.
    config_dir: a folder of the user's own YAML files, whose defaults may name verlite's.
    check: also apply the rules that span keys and look at files. Without it only names and types are checked.
    """
    builder = _Builder()
    arguments, groups, builder.problems = from_command_line(overrides, config_dir)
    name = (config_name or "ppo_trainer").removesuffix(".yaml")
    try:
        assignments = (
            from_our_yaml(name)
            if config_dir is None
            else from_yaml(name, Path(config_dir).expanduser().resolve(), groups)
        )
    except ConfigError as error:
        # Without the file no rule can be judged; names and types on the command line can.
        for assignment in arguments:
            builder.assign(assignment)
        raise ConfigError([*error.problems, *builder.problems]) from None
    for assignment in [*assignments, *arguments]:
        builder.assign(assignment)
    return builder.finish(check)


def main_argv(argv: Sequence[str], program: str = "python -m verlite.main_ppo") -> Loaded:
    """Load what a training job's command line says; print problems and leave with code 2, or help with code 0."""
    config_name, config_dir, overrides, help_wanted = parse_argv(argv)
    if help_wanted:
        print(_help(program))
        raise SystemExit(0)
    try:
        return compose(config_name, overrides, config_dir)
    except ConfigError as error:
        from verlite.config.show import console

        console(stderr=True).print(error.text(), soft_wrap=True, end="")
        raise SystemExit(2) from None


def parse_argv(argv: Sequence[str]) -> tuple[str | None, str | None, list[str], bool]:
    """(config name, folder of YAML files, overrides, help wanted) of a command line with these in any order."""
    options: dict[str, str] = {}
    overrides: list[str] = []
    names = {
        "--config-name": "name",
        "-cn": "name",
        "--config-path": "dir",
        "-cp": "dir",
        "--config-dir": "dir",
        "-cd": "dir",
    }
    arguments = iter(argv)
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if argument in ("--help", "-h"):
            return None, None, [], True
        if option in names:
            options[names[option]] = value if equals else next(arguments, "")
        else:
            overrides.append(argument)
    return options.get("name"), options.get("dir"), overrides, False


def dump(loaded: Loaded) -> str:
    """The resolved configuration as YAML, with the origin of every value that is not the default, and secrets masked."""
    lines = [
        "# Every value of this run. A comment says where a value comes from; without one it is the default.",
        *_dump(OmegaConf.to_container(loaded.tree, resolve=True), "", "", loaded.provenance),
    ]
    return "\n".join(lines) + "\n"


class _Builder:
    """Collects assignments into the schema's tree, and everything there is to say about them."""

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
        """(origin, present name) -> every assignment to it there, under whatever name."""
        self.broken: set[str] = set()

    def assign(self, assignment: Assignment) -> None:
        """Set one key, or every key below it when its value is a mapping."""
        key, value = assignment.key, assignment.value
        known = keys.keys().get(key)
        if assignment.delete:
            self._reset(assignment)
        elif isinstance(value, dict) and not (known is None and aliases.renamed(key)):
            self._assign_mapping(assignment)
        elif known and known.section:
            self._problem(
                assignment,
                "is a section; it holds keys, not a value",
                f"Its keys: verlite explain {key}.",
            )
        else:
            self._assign_leaf(assignment)

    def _assign_mapping(self, assignment: Assignment) -> None:
        key, value = assignment.key, assignment.value
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
        typed, value = assignment.key, assignment.value
        key = typed if keys.find(typed) else aliases.renamed(typed) or typed
        meaning = _meaning(key)
        if meaning == "schema":
            if key != typed:
                self.old_names[typed] = key
                value = aliases.NULL_MEANS.get(key) if value is None else value
            assignment = replace(assignment, value=value)
            if self._wins(assignment, key):
                self._set(assignment, key)
        elif meaning == "per device":
            self.per_device[key] = assignment
        elif meaning == "fixed":
            accepted, why = aliases.lookup(aliases.FIXED, key)
            if any(
                value == one and isinstance(value, bool) == isinstance(one, bool)
                for one in accepted
            ):
                self.ignored[typed] = why
            else:
                legal = " or ".join(display(key, one) for one in accepted)
                self._problem(
                    assignment,
                    f"only {legal} is accepted here: {why}",
                    f"Leave the key out, or use {legal}.",
                )
        elif meaning == "ignored":
            self.ignored[typed] = aliases.lookup(aliases.IGNORED, key)
        elif meaning == "refused":
            self._problem(
                assignment, "this key has no meaning here", aliases.lookup(aliases.REFUSED, key)
            )
        else:
            self._unknown(assignment)

    def _wins(self, assignment: Assignment, key: str) -> bool:
        """Whether to take this value for `key`, which may have been set under another of its names in the same place."""
        given = self.given.setdefault((assignment.origin, key), [])
        other = next((one for one in reversed(given) if one.key != assignment.key), None)
        given.append(assignment)
        if other is None or other.value == assignment.value:
            return True
        if key == "actor_rollout_ref.rollout.n" and 1 in (assignment.value, other.value):
            return assignment.value != 1  # Search-R1 multiplies n and n_agent
        old, new = (assignment, other) if assignment.key != key else (other, assignment)
        self._problem(
            old,
            f"{new.key}={display(new.key, new.value, True)} is set too, and is the same key",
            f"Keep only {key}.",
        )
        return False

    def _set(self, assignment: Assignment, key: str) -> None:
        value = assignment.value
        known = keys.owner(key)
        if (
            known.type.startswith("list of")
            and isinstance(value, str)
            and not value.startswith("${")
        ):
            value = [value]
        if key in PATHS:
            value = [_expand(item) for item in value] if isinstance(value, list) else _expand(value)
        try:
            if known.free and OmegaConf.select(self.tree, known.name) is None:
                OmegaConf.update(self.tree, known.name, {}, merge=False)
            OmegaConf.update(self.tree, key, value, merge=False, force_add=known.free)
        except (OmegaConfBaseException, ValueError, TypeError):
            hint = "null is written in lower case." if value in ("None", "Null", "none") else ""
            expected = known.type if not known.free or key == known.name else "text"
            self._problem(assignment, f"expected {expected}, got {_kind(value)}", hint)
            self.broken.add(key)
            return
        # A file may list defaults for the reader's sake; a command line means what it says.
        meant = assignment.by_user and (assignment.origin == COMMAND_LINE or value != known.default)
        for name in {key, known.name}:
            self.provenance[name] = assignment.origin
            if meant:
                self.user_keys.add(name)

    def _reset(self, assignment: Assignment) -> None:
        """`~key`: the schema's default again; `~mapping.entry`: without that entry."""
        key = assignment.key
        known = keys.find(key)
        if known is None:
            self._unknown(assignment)
        elif known.free and key != known.name:
            parent, _, last = key.rpartition(".")
            node = OmegaConf.select(self.tree, parent)
            if node is None or last not in node:
                self._problem(assignment, "there is no such entry to remove")
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
        remedy = (
            f"Did you mean {' or '.join(close)}?" if close else "verlite explain lists the keys."
        )
        self._problem(assignment, "there is no such key", remedy)

    def _problem(self, assignment: Assignment, rule: str, remedy: str = "") -> None:
        value = (
            None
            if assignment.delete
            else display(assignment.key, assignment.value, keys.is_plain(assignment.key))
        )
        key = (
            assignment.key
            if assignment.origin == COMMAND_LINE
            else f"{assignment.key} ({assignment.origin})"
        )
        self.problems.append(Problem(key, value, rule, remedy))
        self.broken.add(assignment.key)

    def finish(self, check: bool) -> Loaded:
        """Derive what old names imply, resolve the tree, apply the rules."""
        self._divide_per_device()
        for name in keys.leaves():
            self._resolve(name)
        for name in sorted(OmegaConf.missing_keys(self.tree)):
            if name not in self.broken:
                self.problems.append(Problem(name, None, "must be given", keys.keys()[name].doc))
            self.broken.add(name)
            OmegaConf.update(self.tree, name, "")
        config: Config = OmegaConf.to_object(self.tree)  # type: ignore[assignment]
        in_vain: dict[str, str] = {}
        remarks: list[str] = []
        if check:
            from verlite.config import ineffective, rules

            found = [
                problem
                for problem in rules.check(config, self.user_keys)
                if problem.key not in self.broken
            ]
            self.problems += [
                replace(problem, key=self._as_typed(problem.key)) for problem in found
            ]
            if not self.problems:
                in_vain = ineffective.keys_without_effect(config, self.user_keys)
                remarks = ineffective.remarks(config, self.old_names)
        notes = [*self._notes(in_vain), *remarks]
        if self.problems:
            raise ConfigError(self.problems, notes)
        return Loaded(config, self.tree, notes, self.provenance, frozenset(self.user_keys))

    def _notes(self, in_vain: dict[str, str]) -> Iterator[str]:
        """One note per key, under the name that was typed: renamed, derived, given twice, or without effect."""
        for old, new in self.old_names.items():
            if new not in in_vain:
                yield self.derived.get(old) or f"{old} is now called {new}"
        for (origin, key), given in self.given.items():
            values = [
                display(key, one.value, keys.is_plain(key))
                for one in given
                if one.key == given[0].key
            ]
            if len(set(values)) > 1:
                yield f"{given[0].key} is given {len(values)} times ({origin}): {', '.join(values)}; the last one counts"
        by_reason: dict[str, list[str]] = {}
        for key, why in [
            *self.ignored.items(),
            *((self._as_typed(key), why) for key, why in in_vain.items()),
        ]:
            by_reason.setdefault(why, []).append(key)
        for why, names in by_reason.items():
            yield f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect: {why}"

    def _as_typed(self, key: str) -> str:
        """The older name under which a key, or the mapping that it is an entry of, was set; else its own name."""
        for old, new in self.old_names.items():
            if key == new or key.startswith(new + "."):
                return old + key.removeprefix(new)
        return key

    def _divide_per_device(self) -> None:
        """Old micro-batch sizes counted samples on all devices; divide them by the actor's number of devices."""
        for old, assignment in self.per_device.items():
            if assignment.value is None:
                continue
            new, value = aliases.PER_DEVICE[old], assignment.value
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                self._problem(
                    assignment, f"expected a whole number from 1, got {_kind(value)}", f"Use {new}."
                )
                self.broken.add(new)
                continue
            set_too = self.given.get((assignment.origin, new))
            if set_too and set_too[-1].value is not None:
                self._problem(
                    assignment,
                    f"{new}={set_too[-1].value} is set too; they are two units of one size",
                    f"Keep only {new}.",
                )
                continue
            if self.provenance[new] == COMMAND_LINE and assignment.origin != COMMAND_LINE:
                continue
            n_devices = self._actor_devices()
            size = max(1, value // n_devices)
            self._set(replace(assignment, value=size), new)
            rounded = "" if value % n_devices == 0 else " (rounded)"
            self.old_names[old] = new
            self.derived[old] = (
                f"{old} counts all devices; {value} / {n_devices} devices{rounded} gives {new}={size}"
            )

    def _actor_devices(self) -> int:
        from verlite.config.placement import devices

        trainer, spec = self.tree.trainer, self.tree.cluster.component_placement
        n_devices = max(1, trainer.nnodes * trainer.n_gpus_per_node)
        for names, text in (spec or {}).items():
            if "actor" in [name.strip() for name in names.split(",")]:
                try:
                    return len(devices(str(text), n_devices))
                except ValueError:
                    break  # the rules report it
        return n_devices

    def _resolve(self, name: str) -> None:
        """Report an interpolation that cannot be resolved, and take the default so that the rest can be checked."""
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
            self.problems.append(
                Problem(name, text, str(error).splitlines()[0], "Check the ${...} in the value.")
            )
            self.broken.add(name)
            self._to_default(name)

    def _to_default(self, name: str) -> None:
        parent, _, last = name.rpartition(".")
        fresh = OmegaConf.select(_schema(), parent) if parent else _schema()
        section = OmegaConf.select(self.tree, parent) if parent else self.tree
        section._set_item_impl(last, copy.deepcopy(fresh._get_node(last)))


@functools.cache
def _schema() -> DictConfig:
    """The schema as a tree, to be copied: a copy costs a quarter of making it anew."""
    return OmegaConf.structured(Config)


def _meaning(name: str) -> str | None:
    """What a key's name is: one of the schema's, renamed, in one of the other alias tables, or unknown (None)."""
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
    return next(
        (meaning for meaning, table in tables.items() if aliases.lookup(table, name) is not None),
        None,
    )


def _leaf_names(prefix: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, entry in value.items():
            yield from _leaf_names(f"{prefix}.{name}", entry)
    else:
        yield prefix


def _expand(value: Any) -> Any:
    return (
        str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~") else value
    )


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


def _dump(node: Any, prefix: str, indent: str, provenance: dict[str, str]) -> Iterator[str]:
    for name, value in node.items():
        key = f"{prefix}{name}"
        written = yaml.safe_dump(str(name), width=10**6).splitlines()[0]
        if isinstance(value, dict) and value:
            yield f"{indent}{written}:"
            yield from _dump(value, key + ".", indent + "  ", provenance)
            continue
        known = keys.owner(key)
        if known.free and is_secret(key, value):
            value = "***"
        elif isinstance(value, str):
            value = display(key, value, known=True)
        text = (
            yaml.safe_dump(value, default_flow_style=True, width=10**6)
            .removesuffix("...\n")
            .strip()
        )
        origin = provenance.get(key, provenance.get(known.name, DEFAULT))
        yield f"{indent}{written}: {text}" + (f"  # {origin}" if origin != DEFAULT else "")


def _help(program: str) -> str:
    names = ", ".join(our_names())
    return (
        f"usage: {program} [--config-name NAME] [--config-path FOLDER] [key=value ...]\n\n"
        f"NAME is one of {names}, or a YAML file of FOLDER, whose defaults may name these. Overrides may stand anywhere:\n"
        "  key=value, +key=value, ++key=value set a key; ~key takes its default again.\n\n"
        "verlite check <the same arguments>   finds everything wrong, without starting anything\n"
        "verlite explain <key>                says what a key means"
    )
