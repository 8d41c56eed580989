"""The rollout phase of asynchronous and pipelined training: engines sample groups while others are
trained.

`control.flow` decides which groups are drawn, started and trained; these functions do it.
"""

import functools
import statistics
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from verlite.config.critical import code_contents
from verlite.config.plan import steps_ahead
from verlite.control import limits
from verlite.control.flow import Flow, State, versions_of
from verlite.controller.columns import keep
from verlite.controller.failures import RankDied
from verlite.protocol.data import DataProto, object_array
from verlite.trainer import batch as batches
from verlite.trainer import saved_groups
from verlite.trainer.checkpoints import Checkpoint
from verlite.trainer.errors import StepAborted
from verlite.trainer.groups import Groups, state_at, uid_of
from verlite.trainer.outage import wait_for_services, waits_for_services
from verlite.trainer.run import Run, stage
from verlite.trainer.stages.rollout import (
    REQUEST_FIELDS,
    check_failed_samples,
    check_generations,
    generations_of,
    requests_of,
    score,
    shape_rewards,
    with_signal,
)
from verlite.trainer.stages.weights import call_engines, replace_engines, sync_weights
from verlite.workers.rollout import KEPT


def open_groups(run: Run, state: dict[str, Any], checkpoint: Checkpoint | None = None) -> Groups:
    """Return the groups of a run. Finished ones whose samples a checkpoint has are trained as they
    are, unless they do not fit the settings any more.

    state: the driver's, with those of a checkpoint if it resumes from one. A checkpoint of
        trainer.mode=sync has none: every prompt that was drawn before it is trained.
    checkpoint: the one that the state is of.
    """
    settings, plan = run.config.async_training, run.plan
    is_async = run.config.trainer.mode == "async"
    flow = Flow(
        groups_per_step=plan.prompts,
        bound=settings.max_age if is_async else 0,
        depth=steps_ahead(run.config) if is_async else 0,
        engines=plan.engines,
        swaps=settings.partial_rollout,
        total_steps=run.total_steps,
    )
    groups = Groups(flow)
    saved = state.get("groups") or state_at(state["step"], plan.prompts)
    groups.undrawn = saved["undrawn"]
    for number, row in saved["rows"].items():
        groups.add(int(number), row, requests_of_group(run, int(number), row))
    if checkpoint is not None and state.get("code") == code_contents(run.config):
        take_saved(run, groups, checkpoint, saved["flow"])
    else:
        flow.load_state_dict(saved["flow"])
    return groups


def take_saved(run: Run, groups: Groups, checkpoint: Checkpoint, state: dict[str, Any]) -> None:
    """Give the groups of a checkpoint the samples that it has, as far as they fit the settings.

    state: of the flow.
    """

    def read(folder: str, kind: State) -> dict[int, DataProto]:
        oldest = versions_of(state, kind)
        return saved_groups.read(checkpoint, folder, groups.requests, oldest, run.display.warn)

    finished = read(saved_groups.FINISHED, State.READY)
    running = read(saved_groups.RUNNING, State.RUNNING)
    versions = {number: saved_groups.oldest_of(rows) for number, rows in running.items()}
    begun = {number: oldest for number, oldest in versions.items() if oldest is not None}
    groups.flow.load_state_dict(state, finished, begun)
    alive = groups.flow.groups
    for number, rows in finished.items():
        if alive[number].oldest is not None:
            groups.keep(number, rows)
    groups.running = {n: one for n, one in running.items() if alive[n].oldest is not None}
    if kept := len(groups.answers):
        run.display.info(f"{kept} finished prompts of the checkpoint are not sampled again")
    if kept := len(groups.running):
        run.display.info(f"{kept} running prompts of the checkpoint go on")


def finished_groups(run: Run) -> DataProto:
    """Return the samples of the step's groups, scored. See `scored_groups`."""
    begin_step(run)
    counts = groups_of(run).flow.counts()
    run.metrics["async/ready"] = float(counts[State.READY])
    run.metrics["async/running"] = float(counts[State.RUNNING])
    run.metrics["async/depth"] = len(groups_of(run).flow.groups) / run.plan.prompts - 1
    return scored_groups(run)


def scored_groups(run: Run, meanwhile: Callable[[], None] = lambda: None) -> DataProto:
    """Wait until the groups of the step are finished, and return their samples, scored. After an
    outage of a service they are sampled again.

    Args:
        meanwhile: called after each wait for groups, also after the last.

    Raises:
        RolloutFailures, RewardFailures: too many samples failed (`rollout.max_error_rate`,
            `reward.max_error_rate`).
    """
    groups = groups_of(run)
    wait_for_groups(run, meanwhile)
    while waits_for_services(run) and wait_for_services(run, groups.samples(groups.in_step)):
        groups.again()
        wait_for_groups(run, meanwhile)
    return score(run, check_failed_samples(run, groups.samples(groups.in_step)))


