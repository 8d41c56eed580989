"""The rollout phase of asynchronous training: engines sample groups while others are trained.

`control.flow` decides which groups are drawn, started and trained; these functions do it.
"""

import functools
from contextlib import suppress
from typing import Any

from verlite.config.plan import steps_ahead
from verlite.control.flow import Flow, State
from verlite.controller.failures import RankDied
from verlite.protocol.data import DataProto
from verlite.trainer import batch as batches
from verlite.trainer.errors import StepAborted
from verlite.trainer.groups import Groups, state_at, uid_of
from verlite.trainer.outage import wait_for_services, waits_for_services
from verlite.trainer.run import Run, stage
from verlite.trainer.stages.rollout import (
    REQUEST_FIELDS,
    check_failed_samples,
    requests_of,
    score,
)
from verlite.trainer.stages.weights import call_engines, replace_engines, sync_weights

WAIT_S = 0.25
"""How long the engines wait for their next finished group before they answer that there is none. A
request to stop is noticed between two answers."""


def open_groups(run: Run, state: dict[str, Any]) -> Groups:
    """Return the groups of a run.

    state: the driver's, with those of a checkpoint if it resumes from one. A checkpoint of
        trainer.mode=sync has none: every prompt that was drawn before it is trained.
    """
    settings, plan = run.config.async_training, run.plan
    flow = Flow(
        groups_per_step=plan.prompts,
        bound=settings.max_age,
        depth=steps_ahead(run.config),
        engines=plan.engines,
        swaps=settings.partial_rollout,
        total_steps=run.total_steps,
    )
    groups = Groups(flow)
    saved = state.get("groups") or state_at(state["step"], plan.prompts)
    flow.load_state_dict(saved["flow"])
    groups.undrawn = saved["undrawn"]
    for number, row in saved["rows"].items():
        groups.add(int(number), row, requests_of_group(run, int(number), row))
    return groups


def first_weights(run: Run) -> None:
    """Give the engines their first weights."""
    sync_weights(run)
    _groups(run).flow.published()


def finished_groups(run: Run) -> DataProto:
    """Return the samples of the step's groups, scored. After an outage of a service they are
    sampled again.

    Raises:
        RolloutFailures, RewardFailures: too many samples failed (`rollout.max_error_rate`,
            `reward.max_error_rate`).
    """
    groups = _groups(run)
    wait_for_groups(run)
    while waits_for_services(run) and wait_for_services(run, groups.batch()):
        groups.again()
        wait_for_groups(run)
    return score(run, check_failed_samples(run, groups.batch()))


@stage("gen")
def wait_for_groups(run: Run) -> None:
    """Wait until the groups of the step are finished. Meanwhile start those that may start."""
    groups = _groups(run)
    collect(run, 0.0)
    start_groups(run)
    counts = groups.flow.counts()
    run.metrics["async/ready"] = float(counts[State.READY])
    run.metrics["async/running"] = float(counts[State.RUNNING])
    while (numbers := groups.flow.choose()) is None:
        collect(run)
        start_groups(run)
    groups.in_step = numbers


def start_groups(run: Run) -> None:
    """Draw the prompts that may be drawn now, and start those that may be sampled now."""
    groups = _groups(run)
    for number in groups.flow.draw(groups.flow.wanted()):
        groups.undrawn = groups.undrawn or run.sampler.next_batch()
        row = groups.undrawn.pop(0)
        groups.add(number, row, requests_of_group(run, number, row))
    assigned = groups.flow.assign()
    if not any(assigned.values()):
        return
    assignment: list[list[int]] = [[] for _ in range(run.plan.engines)]
    parts: list[DataProto] = []
    rows = 0
    for engine, numbers in assigned.items():
        for number in numbers:
            part = groups.requests[number].select([], (*REQUEST_FIELDS, "uid"))
            assignment[engine] += range(rows, rows + len(part))
            rows += len(part)
            parts.append(part)
    try:
        run.rollout.start(DataProto.concat(parts).with_meta(assignment=assignment))
    except RankDied as died:  # its groups have been put back, and are started by the next call
        replace_engines(run, died)


def requests_of_group(run: Run, number: int, row: int) -> DataProto:
    """Return a group's samples without responses, with the uid and the seeds that they would have
    with trainer.mode=sync."""
    rollout, prompts = run.config.actor_rollout_ref.rollout, run.plan.prompts
    step, place = number // prompts + 1, number % prompts
    seeds = _seeds(rollout.seed, step, prompts * rollout.n)
    own = seeds[place * rollout.n : (place + 1) * rollout.n]
    return requests_of(run, [row], [uid_of(number, prompts)], own)


@functools.lru_cache(maxsize=4)
def _seeds(seed: int, step: int, count: int) -> list[int]:
    """Return the seeds of a step's samples. Its groups are drawn one after another."""
    return batches.seeds(seed, step, 0, count)


def collect(run: Run, wait_s: float = WAIT_S) -> None:
    """Get the samples of finished groups. If an engine has none, it waits so long for one."""
    for answer in call_engines(run, run.rollout.finished, False, wait_s):
        _groups(run).finish(answer)


def publish_weights(run: Run) -> None:
    """Give the engines the weights of the step, with which they go on. Then start the groups that
    may be sampled now.

    After a request to stop nothing is sampled any more, so the engines get no weights: the run that
    resumes gives them, under the same version.
    """
    groups = _groups(run)
    groups.trained()
    with suppress(StepAborted):  # a stop has ended the engines
        wait_for_running(run)
    if _is_stopping(run):
        run.version += 1
        return
    sync_weights(run)
    groups.flow.published()
    # With max_age=0 nothing may start before the step has ended, so that the engines compute the
    # same batches as with trainer.mode=sync.
    if run.config.async_training.max_age and not _is_stopping(run):
        with suppress(StepAborted):
            start_groups(run)


@stage("gen")
def wait_for_running(run: Run) -> None:
    """Without partial_rollout: wait until the running samples are finished."""
    while not (_groups(run).flow.may_publish() or _is_stopping(run)):
        collect(run)


def _is_stopping(run: Run) -> bool:
    return run.stop.machine.requested is not None


def _groups(run: Run) -> Groups:
    assert run.groups is not None
    return run.groups
