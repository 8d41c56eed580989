"""A run that does not exist yet: its samples from quantiles, and what a step costs by a roofline.

Lengths and tool latencies are drawn. Costs follow from data sheets of GPUs and the model's
config.json; nothing is measured. The shares of the peaks that are reached are assumptions;
`ASSUMED` says them in words.
"""

import functools
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from verlite.config.plan import Plan
from verlite.config.schema import Config
from verlite.sizing.devices import KNOWN, Devices, DevicesError
from verlite.sizing.facts import DTYPE_BYTES
from verlite.sizing.memory import sync_bytes
from verlite.sizing.simulation import Costs, Sample, Turn, Workload
from verlite.sizing.tables import RunModels, step_flops

LARGEST = 1e12
"""Of a drawn number: of a lognormal distribution, the largest of 1e12 draws."""
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Quantiles:
    """A distribution of positive numbers.

    points: (share, value), ascending. One: a constant. Two: the lognormal distribution through
        them. More: straight lines between the logarithms of the values, and none beyond the ends.
    """

    points: tuple[tuple[float, float], ...]

    def at(self, share: float) -> float:
        """Return the quantile of a share between 0 and 1."""
        points = self.points
        if len(points) == 1:
            return points[0][1]
        if len(points) == 2:
            (low, first), (high, last) = points
            slope = math.log(last / first) / (_NORMAL.inv_cdf(high) - _NORMAL.inv_cdf(low))
            distance = _NORMAL.inv_cdf(min(max(share, 1e-12), 1 - 1e-12)) - _NORMAL.inv_cdf(low)
            return first * math.exp(slope * distance)
        share = min(max(share, points[0][0]), points[-1][0])
        for (low, first), (high, last) in zip(points, points[1:], strict=False):
            if share <= high:
                return first * math.pow(last / first, (share - low) / (high - low))
        raise AssertionError("the last share is the largest")

    def values(self, most: float = math.inf) -> list[float]:
        """Return 1000 values of equal probability, those above `most` cut to it."""
        return [min(self.at((place + 0.5) / 1000), most) for place in range(1000)]

    def __str__(self) -> str:
        if len(self.points) == 1:
            return f"{self.points[0][1]:g}"
        return " ".join(f"p{100 * share:g}={value:g}" for share, value in self.points)


def parse_quantiles(text: str, option: str) -> Quantiles:
    """Return the distribution of "1500", "p50=1500 p99=12000", or with more quantiles.

    Raises:
        ValueError: names the option, its value and the rule.
    """
    rule = (
        f'{option} {text!r} must be a number above 0, as in "1500", or quantiles that rise, as in '
        '"p50=1500 p99=12000": two are those of a lognormal distribution, more are joined'
    )
    words = text.replace(",", " ").split()
    try:
        if len(words) == 1 and "=" not in words[0]:
            points = [(0.5, float(words[0]))]
        else:
            found = [re.fullmatch(r"p([\d.]+)=(\S+)", word) for word in words]
            points = [(float(one[1]) / 100, float(one[2])) for one in found if one]
            if len(points) < max(2, len(found)):
                raise ValueError(rule)
    except ValueError as error:
        raise ValueError(rule) from error
    shares, values = zip(*points, strict=True)
    rises = list(shares) == sorted(set(shares)) and list(values) == sorted(values)
    ends = (0 < shares[0], shares[-1] < 1) if len(points) == 2 else (True, shares[-1] <= 1)
    if not (rises and all(ends) and 0 < values[0] and values[-1] < math.inf):
        raise ValueError(rule)
    quantiles = Quantiles(tuple(points))
    try:
        largest = quantiles.at(1.0)
    except OverflowError:
        largest = math.inf
    if largest > LARGEST:
        raise ValueError(
            f"{option} {text!r} spreads too far: numbers up to {largest:.0e} would be drawn, and "
            f"{LARGEST:.0e} is allowed. Lower the last quantile, or write three or more, as in "
            '"p50=0.5 p99=30 p100=60": the last one is then the largest'
        )
    return quantiles


