"""Conversion of batch rows to the inputs of one forward pass.

Rows without a trainable token are not run: they have no loss, and every [B, R] result is 0 there
anyway. In the other rows only real tokens are run, and only hidden states that predict a trainable
token reach the output head.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad

from verlite.algorithms.balancing import micro_batches_of_tree
from verlite.algorithms.packing import Packed, ResponseTargets, pack, response_targets
from verlite.algorithms.prefix_tree import PrefixTree, prefix_tree, sort_by_prefix, token_keys
from verlite.engine.attention import Paths, Sequences
from verlite.engine.offload import to_device

LEAST_SAVING = 0.05
"""Share of a batch's tokens that sharing prefixes must save: a tree copies keys and values along
its paths. On a CPU it takes 0.96 of the time there (recipes/benchmark/trees.py)."""


class MicroBatch(NamedTuple):
    """The rows of one forward pass, by their numbers, and whether it computes prefixes that they
    share once."""

    rows: Tensor
    share_prefixes: bool


@dataclass(frozen=True)
class MicroBatching:
    """How one device's rows are split into forward passes. Exactly one limit is set.

    size: maximum number of rows per pass, or of groups of rows.
    max_tokens: maximum number of real tokens per pass; shared ones count once.
    together: rows of a group: so many adjacent ones are in the same pass, one after the other.
    """

    size: int | None = None
    max_tokens: int | None = None
    together: int = 1

    def __post_init__(self) -> None:
        limits = f"got size={self.size}, max_tokens={self.max_tokens}"
        if (self.size is None) == (self.max_tokens is None):
            raise ValueError(f"micro-batches need either size or max_tokens, {limits}")
        if (self.size or self.max_tokens or 0) < 1:
            raise ValueError(f"the limit of micro-batches must be at least 1, {limits}")

    def split(self, rows: TensorDict, share_prefixes: bool = False) -> list[MicroBatch]:
        """Return the micro-batches of all groups with a trainable token.

        share_prefixes: if it saves enough of all rows' tokens, those with a common prefix stay
            together, and its tokens count once.
        """
        has_token = rows["response_mask"].any(-1).view(-1, self.together).any(-1)
        trainable = has_token.nonzero().squeeze(1)
        if not len(trainable):
            return []
        lengths = self._per_group(rows["attention_mask"])[trainable]
        shared = torch.zeros_like(lengths)
        if share_prefixes:
            order, saved = self._saved(rows, trainable)
            share_prefixes = int(saved.sum()) >= LEAST_SAVING * int(lengths.sum())
            if share_prefixes:
                trainable, lengths = trainable[order], lengths[order]
                # Each trained token needs the head, even if another row has the same.
                trained = self._per_group(rows["response_mask"])[trainable]
                shared = torch.minimum(saved, lengths - trained)
                if self.together > 1:  # shared within the group
                    lengths, shared = lengths - shared, torch.zeros_like(shared)
        if self.size is not None:
            parts = list(trainable.split(self.size))
        else:
            assert self.max_tokens is not None
            numbers = micro_batches_of_tree(lengths.tolist(), shared.tolist(), self.max_tokens)
            parts = [trainable[part] for part in numbers]
        return [MicroBatch(self._rows(part.sort().values), share_prefixes) for part in parts]

    def _per_group(self, mask: Tensor) -> Tensor:
        """Return the number of each group's tokens in a mask."""
        return mask.sum(-1).view(-1, self.together).sum(-1)

    def _saved(self, rows: TensorDict, groups: Tensor) -> tuple[list[int], Tensor]:
        """Return the order of the groups in the tree, and how many tokens each has in common with
        the one before it. A group of several rows stays in its place and has them within itself."""
        keys = token_keys(_packed(rows))
        if self.together == 1:
            order, shared = sort_by_prefix([keys[row] for row in groups.tolist()])
            return order, torch.tensor(shared)
        own = [[keys[row] for row in self._rows(group[None]).tolist()] for group in groups]
        return list(range(len(own))), torch.tensor([sum(sort_by_prefix(k)[1]) for k in own])

    def _rows(self, groups: Tensor) -> Tensor:
        """Return the rows of these groups."""
        first = groups[:, None] * self.together
        return (first + torch.arange(self.together)).flatten()


