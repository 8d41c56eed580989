"""The log-prob probe: after a weight sync, an engine scores a fixed sequence of tokens, and the
result is compared with the trainer's.

A fingerprint does not depend on the order of values, so that it can be compared between layouts. It
therefore cannot tell that two weights of one shape were exchanged, that a square weight was
transposed, or that shards were put together in another order. Most of these change the log-probs of
nearly every token; two exchanged experts change only those of tokens that visit them.
`recipes/benchmark/probe.py` measures what the probe sees.
"""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verlite.protocol.data import DataProto

LENGTH = 32
"""Tokens of the sequence, for a model without experts."""

_FLOAT32_SHARE = 0.1
_HALF_SHARE = 2.0
"""`Gap.relative` may be this much of rollout.log_prob_gap_limit, if both sides compute in float32,
and otherwise. Rounding gives 1e-6 in float32 and 0.003 to 0.02 in bfloat16 (docs/weights.md)."""
_TAIL = 0.95
_TAIL_SHARE = 2.0
"""That quantile of single tokens may be this many times the limit. Rounding gives 0.01 to 0.03 in
bfloat16. Single tokens may be further away: rounding sends them to other experts."""
_SMALLEST_SPREAD = 0.01
"""In nats: a model that gives all tokens the same probability has no spread to compare with."""


@dataclass(frozen=True)
class Probe:
    """Tokens and the trainer's log-probs of all but the first, at temperature 1.

    limit: of `Gap.is_within`.
    seconds: the trainer's time to compute it.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    limit: float
    seconds: float = 0.0


@dataclass(frozen=True)
class Gap:
    """Difference between the engine's and the trainer's log-probs.

    nats: median over tokens of |log p_engine - log p_train|. NaN if a value is not finite.
    relative: `nats` as a share of the standard deviation of the trainer's log-probs over tokens. It
        is about 1 for unrelated weights, whatever the model's size and training.
    tail: the same of the token at the 0.95 quantile. A weight that only some tokens visit, such as
        an expert's, shows here.
    """

    nats: float
    relative: float
    tail: float

    def is_within(self, limit: float) -> bool:
        """Return whether median and tail are what rounding may give; False for NaN."""
        return self.relative <= limit and self.tail <= _TAIL_SHARE * limit

    def __str__(self) -> str:
        """For messages that end in "the difference is"."""
        return (
            f"{self.nats:.2e} in the median, {self.relative:.1%} of the standard deviation of "
            f"these log-probs, and {self.tail:.1%} or more for one token in twenty"
        )


def probe_length(experts: int, visited: int) -> int:
    """Return the number of random tokens with which a layer's experts are all visited.

    With t tokens, an expert that gets half of the average load stays without a token with a
    probability of exp(-t x visited / (2 x experts)). The result makes that 1 / (7 x experts).

    Args:
        experts: of a layer; 0 without experts.
        visited: by each token.
    """
    if not experts:
        return LENGTH
    return max(LENGTH, math.ceil(2 * experts / visited * (math.log(experts) + 2)))


def probe_ids(vocab_size: int, length: int = LENGTH) -> list[int]:
    """Return the fixed sequence for a vocabulary: random tokens, the same in every process."""
    generator = random.Random(vocab_size)
    return [generator.randrange(vocab_size) for _ in range(length)]


def probe_rows(ids: Sequence[int]) -> DataProto:
    """Return the sequence as one row: a prompt of one token, and a response [1, R] of the rest."""
    input_ids = torch.tensor([list(ids)])
    ones = torch.ones_like(input_ids)
    return DataProto.from_dict(
        {
            "input_ids": input_ids,
            "prompts": input_ids[:, :1],
            "responses": input_ids[:, 1:],
            "attention_mask": ones,
            "position_ids": ones.cumsum(1) - 1,
            "response_mask": ones[:, 1:],
        }
    )


def probe_limit(gap_limit: float, *dtypes: str) -> float:
    """Return the limit of `Gap.relative` for engines that compute in these dtypes.

    gap_limit: rollout.log_prob_gap_limit.
    """
    is_float32 = all(dtype == "float32" for dtype in dtypes)
    return gap_limit * (_FLOAT32_SHARE if is_float32 else _HALF_SHARE)


def gap(probe: Probe, log_probs: Sequence[float]) -> Gap:
    """Compare an engine's log-probs of the probe's tokens, all but the first.

    Raises:
        ValueError: there are more or fewer.
    """
    differences = torch.tensor(
        [abs(found - expected) for found, expected in zip(log_probs, probe.log_probs, strict=True)],
        dtype=torch.float64,
    )
    nats = float(differences.median())  # NaN if one is
    tail = float(differences.quantile(_TAIL, interpolation="higher"))
    spread = max(statistics.pstdev(probe.log_probs), _SMALLEST_SPREAD)
    return Gap(nats, nats / spread, tail / spread)
