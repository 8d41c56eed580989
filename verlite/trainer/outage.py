"""Generate a step again after an outage of the tools or of the reward service."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verlite.config.plan import scores_remotely
from verlite.protocol.data import DataProto
from verlite.rewards.remote import UNAVAILABLE
from verlite.rollout.types import Status
from verlite.trainer.agent import tool_failures
from verlite.trainer.run import Run
from verlite.trainer.stages.weights import call_engines

_CHECK_EVERY_S = 2.0
_MAX_RESAMPLES = 3
"""Generations of the same samples after the first one, each after an outage."""


@dataclass(frozen=True)
class _Outage:
    lost: str
    """What the samples lost, in words: "tools" or "rewards"."""
    service: str
    """What has to recover, in words."""
    failures: Sequence[str]
    """The error of each sample that failed for this reason."""
    samples: int
    limit_s: float
    """How long to wait."""
    health: Callable[[], Sequence[str | None]]
    """Returns one reason or None per worker, from the worker's own machine."""


def waits_for_services(run: Run) -> bool:
    """Return whether a generation is repeated after an outage."""
    return _waits_for_tools(run) or _waits_for_rewards(run)


def generate_with_retry(run: Run, requests: DataProto) -> DataProto:
    """Generate; when a service failed too many samples and then recovered, generate again.

    Retries are bounded: a passing health check does not guarantee success.
    """
    for _ in range(_MAX_RESAMPLES):
        answers = call_engines(run, run.rollout.generate, False, requests, sleep_after=False)
        if not wait_for_services(run, answers):
            return answers
    return call_engines(run, run.rollout.generate, False, requests, sleep_after=False)


def wait_for_services(run: Run, batch: DataProto) -> bool:
    """Return whether the samples should be drawn again after an outage.

    True: a service failed more samples than `rollout.max_error_rate` (tools) or
    `reward.max_error_rate` (rewards) allows, and recovered within its `outage_wait_s`. False: the
    services worked, or one did not recover in time.
    """
    outage = _find_outage(run, batch)
    return outage is not None and _recovers(run, outage)


def _waits_for_tools(run: Run) -> bool:
    return run.env_factory is not None and run.config.retriever.outage_wait_s > 0


def _waits_for_rewards(run: Run) -> bool:
    reward = run.config.reward
    return scores_remotely(reward) and reward.remote.outage_wait_s > 0


def _find_outage(run: Run, batch: DataProto) -> _Outage | None:
    config = run.config
    if _waits_for_tools(run):
        failures = tool_failures(batch)
        if len(failures) / len(batch) > config.actor_rollout_ref.rollout.max_error_rate:
            return _Outage(
                "tools",
                "tools",
                failures,
                len(batch),
                config.retriever.outage_wait_s,
                run.rollout.tool_health,
            )
    if _waits_for_rewards(run):
        failures = _reward_failures(batch)
        scored = int((batch.non_tensor_batch["status"] != Status.ERROR).sum())
        if len(failures) / max(1, scored) > config.reward.max_error_rate:
            return _Outage(
                "rewards",
                "reward service",
                failures,
                len(batch),
                config.reward.remote.outage_wait_s,
                run.rollout.reward_health,
            )
    return None


def _reward_failures(batch: DataProto) -> list[str]:
    """Return the cause of each reward that the service did not answer."""
    columns = batch.non_tensor_batch
    return [
        cause
        for error, cause in zip(columns["error"], columns["reward_traceback"], strict=True)
        if error == f"reward: {UNAVAILABLE}"
    ]


def _recovers(run: Run, outage: _Outage) -> bool:
    run.display.warn(
        f"{len(outage.failures)} of {outage.samples} samples lost their {outage.lost} "
        f"({outage.failures[0]}); waiting up to {outage.limit_s:g} s for the {outage.service}"
    )
    began = time.monotonic()
    while True:
        # Every worker checks from its own machine. A stop request ends the step here.
        broken = any(call_engines(run, outage.health, False))
        waited = time.monotonic() - began
        if not broken:
            run.display.info(
                f"the {outage.service} recovered after {waited:.0f} s; "
                "sampling the step's prompts again"
            )
            return True
        if waited >= outage.limit_s:
            return False
        time.sleep(min(_CHECK_EVERY_S, outage.limit_s - waited))
