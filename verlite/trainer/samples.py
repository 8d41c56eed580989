"""The sample log: some of each step's samples as JSON lines in rollouts/."""

import io
import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verlite.controller.columns import fetch
from verlite.protocol.data import DataProto
from verlite.trainer.run import Run

_SAMPLE_FIELDS = ("prompt_ids", "text", "transcript", "agent_log")
"""Columns of the sample log that are stored on the workers."""
_TOKEN_FIELDS = {
    "response_mask": "sampled",
    "loss_mask": "trained",
    "rollout_log_probs": "rollout_log_prob",
    "old_log_probs": "log_prob",
    "teacher_log_prob": "teacher_log_prob",
    "entropys": "entropy",
    "advantages": "advantage",
}
"""Columns with one number per response token, and their names in the sample log. Both names of a
log-prob are verl's: the rollout engine's, and the trainer's before the step's updates."""
_CREDIT = "credit"
"""Column of the factor of an agent program's advantages."""
TOKENS_PER_STEP = 16_384
"""Response tokens of a step whose details are kept, about 50 bytes each. They are those of the
first samples in the file that fit."""
_INCOMPLETE = 16
"""Tokens that may wait for the end of a character. Without a limit, a model that writes nothing but
bytes that are not valid text would cost time quadratic in the length."""
_DECIMALS = 5
TEXT_LOST = (
    "the response is lost with a rollout engine that died after it drew the sample; the prompt is "
    "shown without its chat template"
)


def keep_samples(run: Run, batch: DataProto) -> list[dict[str, Any]]:
    """Write `trainer.rollouts_per_step` samples of the step to rollouts/step_N.jsonl.

    Returns:
        What was written.
    """
    chosen = choose_rows(
        [
            score if ok else None
            for score, ok in zip(
                batch.batch["scores"].tolist(), batch.batch["valid"].tolist(), strict=True
            )
        ],
        list(batch.non_tensor_batch["data_source"]),
        list(batch.non_tensor_batch["uid"]),
        kept_per_step(run),
        seed=f"{run.config.data.seed}/{run.step}",
    )
    rows = batch[[row for row, _ in chosen]]
    records = sample_records(run, rows)
    for record, (_, reason) in zip(records, chosen, strict=True):
        record["chosen"] = reason
    add_tokens(records, rows, run.tokenizer)
    path = run.run_dir / "rollouts" / f"step_{run.step}.jsonl"
    run.writer.replace(path, as_jsonl(records))
    if run.config.trainer.rollouts_parquet:
        run.writer.replace(path.with_suffix(".parquet"), as_parquet(run, batch))
    return records


def choose_rows(
    scores: Sequence[float | None],
    sources: Sequence[str],
    uids: Sequence[str],
    count: int | None,
    seed: str,
) -> list[tuple[int, str]]:
    """Choose samples of a step that are worth reading.

    Data sources take turns. Each contributes in turn its worst sample, its best one, and a random
    one, of prompts that are not chosen yet as long as there are some. Failed samples are the worst.
    Samples with equal scores are chosen at random.

    Args:
        scores: [B], None for failed samples.
        sources: [B] data source of each.
        uids: [B] prompt id of each.
        count: how many, None for all in their order.
        seed: of the random choices.

    Returns:
        (row, "worst", "best", "random" or "all") of each.
    """
    if count is None or count >= len(scores):
        return [(row, "all") for row in range(len(scores))]
    shuffled = list(range(len(scores)))
    random.Random(seed).shuffle(shuffled)
    by_source: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for source in sorted(set(sources)):
        own = [row for row in shuffled if sources[row] == source]
        ranked = sorted(own, key=lambda row: -np.inf if (s := scores[row]) is None else s)
        by_source[source] = {"worst": ranked, "best": ranked[::-1], "random": own}
    chosen: dict[int, str] = {}
    shown: set[str] = set()
    prompts = len(set(uids))
    while len(chosen) < count:
        for reason in ("worst", "best", "random"):
            for rows in by_source.values():
                if len(chosen) == count:
                    break
                new = (row for row in rows[reason] if uids[row] not in shown)
                left = (row for row in rows[reason] if row not in chosen)
                row = next(new, None) if len(shown) < prompts else None
                row = next(left, None) if row is None else row
                if row is not None:
                    chosen[row] = reason
                    shown.add(uids[row])
    return list(chosen.items())


def add_tokens(
    records: list[dict[str, Any]], rows: DataProto, tokenizer: Any, limit: int | None = None
) -> int:
    """Add `tokens` to the records of these rows: id, text and numbers of each response token.

    limit: tokens with details; None: TOKENS_PER_STEP.

    Masks are strings of 0 and 1. A row whose trained tokens all have the same advantage has one
    number. Columns that the run does not have are left out. So are rows whose tokens are lost with
    the worker that had them, and numbers that are lost.

    Returns:
        How many more tokens the limit allows.
    """
    columns = _token_columns(rows)
    left = TOKENS_PER_STEP if limit is None else limit
    for row, (record, ids) in enumerate(zip(records, columns["response_ids"], strict=True)):
        if ids is None or len(ids) > left:
            continue
        left -= len(ids)
        tokens: dict[str, Any] = {"id": ids.tolist(), "text": token_texts(tokenizer, ids.tolist())}
        for name, key in _TOKEN_FIELDS.items():
            values = columns[name][row] if name in columns else None
            if values is not None:
                tokens[key] = _compact(values, name)
        record["tokens"] = tokens
    return left


