"""Numbers that describe a step, under verl's metric names. `docs/metrics.md` says what each means."""

import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from verlite.protocol.data import DataProto
from verlite.protocol.metrics import Metrics, summarize


def batch_metrics(batch: DataProto, max_prompt_length: int, max_response_length: int) -> Metrics:
    """Scores, rewards and lengths of one step's B samples.

    Rows without a vote (`valid` False) are left out of everything but the lengths and the error rates.
    """
    t = batch.batch
    valid, lengths, prompts = t["valid"], t["response_length"], t["prompt_length"]
    metrics = {
        **summarize("critic/score", t["scores"][valid]),
        **summarize("reward/raw_score", t["raw_scores"][valid]),
        **summarize("critic/rewards", t["rewards"][valid]),
        **summarize("response_length", lengths),
        "response_length/clip_ratio": (lengths >= max_response_length).double().mean().item(),
        "response/aborted_ratio": (lengths == 0).double().mean().item(),
        **summarize("response_length_non_aborted", lengths[lengths > 0]),
        **summarize("num_turns", t["turns"]),
        **summarize("prompt_length", prompts),
        "prompt_length/clip_ratio": (prompts >= max_prompt_length).double().mean().item(),
        "rollout/error_rate": (batch.non_tensor_batch["status"] == "error").mean().item(),
        "reward/error_rate": batch.meta_info["reward_error_rate"],
        "perf/total_num_tokens": float((prompts + lengths).sum()),
    }
    if "overlong_penalty" in t.keys():
        metrics |= summarize("reward/overlong_penalty", t["overlong_penalty"][valid])
    metrics |= group_metrics(batch)
    return metrics


def group_metrics(batch: DataProto) -> Metrics:
    """Share of prompts whose samples all got the same score: they teach a group estimator nothing."""
    scores, groups = batch.batch["scores"].tolist(), defaultdict(set)
    for uid, score, valid in zip(
        batch.non_tensor_batch["uid"], scores, batch.batch["valid"].tolist(), strict=True
    ):
        if valid:
            groups[uid].add(score)
    if not groups:
        return {}
    return {"rollout/zero_variance_groups": sum(len(g) == 1 for g in groups.values()) / len(groups)}


@dataclass
class Stopwatch:
    """Seconds by phase within one step: `timing_s/<phase>`. `step` runs from the stopwatch's making to `end_step`."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    begin: float = field(default_factory=time.perf_counter)

    def end_step(self) -> None:
        self.seconds["step"] = time.perf_counter() - self.begin

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - begin

    def metrics(self) -> Metrics:
        return {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}


# Phases whose cost per token is reported, and whether they handle response tokens alone.
_PER_TOKEN = {
    "gen": True,
    "ref": False,
    "values": False,
    "adv": False,
    "update_critic": False,
    "update_actor": False,
}


def speed_metrics(
    stopwatch: Stopwatch, total_tokens: float, response_tokens: float, n_devices: int
) -> Metrics:
    """Throughput per device and cost per token of each phase, from the step's stopwatch (which must have timed `step`)."""
    seconds = stopwatch.seconds
    metrics = {
        "perf/time_per_step": seconds["step"],
        "perf/throughput": total_tokens / (seconds["step"] * n_devices),
        "perf/driver_max_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    for phase, response_only in _PER_TOKEN.items():
        tokens = response_tokens if response_only else total_tokens
        if phase in seconds and tokens:
            metrics[f"timing_per_token_ms/{phase}"] = 1000 * seconds[phase] / tokens
    return metrics
