"""Try in this process, without Ray, what a run meets in its first minute: the reward function, the
tools, the disk, the tokenizer and the first prompts. `verlite check` does.

The functions are those of the run itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from verlite import hub
from verlite.config.plan import Plan
from verlite.config.schema import Config
from verlite.data.dataset import DataError
from verlite.rewards.process import FunctionError
from verlite.rewards.routing import UnknownDataSource
from verlite.trainer.disk import disk_warning
from verlite.trainer.errors import RunRefused, ServiceMissing
from verlite.trainer.inputs import (
    HubMissing,
    data_lines,
    load_datasets,
    load_environment,
    load_policy_tokenizer,
    make_sampler,
    read_rows,
)
from verlite.trainer.launch import (
    absolutize_paths,
    check_tools,
    environment,
    validate_reward_fn,
)

ROWS = 1000
"""Rows of each file that are read and tokenized."""


@dataclass
class Trial:
    """What was found, as sentences that may lack the period."""

    seen: list[str] = field(default_factory=list)
    """What the prompts look like."""
    warnings: list[str] = field(default_factory=list)
    """What a run would warn about, and what it would refuse as long as something does not answer.
    """
    errors: list[str] = field(default_factory=list)
    """Why a run would be refused, in its own words."""


def try_out(config: Config, plan: Plan) -> Trial:
    """Try the run's functions and files. Only the first ROWS rows of each file are read."""
    config = absolutize_paths(config)
    trial = Trial()
    with environment(config.ray_kwargs.ray_init.runtime_env.env_vars):
        with _noted(trial):
            check_tools(config, plan, trial.warnings.append)
        with _noted(trial):
            _try_data(config, plan, trial)
    return trial


@contextmanager
def _noted(trial: Trial) -> Iterator[None]:
    """Keep the message of a refused run, so that what follows is tried too.

    A service may be started later, so one that does not answer is a warning.
    """
    try:
        yield
    except ServiceMissing as error:
        trial.warnings.append(f"{error}. A run refuses to start until then")
    except (RunRefused, DataError, FunctionError, UnknownDataSource) as error:
        trial.errors.append(str(error))


def _try_data(config: Config, plan: Plan, trial: Trial) -> None:
    train, val = read_rows(config, ROWS)
    with _noted(trial):
        validate_reward_fn(config, train, val, trial.warnings.append)
    warning = disk_warning(config, plan, train.in_files)
    if warning:
        trial.warnings.append(warning)
    model = config.actor_rollout_ref.model
    try:
        tokenizer, described = load_policy_tokenizer(model)
    except HubMissing as error:
        if hub.neighbors(model.path) or hub.neighbors(model.tokenizer_path or ""):
            raise
        trial.warnings.append(f"{error}. So the tokenizer and the prompts were not tried")
        return
    factory = load_environment(config, plan, tokenizer)
    loaded = load_datasets(config, plan, (train, val), tokenizer, described, factory)
    trial.seen += data_lines(tokenizer, *loaded)
    make_sampler(config, plan, loaded[0])