@dataclass(frozen=True)
class ModelInputs:
    """Inputs of one forward pass over b rows.

    Rows are packed into [1, T], in which prefixes that they share may stand once, or padded to
    [b, S'] if `sequences` is None. After `rank_slice`,
    input_ids, position_ids and targets are this rank's slice, while `sequences` still describes the
    whole row.

    input_ids, position_ids: [1, T] or [b, S'].
    attention_mask: None or [b, S'].
    targets: the K trainable tokens; `source` indexes the flattened tokens.
    shape: (b, R).
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    sequences: Sequences | None
    targets: ResponseTargets
    shape: tuple[int, int]

    @property
    def tokens(self) -> int:
        """Return the tokens that are computed, by all ranks that share the row."""
        return self.input_ids.numel() if self.sequences is None else sum(self.sequences.lengths)

    def scatter(self, values: Tensor) -> Tensor:
        """Scatter [K] values into [b, R]; 0 elsewhere. Differentiable.

        With sequence parallelism every rank receives the values of all ranks, but only the gradient
        of its own values. Whatever a loss computes from the whole row, each rank's backward pass
        then contributes its own tokens' part exactly once.
        """
        b, response_length = self.shape
        whole = values.new_zeros(b * response_length)
        destination = self.targets.destination
        if self.sequences is not None and self.sequences.group is not None:
            whole.index_copy_(0, destination, values.detach())
            dist.all_reduce(whole, group=self.sequences.group)  # adds zeros, so nothing is rounded
        return whole.index_copy(0, destination, values).view(self.shape)

    def rank_slice(self, group: dist.ProcessGroup | None) -> "ModelInputs":
        """Return this rank's slice of a packed row, and the targets it predicts (see ulysses.py).
        None: the inputs themselves.

        T is padded to a multiple of the ranks by an extra last sequence, which nothing reads. A
        token keeps its label even if the next token is in the next rank's slice. All ranks of the
        group must pass the same row.
        """
        if group is None:
            return self
        assert self.sequences is not None
        padding = -self.input_ids.shape[1] % group.size()
        input_ids = pad(self.input_ids, (0, padding))
        position_ids = pad(self.position_ids, (0, padding))
        slice_length = input_ids.shape[1] // group.size()
        start = group.rank() * slice_length
        columns = slice(start, start + slice_length)
        source = self.targets.source - start
        is_own = (source >= 0) & (source < slice_length)
        targets = replace(self.targets, source=source).mapped(lambda of_row: of_row[is_own])
        return replace(
            self,
            input_ids=input_ids[:, columns],
            position_ids=position_ids[:, columns],
            sequences=replace(self.sequences.padded(padding), group=group),
            targets=targets,
        )

    def to(
        self, device: torch.device, rows: TensorDict | None = None
    ) -> tuple["ModelInputs", TensorDict | None]:
        """Return copies of the inputs and of the rows on `device`, sent together."""
        tensors: list[Tensor] = []

        def collect(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        self.mapped(collect)
        if rows is not None:
            rows.apply(collect)
        moved = iter(to_device(tensors, device))
        inputs = self.mapped(lambda _: next(moved))
        return inputs, None if rows is None else rows.apply(lambda _: next(moved), device=device)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "ModelInputs":
        """Return a copy with the function's results for all tensors."""
        mask, sequences = self.attention_mask, self.sequences
        return replace(
            self,
            input_ids=function(self.input_ids),
            position_ids=function(self.position_ids),
            attention_mask=None if mask is None else function(mask),
            sequences=None if sequences is None else sequences.mapped(function),
            targets=self.targets.mapped(function),
        )


def _packed(rows: TensorDict) -> Packed:
    return pack(rows["input_ids"], rows["attention_mask"], rows["position_ids"])


def model_inputs(rows: TensorDict, packed: bool, share_prefixes: bool = False) -> ModelInputs:
    """Build the inputs of a forward pass over `rows`, each of which has a trainable token.

    Best called on the CPU, because tensor sizes depend on values.

    share_prefixes: compute prefixes that rows have in common once. Only the inputs' layout
        differs: targets are those of all rows. Needs `packed`.

    Raises:
        ValueError: a trainable token has no real token before it that could predict it.
    """
    mask = rows["response_mask"]
    attention_mask = rows["attention_mask"]
    rows_count, response_length = mask.shape
    columns = attention_mask.shape[1]
    batch = _packed(rows)
    candidates = response_targets(batch, columns, response_length)
    is_trainable = mask.flatten()[candidates.destination].bool()
    targets = candidates.mapped(lambda of_all: of_all[is_trainable])
    marked = int(mask.sum())
    if len(targets.destination) != marked:
        raise ValueError(
            f"response_mask marks {marked} tokens, but only {len(targets.destination)} of them are "
            "real tokens with a real token before them. Every row needs a prompt token, and "
            "attention_mask must cover what response_mask covers"
        )
    shape = (rows_count, response_length)
    if packed:
        tree = prefix_tree(batch) if share_prefixes else None
        if tree is not None:
            return _tree_inputs(batch, tree, targets, shape)
        sequences = Sequences(tuple(batch.cu_seqlens.diff().tolist()), batch.cu_seqlens)
        return ModelInputs(
            batch.input_ids[None], batch.position_ids[None], None, sequences, targets, shape
        )
    # Drop columns that are padding in every row. Remaining padding becomes token 0, whatever it
    # was.
    used = attention_mask.any(0).nonzero()
    first = int(used[0])
    last = int(used[-1]) + 1
    place = batch.indices[targets.source]
    source = place // columns * (last - first) + place % columns - first
    attention_mask = attention_mask[:, first:last]
    input_ids = rows["input_ids"][:, first:last].masked_fill(attention_mask == 0, 0)
    return ModelInputs(
        input_ids,
        rows["position_ids"][:, first:last],
        attention_mask,
        None,
        replace(targets, source=source),
        shape,
    )


def _tree_inputs(
    batch: Packed, tree: PrefixTree, targets: ResponseTargets, shape: tuple[int, int]
) -> ModelInputs:
    """Build the inputs of a pass over distinct tokens."""
    lengths = tuple(map(len, tree.paths))
    paths = Paths(torch.cat(tree.paths), lengths, _boundaries(lengths))
    return ModelInputs(
        batch.input_ids[tree.kept][None],
        batch.position_ids[tree.kept][None],
        None,
        Sequences(tree.lengths, _boundaries(tree.lengths), paths=paths),
        replace(targets, source=tree.places[targets.source]),
        shape,
    )


def _boundaries(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def dummy_inputs(packed: bool) -> ModelInputs:
    """Build a pass over one token, for a rank that has no micro-batch left: the other ranks'
    collectives need it to take part."""
    zero = torch.zeros(1, dtype=torch.int64)
    sequences = None
    attention_mask = None
    if packed:
        sequences = Sequences((1,), torch.tensor([0, 1], dtype=torch.int32))
    else:
        attention_mask = torch.ones_like(zero)[None]
    targets = ResponseTargets(zero, zero, zero)
    return ModelInputs(zero[None], zero[None], attention_mask, sequences, targets, (1, 1))
