"""Try in this process, without Ray, what a run meets in its first minute: the run directory and its
checkpoint, the reward function, the tools and services, the disk, the tokenizer and the first
prompts. `verlite check` does.

The functions are those of the run itself. They only read.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from verlite import hub
from verlite.config import debug
from verlite.config.critical import begin_run
from verlite.config.plan import Plan
from verlite.config.schema import Config
from verlite.data.dataset import DataError
from verlite.data.sampler import PromptSampler
from verlite.engine.reference_wire import ModelInfo
from verlite.rewards.process import FunctionError
from verlite.rewards.routing import UnknownDataSource
from verlite.trainer.checkpoints import STATE, Checkpoint, CheckpointError, ResumeRefused
from verlite.trainer.disk import disk_warning
from verlite.trainer.errors import RunRefused, ServiceMissing
from verlite.trainer.inputs import (
    HubMissing,
    check_functions,
    data_lines,
    load_datasets,
    load_environment,
    load_policy_tokenizer,
    make_sampler,
    prove_models,
    read_rows,
)
from verlite.trainer.launch import (
    absolutize_paths,
    check_servers,
    check_tools,
    environment,
    nothing_left,
    resume_point,
    try_run_dir,
    validate_reward_fn,
)
from verlite.trainer.reference import check_shape, find_service

ROWS = 1000
"""Rows of each file that are read and tokenized."""


@dataclass
class Trial:
    """What was found, as sentences that may lack the period."""

    seen: list[str] = field(default_factory=list)
    """What the prompts look like."""
    warnings: list[str] = field(default_factory=list)
    """What a run would warn about, and what could not be tried here."""
    missing: list[str] = field(default_factory=list)
    """What does not answer now. A run would not start until it does."""
    errors: list[str] = field(default_factory=list)
    """Why a run would be refused, in its own words."""

    def verdict(self) -> str:
        """Return the last line that `verlite check` prints if there are no errors."""
        if self.missing:
            return "The configuration is fine, but a run would not start now. See the notes above."
        if self.warnings:
            return "The configuration is fine. See the notes above."
        return "The configuration is fine."


def try_out(config: Config, plan: Plan) -> Trial:
    """Try the run's functions and files. Only the first ROWS rows of each file are read."""
    config = absolutize_paths(config)
    if debug.debugger(config):
        config = debug.without_limits(config)
    trial = Trial()
    run_dir = Path(config.trainer.default_local_dir)
    with environment(config.ray_kwargs.ray_init.runtime_env.env_vars):
        with noted(trial):
            try_run_dir(run_dir)
        checkpoint = None
        with noted(trial):
            begin_run()
            checkpoint = resume_point(config, run_dir, trial.warnings.append, clean=False)
            if checkpoint and nothing_left(plan, checkpoint):
                trial.warnings.append(
                    f"{checkpoint.path} is from the last step, {plan.total_steps}: a run would "
                    "find nothing left to train"
                )
        with noted(trial):
            check_functions(config)
        with noted(trial):
            check_tools(config, plan, trial.warnings.append)
        service = None
        with noted(trial):
            service = find_service(config, plan, trial.warnings.append)
        with noted(trial):
            check_servers(_without_wait(config), plan, trial.seen.append, trial.warnings.append)
        with noted(trial):
            _try_data(config, plan, trial, checkpoint, service)
    return trial


def _without_wait(config: Config) -> Config:
    """Return a copy that asks the generation servers once."""
    once = copy.deepcopy(config)
    once.actor_rollout_ref.rollout.server_wait_s = 0.0
    return once


@contextmanager
def noted(trial: Trial) -> Iterator[None]:
    """Keep the message of a refused run, so that what follows is tried too."""
    try:
        yield
    except ServiceMissing as error:
        trial.missing.append(f"{error}. A run refuses to start until then")
    except (RunRefused, DataError, FunctionError, UnknownDataSource, CheckpointError) as error:
        trial.errors.append(str(error))


def _try_data(
    config: Config,
    plan: Plan,
    trial: Trial,
    checkpoint: Checkpoint | None,
    service: ModelInfo | None,
) -> None:
    data = config.data
    train, val = read_rows(config, ROWS)
    with noted(trial):
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
    if service:
        with noted(trial):
            check_shape(service, described, model.path)
    with noted(trial):
        trial.warnings += prove_models(config, plan)
    factory = load_environment(config, plan, tokenizer)
    loaded = load_datasets(config, plan, (train, val), tokenizer, described, factory)
    trial.seen += data_lines(tokenizer, *loaded, data.apply_chat_template_kwargs)
    sampler = make_sampler(config, plan, loaded[0])
    if checkpoint and not loaded[0].report().in_files:
        _try_position(sampler, checkpoint)


def _try_position(sampler: PromptSampler, checkpoint: Checkpoint) -> None:
    """Continue the order of the prompts from the checkpoint. All rows must have been read."""
    try:
        sampler.load_state_dict(checkpoint.state()["sampler"])
    except ValueError as error:
        raise ResumeRefused(f"{checkpoint.path / STATE}: {error}") from error
