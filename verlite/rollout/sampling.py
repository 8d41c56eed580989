"""Drawing tokens: the sampled distribution, its log-probs, and random numbers that depend only on (seed, position)."""

import torch
from torch import Tensor

_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def mix64(seed: int) -> int:
    """SplitMix64's output function (Steele, Lea and Flood 2014, figure 15) of any integer, as a signed 64-bit integer."""
    z = (seed + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return _signed(z ^ (z >> 31))


def uniform(key: Tensor, position: Tensor) -> Tensor:
    """One number in [0, 1) for each (key, position) pair of int64 tensors, float64 with 52 random bits.

    SplitMix64 at state key + position * gamma. A row's numbers depend on nothing else, so what it samples does not depend
    on which rows are computed beside it.
    """
    z = key + position * _signed(_GAMMA)
    z = (z ^ _shift_right(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(_MIX_2)
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 12).double() * 2.0**-52


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's copies the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    draws: Tensor,
    *,
    filtered: bool,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution.

    logits [n, V] of any float type; temperature [n], 0 for greedy; top_k [n] in 1..V; top_p [n]; draws [n] in [0, 1).
    filtered=False promises that no row has top_k < V or top_p < 1, and saves a sort. Returns ids [n] int64 and log_probs [n]
    float32 under the distribution that was drawn from (for a greedy row: at temperature 1).
    """
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    if filtered:
        scaled = _filter(scaled, top_k, top_p)
    log_probs = scaled.log_softmax(-1)
    # float64, because a float32 running sum loses the tail of a large vocabulary
    cumulative = log_probs.exp().double().cumsum(-1)
    targets = draws[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, targets, right=True)
    ids = torch.where(greedy[:, None], scaled.argmax(-1, keepdim=True), ids)
    return ids[:, 0], log_probs.gather(1, ids)[:, 0]


def _filter(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """-inf outside the top_k most likely tokens, then outside the smallest set of them with probability top_p."""
    ordered = scaled.sort(-1, descending=True).values
    kept = ordered.masked_fill(ordered < ordered.gather(1, top_k[:, None] - 1), -torch.inf)
    probs = kept.softmax(-1)
    # A token is kept while those before it have less than top_p; so the first always is. Rounding can leave the sum of the
    # top_k below 1, so the cut ones are excluded by name.
    before = probs.cumsum(-1) - probs
    last = ((before < top_p[:, None]) & (kept > -torch.inf)).sum(-1, keepdim=True) - 1
    return scaled.masked_fill(scaled < kept.gather(1, last), -torch.inf)
