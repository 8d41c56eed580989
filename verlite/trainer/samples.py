"""The sample log: a few of each step's samples as JSON lines, in rollouts/."""

import json

from verlite.controller.columns import fetch
from verlite.protocol.data import DataProto
from verlite.trainer.run import Run

_SAMPLE_FIELDS = ("prompt_ids", "text", "transcript")
"""Columns of the sample log that are stored on the workers."""


def sample_records(run: Run, batch: DataProto) -> list[dict]:
    """What a person wants to see of each sample: prompt, response, score and its parts, status, versions."""
    t, columns = (
        batch.batch,
        fetch(
            batch, [name for name in _SAMPLE_FIELDS if name in batch.non_tensor_batch]
        ).non_tensor_batch,
    )
    scores = t.get("scores", t["raw_scores"]).tolist()
    return [
        {
            "uid": columns["uid"][i],
            "index": columns["index"][i],
            "data_source": columns["data_source"][i],
            "prompt": run.tokenizer.decode(columns["prompt_ids"][i]),
            "response": columns["text"][i],
            "ground_truth": columns["ground_truth"][i],
            "score": scores[i] if t["valid"][i] else None,
            **(
                {"raw_score": t["raw_scores"][i].item()}
                if t["valid"][i] and t["raw_scores"][i] != scores[i]
                else {}
            ),
            "reward_parts": columns["reward_parts"][i],
            "status": columns["status"][i],
            "error": columns["error"][i],
            "response_tokens": int(t["response_length"][i]),
            "trained_tokens": int(t["trained_tokens"][i]),
            "weight_version": int(t["weight_version"][i]),
            **(
                {name: columns[name][i] for name in ("transcript", "turn_infos") if name in columns}
            ),
        }
        for i in range(len(batch))
    ]


def keep_samples(run: Run, batch: DataProto) -> None:
    """Write a few of the step's samples to rollouts/step_N.jsonl."""
    write_jsonl(
        run.run_dir / "rollouts" / f"step_{run.step}.jsonl",
        sample_records(run, batch[: kept_per_step(run)]),
    )


def kept_per_step(run: Run) -> int | None:
    count = run.config.trainer.rollouts_per_step
    return None if count < 0 else count


def write_jsonl(path, records: list[dict]) -> None:
    path.parent.mkdir(exist_ok=True)
    text = "".join(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records)
    # A lone surrogate, which a model can write as an escape in a call's JSON, is kept as that escape.
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
