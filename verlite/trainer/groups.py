"""The groups of asynchronous and pipelined training that are drawn and not trained yet.

A group is a prompt with its samples. Its number is its place in the order in which prompts are
drawn, from 0. `control.flow` decides what becomes of each; this keeps what it decides about.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from verlite.control import limits
from verlite.control.flow import (
    Flow,
    check_entries,
    check_flow_state,
    flow_state_at,
    is_count,
    wrong,
)
from verlite.controller import worker_group
from verlite.protocol.data import DataProto
from verlite.protocol.metrics import Metrics
from verlite.rollout.types import Load
from verlite.trainer.flow_metrics import Window, load_metrics
from verlite.trainer.saved_groups import rows_of
from verlite.workers.rollout import RolloutWorker


@dataclass
class Groups:
    """Groups by their numbers.

    Attributes:
        flow: decides which groups are drawn, started and trained.
        rows: row of the training data, of each group that is not trained.
        undrawn: rows that the sampler has given, and that have no group yet.
        requests: the group's samples without responses (`batch.requests`).
        answers: what the rollout worker returned, of each finished group. The driver keeps the
            tokens, so they outlive the engine.
        running: what the samples of groups that are not finished had when they were last looked
            at, or in the checkpoint (`RolloutWorker.running`).
        in_step: the groups of the current step, until its updates are done.
        numbers: number of each group by its uid.
        window: lengths of the responses that were sampled and trained lately.
        loads: what each engine has done, by its newest report.
        loads_before: the same, when the last step ended.
        judged: with filter_groups, the mean score of each group that has finished since the last
            step, and whether it was kept.
    """

    flow: Flow
    rows: dict[int, int] = field(default_factory=dict)
    undrawn: list[int] = field(default_factory=list)
    requests: dict[int, DataProto] = field(default_factory=dict)
    answers: dict[int, DataProto] = field(default_factory=dict)
    running: dict[int, DataProto] = field(default_factory=dict)
    in_step: list[int] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    window: Window = field(default_factory=Window)
    loads: dict[int, Load] = field(default_factory=dict)
    loads_before: dict[int, Load] = field(default_factory=dict)
    judged: list[tuple[float, bool]] = field(default_factory=list)

    def add(self, number: int, row: int, requests: DataProto) -> None:
        """Add a group that was drawn."""
        self.rows[number], self.requests[number] = row, requests
        self.numbers[requests.non_tensor_batch["uid"][0]] = number

    @property
    def publication_is_due(self) -> bool:
        """Whether the engines still have the weights from before the last finished update."""
        return self.flow.version <= self.flow.step

    def finish(self, answer: DataProto) -> list[int]:
        """Keep the samples of finished groups, in the order of their requests. Return the groups'
        numbers."""
        found = []
        uids = answer.non_tensor_batch["uid"]
        for uid in dict.fromkeys(uids):
            number = self.numbers.get(uid)
            if number is None:  # it has been trained
                continue
            rows = answer.select_idxs(uids == uid)
            rows = rows.select_idxs(rows.batch["sample_index"].argsort())
            versions = rows.batch["oldest_version"]
            versions = versions[versions >= 0]  # without rows that failed before their first token
            oldest = int(versions.min()) if len(versions) else None
            if self.flow.finished(number, oldest):
                self.running.pop(number, None)
                rows = rows.pop(["sample_index"], ["uid"])[1].select(meta_info_keys=[])
                self.keep(number, rows)
                found.append(number)
        return found

    def keep(self, number: int, rows: DataProto) -> None:
        """Keep the samples of a group that has finished."""
        self.answers[number] = rows
        self.window.finish(rows.batch["response_length"].tolist())

    def samples(self, numbers: Sequence[int]) -> DataProto:
        """Return the samples of finished groups."""
        requests = DataProto.concat([self.requests[number] for number in numbers])
        answers = DataProto.concat([self.answers[number] for number in numbers])
        return requests.pop(non_tensor_batch_keys=["prompt_ids"])[1].union(answers)

    def trained(self) -> None:
        """Forget the groups of the current step: its updates are done."""
        self.flow.trained(self.in_step)
        lengths = [self.answers[number].batch["response_length"] for number in self.in_step]
        self.window.train(torch.cat(lengths).tolist())
        for number in self.in_step:
            self._forget(number)
        self.in_step = []
        self.judged = []

    def leave_out(self, number: int, reason: str) -> None:
        """Leave a finished group out of training. Another prompt is drawn in its place."""
        self.flow.filtered(number, reason)
        self._forget(number)

    def _forget(self, number: int) -> None:
        del self.rows[number], self.answers[number]
        del self.numbers[self.requests.pop(number).non_tensor_batch["uid"][0]]

    def again(self) -> None:
        """Let the groups of the current step be sampled again, in their places."""
        self.flow.again(self.in_step)
        for number in self.in_step:
            del self.answers[number]
        self.in_step = []

    def look(self, engines: RolloutWorker) -> None:
        """Ask the engines what the running samples have so far, for a checkpoint.

        What an engine said before stays if it does not answer in time, as in a validation, or was
        ended. The next call notices one that has died.
        """
        workers = worker_group.group(engines)
        if not any(worker in workers.supervisor.workers for worker in workers.workers):
            return
        call = worker_group.submit(engines.running)
        answers = workers.supervisor.answers_within(call, limits.ENGINES_LOOK_S)
        for rows in answers:
            uids = rows.non_tensor_batch["uid"]
            for uid in dict.fromkeys(uids):
                self.running[self.numbers[uid]] = rows.select_idxs(uids == uid)

    def begun(self, number: int) -> list[dict[str, Any] | None]:
        """Return what each sample of a group had in the checkpoint, None for nothing. It is
        forgotten: the engine has it now."""
        found: list[dict[str, Any] | None] = [None] * len(self.requests[number])
        rows = self.running.pop(number, None)
        if rows is not None:
            for place, row in zip(rows.batch["sample_index"].tolist(), rows_of(rows), strict=True):
                found[place] = row
        return found

    def engines_replaced(self, engines: Iterable[int]) -> None:
        """Let the groups that ran on engines that died be sampled again."""
        for engine in engines:
            for number in self.flow.engine_lost(engine):
                self.running.pop(number, None)
            self.flow.engine_back(engine)
            self.loads.pop(engine, None)
            self.loads_before.pop(engine, None)

    def metrics(self, epochs: int, places: float) -> Metrics:
        """Return the metrics of the step that was trained last: see `flow_metrics`.

        Args:
            epochs: how often a step trains on its samples.
            places: samples that one engine may generate at once.
        """
        metrics = self.window.metrics(epochs) | load_metrics(self.loads_before, self.loads, places)
        self.loads_before = dict(self.loads)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON values. Groups that are not trained are sampled
        again then, from the same prompts, unless the checkpoint has their samples
        (`saved_groups`)."""
        rows = {str(number): row for number, row in self.rows.items()}
        return {"flow": self.flow.state_dict(), "rows": rows, "undrawn": self.undrawn}


