"""Debugging a run: which debugger stops its workers, and no time limit while one waits for it."""

import copy
import os

from verlite.breakpoints import NO_LIMIT_S
from verlite.config import keys
from verlite.config.schema import Config

DEBUGPY = "debugpy"
LEGACY = "legacy"
DEBUGGERS = {
    DEBUGPY: "debugpy (VS Code, or another client)",
    LEGACY: "Ray's legacy debugger (`ray debug`)",
}
LIFTED = (
    "trainer.phase_timeout_s",
    "trainer.heartbeat_timeout_s",
    "reward.timeout_s",
    "reward.item_timeout_s",
    "actor_rollout_ref.rollout.request_timeout_s",
    "actor_rollout_ref.rollout.server_timeout_s",
    "agent.timeout_s",
    "reward.remote.timeout_s",
    "reward.remote.deadline_s",
    "actor_rollout_ref.ref.timeout_s",
    "actor_rollout_ref.ref.deadline_s",
    "distillation.teacher_models.teacher_model.timeout_s",
    "distillation.teacher_models.teacher_model.deadline_s",
    "retriever.timeout_s",
    "retriever.deadline_s",
)
"""Time limits that a stopped process would exceed."""


def debugger(config: Config) -> str:
    """Return the run's debugger, DEBUGPY or LEGACY; "" if the run is not debugged.

    trainer.debug turns debugging on, and so do the variables that Ray reads: RAY_DEBUG=1,
    RAY_DEBUG=legacy and RAY_DEBUG_POST_MORTEM=1. RAY_DEBUG chooses the debugger.
    """
    name = variable(config, "RAY_DEBUG")
    if name == LEGACY:
        return LEGACY
    return DEBUGPY if config.trainer.debug or name == "1" or stops_at_failures(config) else ""


def stops_at_failures(config: Config) -> bool:
    """Return whether a failing worker waits for the debugger before it reports its failure."""
    return variable(config, "RAY_DEBUG_POST_MORTEM") == "1"


def variable(config: Config, name: str) -> str:
    """Return an environment variable as the run will see it, "" if it is not set."""
    for_the_run = config.ray_kwargs.ray_init.runtime_env.env_vars
    return for_the_run.get(name, os.environ.get(name, ""))


def without_limits(config: Config) -> Config:
    """Return a copy with trainer.debug on and the time limits lifted."""
    config = copy.deepcopy(config)
    config.trainer.debug = True
    for name in LIFTED:
        section, _, key = name.rpartition(".")
        setattr(keys.get(config, section), key, NO_LIMIT_S)
    return config
