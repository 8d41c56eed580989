"""A synthetic corpus, and a naive BM25."""

import json
import math
import random
from pathlib import Path
from typing import Any

# No stop words, plurals or capitals, so the naive search only splits at spaces.
WORDS = (
    "amber birch canyon delta ember falcon garnet harbor island juniper kettle lantern meadow "
    "nickel orchid pepper quartz river saddle "
    "timber umber violet walnut yarrow zephyr anchor beacon copper dragon feather"
).split()
ROWS = 40


def passages(rows: int = ROWS) -> list[dict[str, str]]:
    """Return passages of 3 to 30 words, some of them rare. An id is not the row number."""
    chosen = random.Random(7)
    weights = [1 / (1 + place) for place in range(len(WORDS))]
    texts = [" ".join(chosen.choices(WORDS, weights, k=chosen.randint(3, 30))) for _ in range(rows)]
    return [
        {"id": f"p{1000 - row}", "contents": f'"number{row}"\n{text}'}
        for row, text in enumerate(texts)
    ]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    return path


def naive_bm25(
    query: str, k1: float = 0.9, b: float = 0.4, rows: int = ROWS
) -> list[tuple[int, float]]:
    """Return (row, score) of all passages that have a word of the query, best first.

    Equal scores are in the order of rows.
    """
    texts = [passage["contents"].replace('"', " ").split() for passage in passages(rows)]
    mean = sum(map(len, texts)) / len(texts)
    scored = []
    for row, text in enumerate(texts):
        score = 0.0
        for word in query.split():
            containing = sum(word in other for other in texts)
            idf = math.log(1 + (len(texts) - containing + 0.5) / (containing + 0.5))
            score += (
                idf * text.count(word) / (text.count(word) + k1 * (1 - b + b * len(text) / mean))
            )
        scored.append((row, score))
    return sorted((pair for pair in scored if pair[1] > 0), key=lambda pair: -pair[1])
