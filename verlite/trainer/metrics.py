"""Metrics of a training step, under verl's names, and of multi-turn samples, under Search-R1's.
docs/metrics.md describes each.
"""

import resource
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from verlite.envs.step import ToolError
from verlite.protocol.data import DataProto
from verlite.protocol.metrics import Metrics, quantiles, summarize
from verlite.protocol.ragged import BRANCHES
from verlite.rollout.types import Status


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
    status = batch.non_tensor_batch["status"]
    longest = lengths
    if BRANCHES in batch.non_tensor_batch:  # one of them may have reached the limit
        rows = batch.non_tensor_batch[BRANCHES]
        longest = torch.tensor([max(map(sum, row)) - 1 for row in rows])
    cut = longest >= max_response_length
    metrics = {
        **summarize("critic/score", t["scores"][valid]),
        **quantiles("critic/score", t["scores"][valid]),
        **summarize("reward/raw_score", t["raw_scores"][valid]),
        **summarize("critic/rewards", t["rewards"][valid]),
        **summarize("response_length", lengths),
        **quantiles("response_length", lengths),
        "response_length/clip_ratio": cut.double().mean().item(),
        "response/aborted_ratio": (lengths == 0).double().mean().item(),
        **summarize("response_length_non_aborted", lengths[lengths > 0]),
        **summarize("num_turns", t["num_turns"]),
        **summarize("prompt_length", prompts),
        "prompt_length/clip_ratio": (prompts >= max_prompt_length).double().mean().item(),
        "rollout/error_rate": (status == Status.ERROR).mean().item(),
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
    "teacher": False,
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


def agent_metrics(batch: DataProto) -> Metrics:
    """Return `env/*` metrics of a step's samples, {} for single-turn runs.

    Samples with status error count in `env/status/error` and `env/tool_error_rate` alone. With
    several data sources the main metrics are also given by source.
    """
    if "segments" not in batch.non_tensor_batch:
        return {}
    status = batch.non_tensor_batch["status"]
    metrics = {f"env/status/{name}": (status == name).mean().item() for name in Status}
    metrics["env/tool_error_rate"] = len(tool_failures(batch)) / len(batch)
    metrics |= _slowest_sample(batch)
    completed = batch.select_idxs(torch.from_numpy(status != Status.ERROR))
    if len(completed):
        metrics |= _metrics_of_completed(completed)
    return metrics | session_metrics(batch)


def session_metrics(batch: DataProto) -> Metrics:
    """Return `agent/*` metrics of agent programs' samples, failed ones too; {} without programs.

    `agent/repeated_token_frac` is the share of the rows' tokens that an earlier branch of the
    sample has, too, so a step computes them again. The others are means per sample.
    """
    if "session" not in batch.non_tensor_batch:
        return {}
    sessions = batch.non_tensor_batch["session"]
    sums = {name: float(sum(session[name] for session in sessions)) for name in sessions[0]}
    repeated = sums.pop("repeated_tokens") / max(1.0, sums.pop("tokens"))
    means = {f"agent/{name}": value / len(sessions) for name, value in sums.items()}
    return {"agent/repeated_token_frac": repeated, **means}


def _slowest_sample(batch: DataProto) -> Metrics:
    t = batch.batch
    slowest = int((t["gen_seconds"] + t["tool_seconds"]).argmax())
    return {
        "rollout/slowest/gen_s": t["gen_seconds"][slowest].item(),
        "rollout/slowest/tool_s": t["tool_seconds"][slowest].item(),
        "rollout/slowest/tokens": float(t["response_length"][slowest]),
    }


def _metrics_of_completed(batch: DataProto) -> Metrics:
    t = batch.batch
    columns = batch.non_tensor_batch
    numbers = trajectory_numbers(batch)
    actions = torch.tensor(numbers.pop("number_of_actions"))
    metrics = summarize("env/number_of_actions", actions)
    metrics |= {f"env/{name}": _mean(values) for name, values in numbers.items()}
    metrics |= _call_metrics(info for infos in columns["turn_infos"] for info in infos)
    authors = [author for segments in columns["segments"] for author, _ in segments]
    observations = max(1, authors.count("tool"))
    tokens = max(1, int(t["response_length"].sum()))
    metrics["env/obs_truncated"] = int(t["truncated_observations"].sum()) / observations
    metrics["env/trainable_token_frac"] = int(t["trained_tokens"].sum()) / tokens
    formats = [p["format_valid"] for p in columns["reward_parts"] if "format_valid" in p]
    if formats:
        metrics["env/format_valid"] = _mean(formats)
    sources = columns["data_source"]
    if len(set(sources)) > 1:
        for source in set(sources):
            rows = batch.select_idxs(torch.from_numpy(sources == source))
            numbers = trajectory_numbers(rows)
            metrics |= {f"env/{name}/{source}": _mean(values) for name, values in numbers.items()}
    return metrics


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def trajectory_numbers(batch: DataProto) -> dict[str, list[float]]:
    """Return one number per sample by name: turns, valid turns, tool calls, whether it ended.

    `finish_ratio` is 1 for samples with status done.
    """
    columns = batch.non_tensor_batch
    turns = batch.batch["turns"].tolist()
    invalid = batch.batch["invalid_turns"].tolist()
    infos = columns["turn_infos"]
    valid = [len(turn_infos) - wrong for turn_infos, wrong in zip(infos, invalid, strict=True)]
    calls = [sum(bool(info.get("called")) for info in turn_infos) for turn_infos in infos]
    return {
        "number_of_actions": [float(n) for n in turns],
        "number_of_valid_action": [float(n) for n in valid],
        "ratio_of_valid_action": [good / max(1, n) for good, n in zip(valid, turns, strict=True)],
        "number_of_valid_search": [float(n) for n in calls],
        "finish_ratio": [float(status == Status.DONE) for status in columns["status"]],
    }


def _call_metrics(infos: Iterable[dict[str, Any]]) -> Metrics:
    calls = [info for info in infos if info.get("called") and "seconds" in info]
    if not calls:
        return {}
    seconds = torch.tensor([float(info["seconds"]) for info in calls], dtype=torch.float64)
    return {
        "env/tool_latency_s/mean": seconds.mean().item(),
        "env/tool_latency_s/p95": seconds.quantile(0.95).item(),
        "env/tool_latency_s/max": seconds.max().item(),
        "env/tool_retries": float(sum(info.get("retries", 0) for info in calls)),
        "env/cache_hit": sum(bool(info.get("cached")) for info in calls) / len(calls),
    }


def tool_failures(batch: DataProto) -> list[str]:
    """Return the first error of each sample whose tools failed.

    The failure may have ended the sample, or the model may have received it as an observation.
    """
    kind = f"{ToolError.__name__}: "
    columns = batch.non_tensor_batch
    failures = []
    for error, infos in zip(columns["error"], columns["turn_infos"], strict=True):
        observed = [f"{kind}{info['error']}" for info in infos if "error" in info]
        if error is not None and error.startswith(kind):
            failures.append(error)
        elif observed:
            failures.append(observed[0])
    return failures
