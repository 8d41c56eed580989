"""The training command of a launcher, checked on a machine that may not be one of the run's."""

from verlite.config.commands import PPO
from verlite.config.load import Loaded, compose, parse_argv, with_home
from verlite.config.problems import ConfigError, Problem

NODES, DEVICES = "trainer.nnodes", "trainer.n_gpus_per_node"
ELSEWHERE = ("trainer.device", DEVICES, "actor_rollout_ref.rollout.name")
"""Keys whose problems on this machine (no GPU, no vLLM) the run's machines need not have."""


def parse(arguments: list[str]) -> tuple[str | None, str | None, list[str]]:
    """Return (--config-name, --config-path, overrides) of the arguments of main_ppo.

    Raises:
        ConfigError: they cannot be read, or ask for help.
    """
    name, folder, overrides, help_wanted = parse_argv(arguments)
    if help_wanted:
        raise ConfigError([Problem("--help", None, "stands after --", "Give it before the --.")])
    return name, folder, with_home(overrides)


def options(name: str | None, folder: str | None) -> list[str]:
    """Return the options of main_ppo for a configuration's name and folder."""
    given = (("config-name", name), ("config-path", folder))
    return [f"--{option}={value}" for option, value in given if value]


def without_shape(overrides: list[str]) -> list[str]:
    """Return the overrides without those of NODES and DEVICES, which the launcher sets."""
    return [text for text in overrides if current_name(text) not in (NODES, DEVICES)]


def current_name(override: str) -> str:
    """Return the key of an override under its current name."""
    key = override.partition("=")[0].lstrip("+~")
    return PPO.tables.new_name(key) or key


def checked(
    name: str | None, overrides: list[str], folder: str | None, files_later: bool = False
) -> Loaded:
    """Check the configuration. What only the run's machines need is not a problem here.

    files_later: files may be missing here.

    Raises:
        ConfigError: with every other problem.
    """
    try:
        return compose(name, overrides, folder)
    except ConfigError as error:
        problems = [
            problem
            for problem in error.problems
            if not problem.is_local or not (files_later or problem.key in ELSEWHERE)
        ]
        if problems:
            raise ConfigError(problems) from None
        return compose(name, overrides, folder, elsewhere=True)
