"""Metrics of a training step, under verl's names. docs/metrics.md describes each."""

import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from verlite.protocol.data import DataProto
from verlite.protocol.metrics import Metrics, quantiles, summarize


def batch_metrics(
    batch: DataProto,
    max_prompt_length: int,
    max_response_length: int,
    gdpo_reward_keys: Sequence[str] = (),
) -> Metrics:
    """Summarize scores, rewards and lengths of a step's samples.

    Rows that are not valid are left out, except from lengths and error rates.

    Args:
        gdpo_reward_keys: names of the columns of gdpo_rewards, if the batch has it.
    """
    t = batch.batch
    valid = t["valid"]
    lengths = t["response_length"]
    prompts = t["prompt_length"]
    metrics = {
        **summarize("critic/score", t["scores"][valid]),
        **quantiles("critic/score", t["scores"][valid]),
        **summarize("reward/raw_score", t["raw_scores"][valid]),
        **summarize("critic/rewards", t["rewards"][valid]),
        **summarize("response_length", lengths),
        **quantiles("response_length", lengths),
        "response_length/clip_ratio": (lengths >= max_response_length).double().mean().item(),
        "response/aborted_ratio": (lengths == 0).double().mean().item(),
        **summarize("response_length_non_aborted", lengths[lengths > 0]),
        **summarize("num_turns", t["num_turns"]),
        **summarize("prompt_length", prompts),
        "prompt_length/clip_ratio": (prompts >= max_prompt_length).double().mean().item(),
        "rollout/error_rate": (batch.non_tensor_batch["status"] == "error").mean().item(),
        "reward/error_rate": batch.meta_info["reward_error_rate"],
        "perf/total_num_tokens": float((prompts + lengths).sum()),
    }
    if "overlong_penalty" in t.keys():
        metrics |= summarize("reward/overlong_penalty", t["overlong_penalty"][valid])
    if "gdpo_rewards" in t.keys():
        for name, part in zip(gdpo_reward_keys, t["gdpo_rewards"][valid].unbind(1), strict=True):
            metrics |= summarize(f"gdpo/{name}", part)
            if len(part):
                metrics[f"gdpo/{name}/std"] = part.std(correction=0).item()
    return metrics | group_metrics(batch)


def group_metrics(batch: DataProto) -> Metrics:
    """Return the share of prompts whose samples have equal scores: group advantages are 0 there.

    With gdpo, the share of prompts whose samples have equal reward parts.
    """
    t = batch.batch
    uids = batch.non_tensor_batch["uid"]
    compared = t.get("gdpo_rewards", t["scores"].unsqueeze(1)).tolist()
    groups: dict[str, set[tuple[float, ...]]] = defaultdict(set)
    for uid, numbers, ok in zip(uids, compared, t["valid"].tolist(), strict=True):
        if ok:
            groups[uid].add(tuple(numbers))
    if not groups:
        return {}
    equal = sum(len(group) == 1 for group in groups.values())
    return {"rollout/zero_variance_groups": equal / len(groups)}


@dataclass
class Stopwatch:
    """Seconds per phase of one step, logged as `timing_s/<phase>`.

    The phase `step` lasts from the creation of the stopwatch to `end_step`.
    """

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    begin: float = field(default_factory=time.perf_counter)

    def end_step(self) -> None:
        """End the phase `step`."""
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


# Phases with a metric per token, and whether they process response tokens only.
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
    """Return throughput per device and time per token of each phase.

    stopwatch: of the step, after `end_step`.
    """
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
