"""Write HotpotQA's articles (Yang et al., 2018) as a corpus.jsonl for `verlite serve retriever`.

python data_preprocess/hotpotqa_corpus.py --articles FILE [...] --local_save_dir ~/data/hotpotqa

A file is one of {title: [sentence, ...]}, [{"title", "text"}, ...], or questions
[{"context": [[title, [sentence, ...]], ...]}, ...]. Duplicate articles (same title and text) are
written once.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verlite.data.dataset import DataError
from verlite.data.preprocess import write_text


def articles(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of each article in a file's JSON value. Raises DataError."""
    rows = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(rows, list):
        raise DataError(
            f"{where}: a {type(value).__name__}, "
            "expected an object of titles or a list of articles or questions"
        )
    for place, row in enumerate(rows):
        if isinstance(row, dict) and "context" in row:
            yield from articles(row["context"], f"{where} entry {place} context")
            continue
        title, text = _title_and_text(row)
        if isinstance(text, list) and all(isinstance(sentence, str) for sentence in text):
            text = "".join(text)  # HotpotQA's sentences start with a space
        if not isinstance(title, str) or not isinstance(text, str):
            raise DataError(
                f"{where} entry {place}: "
                "expected a title with sentences or text, or a question with context"
            )
        if text.strip():
            yield " ".join(title.split()), " ".join(text.split())


def _title_and_text(row: Any) -> tuple[Any, Any]:
    if isinstance(row, dict):
        return row.get("title"), row.get("text")
    is_pair = isinstance(row, list | tuple) and len(row) == 2
    return (row[0], row[1]) if is_pair else (None, None)


def read_articles(file: str) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of each article in a file. Raises DataError or OSError."""
    try:
        value = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file}: not JSON: {error}") from error
    yield from articles(value, file)


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
        help="folder for corpus.jsonl (default ~/data/hotpotqa)",
    )
    arguments = parser.parse_args()
    try:
        found: dict[tuple[str, str], None] = {}
        for file in arguments.articles:
            found.update(dict.fromkeys(read_articles(file)))
        if not found:
            raise DataError(f"{', '.join(arguments.articles)}: no article has a text")
        lines = []
        for row, (title, text) in enumerate(found):
            passage = {"id": str(row), "contents": f'"{title}"\n{text}'}
            lines.append(json.dumps(passage, ensure_ascii=False) + "\n")
        path = Path(arguments.local_save_dir).expanduser() / "corpus.jsonl"
        size = write_text("".join(lines), path)
        print(f"{path}: {len(found)} passages, {size} bytes")
    except (DataError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
