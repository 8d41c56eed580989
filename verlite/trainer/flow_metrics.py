"""Metrics of asynchronous training: how old the samples are, whether they are a fair choice of
those that were sampled, and who waits for whom."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from verlite.algorithms.gap import length_distance
from verlite.protocol.metrics import Metrics
from verlite.rollout.types import Load

WINDOW = 20
"""Newest steps whose trained and sampled responses are compared. Responses that are finished and
wait for a step at either end of it are in one of the two sets only: few of them in 20 steps."""


@dataclass
class Window:
    """Lengths of the responses of the newest steps, in tokens.

    Attributes:
        trained: of each step, the trained responses.
        sampled: of each step, those that finished since the step before, whatever becomes of them:
            trained, left out, or sampled again.
    """

    trained: deque[list[int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    sampled: deque[list[int]] = field(default_factory=lambda: deque([[]], maxlen=WINDOW + 1))

    def finish(self, lengths: Iterable[int]) -> None:
        """Responses have finished."""
        self.sampled[-1].extend(lengths)

    def train(self, lengths: Iterable[int]) -> None:
        """A step was trained on these responses."""
        self.trained.append(list(lengths))
        self.sampled.append([])

    def metrics(self, epochs: int) -> Metrics:
        """Compare the trained responses with the sampled ones; {} without any.

        epochs: how often a step trains on its responses.

        Returns:
            async/length_distance: Kolmogorov-Smirnov distance between their lengths.
            async/length_distance_limit: what it exceeds by chance in 5% of all cases, if the two
                were drawn from one distribution independently of each other.
            async/reuse: how often a sampled response is trained on, on average.
        """
        trained, sampled = (
            torch.tensor([length for step in steps for length in step])
            for steps in (self.trained, self.sampled)
        )
        distance = length_distance(trained, sampled)
        if distance is None:
            return {}
        n, m = len(trained), len(sampled)
        return {
            "async/length_distance": distance,
            "async/length_distance_limit": 1.36 * (1 / n + 1 / m) ** 0.5,
            "async/reuse": epochs * n / m,
        }


def load_metrics(before: Mapping[int, Load], now: Mapping[int, Load], places: float) -> Metrics:
    """Return how much the engines did between two reports of the same process; {} without any.

    Args:
        before, now: reports by engine.
        places: samples that one engine may generate at once.

    Returns:
        fully_async/rollouter/idle_ratio: share of the engines' time without a generation step.
        async/idle_slots: share of the engines' places for samples that were empty, over that time;
            0 if they had more samples.
    """
    done = [now[engine].since(last) for engine, last in before.items() if engine in now]
    seconds = sum(one.at for one in done)
    if not seconds:
        return {}
    sample_seconds = sum(one.sample_seconds for one in done)
    return {
        "fully_async/rollouter/idle_ratio": 1 - sum(one.busy_s for one in done) / seconds,
        "async/idle_slots": max(0.0, 1 - sample_seconds / (seconds * places)),
    }
