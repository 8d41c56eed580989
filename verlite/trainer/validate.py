"""Validation: generate, score, and summarize by data source, under verl's names.

The metrics are `val-core/<data_source>/<variable>/<metric>` and `val-aux/...`. The variable is
`reward` or a numeric part that the reward function returned, such as `acc`. The metric is `mean@N`,
`std@N`, `best@k/mean`, `worst@k/mean` or `maj@k/mean` over the N samples of a prompt.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verlite.data.dataset import PromptDataset, PromptRow
from verlite.protocol.data import DataProto
from verlite.protocol.metrics import Metrics, summarize
from verlite.rewards.result import MAX_PARTS
from verlite.rollout.types import Sampling
from verlite.trainer.batch import requests, seeds
from verlite.trainer.errors import RewardFailures
from verlite.trainer.failed_rewards import failed_rows
from verlite.trainer.metrics import trajectory_numbers
from verlite.trainer.run import Run, stage
from verlite.trainer.samples import (
    TOKENS_PER_STEP,
    add_tokens,
    as_jsonl,
    kept_per_step,
    sample_records,
)
from verlite.trainer.stages.rollout import sample_responses


@dataclass
class _Results:
    """Results of all chunks, one entry per sample. rewards: None where the reward failed."""

    sources: list[str] = field(default_factory=list)
    uids: list[str] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)
    num_turns: list[int] = field(default_factory=list)
    trajectory_info: dict[str, list[float | None]] = field(
        default_factory=lambda: defaultdict(list)
    )
    first_error: str = ""

    def add(self, batch: DataProto, multi_turn: bool) -> None:
        columns = batch.non_tensor_batch
        valid = batch.batch["valid"].tolist()
        self.sources += list(columns["data_source"])
        self.uids += list(columns["uid"])
        self.parts += list(columns["reward_parts"])
        self.num_turns += batch.batch["num_turns"].tolist()
        self.rewards += _of_valid(batch.batch["raw_scores"].tolist(), valid)
        if multi_turn:
            for name, values in trajectory_numbers(batch).items():
                self.trajectory_info[name] += _of_valid(values, valid)
        if not self.first_error:
            generation_errors = (error for error in columns["error"] if error)
            tracebacks = (columns["reward_traceback"][row] for row in failed_rows(batch))
            self.first_error = next(tracebacks, "") or next(generation_errors, "")

    def variables(self) -> dict[str, list[float | None]]:
        """Return the reward, the trajectories' numbers, and the numeric parts of the reward: of
        their names the first MAX_PARTS, as samples may differ in them."""
        numeric = {
            name
            for parts in self.parts
            for name, value in parts.items()
            if isinstance(value, (int, float)) and name != "reward"
        }
        parts = {name: [p.get(name) for p in self.parts] for name in sorted(numeric)[:MAX_PARTS]}
        return {"reward": self.rewards, **self.trajectory_info, **parts}


def _of_valid(values: list[float], valid: list[bool]) -> list[float | None]:
    return [value if ok else None for value, ok in zip(values, valid, strict=True)]


@stage("testing")
def validate(run: Run) -> Metrics:
    """Generate on the validation set with `rollout.val_kwargs`; return metrics by data source.

    Samples that could not be scored are left out, with a warning.

    Raises:
        RewardFailures: No sample could be scored.
    """
    if run.val_data is None:
        return {}
    kept = kept_per_step(run)
    shown = run.config.trainer.log_val_generations
    wanted = None if kept is None else max(kept, shown)
    records: list[dict[str, Any]] = []
    tokens_left = TOKENS_PER_STEP
    results = _Results()
    for chunk in _requests(run, run.val_data):
        batch = sample_responses(run, chunk, sleep_after=False)
        results.add(batch, multi_turn=run.env_factory is not None)
        left = None if wanted is None else max(0, wanted - len(records))
        rows = batch[:left]
        found = sample_records(run, rows)
        tokens_left = add_tokens(found, rows, run.tokenizer, tokens_left)
        records += found
    path = run.run_dir / "rollouts" / f"val_step_{run.step}.jsonl"
    run.writer.replace(path, as_jsonl(records[:kept]))
    run.tracking.samples(run.step, "val", records)
    samples = len(results.rewards)
    failed = sum(reward is None for reward in results.rewards)
    if failed == samples:
        raise RewardFailures(
            f"none of the {failed} validation samples could be scored. The first failure:\n"
            f"{results.first_error.rstrip()}"
        )
    if failed:
        run.display.warn(
            f"{failed} of {samples} validation samples could not be scored and are left out; "
            f"first: {results.first_error}"
        )
    for record in records[:shown]:
        run.display.info(
            f"{record['prompt']}{record['response']}  [score {record['score']}, "
            f"expected {record['ground_truth']}]"
        )
    predictions = [parts.get("pred") for parts in results.parts]
    metrics = validation_metrics(results.sources, results.uids, results.variables(), predictions)
    metrics |= summarize("val-aux/num_turns", torch.tensor(results.num_turns))
    metrics["val-aux/error_rate"] = failed / samples
    return metrics


def _requests(run: Run, val_data: PromptDataset) -> list[DataProto]:
    """Return the requests for the validation set, `data.val_batch_size` prompts at a time."""
    val = run.config.actor_rollout_ref.rollout.val_kwargs
    data = run.config.data
    rows: list[tuple[str, PromptRow]] = [
        (f"val-{i}", val_data.row(i)) for i in range(len(val_data)) for _ in range(val.n)
    ]
    greedy = not val.do_sample or val.temperature == 0
    temperature = 0.0 if greedy else val.temperature
    samplings = [
        Sampling(temperature, val.top_p, val.top_k, data.max_response_length, seed=seed)
        for seed in seeds(run.config.actor_rollout_ref.rollout.seed, 0, 0, len(rows))
    ]
    chunk_size = (data.val_batch_size or len(val_data)) * val.n
    chunks = []
    for start in range(0, len(rows), chunk_size):
        part = slice(start, start + chunk_size)
        uids, prompts = map(list, zip(*rows[part], strict=True))
        chunks.append(requests(prompts, uids, samplings[part]))
    return chunks


_DRAWS = 1000
_SEED = 42
"""Bootstrap of best@k and worst@k, with verl's values."""


