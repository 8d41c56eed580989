"""Key-value cache of the hf engine, and the attention that reads it.

Shapes: n rows (sequences), L slots (positions), H key-value heads, D head size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from verlite.algorithms.attention import causal_attention, mask_window

CACHED_ATTENTION = "verlite_rollout"
"""Name under which `_attention` is registered with transformers."""

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # additions to attention scores in some models


class KVCache:
    """Keys and values of all layers, [rows, H, L, D] each.

    Attention writes to the cache itself. The model runs as if it had no cache; its mask is the
    sliding window or None.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.slots = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._prefill: tuple[Tensor, Tensor] | None = None
        self._positions = torch.empty(0, dtype=torch.int64)
        self._index = torch.empty(0, dtype=torch.int64)
        self._length = 0
        self._masks: dict[int | None, Tensor] = {}

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for `rows` sequences of `slots` tokens. Contents that fit are kept."""
        if (rows, slots) == (self.rows, self.slots):
            return
        self.rows = rows
        self.slots = slots
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = (self._resized(keys), self._resized(values))

    def _resized(self, old: Tensor) -> Tensor:
        new = old.new_zeros(self.rows, old.shape[1], self.slots, old.shape[3])
        rows = min(self.rows, old.shape[0])
        slots = min(self.slots, old.shape[2])
        new[:rows, :, :slots] = old[:rows, :, :slots]
        return new

    def slot_bytes(self) -> int:
        """Return the bytes of one token, in all layers that ran."""
        tensors = (tensor for pair in self._layers.values() for tensor in pair)
        return sum(x.shape[1] * x.shape[3] * x.element_size() for x in tensors)

    def begin_prefill(self, rows: Tensor, source: Tensor) -> None:
        """Prepare a pass over prompts [m, P]. Row rows[i] receives the keys and values of prompt
        source[i]."""
        self._prefill = (rows, source)

    def begin_decode(self, positions: Tensor) -> None:
        """Prepare a pass over one token for each of the first n rows, at `positions` [n]."""
        self._prefill = None
        self._positions = positions
        self._index = torch.arange(len(positions), device=positions.device)
        self._length = int(positions.max()) + 1
        self._masks.clear()

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` slots of rows `sources` over rows `targets`."""
        for keys, values in self._layers.values():
            keys[targets, :, :length] = keys[sources, :, :length]
            values[targets, :, :length] = values[sources, :, :length]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        """Compute one layer's attention in the prepared pass: query [b, heads, q, D] -> [b, q,
        heads, D].

        In a pass over prompts it is causal within each prompt, and stores their keys and values; in
        one over tokens, that of one new token per row over its cached context.
        """
        if layer not in self._layers:
            self._layers[layer] = (
                key.new_zeros(self.rows, key.shape[1], self.slots, key.shape[3]),
                value.new_zeros(self.rows, value.shape[1], self.slots, value.shape[3]),
            )
        keys, values = self._layers[layer]
        if self._prefill is not None:
            rows, source = self._prefill
            length = key.shape[2]
            keys[rows, :, :length] = key[source]
            values[rows, :, :length] = value[source]
            return causal_attention(query, key, value, scale, window).transpose(1, 2)
        keys[self._index, :, self._positions] = key[:, :, 0]
        values[self._index, :, self._positions] = value[:, :, 0]
        n, heads, _, size = query.shape
        # Treat the query heads that share a key-value head as query positions, so that keys and
        # values are not repeated.
        grouped = query.view(n, key.shape[1], heads // key.shape[1], size)
        out = F.scaled_dot_product_attention(
            grouped,
            keys[:n, :, : self._length],
            values[:n, :, : self._length],
            attn_mask=self._mask(window, query.dtype),
            scale=scale,
        )
        return out.reshape(n, 1, heads, values.shape[3])

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return this decode step's additive mask [n, 1, 1, L] for all layers with this window."""
        if window not in self._masks:
            slots = torch.arange(self._length, device=self._positions.device)
            age = self._positions[:, None] - slots
            is_visible = age >= 0
            if window is not None:
                is_visible &= age < window
            mask = torch.zeros(is_visible.shape, dtype=dtype, device=is_visible.device)
            mask.masked_fill_(~is_visible, -torch.inf)
            self._masks[window] = mask[:, None, None]
        return self._masks[window]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | int | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    rollout_cache: KVCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. The cache arrives through the model's keyword
    arguments."""
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if isinstance(attention_mask, int):
        sliding_window = attention_mask
    elif attention_mask is not None:
        unsupported.append("a mask of the model's own")
    if unsupported:
        raise NotImplementedError(f"cached generation does not support {', '.join(unsupported)}")
    if rollout_cache is None:
        raise NotImplementedError("the model does not pass keyword arguments on to attention")
    out = rollout_cache.attend(module.layer_idx, query, key, value, scaling, sliding_window)  # type: ignore[arg-type]
    return out, None


AttentionInterface.register(CACHED_ATTENTION, _attention)
AttentionMaskInterface.register(CACHED_ATTENTION, mask_window)
