"""The training command of a launcher, checked on a machine that may not be one of the run's."""

from collections.abc import Iterator

from verlite.config.commands import PPO
from verlite.config.load import Loaded, compose, parse_argv, with_home
from verlite.config.override_text import override
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


def for_other_machines(given: Loaded, overrides: list[str]) -> list[str]:
    """Return the overrides as other machines need them: without NODES and DEVICES, which the
    launcher sets; with this user's home in paths of a YAML file, as on the command line
    (`with_home`); and with GPUs unless trainer.device is set.

    given: their configuration.
    """
    of_yaml = [override(key, value) for key, value in given.from_home.items()]
    kept = [one for one in (*of_yaml, *overrides) if current_name(one) not in (NODES, DEVICES)]
    if given.config.trainer.device != "cpu" and "trainer.device" not in given.user_keys:
        kept.append("trainer.device=cuda")  # CPU slots must not replace GPUs that are missing
    return kept


def own_cluster(given: Loaded, launcher: str) -> Iterator[Problem]:
    """Refuse to join a Ray cluster."""
    address = given.config.ray_kwargs.ray_init.address
    if address is not None:
        rule = f"{launcher} starts a Ray cluster of its own"
        yield Problem("ray_kwargs.ray_init.address", address, rule, "Leave it out.")


def current_name(override: str) -> str:
    """Return the key of an override under its current name."""
    key = override.partition("=")[0].lstrip("+~")
    return PPO.tables.new_name(key) or key


def checked(
    name: str | None,
    overrides: list[str],
    folder: str | None,
    problems: list[Problem],
    files_later: bool = False,
) -> Loaded:
    """Check the configuration. What only the run's machines need is not a problem here.

    Args:
        problems: those of the launcher's own options.
        files_later: files may be missing here.

    Raises:
        ConfigError: with these problems and every other one.
    """
    is_elsewhere = False
    try:
        loaded = compose(name, overrides, folder)
    except ConfigError as error:
        is_elsewhere = True
        problems = problems + [
            problem
            for problem in error.problems
            if not problem.is_local or not (files_later or problem.key in ELSEWHERE)
        ]
    if problems:
        raise ConfigError(problems)
    return compose(name, overrides, folder, elsewhere=True) if is_elsewhere else loaded
