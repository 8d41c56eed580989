"""Multi-turn samples: metrics under Search-R1's names, and retries after an outage of the tools."""

import time
from collections.abc import Iterable
from typing import Any

import torch

from verlite.envs.step import ToolError
from verlite.protocol.data import DataProto
from verlite.rollout.types import Status
from verlite.trainer.metrics import Metrics, summarize
from verlite.trainer.run import Run

_CHECK_EVERY_S = 2.0
_MAX_RESAMPLES = 3
"""Generations of the same samples after the first one, each after an outage."""


def agent_metrics(batch: DataProto) -> Metrics:
    """`env/*` of one step's samples, and for several data sources the main ones by source. Nothing for single turns.

    Samples with status error count in `env/status/error` and `env/tool_error_rate` alone.
    """
    if "segments" not in batch.non_tensor_batch:
        return {}
    t, columns = batch.batch, batch.non_tensor_batch
    status = columns["status"]
    kept = status != Status.ERROR
    metrics = {f"env/status/{name}": (status == name).mean().item() for name in Status}
    metrics["env/tool_error_rate"] = len(_tool_failures(batch)) / len(batch)
    slowest = int((t["gen_seconds"] + t["tool_seconds"]).argmax())
    lengths = t["response_length"]
    metrics |= {
        "rollout/slowest/gen_s": t["gen_seconds"][slowest].item(),
        "rollout/slowest/tool_s": t["tool_seconds"][slowest].item(),
        "rollout/slowest/tokens": float(lengths[slowest]),
    }
    if not kept.any():
        return metrics
    rows = batch.select_idxs(torch.from_numpy(kept))
    numbers = sample_numbers(rows)
    metrics |= summarize("env/number_of_actions", torch.tensor(numbers.pop("number_of_actions")))
    metrics |= {f"env/{name}": sum(values) / len(values) for name, values in numbers.items()}
    metrics |= _call_metrics(
        [info for infos in rows.non_tensor_batch["turn_infos"] for info in infos]
    )
    observations = sum(
        who == "tool" for segments in rows.non_tensor_batch["segments"] for who, _ in segments
    )
    metrics["env/obs_truncated"] = int(rows.batch["truncated_observations"].sum()) / max(
        1, observations
    )
    metrics["env/trainable_token_frac"] = int(rows.batch["trained_tokens"].sum()) / max(
        1, int(lengths[torch.from_numpy(kept)].sum())
    )
    formats = [
        parts["format_valid"]
        for parts in rows.non_tensor_batch["reward_parts"]
        if "format_valid" in parts
    ]
    if formats:
        metrics["env/format_valid"] = sum(formats) / len(formats)
    sources = rows.non_tensor_batch["data_source"]
    for source in set(sources) if len(set(sources)) > 1 else ():
        of_source = sample_numbers(rows.select_idxs(torch.from_numpy(sources == source)))
        metrics |= {
            f"env/{name}/{source}": sum(values) / len(values) for name, values in of_source.items()
        }
    return metrics


def sample_numbers(batch: DataProto) -> dict[str, list[float]]:
    """B numbers each: how often the model spoke, how often it acted well, how often a tool was used, whether it came to an end."""
    t, columns = batch.batch, batch.non_tensor_batch
    turns, invalid = t["turns"].tolist(), t["invalid_turns"].tolist()
    valid = [
        len(infos) - wrong for infos, wrong in zip(columns["turn_infos"], invalid, strict=True)
    ]
    return {
        "number_of_actions": [float(n) for n in turns],
        "number_of_valid_action": [float(n) for n in valid],
        "ratio_of_valid_action": [good / max(1, n) for good, n in zip(valid, turns, strict=True)],
        "number_of_valid_search": [
            float(sum(bool(info.get("called")) for info in infos))
            for infos in columns["turn_infos"]
        ],
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


def _tool_failures(batch: DataProto) -> list[str]:
    """Why its tools failed, for each sample of which they did, whether that ended it or the model was told."""
    failures, kind = [], f"{ToolError.__name__}: "
    for error, infos in zip(
        batch.non_tensor_batch["error"], batch.non_tensor_batch["turn_infos"], strict=True
    ):
        told = [f"{kind}{info['error']}" for info in infos if "error" in info]
        failures += [error] if (error or "").startswith(kind) else told[:1]
    return failures


def waits_for_tools(run: Run) -> bool:
    """Return whether a generation is repeated after an outage of the tools."""
    return run.env_factory is not None and run.config.retriever.outage_wait_s > 0


def generate_with_retry(run: Run, requests: DataProto) -> DataProto:
    """Generate; when tools failed too many samples and then recovered, generate again.

    Retries are bounded: a passing health check does not guarantee success.
    """
    for _ in range(_MAX_RESAMPLES):
        answers = run.rollout.generate(requests, sleep_after=False)
        if not wait_for_tools(run, answers):
            return answers
    return run.rollout.generate(requests, sleep_after=False)


def wait_for_tools(run: Run, batch: DataProto) -> bool:
    """Return whether the samples should be drawn again after an outage of the tools.

    True: tools failed more samples than `rollout.max_error_rate` allows, and recovered within
    `retriever.outage_wait_s`. False: the tools worked, or they did not recover in time.
    """
    failures = _tool_failures(batch)
    if len(failures) / len(batch) <= run.config.actor_rollout_ref.rollout.max_error_rate:
        return False
    limit_s = run.config.retriever.outage_wait_s
    run.display.warn(
        f"{len(failures)} of {len(batch)} samples lost their tools ({failures[0]}); "
        f"waiting up to {limit_s:g} s for the tools"
    )
    began = time.monotonic()
    while not run.stop.requested:
        broken = any(run.rollout.tool_health())  # every worker checks from its own machine
        waited = time.monotonic() - began
        if not broken:
            run.display.info(
                f"the tools recovered after {waited:.0f} s; sampling the step's prompts again"
            )
            return True
        if waited >= limit_s:
            break
        time.sleep(min(_CHECK_EVERY_S, limit_s - waited))
    return False
