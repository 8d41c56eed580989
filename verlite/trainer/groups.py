"""The groups of asynchronous training that are drawn and not trained yet.

A group is a prompt with its samples. Its number is its place in the order in which prompts are
drawn, from 0. `control.flow` decides what becomes of each; this keeps what it decides about.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from verlite.control.flow import Flow
from verlite.protocol.data import DataProto


@dataclass
class Groups:
    """Groups by their numbers.

    Attributes:
        flow: decides which groups are drawn, started and trained.
        rows: row of the training data, of each group that is not trained.
        undrawn: rows that the sampler has given, and that have no group yet.
        requests: the group's samples without responses (`batch.requests`).
        answers: what the rollout worker returned, of each finished group.
        in_step: the groups of the current step, until its updates are done.
        numbers: number of each group by its uid.
    """

    flow: Flow
    rows: dict[int, int] = field(default_factory=dict)
    undrawn: list[int] = field(default_factory=list)
    requests: dict[int, DataProto] = field(default_factory=dict)
    answers: dict[int, DataProto] = field(default_factory=dict)
    in_step: list[int] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def add(self, number: int, row: int, requests: DataProto) -> None:
        """Add a group that was drawn."""
        self.rows[number], self.requests[number] = row, requests
        self.numbers[requests.non_tensor_batch["uid"][0]] = number

    @property
    def publication_is_due(self) -> bool:
        """Whether the engines still have the weights from before the last finished update."""
        return self.flow.version <= self.flow.step

    def finish(self, answer: DataProto) -> None:
        """Keep the samples of finished groups, in the order of their requests."""
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
                self.answers[number] = rows.pop(["sample_index"], ["uid"])[1]

    def batch(self) -> DataProto:
        """Return the samples of the current step."""
        requests = DataProto.concat([self.requests[number] for number in self.in_step])
        answers = DataProto.concat([self.answers[number] for number in self.in_step])
        return requests.pop(non_tensor_batch_keys=["prompt_ids"])[1].union(answers)

    def trained(self) -> None:
        """Forget the groups of the current step: its updates are done."""
        self.flow.trained(self.in_step)
        for number in self.in_step:
            del self.rows[number], self.answers[number]
            del self.numbers[self.requests.pop(number).non_tensor_batch["uid"][0]]
        self.in_step = []

    def again(self) -> None:
        """Let the groups of the current step be sampled again, in their places."""
        self.flow.again(self.in_step)
        for number in self.in_step:
            del self.answers[number]
        self.in_step = []

    def engines_replaced(self, engines: Iterable[int]) -> None:
        """Let the groups of engines that died be sampled again, also the finished ones: their
        samples are lost with the process."""
        for engine in engines:
            here = [
                number
                for number in self.answers
                if self.flow.groups[number].engine == engine and number not in self.in_step
            ]
            for number in self.flow.engine_lost(engine, here):
                self.answers.pop(number, None)
            self.flow.engine_back(engine)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON values. Groups that are not trained are sampled
        again then, from the same prompts."""
        rows = {str(number): row for number, row in self.rows.items()}
        return {"flow": self.flow.state_dict(), "rows": rows, "undrawn": self.undrawn}


def uid_of(number: int, prompts: int) -> str:
    """Return the uid of a group, which is that of trainer.mode=sync: step-place.

    prompts: of one step.
    """
    return f"{number // prompts + 1}-{number % prompts}"
