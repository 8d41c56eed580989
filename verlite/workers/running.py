"""Samples that run, as columns: a checkpoint keeps them, and another worker goes on with them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verlite.protocol.data import DataProto, object_array
from verlite.rewards.result import RewardResult
from verlite.rollout.trajectory import Request, Sample, goes_on
from verlite.rollout.types import Completion, Status, Trajectory, extend_spans

_ARRAYS = {
    "prompt_ids": np.int32,
    "response_ids": np.int32,
    "response_mask": np.int8,
    "rollout_log_probs": np.float32,
    "turn_ids": np.int32,
    "turn_log_probs": np.float32,
}
"""Columns of one number per token; those of `turn_` are of the turn that is generated."""


@dataclasses.dataclass
class Running(Sample):
    """A sample in the background.

    Attributes:
        request: what is sampled, a `Request` or the task of an agent program; None if it is only
            looked at.
        is_finished: whether its generation has ended.
        result: its reward, once it is known.
    """

    request: Any = None
    is_finished: bool = False
    result: RewardResult | None = None

    @property
    def goes_on(self) -> bool:
        """Whether another worker can go on with it, and has something to go on with."""
        begun = self.is_finished or self.trajectory.turns or (self.so_far and self.so_far.ids)
        if not begun or self.is_finished:
            return bool(begun)
        return isinstance(self.request, Request) and goes_on(self.request, self.trajectory)


def as_rows(samples: Sequence[Running]) -> DataProto:
    """Return a row for each sample. Their names are (uid, place in the group)."""
    rows = [_row(sample) for sample in samples]
    columns = {
        name: object_array([np.asarray(row[name], dtype=dtype) for row in rows])
        for name, dtype in _ARRAYS.items()
    }
    uids = object_array([sample.name[0] for sample in samples])
    state = object_array([row["running"] for row in rows])
    places = torch.tensor([sample.name[1] for sample in samples], dtype=torch.int64)
    return DataProto.from_dict({"sample_index": places}, {**columns, "uid": uids, "running": state})


def _row(sample: Running) -> dict[str, Any]:
    trajectory, turn = sample.trajectory, sample.so_far or Completion([], [], "", [])
    fields = {
        name: list(value) if isinstance(value, list) else value  # the lists go on growing
        for name, value in vars(trajectory).items()
    }
    fields["score"] = _result(trajectory.score)
    return {
        "prompt_ids": fields.pop("prompt_ids"),
        "response_ids": fields.pop("response_ids"),
        "response_mask": fields.pop("response_mask"),
        "rollout_log_probs": fields.pop("log_probs"),
        "turn_ids": turn.ids,
        "turn_log_probs": turn.log_probs,
        "running": {
            "trajectory": fields,
            "turn_versions": turn.weight_versions,
            "is_finished": sample.is_finished,
            "result": _result(sample.result),
        },
    }


def _result(result: RewardResult | None) -> dict[str, Any] | None:
    return None if result is None else dataclasses.asdict(result)


def _result_of(values: dict[str, Any] | None) -> RewardResult | None:
    return None if values is None else RewardResult(**values)


def of_row(row: Mapping[str, Any], name: Any = None, request: Any = None) -> Running:
    """Return the sample of a row.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is none.
    """
    state, ids = row["running"], [int(token) for token in row["turn_ids"]]
    fields = dict(state["trajectory"])
    spans = _spans(fields.pop("weight_versions"))
    branches = [(int(prompt), int(response)) for prompt, response in fields.pop("branches", ())]
    segments = [(str(author), int(count)) for author, count in fields.pop("segments")]
    trajectory = Trajectory(
        row["prompt_ids"].tolist(),
        row["response_ids"].tolist(),
        row["response_mask"].tolist(),
        row["rollout_log_probs"].tolist(),
        status=Status(fields.pop("status")),
        score=_result_of(fields.pop("score")),
        weight_versions=spans,
        branches=branches,
        segments=segments,  # type: ignore[arg-type]  # checked below
        **fields,
    )
    turn = Completion(ids, row["turn_log_probs"].tolist(), "", _spans(state["turn_versions"]))
    sampled = sum(count for author, count in segments if author == "model")
    length = len(trajectory.response_ids)
    tokens = [
        (len(trajectory.response_mask), length),
        (len(trajectory.log_probs), length),
        (len(turn.log_probs), len(ids)),
        (sum(count for _, count in turn.weight_versions), len(ids)),
    ]
    if branches:
        tokens.append((sum(map(sum, branches)), len(trajectory.prompt_ids) + length))
    if not state["is_finished"]:
        tokens += [
            (sum(count for _, count in segments), length),
            (sum(count for _, count in spans), sampled),
            (sum(author == "model" for author, _ in segments), trajectory.turns),
        ]
    if any(found != expected for found, expected in tokens):
        raise ValueError(f"the numbers of its tokens do not agree: {tokens}")
    return Running(
        name,
        trajectory,
        turn if ids else None,
        request=request,
        is_finished=bool(state["is_finished"]),
        result=_result_of(state["result"]),
    )


def oldest_version(sample: Sample) -> int | None:
    """Return the oldest version that sampled a token of it, None without any."""
    spans = [*sample.trajectory.weight_versions]
    spans += sample.so_far.weight_versions if sample.so_far else []
    return min((version for version, _ in spans), default=None)


def _spans(spans: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for version, count in spans:
        extend_spans(found, int(version), int(count))
    return found
