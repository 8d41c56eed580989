"""Building a step's batch: requests for the rollout, and the plan of who updates on what."""

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict

from verlite.algorithms.balancing import karmarkar_karp, workload
from verlite.config.plan import Updates
from verlite.controller.columns import fetch
from verlite.data.dataset import PromptRow
from verlite.protocol.data import DataProto, object_array
from verlite.protocol.ragged import TOKENS, padded
from verlite.rollout.types import Sampling
from verlite.trainer.run import Run


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


def update_numbers(uids: Sequence[str], updates: Updates, seed: Sequence[int]) -> torch.Tensor:
    """[B, epochs] int64: in which optimizer step of each epoch a row takes part.

    Rows of a prompt stay in one update; with `updates.shuffle` each epoch deals the rows out anew, as many to each update.
    """
    order = {uid: i for i, uid in enumerate(dict.fromkeys(uids))}
    number = torch.tensor([order[uid] // updates.mini_prompts for uid in uids])
    if not updates.shuffle:
        return number[:, None].expand(-1, updates.epochs)
    rng = np.random.default_rng(seed)
    return torch.stack(
        [number[torch.from_numpy(rng.permutation(len(number)))] for _ in range(updates.epochs)],
        dim=1,
    )


def balance_metrics(lengths: torch.Tensor, assignment: list[list[int]]) -> dict[str, float]:
    """Tokens of a rank: in the order of the rows (min, max, minmax_diff, mean), and as they were spread (balanced_min, balanced_max)."""
    plain = [int(part.sum()) for part in lengths.tensor_split(len(assignment))]
    spread_out = [int(lengths[rows].sum()) for rows in assignment]
    values = {
        "min": min(plain),
        "max": max(plain),
        "minmax_diff": max(plain) - min(plain),
        "mean": sum(plain) / len(plain),
        "balanced_min": min(spread_out),
        "balanced_max": max(spread_out),
    }
    return {f"global_seqlen/{name}": float(value) for name, value in values.items()}


def balance_rows(
    numbers: torch.Tensor, lengths: torch.Tensor, n_ranks: int, balance: bool
) -> list[list[int]]:
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
        parts.sort(
            key=lambda part: -costs[part].sum()
        )  # the heaviest part to the least loaded rank
        for rank, part in zip(np.argsort(load, kind="stable"), parts, strict=True):
            ranks[rank] += part.tolist()
            load[rank] += costs[part].sum()
    return ranks


def to_ranks(run: Run, batch: DataProto, role: str, *columns: str) -> DataProto:
    """The batch as one role's ranks take it: rows spread by cost within each update, and the number of updates in an epoch.

    With the numbers of each row, its tokens, and those of the named ragged columns that there are. Ranks that run their rows together
    are one to spread over; which of them brings a row does not matter.
    """
    numbers = batch.batch["critic_mini_batch_index" if role == "critic" else "mini_batch_index"][
        :, 0
    ]
    lengths = batch.batch["prompt_length"] + batch.batch["response_length"]
    shared = run.plan.sequence_parallel[role]
    groups = balance_rows(
        numbers, lengths, len(run.plan.placement[role]) // shared, run.config.trainer.balance_batch
    )
    assignment = [rows[i::shared] for rows in groups for i in range(shared)]
    if role == "actor":
        run.metrics.update(balance_metrics(lengths, groups))
    return with_ragged(batch, *columns).with_meta(
        assignment=assignment, updates=int(numbers.max()) + 1, step=run.step
    )


def with_ragged(batch: DataProto, *columns: str) -> DataProto:
    """The numbers of each row, its tokens, and those of the named ragged columns that there are; nothing else."""
    return batch.select(
        non_tensor_batch_keys=[
            name for name in (*TOKENS, *columns) if name in batch.non_tensor_batch
        ]
    )


def fetch_padded(batch: DataProto, *columns: str) -> TensorDict:
    """`with_ragged` as padded tensors on the driver: for what looks at all tokens of a step together."""
    return padded(fetch(with_ragged(batch, *columns))).batch
