"""Attention over packed rows: sequences are concatenated into one row of T tokens, and none attends
to another. Tokens that sequences have in common at their start may stand once (see
algorithms/prefix_tree.py); then each sequence attends to its path through the row.

The function is registered with transformers as `verlite_packed`. Its mask is the sliding window or
None, so that no [T, T] mask is built. The boundaries of the sequences reach attention as the
model's keyword argument `sequences`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface

from verlite.algorithms.attention import causal_attention, mask_window
from verlite.engine import ulysses

PACKED_ATTENTION = "verlite_packed"

# Additions to attention scores in some architectures. Ignoring them would be silently wrong.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sinks")
_MAX_HEAD_DIM = 256  # of the varlen kernel
_SHORT = 256  # tokens of sequences whose calls cost more than copies of their tensors
_VARLEN_SHARES_HEADS = "enable_gqa" in signature(varlen.varlen_attn).parameters  # torch 2.13
_REMEDY = "Set model.use_remove_padding=False"


@dataclass(frozen=True)
class Paths:
    """Which tokens of a packed row each of its n sequences attends to.

    tokens: [P] on the model's device, the row's tokens path by path, each from the sequence's
        first token to its last.
    lengths: tokens of each path, at least those of the sequence in the row; their sum is P.
    cu_seqlens: [n + 1] int32 on the model's device: the sums of `lengths`.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    cu_seqlens: Tensor

    def gather(self, x: Tensor) -> Tensor:
        """Return the tokens of all paths, one after another, of [1, KV, T, D]."""
        _, heads, _, size = x.shape
        rows: Tensor = Select.apply(x.transpose(1, 2).flatten(2).squeeze(0), self.tokens)
        return rows.unflatten(1, (heads, size)).transpose(0, 1).unsqueeze(0)


