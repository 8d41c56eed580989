"""Articles of HotpotQA (Yang et al., 2018) and data sets in its format as a corpus.jsonl for `verlite serve retriever`.

python data_preprocess/hotpotqa_corpus.py --articles FILE.json [FILE.json ...] --local_save_dir ~/data/hotpotqa

A file is one of {title: [sentence, ...]}, [{"title", "text"}, ...], or questions [{"context": [[title, [sentence, ...]], ...]}, ...]. An
article that is there several times, with the same title and text, is written once.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verlite.data.dataset import DataError
from verlite.data.preprocess import write_text


def articles(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """(title, text) of each article in a file's JSON value. Raises DataError."""
    rows = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(rows, list):
        raise DataError(
            f"{where}: a {type(value).__name__}, expected an object of titles or a list of articles or questions"
        )
    for place, row in enumerate(rows):
        if isinstance(row, dict) and "context" in row:
            yield from articles(row["context"], f"{where} entry {place} context")
            continue
        title, text = (
            (row.get("title"), row.get("text"))
            if isinstance(row, dict)
            else row
            if _is_pair(row)
            else (None, None)
        )
        if isinstance(text, list) and all(isinstance(sentence, str) for sentence in text):
            text = "".join(text)  # HotpotQA's sentences begin with their space
        if not isinstance(title, str) or not isinstance(text, str):
            raise DataError(
                f"{where} entry {place}: expected a title with its sentences, or title and text, or a question with context"
            )
        if text.strip():
            yield " ".join(title.split()), " ".join(text.split())


def _is_pair(row: Any) -> bool:
    return isinstance(row, (list, tuple)) and len(row) == 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--articles",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON files of articles or questions",
    )
    parser.add_argument(
        "--local_save_dir",
        "--local_dir",
        default="~/data/hotpotqa",
        help="where corpus.jsonl goes (default ~/data/hotpotqa)",
    )
    arguments = parser.parse_args()
    try:
        found: dict[tuple[str, str], None] = {}
        for name in arguments.articles:
            try:
                value = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
            except ValueError as error:
                raise DataError(f"{name}: not JSON: {error}") from error
            found.update(dict.fromkeys(articles(value, name)))
        if not found:
            raise DataError(f"{', '.join(arguments.articles)}: no article has a text")
        lines = (
            json.dumps({"id": str(row), "contents": f'"{title}"\n{text}'}, ensure_ascii=False)
            for row, (title, text) in enumerate(found)
        )
        path = Path(arguments.local_save_dir).expanduser() / "corpus.jsonl"
        size = write_text("".join(f"{line}\n" for line in lines), path)
        print(f"{path}: {len(found)} passages, {size} bytes")
    except (DataError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
