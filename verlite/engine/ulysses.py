"""Ulysses sequence parallelism (DeepSpeed-Ulysses, arXiv:2309.14509): a few neighbouring ranks run one packed row together.

Each holds an equal slice of the row's T tokens and runs every layer on it alone. Only attention looks further: there an all-to-all
trades [all heads, this rank's tokens] for [this rank's heads, all tokens], and back afterwards. engine.micro cuts the row.
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


def neighbours(size: int, packed: bool) -> dist.ProcessGroup | None:
    """The group of this rank and its neighbours, `size` of them; None for a group of one. All ranks must call it.

    Raises ValueError when the ranks do not make whole groups, or rows are not packed.
    """
    if size == 1:
        return None
    if size < 1 or dist.get_world_size() % size:
        raise ValueError(
            f"{KEY}={size} must divide the {dist.get_world_size()} devices of this role"
        )
    if not packed:
        raise ValueError(f"{KEY}={size} cuts packed rows: it needs model.use_remove_padding=True")
    return dist.new_subgroups(size)[0]


def together(rows: TensorDict, group: dist.ProcessGroup) -> tuple[TensorDict, slice]:
    """The rows of all ranks of the group in rank order, and where this rank's own are among them.

    Ranks pad their rows for themselves: prompts become as wide, on the left, and responses, on the right, as the widest.
    """
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(
        every, rows.clone(), group=group
    )  # a copy: a view would be sent with all that it is a view of
    start = sum(len(part) for part in every[: group.rank()])
    widths = [(part["attention_mask"].shape[1], part["response_mask"].shape[1]) for part in every]
    p, r = max(both - own for both, own in widths), max(own for _, own in widths)
    alike = [
        _widened(part, p - (both - own), r - own)
        for part, (both, own) in zip(every, widths, strict=True)
    ]
    return torch.cat(alike), slice(start, start + len(rows))


def _widened(rows: TensorDict, left: int, right: int) -> TensorDict:
    sides = {"B P": (left, 0), "B R": (0, right), "B S": (left, right)}
    shapes = {name: FIELDS[name].shape for name in rows.keys() if name in FIELDS}
    wider = {
        name: pad(rows[name], sides[shape]) for name, shape in shapes.items() if shape in sides
    }
    return TensorDict({**rows, **wider}, rows.batch_size)


def to_heads(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Of all heads and T/n tokens, this rank's 1/n of the heads and all T tokens. [1, heads, T/n, D] -> [1, heads/n, T, D]; differentiable.

    Key and value heads that cannot be dealt out evenly are repeated as often as it takes. Raises ValueError when n does not divide
    the query's heads.
    """
    n, heads, kv_heads = group.size(), query.shape[1], key.shape[1]
    if heads % n:
        raise ValueError(f"{KEY}={n} must divide the model's {heads} attention heads")
    copies = (
        math.lcm(kv_heads, n) // kv_heads
    )  # both divide the query's heads, and so does their least common multiple
    key, value = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value))
    query, key, value = (_Trade.apply(x, 1, 2, group) for x in (query, key, value))
    return query, key, value


def to_tokens(attended: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back: [1, T, heads/n, D] -> [1, T/n, heads, D]; differentiable."""
    return _Trade.apply(attended, 1, 2, group)


class _Trade(torch.autograd.Function):
    """Cut dimension `cut` into one part for each rank, send each its part, and join what comes along dimension `join`.

    Elements only move, so the gradient moves back the same way.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int, join: int, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.way = cut, join, group
        parts = torch.stack(x.chunk(group.size(), cut))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        cut, join, group = ctx.way
        return _Trade.apply(grad, join, cut, group), None, None, None
