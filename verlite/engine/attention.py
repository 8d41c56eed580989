"""Attention over packed rows: sequences lie end to end in one row of T tokens and none sees another.

Registered with transformers under the name `verlite_packed`. transformers makes masks only for the implementations of its
mask registry; this one is absent there on purpose, so models pass attention_mask=None and no [T, T] mask is ever built.
Where the sequences begin travels through the model's keyword arguments as `sequences`.
"""

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from verlite.engine import ulysses

PACKED_ATTENTION = "verlite_packed"

# What some architectures add to the attention scores. Ignoring it would be silently wrong.
_REFUSED = ("softcap", "s_aux", "position_bias", "sinks")


@dataclass(frozen=True)
class Sequences:
    """Where the n sequences of a packed row lie.

    lengths: tokens of each sequence, in order; their sum is T.
    cu_seqlens: [n + 1] int32 on the model's device: the first token of each sequence, and T.
    group: the ranks that each hold an equal slice of the row (engine.ulysses). None: this rank holds all of it.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    group: ProcessGroup | None = None


@torch.compiler.disable  # torch.compile would make it anew for each set of lengths
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    sequences: Sequences | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence. query: [1, H, T, D]; key, value: [1, KV, T, D]. Returns ([1, T, H, D], None).

    Where the row is shared by ranks, T is this rank's tokens; each then attends with some of the heads over all of the row.

    Raises NotImplementedError for what it does not compute: masks, dropout, score soft-capping, sinks, position biases,
    attention that is not causal, and models that do not hand their keyword arguments down to attention.
    """
    refused = [name for name in _REFUSED if kwargs.get(name) is not None]
    if refused or dropout or attention_mask is not None or not getattr(module, "is_causal", True):
        what = refused or [
            "dropout"
            if dropout
            else "an attention mask"
            if attention_mask is not None
            else "bidirectional attention"
        ]
        raise NotImplementedError(
            f"packed attention does not do {', '.join(what)}; set model.use_remove_padding=False for this model"
        )
    if sequences is None:
        raise NotImplementedError(
            f"{type(module).__name__} did not receive the packing layout: its model does not pass keyword arguments on to attention; "
            "set model.use_remove_padding=False"
        )
    if sequences.group is not None:
        query, key, value = ulysses.to_heads(query, key, value, sequences.group)
    flash = (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= 256
    )
    if flash:
        out = _varlen(query, key, value, scaling, sliding_window, sequences)
    else:
        out = _per_sequence(query, key, value, scaling, sliding_window, sequences.lengths)
    return (out if sequences.group is None else ulysses.to_tokens(out, sequences.group)), None


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    sequences: Sequences,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    more = {}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in signature(varlen_attn).parameters:
            more["enable_gqa"] = True
        else:  # torch 2.11
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    longest, cu_seqlens = max(sequences.lengths), sequences.cu_seqlens
    back = -1 if window is None else window - 1
    out = varlen_attn(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        scale=scaling,
        window_size=(back, 0),
        **more,
    )
    return out.unsqueeze(0)


def _per_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    lengths: tuple[int, ...],
) -> Tensor:
    # One call per sequence: on a CPU never slower than padded blocks of sequences, and 4x faster where lengths differ much.
    # `split`, unlike slicing, has a backward that writes each gradient once.
    gqa = query.shape[1] != key.shape[1]
    outputs = []
    for q, k, v in zip(
        query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True
    ):
        band = (
            None if window is None or window >= q.shape[2] else _band(q.shape[2], window, q.device)
        )
        outputs.append(
            scaled_dot_product_attention(
                q, k, v, band, is_causal=band is None, scale=scaling, enable_gqa=gqa
            )
        )
    return torch.cat(outputs, 2).transpose(1, 2)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """[length, length] bool: each token sees itself and the window - 1 tokens before it."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril() & ones.triu(1 - window)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