def _token_columns(batch: DataProto) -> dict[str, list[np.ndarray | None]]:
    """Return each row's values of the columns of tokens, [R], by the batch's names: one value if
    all tokens have it, None where they are lost."""
    numbers, stored = batch.tensors(), batch.non_tensor_batch
    names = [name for name in ("response_ids", *_TOKEN_FIELDS, _CREDIT) if name in stored]
    fetched = fetch(batch, names, lost_as_none=True).non_tensor_batch
    columns: dict[str, list[np.ndarray | None]] = {
        name: list(numbers[name].numpy()) for name in _TOKEN_FIELDS if name in numbers
    }
    for name in names:
        columns[name] = [None if v is None else np.asarray(v) for v in fetched[name]]
    credits = columns.pop(_CREDIT, [None] * len(batch))
    if "advantages" in columns:
        columns["advantages"] = list(map(_credited, columns["advantages"], credits))
    return columns


def _credited(values: np.ndarray | None, credit: np.ndarray | None) -> np.ndarray | None:
    """Return the advantages [R] or [1] that the policy's update had."""
    if values is None or credit is None or np.isin(credit, (0, 1)).all():  # 0: not the model's
        return values
    return values * credit


def _compact(values: np.ndarray, name: str) -> str | float | list[float]:
    if name.endswith("mask"):
        return "".join("1" if value else "0" for value in values)
    rounded = [round(float(value), _DECIMALS) for value in values]
    same = name == "advantages" and len(rounded) == 1
    return rounded[0] if same else rounded


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds. Joined, they are the decoded ids.

    A token that ends inside a character has "", and the text is with the token that completes it.
    A character that begins after many tokens that are not text may be replaced.
    """
    texts = []
    context = done = 0  # Tokens before `context` do not change the text of those after `done`.
    before = ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[context:end])
        if text.endswith("\ufffd") and end < len(ids) and end - done < _INCOMPLETE:
            texts.append("")
            continue
        texts.append(text[len(before) :])
        context, done = done, end
        before = tokenizer.decode(ids[context:done])
    return texts


def as_parquet(run: Run, batch: DataProto) -> bytes:
    """Return all samples as a parquet file, with a list per sample for each column of tokens.

    Columns of tokens have the names of the batch's fields. They are null where a row's values are
    lost, and one number for all tokens is null where the tokens are. Other columns are those of the
    JSON lines. Values that are not text, numbers or true and false are JSON.
    """
    records = sample_records(run, batch)
    names = dict.fromkeys(name for record in records for name in record)
    columns: dict[str, list[Any]] = {
        name: [_plain(record.get(name)) for record in records] for name in names
    }
    tokens = _token_columns(batch)
    for name in ("response_ids", *_TOKEN_FIELDS):
        if name in batch.non_tensor_batch:
            columns[name] = tokens[name]
        elif name in tokens:  # one number for all tokens of a row
            columns[name] = [
                None if ids is None or values is None else np.broadcast_to(values, len(ids))
                for values, ids in zip(tokens[name], tokens["response_ids"], strict=True)
            ]
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd")
    return buffer.getvalue()


def _plain(value: Any) -> Any:
    if value is not None and not isinstance(value, str | int | float):
        value = json.dumps(value, ensure_ascii=False, default=str)
    # A lone surrogate is not valid in a file; as_jsonl writes the same.
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def kept_per_step(run: Run) -> int | None:
    """Return how many samples to write per step, None for all."""
    count = run.config.trainer.rollouts_per_step
    return None if count < 0 else count


def sample_records(run: Run, batch: DataProto) -> list[dict[str, Any]]:
    """Return one JSON object per sample: prompt, response, score and its parts, status, version."""
    names = [name for name in _SAMPLE_FIELDS if name in batch.non_tensor_batch]
    columns = fetch(batch, names, lost_as_none=True).non_tensor_batch
    return [_record(run, batch, columns, row) for row in range(len(batch))]


def _record(run: Run, batch: DataProto, columns: dict[str, Any], row: int) -> dict[str, Any]:
    t = batch.batch
    lost = columns["text"][row] is None
    valid = bool(t["valid"][row])
    raw_score = t["raw_scores"][row].item()
    score = t.get("scores", t["raw_scores"])[row].item()  # validation has raw scores only
    trained_tokens = t.get("trained_tokens", t["sampled_tokens"])[row].item()
    record = {
        "uid": columns["uid"][row],
        "index": columns["index"][row],
        "data_source": columns["data_source"][row],
        "prompt": _messages_text(columns["messages"][row])
        if lost
        else run.tokenizer.decode(columns["prompt_ids"][row]),
        "response": "" if lost else columns["text"][row],
        "ground_truth": columns["ground_truth"][row],
        "score": score if valid else None,
    }
    if valid and raw_score != score:
        record["raw_score"] = raw_score
    record |= {
        "reward_parts": columns["reward_parts"][row],
        "status": columns["status"][row],
        "error": TEXT_LOST if lost else columns["error"][row],
        "response_tokens": t["response_length"][row].item(),
        "trained_tokens": trained_tokens,
        "weight_version": t["weight_version"][row].item(),
    }
    oldest = t.get("oldest_version", t["weight_version"])[row].item()
    if oldest != record["weight_version"]:  # trainer.mode=async
        record["oldest_version"] = oldest
    for name in ("gen_seconds", "tool_seconds"):  # with turns
        if name in t.keys():
            record[name] = round(t[name][row].item(), _DECIMALS)
    for name in ("transcript", "turn_infos", "requests", "agent_log"):
        if name in columns and columns[name][row] is not None:
            record[name] = columns[name][row]
    return record


def _messages_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the prompt as the data set has it. The driver keeps that."""
    return "\n".join(str(message["content"]) for message in messages)


def as_jsonl(records: list[dict[str, Any]]) -> bytes:
    """Return one JSON object per line, in UTF-8.

    A lone surrogate, which a model can produce as a JSON escape in a tool call, is written as that
    escape.
    """
    lines = [json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records]
    return "".join(lines).encode(errors="backslashreplace")
