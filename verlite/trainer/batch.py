"""Build a step's batch: requests for the rollout, and assignment of rows to updates and ranks."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from verlite.algorithms.balancing import karmarkar_karp, workload
from verlite.config.plan import Updates
from verlite.controller.columns import fetch
from verlite.data.dataset import PromptRow
from verlite.protocol.data import DataProto, object_array
from verlite.protocol.metrics import Metrics
from verlite.protocol.ragged import BRANCHES, TOKENS, padded
from verlite.rollout.types import Sampling
from verlite.trainer.run import Run


def requests(rows: list[PromptRow], uids: list[str], samplings: list[Sampling]) -> DataProto:
    """Return one row per sample to generate: prompt, sampling parameters, and data for scoring."""
    names = ["prompt_ids", "messages", "data_source", "ground_truth", "extra_info", "index"]
    if rows[0].teacher_prompt_ids is not None:
        names.append("teacher_prompt_ids")
    columns = {name: object_array([getattr(row, name) for row in rows]) for name in names}
    columns |= {"uid": object_array(uids), "sampling": object_array(samplings)}
    return DataProto.from_dict({}, columns)


def seeds(seed: int, step: int, drawn: int, count: int) -> list[int]:
    """Return seeds for `count` requests after the first `drawn` prompts of a step.

    They depend on these numbers alone, so a resumed run samples the same responses.
    """
    generator = np.random.default_rng([seed, step, drawn])
    return generator.integers(0, 2**31 - 1, count).tolist()


def mini_batch_indices(
    uids: Sequence[str] | np.ndarray, updates: Updates, seed: Sequence[int]
) -> torch.Tensor:
    """Return [B, epochs] int64: the mini-batch of each row in each epoch.

    Rows of a prompt are in one mini-batch. With `updates.shuffle` each epoch distributes the rows
    differently, with the same number of rows per mini-batch.
    """
    order = {uid: i for i, uid in enumerate(dict.fromkeys(uids))}
    index = torch.tensor([order[uid] // updates.mini_prompts for uid in uids])
    if not updates.shuffle:
        return index[:, None].expand(-1, updates.epochs)
    generator = np.random.default_rng(seed)
    epochs = [
        index[torch.from_numpy(generator.permutation(len(index)))] for _ in range(updates.epochs)
    ]
    return torch.stack(epochs, dim=1)


def balance_metrics(lengths: torch.Tensor, assignment: list[list[int]]) -> Metrics:
    """Return statistics of the tokens per rank.

    min, max, minmax_diff and mean are for consecutive rows; balanced_min and balanced_max are for
    this assignment.
    """
    tokens = lengths.numpy()
    plain = [int(part.sum()) for part in np.array_split(tokens, len(assignment))]
    balanced = [int(tokens[rows].sum()) for rows in assignment]
    values = {
        "min": min(plain),
        "max": max(plain),
        "minmax_diff": max(plain) - min(plain),
        "mean": sum(plain) / len(plain),
        "balanced_min": min(balanced),
        "balanced_max": max(balanced),
    }
    return {f"global_seqlen/{name}": float(value) for name, value in values.items()}


class Shared(NamedTuple):
    """What the rows of a prompt have in common.

    group: [B] number of each row's prompt.
    cost: [B] of the prompt alone.
    """

    group: np.ndarray
    cost: np.ndarray


def balance_rows(
    mini_batch_index: torch.Tensor,
    costs: np.ndarray,
    n_ranks: int,
    balance: bool,
    shared: Shared | None = None,
) -> list[list[int]]:
    """Assign rows to ranks; return each rank's row numbers.

    With `balance` each mini-batch's rows are distributed by their cost (Karmarkar-Karp), so that
    the ranks finish together. Otherwise each rank gets consecutive rows, near-equal in number.

    Args:
        mini_batch_index: [B] mini-batch of each row.
        costs: [B] of each row, whole numbers.
        shared: costs that a rank has once for all rows of a group. Groups are divided as far as it
            makes the slowest rank faster.
    """
    if not balance:
        return [part.tolist() for part in torch.arange(len(mini_batch_index)).tensor_split(n_ranks)]
    rows = [mini_batch_index, costs] if shared is None else [mini_batch_index, costs, *shared]
    return _balanced(n_ranks, *(_whole(column).tobytes() for column in rows))


def _whole(column: Any) -> np.ndarray:
    """Return a column as int64. Raises TypeError: it has fractions, which would be cut."""
    return np.asarray(column).astype(np.int64, casting="safe")


@functools.lru_cache(maxsize=8)
def _balanced(n_ranks: int, *columns: bytes) -> list[list[int]]:
    """Do it for balance_rows, once for the calls of a step that have the same rows.

    columns: its arrays, as int64.
    """
    mini_batch_index, costs, *of_prompts = (np.frombuffer(c, np.int64) for c in columns)
    shared = Shared(*of_prompts) if of_prompts else None
    ranks: list[list[int]] = [[] for _ in range(n_ranks)]
    load = np.zeros(n_ranks)
    for mini_batch in range(mini_batch_index.max() + 1):
        rows = (mini_batch_index == mini_batch).nonzero()[0]
        parts, part_costs = _parts(rows, costs, n_ranks, shared)
        # The most expensive part goes to the rank with the least load so far.
        heaviest = np.argsort(-part_costs, kind="stable")
        for rank, part in zip(np.argsort(load, kind="stable"), heaviest, strict=True):
            ranks[rank] += parts[part].tolist()
            load[rank] += part_costs[part]
    return ranks


def _costs_by_part(
    rows: np.ndarray, part: np.ndarray, n: int, costs: np.ndarray, shared: Shared | None
) -> np.ndarray:
    """Return the compute [n] of each part on one rank.

    part: of each of the rows.
    """
    total = np.zeros(n, dtype=np.int64)
    if shared is None:
        np.add.at(total, part, costs[rows])
        return total
    np.add.at(total, part, np.maximum(costs - shared.cost, 0)[rows])
    group = shared.group[rows]
    _, first = np.unique(part * (group.max(initial=0) + 1) + group, return_index=True)
    np.add.at(total, part[first], shared.cost[rows[first]])
    return total


def _parts(
    rows: np.ndarray, costs: np.ndarray, n_ranks: int, shared: Shared | None
) -> tuple[list[np.ndarray], np.ndarray]:
    """Divide a mini-batch's rows among the ranks: whole groups, or halves, quarters and so on of
    them, whichever has the cheapest slowest rank. Return the ranks' rows, and their costs."""
    sizes = np.ones(len(rows), dtype=np.int64)  # of the units that stay together
    if shared is not None:
        rows = rows[np.argsort(shared.group[rows], kind="stable")]
        sizes = np.unique(shared.group[rows], return_counts=True)[1]
    best: tuple[np.ndarray, np.ndarray] | None = None
    while True:
        unit = np.repeat(np.arange(len(sizes)), sizes)
        weights = _costs_by_part(rows, unit, len(sizes), costs, shared)
        part_of_unit = np.empty(len(sizes), dtype=np.int64)
        for number, units in enumerate(karmarkar_karp(weights, n_ranks)):
            part_of_unit[units] = number
        part = part_of_unit[unit]
        loads = _costs_by_part(rows, part, n_ranks, costs, shared)
        if best is None or loads.max() < best[1].max():
            best = part, loads
        if sizes.max(initial=0) <= 1:
            break
        halves = np.stack([sizes - sizes // 2, sizes // 2], axis=1).flatten()
        sizes = halves[halves > 0]
    part, loads = best
    order = np.lexsort((rows, part))
    bounds = np.bincount(part, minlength=n_ranks).cumsum()[:-1]
    return np.split(rows[order], bounds), loads


def costs_of(batch: DataProto, lengths: torch.Tensor, once: bool) -> np.ndarray:
    """Return the relative compute of each row: of all its sequences.

    lengths: [B] tokens of each row.
    once: tokens that an earlier sequence of the row has are not computed again.
    """
    if BRANCHES not in batch.non_tensor_batch:
        return workload(lengths.tolist())
    rows = batch.non_tensor_batch[BRANCHES]
    sums = [workload([sum(branch) for branch in row]).sum() for row in rows]
    costs = np.array(sums, dtype=np.int64)
    if once:
        sessions = batch.non_tensor_batch["session"]
        shares = [1 - s["repeated_tokens"] / max(1, s["tokens"]) for s in sessions]
        costs = np.rint(costs * shares).astype(np.int64)
    return costs


def to_ranks(run: Run, batch: DataProto, role: str, *columns: str) -> DataProto:
    """Return the batch for one role's ranks, with the assignment of rows to ranks.

    It has the numbers per row, the tokens, and those of `columns` that exist. A role's assignment
    is the same in all calls of a step, or of a part of one (meta_info["part"]). A sequence-parallel
    group counts as one rank, and its rows are divided among its members.
    """
    column = "critic_mini_batch_index" if role == "critic" else "mini_batch_index"
    mini_batch_index = batch.batch[column][:, 0]
    lengths = batch.batch["prompt_length"] + batch.batch["response_length"]
    group_size = run.plan.sequence_parallel[role]
    n_groups = len(run.plan.placement[role]) // group_size
    balance = run.config.trainer.balance_batch
    shared = _shared(run, batch, role)
    costs = costs_of(batch, lengths, once=shared is not None)
    groups = balance_rows(mini_batch_index, costs, n_groups, balance, shared)
    part = batch.meta_info.get("part")
    if role == "actor" and part is None:
        run.metrics.update(balance_metrics(lengths, groups))
    return with_columns(batch, *TOKENS, *columns).with_meta(
        assignment=[rows[i::group_size] for rows in groups for i in range(group_size)],
        updates=int(mini_batch_index.max()) + 1,
        step=run.step,
        part=part,
        version=run.version,
    )


def _shared(run: Run, batch: DataProto, role: str) -> Shared | None:
    """Return what the rows of a prompt share in passes of the role's model; None: nothing."""
    config = run.config
    model = config.critic.model if role == "critic" else config.actor_rollout_ref.model
    if not (model.share_prefixes and model.use_remove_padding):
        return None
    _, group = np.unique(batch.non_tensor_batch["uid"].astype(str), return_inverse=True)
    return Shared(group, workload(batch.batch["prompt_length"].flatten().tolist()))


def to_one_rank(run: Run, batch: DataProto, *columns: str) -> DataProto:
    """Return the batch for the actor's first rank alone, with the columns that exist."""
    idle = len(run.plan.placement["actor"]) - 1
    return with_columns(batch, *columns).with_meta(
        assignment=[list(range(len(batch)))] + [[]] * idle,
        step=run.step,
        part=batch.meta_info.get("part"),
    )


def with_columns(batch: DataProto, *columns: str) -> DataProto:
    """Return the numbers per row, and those of the named object columns that exist."""
    names = [name for name in columns if name in batch.non_tensor_batch]
    return batch.select(non_tensor_batch_keys=names, meta_info_keys=[])


def fetch_padded(batch: DataProto, *columns: str) -> TensorDict:
    """Fetch the tokens and these columns to the driver, padded."""
    return padded(fetch(with_columns(batch, *TOKENS, *columns))).batch
