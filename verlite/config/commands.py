"""The training commands main_ppo, main_sft and main_dpo: the schema of each configuration, other
names of its keys, and its rules.
"""

import functools
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verlite.config import rules, sft, translation
from verlite.config.keys import Key, find, table
from verlite.config.problems import Problem
from verlite.config.rules import declared, notes
from verlite.config.rules.context import Context
from verlite.config.schema import Config
from verlite.config.translation import Tables


@dataclass(frozen=True, eq=False)
class Command:
    """A command that takes a configuration."""

    schema: type
    """Dataclass of the whole configuration."""
    config_name: str
    """YAML file that applies without --config-name."""
    tables: Tables
    """Names that other projects give to its keys."""
    verl_defaults: Callable[[], Mapping[str, list[Any]]]
    """verl's keys for the same purpose, with their defaults."""
    verl_files: Mapping[str, str]
    """verl's own YAML files for it; the values are those of `translation.TRAINERS`."""
    rules: Callable[[Any, Collection[str]], Iterable[Problem]]
    """The rules of a configuration, given the keys that the user set."""
    effects: Callable[[Any, Collection[str], Mapping[str, str]], tuple[dict[str, str], list[str]]]
    """Returns the user's keys without effect, with reasons, and remarks; the last argument is
    {name that was typed: its current name}."""
    paths: tuple[str, ...] = ()
    """Keys whose leading ~ means the home folder. A shell does not expand it after an = sign."""
    list_keys: str = "List keys: verlite explain."
    """How to see all keys."""
    explain: str = "verlite explain"
    """The start of the command that explains a key."""

    @functools.cached_property
    def keys(self) -> dict[str, Key]:
        """Every key, sections included."""
        return table(self.schema())

    @functools.cached_property
    def leaves(self) -> list[str]:
        """The names of all keys that have a value."""
        return [name for name, key in self.keys.items() if not key.section]

    @functools.cached_property
    def sections(self) -> frozenset[str]:
        """The top-level names."""
        return frozenset(name for name in self.keys if "." not in name)

    @functools.cached_property
    def tree(self) -> DictConfig:
        """The schema's defaults. Do not change it: `new_tree` gives a copy."""
        return OmegaConf.structured(self.schema)

    @functools.cached_property
    def required(self) -> frozenset[str]:
        """The keys without a default."""
        return frozenset(OmegaConf.missing_keys(self.tree))

    @functools.cached_property
    def _pickled(self) -> bytes:
        return pickle.dumps(self.tree)

    def new_tree(self) -> DictConfig:
        """Return a copy of `tree`. deepcopy would take four times as long."""
        copied: DictConfig = pickle.loads(self._pickled)
        return copied

    def find(self, name: str) -> Key | None:
        """Return the key, or the free mapping that `name` is an entry of, or None."""
        return find(name, self.keys)

    def owner(self, name: str) -> Key:
        """Return the same as `find`. Raises KeyError if there is no such key."""
        key = self.find(name)
        if key is None:
            raise KeyError(name)
        return key

    def meaning(self, name: str) -> str | None:
        """Return "schema", the table of other names that contains a key, or None."""
        known = self.find(name)
        if known:
            return None if known.section else "schema"
        return self.tables.meaning(name)


def _ppo_effects(
    config: Config, user_keys: Collection[str], old_names: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    context = Context(config, user_keys, old_names=old_names)
    return declared.keys_without_effect(context), notes.notes(context)


PPO = Command(
    schema=Config,
    config_name="ppo_trainer",
    tables=translation.read_ppo(),
    verl_defaults=translation.defaults,
    verl_files=translation.TRAINERS,
    rules=rules.check,
    effects=_ppo_effects,
    paths=(
        "data.train_files",
        "data.val_files",
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.model.tokenizer_path",
        "critic.model.path",
        "distillation.teacher_models.teacher_model.model_path",
        "custom_reward_function.path",
        "trainer.default_local_dir",
        "trainer.resume_from_path",
    ),
)
"""`verlite.main_ppo`."""

TUNING_PATHS = (
    "data.train_files",
    "data.val_files",
    "model.path",
    "model.tokenizer_path",
    "trainer.default_local_dir",
    "trainer.resume_from_path",
)
SFT: Command = Command(
    schema=sft.SFTConfig,
    config_name="sft",
    tables=translation.read_sft(PPO.tables),
    verl_defaults=partial(translation.defaults, translation.SFT_TABLE),
    verl_files=translation.SFT_TRAINERS,
    rules=lambda config, user_keys: sft.check(config, SFT.keys),
    effects=lambda config, user_keys, _: sft.effects(config, user_keys, SFT.keys),
    paths=TUNING_PATHS,
    list_keys="List keys: python -m verlite.main_sft --help.",
    explain="verlite explain --sft",
)
"""`verlite.main_sft`."""

DPO: Command = Command(
    schema=sft.DPOConfig,
    config_name="dpo",
    tables=Tables(),
    verl_defaults=dict,
    verl_files={},
    rules=lambda config, user_keys: sft.check(config, DPO.keys),
    effects=lambda config, user_keys, _: sft.effects(config, user_keys, DPO.keys),
    paths=TUNING_PATHS,
    list_keys="List keys: python -m verlite.main_dpo --help.",
    explain="verlite explain --dpo",
)
"""`verlite.main_dpo`."""
