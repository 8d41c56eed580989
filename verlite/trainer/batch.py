"""Building a step's batch: requests for the rollout, padded tensors from its answers, and the plan of who updates on what."""

from collections.abc import Sequence

import numpy as np
import torch

from verlite.algorithms.balancing import karmarkar_karp, workload
from verlite.config.plan import Updates
from verlite.data.dataset import PromptRow
from verlite.protocol import fields
from verlite.protocol.data import DataProto, object_array
from verlite.rollout.types import Sampling

_RAGGED = ("response_ids", "response_mask", "rollout_log_probs")


def requests(rows: list[PromptRow], uids: list[str], samplings: list[Sampling]) -> DataProto:
    """One row per sample to generate: [B] columns of prompt ids, sampling parameters and what scoring needs."""
    return DataProto.from_dict(
        {},
        {
            "uid": object_array(uids),
            "prompt_ids": object_array([row.prompt_ids for row in rows]),
            "sampling": object_array(samplings),
            "messages": object_array([row.messages for row in rows]),
            "data_source": object_array([row.data_source for row in rows]),
            "ground_truth": object_array([row.ground_truth for row in rows]),
            "extra_info": object_array([row.extra_info for row in rows]),
            "index": object_array([row.index for row in rows]),
        },
    )


def seeds(seed: int, step: int, drawn: int, count: int) -> list[int]:
    """Seeds of requests after the first `drawn` prompts of a step: a function of these numbers, so that a resumed run samples the same."""
    return np.random.default_rng([seed, step, drawn]).integers(0, 2**31 - 1, count).tolist()


def pad(rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype, side: str = "right", value: float = 0) -> torch.Tensor:
    """[B, width] tensor from B ragged rows."""
    padded = np.full((len(rows), width), value, dtype=np.float32 if dtype.is_floating_point else np.int64)
    for i, row in enumerate(rows):
        if len(row):
            padded[i, slice(width - len(row), None) if side == "left" else slice(0, len(row))] = row
    return torch.from_numpy(padded).to(dtype)


def assemble(requested: DataProto, answered: DataProto, pad_id: int) -> DataProto:
    """The step's batch from requests and the rollout's ragged answers.

    Adds prompts [B, P], responses [B, R], input_ids, attention_mask and position_ids [B, P+R], response_mask and
    rollout_log_probs [B, R], valid [B], and all else that the rollout says of a row; P and R are the longest of this batch, R at least 1.
    """
    answers = answered.non_tensor_batch
    prompt_ids, response_ids = requested.non_tensor_batch["prompt_ids"], answers["response_ids"]
    p, r = max(map(len, prompt_ids)), max(1, max(map(len, response_ids)))
    prompts = pad(prompt_ids, p, torch.int64, "left", pad_id)
    responses = pad(response_ids, r, torch.int64, "right", pad_id)
    # Real tokens are told by lengths, never by ids: the pad id may well be a token that the model can write.
    attention = torch.cat(
        [
            torch.arange(p)[None] >= p - torch.tensor([len(ids) for ids in prompt_ids])[:, None],
            torch.arange(r)[None] < torch.tensor([len(ids) for ids in response_ids])[:, None],
        ],
        dim=1,
    ).long()
    return requested.with_batch(
        prompts=prompts,
        responses=responses,
        input_ids=torch.cat([prompts, responses], dim=1),
        attention_mask=attention,
        position_ids=(attention.cumsum(1) - 1).clamp(min=0),
        response_mask=pad(answers["response_mask"], r, torch.int64),
        rollout_log_probs=pad(answers["rollout_log_probs"], r, torch.float32),
        valid=torch.tensor([status != "error" for status in answers["status"]]),
        **answered.batch,
    ).with_non_tensor(**{name: column for name, column in answers.items() if name not in _RAGGED})


def join(parts: Sequence[DataProto], pad_id: int) -> DataProto:
    """Assembled batches as one: prompts padded on the left and responses on the right to the longest of all. Without meta_info."""
    p, r = (max(part.batch[name].shape[1] for part in parts) for name in ("prompts", "responses"))
    return DataProto.concat([_widened(part, p, r, pad_id) for part in parts])


def _widened(batch: DataProto, p: int, r: int, pad_id: int) -> DataProto:
    """Every [B, P], [B, R] and [B, P+R] field with P = p and R = r."""
    old_p = batch.batch["prompts"].shape[1]
    left, right = p - old_p, r - batch.batch["responses"].shape[1]
    sides = {"B P": (left, 0), "B R": (0, right), "B S": (left, right)}
    tensors = {}
    for name, tensor in batch.batch.items():
        fill = pad_id if name in ("prompts", "responses", "input_ids") else 0
        tensors[name] = torch.nn.functional.pad(tensor, sides.get(fields.FIELDS[name].shape, (0, 0)) if tensor.ndim > 1 else (), value=fill)
    return DataProto.from_dict(tensors, dict(batch.non_tensor_batch))


def update_numbers(uids: Sequence[str], updates: Updates, seed: Sequence[int]) -> torch.Tensor:
    """[B, epochs] int64: in which optimizer step of each epoch a row takes part.

    Rows of a prompt stay in one update; with `updates.shuffle` each epoch deals the rows out anew, as many to each update.
    """
    order = {uid: i for i, uid in enumerate(dict.fromkeys(uids))}
    number = torch.tensor([order[uid] // updates.mini_prompts for uid in uids])
    if not updates.shuffle:
        return number[:, None].expand(-1, updates.epochs)
    rng = np.random.default_rng(seed)
    return torch.stack([number[torch.from_numpy(rng.permutation(len(number)))] for _ in range(updates.epochs)], dim=1)


def balance_metrics(lengths: torch.Tensor, assignment: list[list[int]]) -> dict[str, float]:
    """Tokens of a rank: in the order of the rows (min, max, minmax_diff, mean), and as they were spread (balanced_min, balanced_max)."""
    plain = [int(part.sum()) for part in lengths.tensor_split(len(assignment))]
    spread_out = [int(lengths[rows].sum()) for rows in assignment]
    values = {
        "min": min(plain), "max": max(plain), "minmax_diff": max(plain) - min(plain), "mean": sum(plain) / len(plain),
        "balanced_min": min(spread_out), "balanced_max": max(spread_out),
    }  # fmt: skip
    return {f"global_seqlen/{name}": float(value) for name, value in values.items()}


def spread(numbers: torch.Tensor, lengths: torch.Tensor, n_ranks: int, balance: bool) -> list[list[int]]:
    """Row numbers for each rank.

    With `balance` the rows of each update (numbers [B]) are spread by their cost (Karmarkar-Karp on `workload` of lengths [B]),
    so that the ranks finish together; otherwise rows go in near-equal consecutive pieces.
    """
    if not balance:
        return [part.tolist() for part in torch.arange(len(numbers)).tensor_split(n_ranks)]
    costs = workload(lengths.tolist())
    ranks: list[list[int]] = [[] for _ in range(n_ranks)]
    load = np.zeros(n_ranks)
    for update in range(int(numbers.max()) + 1):
        rows = (numbers == update).nonzero().flatten().numpy()
        parts = [rows[part] for part in karmarkar_karp(costs[rows], n_ranks)]
        parts.sort(key=lambda part: -costs[part].sum())  # the heaviest part to the least loaded rank
        for rank, part in zip(np.argsort(load, kind="stable"), parts, strict=True):
            ranks[rank] += part.tolist()
            load[rank] += costs[part].sum()
    return ranks
