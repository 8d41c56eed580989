"""The sample log: some of each step's samples as JSON lines in rollouts/."""

import json
from typing import Any

from verlite.controller.columns import fetch
from verlite.protocol.data import DataProto
from verlite.trainer.run import Run

_SAMPLE_FIELDS = ("prompt_ids", "text", "transcript")
"""Columns of the sample log that are stored on the workers."""


def keep_samples(run: Run, batch: DataProto) -> None:
    """Write the first `trainer.rollouts_per_step` samples of the step to rollouts/step_N.jsonl."""
    path = run.run_dir / "rollouts" / f"step_{run.step}.jsonl"
    run.writer.replace(path, as_jsonl(sample_records(run, batch[: kept_per_step(run)])))


def kept_per_step(run: Run) -> int | None:
    """Return how many samples to write per step, None for all."""
    count = run.config.trainer.rollouts_per_step
    return None if count < 0 else count


def sample_records(run: Run, batch: DataProto) -> list[dict[str, Any]]:
    """Return one JSON object per sample: prompt, response, score and its parts, status, version."""
    names = [name for name in _SAMPLE_FIELDS if name in batch.non_tensor_batch]
    columns = fetch(batch, names).non_tensor_batch
    return [_record(run, batch, columns, row) for row in range(len(batch))]


def _record(run: Run, batch: DataProto, columns: dict[str, Any], row: int) -> dict[str, Any]:
    t = batch.batch
    valid = bool(t["valid"][row])
    raw_score = t["raw_scores"][row].item()
    score = t.get("scores", t["raw_scores"])[row].item()  # validation has raw scores only
    trained_tokens = t.get("trained_tokens", t["sampled_tokens"])[row].item()
    record = {
        "uid": columns["uid"][row],
        "index": columns["index"][row],
        "data_source": columns["data_source"][row],
        "prompt": run.tokenizer.decode(columns["prompt_ids"][row]),
        "response": columns["text"][row],
        "ground_truth": columns["ground_truth"][row],
        "score": score if valid else None,
    }
    if valid and raw_score != score:
        record["raw_score"] = raw_score
    record |= {
        "reward_parts": columns["reward_parts"][row],
        "status": columns["status"][row],
        "error": columns["error"][row],
        "response_tokens": t["response_length"][row].item(),
        "trained_tokens": trained_tokens,
        "weight_version": t["weight_version"][row].item(),
    }
    for name in ("transcript", "turn_infos"):
        if name in columns:
            record[name] = columns[name][row]
    return record


def as_jsonl(records: list[dict[str, Any]]) -> bytes:
    """Return one JSON object per line, in UTF-8.

    A lone surrogate, which a model can produce as a JSON escape in a tool call, is written as that
    escape.
    """
    lines = [json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records]
    return "".join(lines).encode(errors="backslashreplace")
