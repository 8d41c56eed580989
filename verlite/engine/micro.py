"""From rows of a batch to what one forward pass needs.

Rows without a trainable token are never run: they carry no loss, and every [B, R] field is 0 there anyway. Of the rows that
are, only real tokens are, and only those that predict a trainable token reach the output head.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad

from verlite.algorithms.balancing import micro_batches_by_tokens
from verlite.algorithms.packing import ResponseTargets, pack, response_targets
from verlite.engine.attention import Sequences


@dataclass(frozen=True)
class MicroBatching:
    """How one device's rows are cut: `size` rows, or at most `max_tokens` real tokens, per forward pass. Exactly one is set."""

    size: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.size is None) == (self.max_tokens is None):
            raise ValueError(
                f"micro-batches need either a size or max_tokens, got size={self.size}, max_tokens={self.max_tokens}"
            )
        if (self.size or self.max_tokens or 0) < 1:
            raise ValueError(
                f"micro-batches must hold at least 1, got size={self.size}, max_tokens={self.max_tokens}"
            )

    def split(self, rows: TensorDict) -> list[Tensor]:
        """Row numbers of each micro-batch, over the rows with at least one trainable token."""
        trained = rows["response_mask"].any(-1).nonzero().squeeze(1)
        if not len(trained):
            return []
        if self.size is not None:
            return list(trained.split(self.size))
        assert self.max_tokens is not None
        lengths = rows["attention_mask"][trained].sum(-1)
        return [
            trained[part]
            for part in micro_batches_by_tokens(lengths.tolist(), self.max_tokens)
            if part
        ]


@dataclass(frozen=True)
class ModelInputs:
    """One forward pass over b rows: packed into [1, T], or padded [b, S'] when sequences is None.

    Where ranks share a packed row (`cut`), input_ids, position_ids and targets are this rank's slice, and sequences those of the row.

    input_ids, position_ids: [1, T] or [b, S']. attention_mask: None or [b, S'].
    targets: the K trainable tokens; `source` counts in the flattened tokens. shape: (b, R).
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    sequences: Sequences | None
    targets: ResponseTargets
    shape: tuple[int, int]

    def spread(self, values: Tensor) -> Tensor:
        """[K] values at their places in [b, R], 0 elsewhere. Differentiable.

        Of a row that ranks share, every rank gets the values of all of them, but the gradient of its own alone: whatever a loss
        makes of the whole, each rank that runs its backward pass contributes its own tokens' part, and together once each.
        """
        b, response_length = self.shape
        whole = values.new_zeros(b * response_length)
        if self.sequences is not None and self.sequences.group is not None:
            whole.index_copy_(0, self.targets.destination, values.detach())
            dist.all_reduce(whole, group=self.sequences.group)  # adds zeros: nothing is rounded
        return whole.index_copy(0, self.targets.destination, values).view(self.shape)

    def cut(self, group: dist.ProcessGroup | None) -> "ModelInputs":
        """This rank's slice of a packed row that the ranks of `group` share, and the targets that it predicts; see engine.ulysses.

        T grows to a multiple of the ranks by a last sequence of padding, which nothing reads. A token keeps its label, also where the
        next token is in the next rank's slice. Each rank must be given the same row.
        """
        if group is None:
            return self
        assert self.sequences is not None
        padding = -self.input_ids.shape[1] % group.size()
        input_ids, position_ids = (
            pad(self.input_ids, (0, padding)),
            pad(self.position_ids, (0, padding)),
        )
        lengths, cu_seqlens = self.sequences.lengths, self.sequences.cu_seqlens
        if padding:
            lengths, cu_seqlens = (
                (*lengths, padding),
                pad(cu_seqlens, (0, 1), value=input_ids.shape[1]),
            )
        each = input_ids.shape[1] // group.size()
        start = group.rank() * each
        source = self.targets.source - start
        mine = (source >= 0) & (source < each)
        targets = ResponseTargets(
            source[mine], self.targets.labels[mine], self.targets.destination[mine]
        )
        here = slice(start, start + each)
        return replace(
            self,
            input_ids=input_ids[:, here],
            position_ids=position_ids[:, here],
            sequences=Sequences(lengths, cu_seqlens, group),
            targets=targets,
        )

    def to(self, device: torch.device) -> "ModelInputs":
        """The same on `device`."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            attention_mask=None if self.attention_mask is None else self.attention_mask.to(device),
            sequences=None
            if self.sequences is None
            else replace(self.sequences, cu_seqlens=self.sequences.cu_seqlens.to(device)),
            targets=ResponseTargets(
                *(
                    x.to(device)
                    for x in (self.targets.source, self.targets.labels, self.targets.destination)
                )
            ),
        )


def model_inputs(rows: TensorDict, packed: bool) -> ModelInputs:
    """Inputs of a forward pass over `rows`, b of them, all with a trainable token. Best made on the CPU: sizes are read from values.

    Raises ValueError when a trainable token has no real token before it, from which it could have been predicted.
    """
    mask, real = rows["response_mask"], rows["attention_mask"]
    (b, response_length), columns = mask.shape, real.shape[1]
    batch = pack(rows["input_ids"], real, rows["position_ids"])
    every = response_targets(batch, columns, response_length)
    trained = mask.flatten()[every.destination].bool()
    source, labels, destination = (
        every.source[trained],
        every.labels[trained],
        every.destination[trained],
    )
    if len(destination) != int(mask.sum()):
        raise ValueError(
            f"response_mask marks {int(mask.sum())} tokens but only {len(destination)} of them are real tokens with a real token before "
            "them: every row needs a prompt token, and attention_mask must cover what response_mask covers"
        )
    if packed:
        sequences = Sequences(tuple(batch.cu_seqlens.diff().tolist()), batch.cu_seqlens)
        targets = ResponseTargets(source, labels, destination)
        return ModelInputs(
            batch.input_ids[None],
            batch.position_ids[None],
            None,
            sequences,
            targets,
            (b, response_length),
        )
    # Columns that are padding in every row go; what padding is left becomes token 0, whatever it was.
    used = real.any(0).nonzero()
    first, last = int(used[0]), int(used[-1]) + 1
    place = batch.indices[source]
    targets = ResponseTargets(
        place // columns * (last - first) + place % columns - first, labels, destination
    )
    attention_mask = real[:, first:last]
    input_ids = rows["input_ids"][:, first:last].masked_fill(attention_mask == 0, 0)
    return ModelInputs(
        input_ids,
        rows["position_ids"][:, first:last],
        attention_mask,
        None,
        targets,
        (b, response_length),
    )


def dummy_inputs(packed: bool) -> ModelInputs:
    """A pass over one token, for a rank that has no micro-batch left while others do: their collectives need its part."""
    zero = torch.zeros(1, dtype=torch.int64)
    sequences = Sequences((1,), torch.tensor([0, 1], dtype=torch.int32)) if packed else None
    attention_mask = None if packed else torch.ones_like(zero)[None]
    return ModelInputs(
        zero[None], zero[None], attention_mask, sequences, ResponseTargets(zero, zero, zero), (1, 1)
    )
