"""Find an outage of the tools or of the reward service, and generate the step again after it."""

import time
from collections.abc import Callable, Sequence

from verlite.config.plan import scores_remotely
from verlite.control.commands import CheckHealth, Do
from verlite.control.machine import Machine, Outage
from verlite.protocol.data import DataProto
from verlite.rewards.remote import UNAVAILABLE
from verlite.rollout.types import Status
from verlite.trainer.metrics import tool_failures
from verlite.trainer.run import Run
from verlite.trainer.stages.weights import call_engines


def waits_for_services(run: Run) -> bool:
    """Return whether a generation is repeated after an outage."""
    return _waits_for_tools(run) or _waits_for_rewards(run)


def generate_with_retry(run: Run, requests: DataProto) -> DataProto:
    """Generate; when a service failed too many samples and then recovered, generate again."""
    while True:
        answers = call_engines(run, run.rollout.generate, False, requests, sleep_after=False)
        if not wait_for_services(run, answers):
            return answers


def wait_for_services(run: Run, batch: DataProto) -> bool:
    """Return whether the samples should be drawn again after an outage.

    An outage: a service failed more samples than `rollout.max_error_rate` (tools) or
    `reward.max_error_rate` (rewards) allows. The control decides how long to wait for it.
    """
    outage, health = _find_outage(run, batch)
    following = run.tell(Machine.answered, outage)
    while isinstance(following, CheckHealth):
        time.sleep(following.after_s)
        # Every worker checks from its own machine. A stop request ends the step here.
        following = run.tell(Machine.health, any(call_engines(run, health, False)))
    return following is Do.RESAMPLE


def _waits_for_tools(run: Run) -> bool:
    return run.env_factory is not None and run.config.retriever.outage_wait_s > 0


def _waits_for_rewards(run: Run) -> bool:
    reward = run.config.reward
    return scores_remotely(reward) and reward.remote.outage_wait_s > 0


def _find_outage(
    run: Run, batch: DataProto
) -> tuple[Outage | None, Callable[[], Sequence[str | None]]]:
    """Return the outage, and what checks the service: it returns one reason or None per worker,
    from the worker's own machine."""
    config = run.config
    if _waits_for_tools(run):
        failures = tool_failures(batch)
        if len(failures) / len(batch) > config.actor_rollout_ref.rollout.max_error_rate:
            outage = Outage(
                "tools", _lost(batch, "tools", failures), config.retriever.outage_wait_s
            )
            return outage, run.rollout.tool_health
    if _waits_for_rewards(run):
        failures = _reward_failures(batch)
        scored = int((batch.non_tensor_batch["status"] != Status.ERROR).sum())
        if len(failures) / max(1, scored) > config.reward.max_error_rate:
            lost, limit_s = _lost(batch, "rewards", failures), config.reward.remote.outage_wait_s
            return Outage("reward service", lost, limit_s), run.rollout.reward_health
    return None, list


def _lost(batch: DataProto, what: str, failures: list[str]) -> str:
    return f"{len(failures)} of {len(batch)} samples lost their {what} ({failures[0]})"


def _reward_failures(batch: DataProto) -> list[str]:
    """Return the cause of each reward that the service did not answer."""
    columns = batch.non_tensor_batch
    return [
        cause
        for error, cause in zip(columns["error"], columns["reward_traceback"], strict=True)
        if error == f"reward: {UNAVAILABLE}"
    ]
