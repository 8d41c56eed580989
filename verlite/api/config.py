"""Configurations of runs in Python code."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from verlite.config import keys
from verlite.config.command import PPO
from verlite.config.load import Loaded, compose, dump
from verlite.config.problems import ConfigError, Problem
from verlite.config.schema import Config

Overrides = Mapping[str, Any] | Sequence[str]
"""A str is one override."""


@dataclass(frozen=True)
class RunConfig:
    """A configuration of a run: a YAML file and what was changed. `load_config` makes it.

    config["trainer.total_training_steps"] is a value. Names and types have been checked, the rules
    between keys and the files not yet: `check` and `train` do that.
    """

    name: str | None
    """Name of the YAML file without its suffix; None: main_ppo's default."""
    folder: Path | None
    """Folder of the user's YAML files. None: verlite's own."""
    overrides: tuple[str | Mapping[str, Any], ...] = ()
    """key=value as on the command line, and mappings, in the order in which they apply."""

    def __post_init__(self) -> None:
        _ = self.values  # raises ConfigError

    def loaded(self, check: bool = True) -> Loaded:
        """Build the configuration; `check` as in `verlite.config.compose`. Raises ConfigError."""
        return compose(self.name, self.overrides, self.folder, check)

    @cached_property
    def values(self) -> Config:
        """All values, as data classes: config.values.trainer.total_training_steps."""
        return self.loaded(check=False).config

    def __getitem__(self, key: str) -> Any:
        if PPO.find(key) is None:
            raise KeyError(key)
        return keys.get(self.values, key)

    def override(self, overrides: Overrides) -> "RunConfig":
        """Return a copy with these keys changed.

        Raises:
            ConfigError: a key is unknown, or a value has the wrong type.
        """
        return replace(self, overrides=(*self.overrides, *_as_list(overrides)))

    def yaml(self) -> str:
        """Return every value as YAML with its origin. Secrets are masked."""
        return dump(self.loaded(check=False))


def load_config(name: str | Path | None = None, overrides: Overrides = ()) -> RunConfig:
    """Return a configuration.

    Args:
        name: one of verlite's configurations ("grpo", "ppo", ...), or the path of a YAML file.
            None: the default of main_ppo.
        overrides: a mapping {"data.train_batch_size": 64}, or a list ["data.train_batch_size=64"]
            in the grammar of the command line.

    Raises:
        ConfigError: the file is missing, a key is unknown, a value has the wrong type, or a
            required one is missing. `problems` lists all of them.
    """
    folder = None
    if name is not None and (str(name).endswith((".yaml", ".yml")) or os.sep in str(name)):
        path = Path(name).expanduser().resolve()
        if not path.is_file():
            raise ConfigError([Problem("name", str(name), "is not a YAML file that exists")])
        name, folder = path.stem, path.parent
    return RunConfig(None if name is None else str(name), folder, tuple(_as_list(overrides)))


def _as_list(overrides: Overrides) -> Sequence[str | Mapping[str, Any]]:
    return [overrides] if isinstance(overrides, str | Mapping) else overrides