def uid_of(number: int, prompts: int) -> str:
    """Return the uid of a group, which is that of trainer.mode=sync: step-place.

    prompts: of one step.
    """
    return f"{number // prompts + 1}-{number % prompts}"


def state_at(step: int, prompts: int) -> dict[str, Any]:
    """Return the state of a run that has trained all prompts that it drew.

    prompts: of one step.
    """
    return {"flow": flow_state_at(step, prompts), "rows": {}, "undrawn": []}


def check_state(state: dict[str, Any], has_groups: bool, prompts: int, size: int) -> None:
    """Check that a run can go on from the groups of a checkpoint.

    Args:
        state: the driver's state.
        has_groups: whether the run that resumes has trainer.mode=async or pipelined.
        prompts: of one step.
        size: number of rows of the training data.

    Raises:
        ValueError: names the entry, its value, what it must be, and the remedy.
    """
    try:
        waiting = _check_state(state, has_groups, prompts, size)
    except ValueError as error:
        raise ValueError(
            f"{error}. Resume from another checkpoint (trainer.resume_mode=resume_path), or start "
            "again with trainer.resume_mode=disable"
        ) from None
    if waiting and not has_groups:
        raise ValueError(
            f"groups: {waiting} prompts were drawn and are not trained yet, which "
            "trainer.mode=sync would leave out. Resume with trainer.mode=async or pipelined"
        )


def _check_state(state: dict[str, Any], has_groups: bool, prompts: int, size: int) -> int:
    """See `check_state`. Return how many prompts were drawn and are not trained."""
    step = state["step"]
    if has_groups and state["version"] != step + 1:
        raise wrong("version", state["version"], f"step + 1 = {step + 1}")
    if "groups" not in state:
        return 0
    saved = state["groups"]
    check_entries("groups", saved, {"flow": dict, "rows": dict, "undrawn": list})
    rows, undrawn = saved["rows"], saved["undrawn"]
    try:
        numbers = check_flow_state(saved["flow"], step, prompts)
    except ValueError as error:
        raise ValueError(f"groups.{error}") from None
    if set(rows) != {str(number) for number in numbers}:
        raise wrong("groups.rows", sorted(rows), f"of the groups {sorted(numbers)}")
    for entry, found in (("rows", list(rows.values())), ("undrawn", undrawn)):
        for row in found:
            if not is_count(row) or row >= size:
                raise wrong(f"groups.{entry}", row, f"a row of the training data, 0 to {size - 1}")
    return len(numbers) + len(undrawn)
