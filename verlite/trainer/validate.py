"""Validation: generate, score, and summarize by data source."""

from collections import defaultdict

import torch

from verlite.data.dataset import PromptRow
from verlite.rollout.types import Sampling
from verlite.trainer import batch as batches
from verlite.trainer.agent import sample_numbers
from verlite.trainer.errors import RewardFailures
from verlite.trainer.evaluation import validation_metrics
from verlite.trainer.metrics import summarize
from verlite.trainer.run import Run, stage
from verlite.trainer.samples import kept_per_step, sample_records, write_jsonl
from verlite.trainer.stages.rollout import reward_failures, sample_responses


@stage("testing")
def validate(run: Run) -> dict[str, float]:
    """Generate on the validation set with `rollout.val_kwargs`, score, and return metrics by data source."""
    if run.val_data is None:
        return {}
    val, data = run.config.actor_rollout_ref.rollout.val_kwargs, run.config.data
    rows: list[tuple[str, PromptRow]] = [
        (f"val-{i}", run.val_data.row(i)) for i in range(len(run.val_data)) for _ in range(val.n)
    ]
    greedy = not val.do_sample or val.temperature == 0
    seeds = batches.seeds(run.config.actor_rollout_ref.rollout.seed, 0, 0, len(rows))
    size = (data.val_batch_size or len(run.val_data)) * val.n
    sources, uids, rewards, parts, records, turns = [], [], [], [], [], []
    trajectory_info: dict[str, list[float | None]] = defaultdict(list)
    first_error, shown = "", kept_per_step(run)
    shown = shown if shown is None else max(shown, run.config.trainer.log_val_generations)
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        samplings = [
            Sampling(
                0.0 if greedy else val.temperature,
                val.top_p,
                val.top_k,
                data.max_response_length,
                seed=seed,
            )
            for seed in seeds[start : start + size]
        ]
        requests = batches.requests([row for _, row in chunk], [uid for uid, _ in chunk], samplings)
        batch = sample_responses(run, requests, sleep_after=False)
        valid, totals = batch.batch["valid"].tolist(), batch.batch["raw_scores"].tolist()
        sources += list(batch.non_tensor_batch["data_source"])
        uids += list(batch.non_tensor_batch["uid"])
        rewards += [total if ok else None for total, ok in zip(totals, valid, strict=True)]
        parts += list(batch.non_tensor_batch["reward_parts"])
        records += sample_records(
            run, batch[: None if shown is None else max(0, shown - len(records))]
        )
        turns += batch.batch["turns"].tolist()
        for name, values in (sample_numbers(batch) if run.env_factory else {}).items():
            trajectory_info[name] += [
                value if ok else None for value, ok in zip(values, valid, strict=True)
            ]
        first_error = (
            first_error
            or reward_failures(batch)[1]
            or next(filter(None, batch.non_tensor_batch["error"]), "")
        )
    numeric = sorted(
        {name for p in parts for name, value in p.items() if isinstance(value, (int, float))}
    )
    variables = {
        "reward": rewards,
        **trajectory_info,
        **{name: [p.get(name) for p in parts] for name in numeric if name != "reward"},
    }
    write_jsonl(
        run.run_dir / "rollouts" / f"val_step_{run.step}.jsonl", records[: kept_per_step(run)]
    )
    failed = sum(reward is None for reward in rewards)
    if failed == len(rewards):
        raise RewardFailures(
            f"none of the {failed} validation samples could be scored. The first failure:\n{first_error.rstrip()}"
        )
    if failed:
        run.display.warn(
            f"{failed} of {len(rewards)} validation samples could not be scored and are left out; first: {first_error}"
        )
    for record in records[: run.config.trainer.log_val_generations]:
        run.display.info(
            f"{record['prompt']}{record['response']}  [score {record['score']}, expected {record['ground_truth']}]"
        )
    return {
        **validation_metrics(sources, uids, variables, [p.get("pred") for p in parts]),
        **summarize("val-aux/num_turns", torch.tensor(turns)),
        "val-aux/error_rate": failed / len(rewards),
    }
