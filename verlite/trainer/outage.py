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
    return any(_limits(run))


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


def _limits(run: Run) -> tuple[float, float]:
    """Return how long to wait for the tools, and for the reward service; 0: not at all."""
    config = run.config
    tools_s = config.retriever.outage_wait_s if run.env_factory is not None else 0.0
    rewards_s = config.reward.remote.outage_wait_s if scores_remotely(config.reward) else 0.0
    return tools_s, rewards_s


def _find_outage(
    run: Run, batch: DataProto
) -> tuple[Outage | None, Callable[[], Sequence[str | None]]]:
    """Return the outage, and what checks the service: it returns one reason or None per worker,
    from the worker's own machine."""
    config, (tools_s, rewards_s) = run.config, _limits(run)
    if tools_s > 0:
        failures = tool_failures(batch)
        if len(failures) / len(batch) > config.actor_rollout_ref.rollout.max_error_rate:
            lost = f"{len(failures)} of {len(batch)} samples lost their tools ({failures[0]})"
            return Outage("tools", lost, tools_s), run.rollout.tool_health
    if rewards_s > 0:
        failures = _reward_failures(batch)
        scored = int((batch.non_tensor_batch["status"] != Status.ERROR).sum())
        if len(failures) / max(1, scored) > config.reward.max_error_rate:
            lost = f"{len(failures)} of {len(batch)} samples lost their rewards ({failures[0]})"
            return Outage("reward service", lost, rewards_s), run.rollout.reward_health
    return None, list


def _reward_failures(batch: DataProto) -> list[str]:
    """Return the cause of each reward that the service did not answer."""
    columns = batch.non_tensor_batch
    return [
        cause
        for error, cause in zip(columns["error"], columns["reward_traceback"], strict=True)
        if error == f"reward: {UNAVAILABLE}"
    ]
