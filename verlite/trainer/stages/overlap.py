"""The rollout phase of pipelined training: while engines sample groups, the others compute with
those that are finished.

A part is what has finished since the last one. Its log-probs and values are those of the weights
that sample, because no optimizer step is taken before the last part. Its gradients are added up to
those of the first optimizer step, which `update_actor` then takes; later mini-batches and epochs
need the weights after it.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from verlite.control.flow import State
from verlite.controller.supervise import Future
from verlite.protocol.data import DataProto, object_array
from verlite.trainer.groups import Groups
from verlite.trainer.run import Run, stage
from verlite.trainer.stages.advantage import (
    INFERENCE,
    loss_mask,
    with_advantages,
    with_columns_of,
    with_old_log_probs,
)
from verlite.trainer.stages.groups import begin_step, groups_of, scored_groups
from verlite.trainer.stages.rollout import trained_samples, with_reward_parts
from verlite.trainer.stages.update import accumulate, assign_mini_batches


@dataclass
class Overlap:
    """What has been computed of the current step's groups.

    Attributes:
        answers: what the rollout workers returned, of each group that is in a part.
        inferred: one answer per part, by phase of INFERENCE.
        gradients: the call that adds the last part's gradients.
        first: of each of the step's groups, which rows are in the first mini-batch, [rollout.n]
            bool. None: it is not known yet, or gradients do not overlap.
        parts: number of parts, also of those that were dropped.
        seconds: spent on parts while other groups were sampled.
        early: number of groups whose part did not wait for the last group.
    """

    answers: dict[int, DataProto] = field(default_factory=dict)
    inferred: dict[str, list[DataProto]] = field(default_factory=dict)
    gradients: Future[list[None]] | None = None
    first: Mapping[int, torch.Tensor] | None = None
    parts: int = 0
    seconds: float = 0.0
    early: int = 0


def overlapped_groups(run: Run) -> DataProto:
    """Return the samples of the step's groups, scored (`groups.scored_groups`). Their log-probs and
    values are in `run.current.inferred`, and the actor has their gradients.
    """
    groups, overlap = groups_of(run), Overlap()
    if _overlaps_gradients(run):
        run.actor.drop_gradients()  # of a step that was given up
    begin_step(run)
    batch = scored_groups(run, lambda: advance(run, overlap))
    if _lost(groups, overlap) or overlap.answers.keys() != set(groups.in_step):
        drop(run, overlap)  # the stages compute all of it
    wait(run, overlap)
    numbers = np.repeat(list(overlap.answers), run.plan.samples_per_prompt)
    order = torch.from_numpy(np.argsort(numbers, kind="stable"))
    run.current.inferred = {
        phase: DataProto.concat(answers).select_idxs(order)
        for phase, answers in overlap.inferred.items()
    }
    run.metrics["pipelined/overlapped_s"] = overlap.seconds
    run.metrics["pipelined/early_prompts"] = overlap.early / run.plan.prompts
    return batch


def advance(run: Run, overlap: Overlap) -> None:
    """Compute with the groups that have finished since the last part."""
    groups = groups_of(run)
    if _lost(groups, overlap):  # an outage: they are sampled again
        drop(run, overlap)
    if _overlaps_gradients(run) and overlap.first is None:
        overlap.first = first_mini_batch(run)
        if overlap.first is None:
            return
    is_early = groups.flow.choose() is None
    began = time.perf_counter()
    new = {n: one for n, one in groups.answers.items() if n not in overlap.answers}
    if not new:
        return
    overlap.answers |= new
    overlap.parts += 1
    part = trained_samples(run, with_reward_parts(run, groups.samples(list(new))))
    zeros = torch.zeros(len(part), 1, dtype=torch.int64)
    part = part.with_batch(mini_batch_index=zeros, critic_mini_batch_index=zeros)
    compute(run, overlap, part.with_meta(part=overlap.parts), list(new))
    if is_early:
        overlap.seconds += time.perf_counter() - began
        overlap.early += len(new)


def compute(run: Run, overlap: Overlap, part: DataProto, numbers: list[int]) -> None:
    """Compute log-probs and values of a part, and begin to add its gradients.

    The gradients of the part before are computed meanwhile, by roles that have devices of their
    own.
    """
    answers = {}
    for phase, ask in INFERENCE.items():
        with run.stopwatch(phase), run.display.phase(phase):
            answer = ask(run, part)
        if answer is not None:
            answers[phase] = answer.select(meta_info_keys=[])
            overlap.inferred.setdefault(phase, []).append(answers[phase])
    if overlap.first is None:
        return
    part = with_old_log_probs(run, part, answers.get("old_log_prob"))
    part = with_columns_of(loss_mask(run, part), answers.get("ref"))
    part = with_columns_of(part, answers.get("teacher"))
    with run.stopwatch("adv"):
        part, _ = with_advantages(run, part)
    rows = part.select_idxs(torch.cat([overlap.first[number] for number in numbers]))
    wait(run, overlap)
    if len(rows):
        overlap.gradients = accumulate(run, rows)


@stage("update_actor")
def wait(run: Run, overlap: Overlap) -> None:
    """Wait for the gradients of the last part."""
    if overlap.gradients is not None:
        overlap.gradients.result()
    overlap.gradients = None


def drop(run: Run, overlap: Overlap) -> None:
    """Forget all parts."""
    wait(run, overlap)
    if _overlaps_gradients(run):
        run.actor.drop_gradients()
    overlap.answers, overlap.inferred, overlap.early = {}, {}, 0


def first_mini_batch(run: Run) -> dict[int, torch.Tensor] | None:
    """Return which rows of each group, [rollout.n] bool, are in the first mini-batch; None until
    all groups of the step are started. None are started later, because nothing is sampled ahead."""
    groups = groups_of(run)
    alive = groups.flow.groups.items()
    numbers = sorted(number for number, group in alive if group.state is not State.QUEUED)
    if len(numbers) < run.plan.prompts:
        return None
    samples = run.plan.samples_per_prompt
    uids = [groups.requests[number].non_tensor_batch["uid"][0] for number in numbers]
    rows = DataProto.from_dict({}, {"uid": np.repeat(object_array(uids), samples)})
    index = assign_mini_batches(run, rows).batch["mini_batch_index"][:, 0]
    return dict(zip(numbers, (index == 0).split(samples), strict=True))


def _lost(groups: Groups, overlap: Overlap) -> bool:
    """Return whether the samples of a part are not those of the step any more."""
    return any(groups.answers.get(number) is not one for number, one in overlap.answers.items())


def _overlaps_gradients(run: Run) -> bool:
    """Whether the step's first update is one that adds gradients while prompts are sampled. None
    follows during the critic's warm-up."""
    return run.plan.overlaps_gradients and run.step >= run.plan.critic_warmup
