"""Ulysses sequence parallelism (DeepSpeed-Ulysses, arXiv:2309.14509): a few neighboring ranks
compute one packed row together.

Each rank has an equal slice of the row's T tokens and runs every layer on that slice. Only
attention needs other tokens: before it, an all-to-all exchanges [all heads, this rank's tokens] for
[this rank's heads, all tokens]; after it, another all-to-all restores the first layout.
engine.micro splits the row.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad

from verlite.protocol.fields import FIELDS

KEY = "ulysses_sequence_parallel_size"


def sp_group(size: int, packed: bool) -> dist.ProcessGroup | None:
    """Return this rank's sequence-parallel group of `size` neighboring ranks; None for size 1.

    All ranks must call it.

    Raises:
        ValueError: `size` does not divide the number of ranks, or rows are not packed.
    """
    if size == 1:
        return None
    ranks = dist.get_world_size()
    if size < 1 or ranks % size:
        raise ValueError(f"{KEY}={size} must divide the {ranks} devices of this role")
    if not packed:
        raise ValueError(f"{KEY}={size} splits packed rows: it needs model.use_remove_padding=True")
    group, _ = dist.new_subgroups(size)
    return group


def all_gather_rows(rows: TensorDict, group: dist.ProcessGroup) -> tuple[TensorDict, slice]:
    """Gather the rows of all ranks of the group.

    Each rank pads its own rows. Here all rows are padded to the widest prompt (on the left) and the
    widest response (on the right).

    Returns:
        The rows in rank order, and the slice of this rank's own rows.
    """
    parts: list[Any] = [None] * group.size()
    # A copy, because a view would be sent together with the whole storage it points into.
    dist.all_gather_object(parts, rows.clone(), group=group)
    start = sum(len(part) for part in parts[: group.rank()])
    totals = [part["attention_mask"].shape[1] for part in parts]
    responses = [part["response_mask"].shape[1] for part in parts]
    prompts = [total - response for total, response in zip(totals, responses, strict=True)]
    padded = [
        _pad_rows(part, max(prompts) - prompt, max(responses) - response)
        for part, prompt, response in zip(parts, prompts, responses, strict=True)
    ]
    gathered: Any = torch.cat(padded)  # type: ignore[arg-type]
    return gathered, slice(start, start + len(rows))


def _pad_rows(rows: TensorDict, left: int, right: int) -> TensorDict:
    """Pad prompts by `left` columns on the left and responses by `right` columns on the right."""
    padding = {"B P": (left, 0), "B R": (0, right), "B S": (left, right)}
    padded = {}
    for name in rows.keys():
        shape = FIELDS[name].shape if name in FIELDS else None
        if shape in padding:
            padded[name] = pad(rows[name], padding[shape])
    return TensorDict({**rows, **padded}, rows.batch_size)


def to_heads(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange [1, heads, T/n, D] for [1, heads/n, T, D] between the n ranks of the group.
    Differentiable.

    Key and value heads that n does not divide are repeated until it does.

    Raises:
        ValueError: n does not divide the query's heads.
    """
    n = group.size()
    heads = query.shape[1]
    kv_heads = key.shape[1]
    if heads % n:
        raise ValueError(f"{KEY}={n} must divide the model's {heads} attention heads")
    # n and kv_heads both divide the query's heads, and so does their least common multiple.
    copies = math.lcm(kv_heads, n) // kv_heads
    if copies > 1:
        key = key.repeat_interleave(copies, 1)
        value = value.repeat_interleave(copies, 1)
    query, key, value = (_AllToAll.apply(x, 1, 2, group) for x in (query, key, value))
    return query, key, value


def to_tokens(attended: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange [1, T, heads/n, D] for [1, T/n, heads, D], the inverse of `to_heads`.
    Differentiable."""
    out: Tensor = _AllToAll.apply(attended, 1, 2, group)
    return out


class _AllToAll(torch.autograd.Function):
    """Split dimension `split` into one part per rank, send each rank its part, and concatenate what
    arrives along `concat`.

    Elements are only moved, so the gradient is moved back in the same way.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, concat: int, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.split = split
        ctx.concat = concat
        ctx.group = group
        parts = torch.stack(x.chunk(group.size(), split))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(), concat)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grad, ctx.concat, ctx.split, ctx.group), None, None, None
