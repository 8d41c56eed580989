"""Examples as `verlite show` and `verlite report` read them: rollouts/step_N.jsonl."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verlite.files import RetryingWriter
from verlite.sft.data import Example

KEPT = 16
"""Examples of a validation that are kept: those with the lowest scores."""


def keep_samples(
    writer: RetryingWriter,
    path: Path,
    tokenizer: Any,
    numbers: Sequence[int],
    sources: Sequence[str],
    examples: Sequence[Example],
    scores: Sequence[float],
) -> None:
    """Write the examples with the lowest scores, lowest first.

    numbers: row of the data of every len(sources) examples, which have these names.
    """
    found = sorted(range(len(examples)), key=scores.__getitem__)[:KEPT]
    lines = []
    for i in found:
        row, place = divmod(i, len(sources))
        record = _record(tokenizer, examples[i], sources[place], numbers[row], scores[i])
        lines.append(json.dumps(record))
    writer.replace(path, "".join(f"{line}\n" for line in lines).encode())


def _record(
    tokenizer: Any, example: Example, source: str, row: int, score: float
) -> dict[str, Any]:
    pieces = itertools.groupby(
        zip(example.response, example.mask, strict=True), key=lambda pair: pair[1]
    )
    transcript = [
        ["model" if trained else "context", tokenizer.decode([token for token, _ in pairs])]
        for trained, pairs in pieces
    ]
    return {
        "index": row,
        "data_source": source,
        "prompt": tokenizer.decode(example.prompt),
        "response": tokenizer.decode(example.response),
        "transcript": transcript,
        "score": score,
        "reward_parts": {},
        "status": "example",
        "ground_truth": "",
        "response_tokens": len(example.response),
        "trained_tokens": example.trained_tokens,
    }