@dataclass(frozen=True)
class Drawn:
    """Samples that are drawn independently of each other.

    Attributes:
        samples: rollout.n.
        prompt: tokens of each prompt.
        response: tokens that the policy samples, over all its turns, which share them evenly.
        longest: largest number of these.
        calls: tool calls of each sample. tool_s: seconds of each. observation: its tokens.
    """

    samples: int
    prompt: int
    response: Quantiles
    longest: int
    calls: int = 0
    tool_s: Quantiles | None = None
    observation: int = 0

    def mean_tokens(self) -> float:
        """Return the mean length of a sample, prompt included."""
        return self.prompt + fmean(self.response.values(self.longest)) + self._observed

    def mean_context(self) -> float:
        """Return the mean number of tokens before a sampled token. Long samples have more of these
        tokens, and longer contexts."""
        lengths = self.response.values(self.longest)
        seen = sum(one * (self.prompt + (one + self._observed) / 2) for one in lengths)
        return seen / sum(lengths)

    @property
    def _observed(self) -> int:
        return self.calls * self.observation

    def __str__(self) -> str:
        text = f"prompts of {self.prompt:,} tokens, responses of {self.response} tokens"
        if self.calls:
            latency = f" that take {self.tool_s} s" if self.tool_s else ""
            text += f", {self.calls} tool calls{latency}"
        return text

    def workload(self, seed: int = 0) -> Workload:
        """Return the samples by prompt. Every mode that is simulated gets the same."""

        @functools.cache
        def group(number: int) -> Sequence[Sample]:
            draw = random.Random(f"{seed}/{number}")
            return [self._sample(draw) for _ in range(self.samples)]

        return group

    def _sample(self, draw: random.Random) -> Sample:
        tokens = min(self.longest, max(1, round(self.response.at(draw.random()))))
        turns = []
        for call in range(self.calls):
            seconds = self.tool_s.at(draw.random()) if self.tool_s else 0.0
            share = tokens * (call + 1) // (self.calls + 1) - tokens * call // (self.calls + 1)
            turns.append(Turn(share, seconds, self.observation))
        turns.append(Turn(tokens - sum(turn.tokens for turn in turns)))
        return Sample(self.prompt, tuple(turns))


def assumed_samples(config: Config, plan: Plan) -> Drawn:
    """Return the samples of a run of which only the limits are known: prompts of half of
    data.max_prompt_length, and lognormal responses with a median of a quarter of
    data.max_response_length and the 99th percentile at it."""
    longest = config.data.max_response_length
    return Drawn(
        samples=plan.samples_per_prompt,
        prompt=max(1, config.data.max_prompt_length // 2),
        response=Quantiles(((0.5, longest / 4), (0.99, float(longest)))),
        longest=plan.longest_response,
        observation=config.data.max_obs_length if plan.max_turns else 0,
    )


TRAINED = 0.35
"""Share of the peak FLOP/s that training passes reach."""
PREFILLED = 0.5
"""Share that prefill reaches."""
READ = 0.7
"""Share of the memory's bandwidth that decoding reaches."""
STEP_S = 0.004
"""Of each decode step: scheduling, sampling, launches."""
SYNCED = 10e9
"""Bytes per second of a weight sync, of the whole weights."""
ASSUMED = (
    f"roofline: training passes reach {TRAINED:.0%} of the peak FLOP/s, prefill {PREFILLED:.0%}, "
    f"decoding {READ:.0%} of the memory's bandwidth and {1000 * STEP_S:g} ms more for each of its "
    f"steps; a weight sync moves {SYNCED / 1e9:g} GB/s and takes a second more. An H200 reached "
    "25% in updates of 1.5B and 33% at 7B's width; nothing else of it was measured"
)


def roofline_costs(
    config: Config, plan: Plan, devices: Devices, models: RunModels, drawn: Drawn
) -> Costs:
    """Return the costs of a run with these samples.

    A decode step reads the weights, and the keys and values of each sample that runs.

    Raises:
        DevicesError: the table has no peak of these devices.
    """
    if devices.name not in KNOWN:
        raise DevicesError(
            f"the costs of {devices.name} are not known. Name GPUs of the table, as in --devices "
            "8xH100-80GB, give the directory of a run, or --decode-step-s and --update-token-s"
        )
    known = KNOWN[devices.name]
    flops, bandwidth = known.tflops * 1e12, known.gb_s * 1e9 * READ
    engine = plan.tensor_parallel
    policy, dtype = models.policy, plan.rollout_dtype
    length = round(drawn.mean_tokens())
    forward = policy.forward_flops(length)
    weights = policy.exported * DTYPE_BYTES[dtype]
    keys = policy.kv_bytes(dtype) * drawn.mean_context()
    passes = step_flops(config, plan, models, length)
    trained = (sum(passes.values()) - passes["generation"]) / (plan.batch_size * length)
    return Costs(
        decode_step_s=STEP_S + weights / (engine * bandwidth),
        decode_sample_s=keys / (engine * bandwidth) + forward / (engine * flops * PREFILLED),
        prefill_token_s=forward / (engine * flops * PREFILLED),
        update_token_s=trained / (flops * TRAINED),
        sync_s=1.0 + sync_bytes(plan, policy).whole / SYNCED,
    )