class Select(torch.autograd.Function):
    """x[source] for x [T, H] and source [K]. The gradient of a token that is selected several times
    is summed in float32 and in a fixed order; that of indexing is in any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        ctx.tokens = len(x)
        return nn.functional.embedding(source, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), (source,) = gradients, ctx.saved_tensors
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        total = torch.ops.aten.embedding_dense_backward(wide, source, ctx.tokens, -1, False)
        return total.to(gradient.dtype), None


@dataclass(frozen=True)
class Sequences:
    """Boundaries of the n sequences in a packed row.

    lengths: tokens of each sequence in the row, in order; their sum is T.
    cu_seqlens: [n + 1] int32 on the model's device: the first token of each sequence, then T.
    group: the sequence-parallel group whose ranks each have an equal slice of the row (see
        ulysses.py). None: this rank has the whole row.
    paths: where the tokens before them are that sequences share with others. None: nowhere.
    longest_own: tokens of the longest in the row, computed. A graph that read `lengths` would be
        compiled for each set of them.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    group: ProcessGroup | None = None
    paths: Paths | None = None
    longest_own: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "longest_own", max(self.lengths))

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sequence, with those that it shares."""
        return self.longest_own if self.paths is None else max(self.paths.lengths)

    def padded(self, padding: int) -> "Sequences":
        """Return the boundaries with so many more tokens: a last sequence of its own, if any."""
        if not padding:
            return self

        def longer(boundaries: Tensor) -> Tensor:
            return torch.cat([boundaries, boundaries[-1:] + padding])

        paths = self.paths
        if paths is not None:
            size = sum(self.lengths)
            added = torch.arange(size, size + padding, device=paths.tokens.device)
            paths = Paths(
                torch.cat([paths.tokens, added]),
                (*paths.lengths, padding),
                longer(paths.cu_seqlens),
            )
        return replace(
            self,
            lengths=(*self.lengths, padding),
            cu_seqlens=longer(self.cu_seqlens),
            paths=paths,
        )

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Sequences":
        """Return a copy with the function's results for all tensors."""
        paths = self.paths
        if paths is not None:
            paths = Paths(function(paths.tokens), paths.lengths, function(paths.cu_seqlens))
        return replace(self, cu_seqlens=function(self.cu_seqlens), paths=paths)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | int | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    sequences: Sequences | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each sequence.

    With sequence parallelism, T is the number of this rank's tokens; each rank then attends with
    some of the heads over the whole row.

    Args:
        module: the attention layer.
        query: [1, H, T, D].
        key: [1, KV, T, D].
        value: [1, KV, T, D].
        attention_mask: None, or the sliding window if the model has it in its mask.
        scaling: factor of the scores; None means 1 / sqrt(D).
        dropout: must be 0.
        sliding_window: number of tokens each token attends to, itself included; None means all
            before it.
        sequences: boundaries of the sequences.
        **kwargs: other arguments of transformers' attention interface.

    Returns:
        ([1, T, H, D], None).

    Raises:
        NotImplementedError: masks, dropout, score soft-capping, sinks, position biases,
            bidirectional attention, or a model that does not pass its keyword arguments on to
            attention.
    """
    if isinstance(attention_mask, int):
        sliding_window = attention_mask
        attention_mask = None
    unsupported = _unsupported_features(module, attention_mask, dropout, kwargs)
    if unsupported:
        raise NotImplementedError(
            f"packed attention does not support {', '.join(unsupported)}. {_REMEDY}"
        )
    if sequences is None:
        raise NotImplementedError(
            f"{type(module).__name__} did not receive the packing layout: its model does not pass "
            f"keyword arguments on to attention. {_REMEDY}"
        )
    is_flat = sequences.group is None and sequences.paths is None
    attend = _attend if is_flat and _fits_varlen_kernel(query, value) else _attend_outside
    return attend(query, key, value, scaling, sliding_window, sequences), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    sliding_window: int | None,
    sequences: Sequences,
) -> Tensor:
    group = sequences.group
    if group is not None:
        query, key, value = ulysses.to_heads(query, key, value, group)
    if sequences.paths is not None:
        key, value = sequences.paths.gather(key), sequences.paths.gather(value)
    if _fits_varlen_kernel(query, value):
        out = _varlen(query, key, value, scaling, sliding_window, sequences)
    else:
        out = _per_sequence(query, key, value, scaling, sliding_window, sequences)
    if group is not None:
        out = ulysses.to_tokens(out, group)
    return out


# Breaks a compiled layer's graph, which would be compiled for every new set of lengths.
_attend_outside = torch.compiler.disable(_attend)


def _unsupported_features(
    module: nn.Module, attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> list[str]:
    found = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if dropout:
        found.append("dropout")
    if attention_mask is not None:
        found.append("an attention mask")
    if not getattr(module, "is_causal", True):
        found.append("bidirectional attention")
    return found


def _fits_varlen_kernel(query: Tensor, value: Tensor) -> bool:
    """Return True if torch's variable-length kernel (FlashAttention-2) supports the tensors and
    their device. Otherwise attention runs once per sequence."""
    head_dim = query.shape[-1]
    return (
        query.is_cuda
        and _has_varlen_kernel(query.device)
        and query.dtype in (torch.bfloat16, torch.float16)
        and head_dim == value.shape[-1] <= _MAX_HEAD_DIM
        and head_dim % 8 == 0
    )


@functools.cache
@torch.compiler.assume_constant_result
def _has_varlen_kernel(device: torch.device) -> bool:
    """Return True on NVIDIA GPUs from Ampere on. AMD's is another kernel, which was not tried."""
    if not torch.cuda.is_available():  # a fake tensor, which stands for one on a current GPU
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    sequences: Sequences,
) -> Tensor:
    """Attention by torch's variable-length kernel, for GPUs.

    With fewer queries than keys, the kernel takes the queries for those of the last keys.
    """
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    options: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if _VARLEN_SHARES_HEADS:
            options["enable_gqa"] = True
        else:  # torch 2.11
            copies = q.shape[1] // k.shape[1]
            k = k.repeat_interleave(copies, 1)
            v = v.repeat_interleave(copies, 1)
    keys = sequences.paths or sequences
    tokens_back = -1 if window is None else window - 1
    out: Any = varlen.varlen_attn(
        q,
        k,
        v,
        sequences.cu_seqlens,
        keys.cu_seqlens,
        sequences.longest_own,
        sequences.longest,
        scale=scaling,
        window_size=(tokens_back, 0),
        **options,
    )
    return out.unsqueeze(0)


def _per_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    sequences: Sequences,
) -> Tensor:
    """Attention by one call per sequence; short ones of equal lengths have one together.

    Sharing a call changes no bit on one thread of a CPU. Several threads, and GPUs without the
    varlen kernel (float32, AMD), may round otherwise. On a CPU this is never slower than padded
    blocks of sequences, and 4x faster if lengths differ much. `split` instead of slices: its
    backward pass writes each gradient once.
    """
    lengths = (sequences.paths or sequences).lengths
    parts = query.split(sequences.lengths, 2), key.split(lengths, 2), value.split(lengths, 2)
    alike: dict[Any, list[int]] = {}
    for number, shape in enumerate(zip(sequences.lengths, lengths, strict=True)):
        alike.setdefault(shape if max(shape) <= _SHORT else number, []).append(number)
    outputs = list(parts[0])
    for numbers in alike.values():
        q, k, v = (
            torch.cat([part[i] for i in numbers]) if len(numbers) > 1 else part[numbers[0]]
            for part in parts
        )
        found = causal_attention(q, k, v, scaling, window).split(1)
        for number, output in zip(numbers, found, strict=True):
            outputs[number] = output
    return torch.cat(outputs, 2).transpose(1, 2).contiguous()  # some models reshape it by view


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, mask_window)
