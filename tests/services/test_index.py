"""BM25 against a naive computation, and index folders, which fit one corpus and its settings."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.services.passages import ROWS, WORDS, naive_bm25, passages, write
from verlite.http.server import ServiceError
from verlite.services.index import BM25, Corpus, best, open_index, read_corpus, tokens

# Corpus files: valid formats, and errors of invalid ones


def read(path: Path) -> Corpus:
    return read_corpus(path, lambda items, **shown: items)


LINES = [
    '{"id": "x7", "contents": "\\"One\\"\\nfirst"}',
    "",
    '{"contents": "second, ünïcode"}',
    '{"id": 30, "title": "Three\\nlines", "text": "third", "url": "http://x"}',
]
READ = [
    {"id": "x7", "contents": '"One"\nfirst'},
    {"id": "1", "contents": "second, ünïcode"},
    {"id": "30", "contents": '"Three lines"\nthird'},
]


@pytest.mark.parametrize("ending", ["", "\n", "\r\n", "\n\n"])
def test_both_row_formats_with_and_without_ids(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(LINES) + ending, encoding="utf-8", newline="")
    corpus = read(path)
    assert [corpus[row] for row in range(len(corpus))] == READ
    assert list(corpus.contents()) == [passage["contents"] for passage in READ]


def test_gzipped_corpus_is_read(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(LINES).encode()))
    corpus = read(path)
    assert [corpus[row] for row in range(len(corpus))] == READ


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "1", "contents": "cut', "not JSON: Unterminated string starting at"),
        ('["a list"]', "a list, expected an object"),
        (
            '{"id": "1", "text": "no title"}',
            "has neither contents nor title and text; it has id, text",
        ),
        ("{}", "has neither contents nor title and text; it has nothing"),
        ('{"contents": 5}', "contents is 5, expected text"),
        ('{"contents": " \\n"}', 'contents is " \\n", expected text'),
        ('{"title": null, "text": "x"}', "title is null, expected text"),
        ('{"id": 1.5, "contents": "x"}', "id is 1.5, expected text or a whole number"),
        ('{"id": true, "contents": "x"}', "id is true, expected text or a whole number"),
        ('{"contents": "\\ud83d"}', "contents has an unpaired surrogate, which is not a character"),
    ],
)
def test_error_names_the_bad_line(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "corpus.jsonl", [LINES[0], "", line, LINES[2]])
    with pytest.raises(ServiceError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:3: {message}")


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_empty_corpus_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(text)
    with pytest.raises(ServiceError, match=r"corpus\.jsonl: has no passages; each line is one"):
        read(path)


def test_incomplete_gzip_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(LINES * 100).encode())[:-20])
    with pytest.raises(
        ServiceError, match=r"corpus\.jsonl\.gz: cannot be unpacked: Compressed file ended"
    ):
        read(path)


QUERIES = [
    "amber",
    "feather",
    "zephyr dragon",
    "amber birch canyon delta",
    "river river meadow",
    "kettle unknown",
    "number17 amber",
]


def opened(path: Path, index: BM25, folder: Path | None = None, rebuild: bool = False) -> Corpus:
    return open_index(path, index, folder, rebuild, lambda items, **shown: items)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus.jsonl", passages())


@pytest.mark.parametrize("settings", [{}, {"k1": 1.5, "b": 0.75}, {"k1": 1.2, "b": 0.0}])
def test_bm25_scores_equal_the_formula(path: Path, settings: dict[str, float]) -> None:
    index = BM25(**settings)
    opened(path, index)
    for query, found in zip(QUERIES, index.search(QUERIES, ROWS), strict=True):
        wanted = naive_bm25(query, **settings)
        assert len(wanted) >= 1
        assert [row for row, _ in found] == [row for row, _ in wanted], query
        assert [score for _, score in found] == pytest.approx(
            [score for _, score in wanted], rel=1e-5
        ), query


def test_only_passages_with_a_word_of_the_query_are_found(path: Path) -> None:
    index = BM25()
    opened(path, index)
    query = WORDS[0]
    containing = len(naive_bm25(query))
    assert 3 < containing < ROWS
    assert [len(found) for found in index.search([query, "unknown", "", "the"], 3)] == [3, 0, 0, 0]
    assert [len(found) for found in index.search([query, "unknown"], 100)] == [containing, 0]


def test_equal_scores_keep_the_order_of_rows(tmp_path: Path) -> None:
    index = BM25()
    opened(
        write(tmp_path / "corpus.jsonl", [{"contents": "amber"}, {"contents": "birch"}] * 300),
        index,
    )
    assert [row for row, _ in index.search(["birch"], 5)[0]] == [1, 3, 5, 7, 9]


def test_best() -> None:
    scores = np.array([0.0, 2.0, 1.0, 3.0, 1.0, 0.0, 1.0], dtype=np.float32)
    assert best(scores, 1) == [(3, 3.0)]
    assert best(scores, 4) == [(3, 3.0), (1, 2.0), (2, 1.0), (4, 1.0)]
    assert best(scores, 7) == [(3, 3.0), (1, 2.0), (2, 1.0), (4, 1.0), (6, 1.0)]
    assert best(np.zeros(3, dtype=np.float32), 2) == []


@pytest.mark.parametrize("size", [999, 2500, 12_345])
@pytest.mark.parametrize("topk", [1, 3, 12, 100])
def test_best_equals_sorting_on_random_scores(size: int, topk: int) -> None:
    """Few scores are above 0, and many are equal."""
    for seed in range(20):
        chosen = np.random.default_rng(seed)
        scores = np.where(
            chosen.random(size) < chosen.choice([0.001, 0.05, 0.9]), chosen.integers(1, 9, size), 0
        ).astype(np.float32)
        scores[-1] = chosen.integers(10)
        wanted = sorted(
            ((row, score) for row, score in enumerate(scores.tolist()) if score > 0),
            key=lambda pair: -pair[1],
        )
        assert best(scores, topk) == wanted[:topk]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Who is the Actor?", ["who", "actor"]),
        ("Malcolm X, 1925", ["malcolm", "x", "1925"]),
        ("Beyoncé's ÉTUDES", ["beyonce", "etude"]),
        (
            "cities houses trees glasses status gas bus class",
            ["city", "house", "tree", "glasse", "status", "gas", "bus", "class"],
        ),
        ("movies series days", ["movy", "sery", "day"]),
        ("  ,. ", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert tokens(text) == words


def test_stored_index_gives_equal_results_without_a_rebuild(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "deep/index"
    plain = BM25()
    built = BM25()
    loaded = BM25()
    opened(path, plain)
    opened(path, built, folder)
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    corpus = opened(path, loaded, folder)
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    assert plain.search(QUERIES, 5) == built.search(QUERIES, 5) == loaded.search(QUERIES, 5)
    assert [corpus[row] for row in range(len(corpus))] == passages()
    assert os.listdir(folder.parent) == ["index"]


def test_gzipped_corpus_is_unpacked_into_the_index_folder(path: Path, tmp_path: Path) -> None:
    packed = tmp_path / "corpus.jsonl.gz"
    folder = tmp_path / "index"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    index = BM25()
    opened(packed, index, folder)
    corpus = opened(packed, index, folder)
    assert corpus[7] == passages()[7]
    assert (folder / "corpus.jsonl").read_bytes() == path.read_bytes()
    (folder / "corpus.jsonl").unlink()
    with pytest.raises(ServiceError, match="index: is damaged"):
        opened(packed, index, folder)


def test_index_of_another_corpus_must_be_rebuilt(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    opened(path, BM25(), folder)
    path.write_text(
        path.read_text()
        .replace("amber", "ember", 1)
        .replace("number1", "nomber11", 1)
        .replace("number10", "nmber1", 1)
    )
    with pytest.raises(ServiceError) as error:
        opened(path, BM25(), folder)
    assert f"--index {folder}: was made from another corpus than {path} as it is now" in str(
        error.value
    )
    assert str(error.value).endswith("--rebuild replaces it; another --index folder keeps both")
    index = BM25()
    opened(path, index, folder, rebuild=True)
    assert len(index.search(["nomber11"], 3)[0]) == 1
    opened(path, BM25(), folder)
    assert sorted(os.listdir(tmp_path)) == ["corpus.jsonl", "index"]


def test_changed_corpus_of_equal_size_is_detected(path: Path, tmp_path: Path) -> None:
    opened(path, BM25(), tmp_path / "index")
    path.write_text(path.read_text().replace("number1", "nomber1", 1))
    with pytest.raises(ServiceError, match="was made from another corpus"):
        opened(path, BM25(), tmp_path / "index")


def test_index_of_other_settings_or_version_is_an_error(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    opened(path, BM25(), folder)
    with pytest.raises(
        ServiceError, match=r"was made with k1=0\.9 \(now 1\.5\), b=0\.4 \(now 0\.75\)\. --rebuild"
    ):
        opened(path, BM25(1.5, 0.75), folder)
    manifest = json.loads((folder / "verlite_index.json").read_text())
    manifest["index"]["library"] = "bm25s 0.0.1"
    (folder / "verlite_index.json").write_text(json.dumps(manifest | {"format": 0}))
    with pytest.raises(
        ServiceError, match=r"was made with format=0 \(now 1\), library=bm25s 0\.0\.1 \(now bm25s "
    ):
        opened(path, BM25(), folder)


@pytest.mark.parametrize("rebuild", [False, True])
def test_folder_with_other_files_is_not_changed(path: Path, tmp_path: Path, rebuild: bool) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    write(folder / "thesis.txt", ["years of work"])
    with pytest.raises(ServiceError, match="exists but is not a readable index"):
        opened(path, BM25(), folder, rebuild)
    assert (folder / "thesis.txt").read_text() == "years of work\n"


@pytest.mark.parametrize("file", ["data.csc.index.npy", "vocab.index.json", "starts.npy"])
@pytest.mark.parametrize("lost", [False, True])
def test_damaged_index_is_an_error_and_can_be_rebuilt(
    path: Path, tmp_path: Path, file: str, lost: bool
) -> None:
    folder = tmp_path / "index"
    opened(path, BM25(), folder)
    data = (folder / file).read_bytes()
    (folder / file).unlink()
    if not lost:
        (folder / file).write_bytes(data[: len(data) // 2])
    with pytest.raises(ServiceError, match=r"index: is damaged \(.*\)\. --rebuild makes it again"):
        opened(path, BM25(), folder)
    index = BM25()
    opened(path, index, folder, rebuild=True)
    assert [row for row, _ in index.search(["amber"], 3)[0]] == [
        row for row, _ in naive_bm25("amber")[:3]
    ]


def test_failed_build_keeps_the_old_index(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    opened(path, BM25(), folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    write(path, [*passages(), "{"])
    with pytest.raises(ServiceError, match=f"{path}:{ROWS + 1}: not JSON"):
        opened(path, BM25(), folder, rebuild=True)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert sorted(os.listdir(tmp_path)) == ["corpus.jsonl", "index"]


def test_corpus_without_searchable_words_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ServiceError, match="no passage of the corpus has a word that can be searched for"
    ):
        opened(write(tmp_path / "corpus.jsonl", [{"contents": "the of ..."}]), BM25())
