"""Token sampling: the sampling distribution, its log-probs, and random numbers that depend only on
(seed, position)."""

import torch
from torch import Tensor

# Constants of SplitMix64 (Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number
# Generators").
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    """Return `value` modulo 2**64 as a signed 64-bit integer."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def mix64(seed: int) -> int:
    """Apply SplitMix64's output function (Steele, Lea and Flood 2014, figure 15) to any integer.

    Returns:
        A signed 64-bit integer.
    """
    z = (seed + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return _signed(z ^ (z >> 31))


def uniform(key: Tensor, position: Tensor) -> Tensor:
    """Return one uniform number in [0, 1) for each (key, position) pair of int64 tensors.

    The result is float64 with 52 random bits: SplitMix64 at state key + position * gamma. A row's
    numbers depend only on its own key and position, so its samples do not depend on the rows that
    are computed in the same step.
    """
    z = key + position * _signed(_GAMMA)
    z = (z ^ _shift_right(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(_MIX_2)
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 12).double() * 2.0**-52


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift right without copying the sign bit, which torch's operator does."""
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
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits: [n, V], any float dtype.
        temperature: [n]; 0 means greedy.
        top_k: [n], from 1 to V.
        top_p: [n], in (0, 1].
        draws: [n] float64, uniform in [0, 1).
        filtered: False if no row has top_k < V or top_p < 1; skips a sort.

    Returns:
        ids [n] int64 and log_probs [n] float32 under the distribution the tokens were drawn from.
        Log-probs of greedy rows are those at temperature 1.
    """
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    if filtered:
        scaled = _filter(scaled, top_k, top_p)
    log_probs = scaled.log_softmax(-1)
    # In float64: a running sum in float32 loses the tail of a large vocabulary.
    cumulative = log_probs.exp().double().cumsum(-1)
    targets = draws[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, targets, right=True)
    ids = torch.where(greedy[:, None], scaled.argmax(-1, keepdim=True), ids)
    return ids[:, 0], log_probs.gather(1, ids)[:, 0]


def _filter(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set logits to -inf outside the top_k most likely tokens, then outside the smallest set with
    probability top_p."""
    ordered = scaled.sort(-1, descending=True).values
    smallest_kept = ordered.gather(1, top_k[:, None] - 1)
    kept = ordered.masked_fill(ordered < smallest_kept, -torch.inf)
    probs = kept.softmax(-1)
    # A token is kept if the tokens before it sum to less than top_p, so the first token is always
    # kept. The second condition is needed because the probabilities of the top_k tokens may sum to
    # less than 1 after rounding.
    before = probs.cumsum(-1) - probs
    is_kept = (before < top_p[:, None]) & (kept > -torch.inf)
    last = is_kept.sum(-1, keepdim=True) - 1
    return scaled.masked_fill(scaled < kept.gather(1, last), -torch.inf)