def validation_metrics(
    sources: list[str],
    uids: list[str],
    variables: dict[str, list[float | None]],
    predictions: list[Any] | None = None,
) -> dict[str, float]:
    """Compute the metrics of B validation samples.

    Args:
        sources: Data source of each sample.
        uids: Prompt id of each sample.
        variables: "reward" and other numeric parts, B values each; None where a sample has no
            value, such as a failed reward.
        predictions: The extracted answer of each sample (the reward part `pred`) or None. They give
            `maj@k`.

    Returns:
        Under `val-core/` the mean, and best and maj at the largest k, of the core variable: `acc`
        if the source has it, otherwise `reward`. Everything else is under `val-aux/`.
    """
    groups: dict[str, dict[str, dict[str, list[tuple[float, Any]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    answers = predictions or [None] * len(uids)
    for i, (source, uid) in enumerate(zip(sources, uids, strict=True)):
        for name, values in variables.items():
            value = values[i]
            if value is not None:
                groups[source][name][uid].append((value, answers[i]))
    metrics = {}
    for source, by_name in groups.items():
        core = "acc" if "acc" in by_name else "reward"
        for name, by_uid in by_name.items():
            n = max(map(len, by_uid.values()))
            core_metrics = (f"mean@{n}", f"best@{n}/mean", f"maj@{n}/mean")
            for metric, value in _metrics_of_groups(list(by_uid.values())).items():
                is_core = name == core and metric in core_metrics
                section = "core" if is_core else "aux"
                metrics[f"val-{section}/{source}/{name}/{metric}"] = value
    return metrics


def _metrics_of_groups(groups_of_pairs: list[list[tuple[float, Any]]]) -> dict[str, float]:
    """Return the mean over prompts of each statistic of a prompt's samples (value, answer)."""
    groups = [[value for value, _ in group] for group in groups_of_pairs]
    n = max(map(len, groups))
    metrics = {f"mean@{n}": float(np.mean([np.mean(g) for g in groups]))}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = float(np.mean([np.std(g) for g in groups]))
    sizes = [2**i for i in range(1, n.bit_length()) if 2**i < n] + [n]
    for k in sizes:
        rng = np.random.default_rng(_SEED)
        best, worst, majority = [], [], []
        for group, pairs in zip(groups, groups_of_pairs, strict=True):
            drawn = rng.integers(0, len(group), (_DRAWS, k))
            draws = np.asarray(group)[drawn]
            best.append(draws.max(1).mean())
            worst.append(draws.min(1).mean())
            if all(answer is not None for _, answer in pairs):
                majority.append(
                    _majority([answer for _, answer in pairs], np.asarray(group), drawn)
                )
        metrics[f"best@{k}/mean"] = float(np.mean(best))
        metrics[f"worst@{k}/mean"] = float(np.mean(worst))
        if len(majority) == len(groups):
            metrics[f"maj@{k}/mean"] = float(np.mean(majority))
    return metrics


def _majority(answers: list[Any], values: np.ndarray, drawn: np.ndarray) -> float:
    """Return the mean over draws [D, k] of the value of the most frequent answer.

    Of equally frequent answers the first one counts.
    """
    numbers: dict[str, int] = {}
    kind = np.array([numbers.setdefault(str(answer), len(numbers)) for answer in answers])[drawn]
    counts = (kind[:, :, None] == kind[:, None, :]).sum(-1)
    return float(values[drawn[np.arange(len(drawn)), counts.argmax(1)]].mean())
