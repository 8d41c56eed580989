"""Multi-turn samples: metrics under Search-R1's names."""

from collections.abc import Iterable
from typing import Any

import torch

from verlite.envs.step import ToolError
from verlite.protocol.data import DataProto
from verlite.protocol.metrics import Metrics, summarize
from verlite.rollout.types import Status


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
    return metrics


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