@stage("gen")
def begin_step(run: Run) -> None:
    """Start the groups that may start now."""
    collect(run, 0.0)
    start_groups(run)


@stage("gen")
def wait_for_some(run: Run) -> None:
    """Start the groups that may start now, and wait a while for finished ones."""
    start_groups(run)
    collect(run)


def wait_for_groups(run: Run, meanwhile: Callable[[], None]) -> None:
    """Wait until the groups of the step are finished. Meanwhile start those that may start."""
    groups = groups_of(run)
    while (numbers := groups.flow.choose()) is None:
        wait_for_some(run)
        meanwhile()
    groups.in_step = numbers
    if groups.judged:
        scores, kept = zip(*groups.judged, strict=True)
        run.metrics["filter_groups/score/mean"] = statistics.fmean(scores)
        run.metrics["filter_groups/kept_ratio"] = statistics.fmean(kept)
        run.metrics["train/num_gen_batches"] = float(_generations(run))


def start_groups(run: Run) -> None:
    """Draw the prompts that may be drawn now, and start those that may be sampled now."""
    groups = groups_of(run)
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
            part = part.with_non_tensor(so_far=object_array(groups.begun(number)))
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


def collect(run: Run, wait_s: float = limits.ENGINES_WAIT_S) -> None:
    """Get the samples of finished groups. If an engine has none, it waits so long for one.

    The driver keeps them in its node's object store, where an engine that dies takes none along.
    """
    groups = groups_of(run)
    for engine, answer in enumerate(call_engines(run, run.rollout.finished, False, wait_s)):
        groups.loads[engine] = answer.meta_info["load"]
        for number in groups.finish(keep(answer, KEPT)):
            if run.plan.filters_groups:
                filter_group(run, number)


def filter_group(run: Run, number: int) -> None:
    """Leave out a finished group whose samples do not differ (DAPO, arXiv:2503.14476, section 3.2);
    another prompt is drawn in its place.

    A group with a failed sample stays: the step counts its failures.

    Raises:
        TooFewGroups: see `stages.rollout.check_generations`.
    """
    groups = groups_of(run)
    samples = groups.samples([number])
    greedy = torch.tensor([one.temperature == 0 for one in samples.non_tensor_batch["sampling"]])
    samples = shape_rewards(run, samples.select_idxs(~greedy))
    is_kept = not samples.batch["valid"].all() or bool(with_signal(run, samples).all())
    groups.judged.append((samples.batch["raw_scores"].mean().item(), is_kept))
    if is_kept:
        return
    groups.leave_out(number, "samples do not differ")
    scores, kept = zip(*groups.judged, strict=True)
    check_generations(run, _generations(run), sum(kept), statistics.fmean(scores))


def _generations(run: Run) -> int:
    """Return how many generations the step needs, with those of the prompts left out."""
    left_out = sum(not is_kept for _, is_kept in groups_of(run).judged)
    return generations_of(run, run.plan.prompts + left_out)


def sync_running_engines(run: Run) -> None:
    """Give the engines the weights of the step, with which they go on. Then start the groups that
    may be sampled now.

    After a request to stop nothing is sampled any more, so the engines get no weights: the run that
    resumes gives them, under the same version.
    """
    groups = groups_of(run)
    groups.trained()
    with suppress(StepAborted):  # a stop has ended the engines
        wait_for_running(run)
    if _is_stopping(run):
        run.version += 1
        return
    sync_weights(run)
    # With bound 0 nothing may start before the step has ended, so that the engines compute the
    # same batches as with trainer.mode=sync.
    if groups_of(run).flow.bound and not _is_stopping(run):
        with suppress(StepAborted):
            start_groups(run)


@stage("gen")
def wait_for_running(run: Run) -> None:
    """Get the finished samples, which a checkpoint of this step then has. Without
    partial_rollout: wait until the running ones are finished."""
    if groups_of(run).flow.counts()[State.RUNNING]:
        collect(run, 0.0)
    while not (groups_of(run).flow.may_publish() or _is_stopping(run)):
        collect(run)


def _is_stopping(run: Run) -> bool:
    return run.stop.machine.requested is not None


def groups_of(run: Run) -> Groups:
    """Return the groups of a run whose mode has them."""
    assert run.groups is not None
    return run.groups
