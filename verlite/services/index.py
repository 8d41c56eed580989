"""A corpus of passages and its search indexes: BM25, and dense retrieval by a sentence-transformers
encoder and FAISS (the extra `dense`); and how an index is built, stored in a folder, and tied to
its corpus.
"""

import gzip
import hashlib
import importlib.metadata
import json
import mmap
import os
import re
import shutil
import tempfile
import unicodedata
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import numpy as np

from verlite.files import kind_of, replace_file
from verlite.http.server import ServiceError

# The corpus: a .jsonl file on disk and the position of each passage in it

Track = Callable[..., Iterable[Any]]
"""track(items, description=..., total=...) -> the same items, with a progress bar."""


class Corpus:
    """Passages by row, counted from 0. Memory has only their positions; text is read on demand.

    `file` must stay open and must not be modified in place. `starts` has the offset of each passage
    in bytes.
    """

    def __init__(self, file: BinaryIO, starts: np.ndarray) -> None:
        self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.starts = starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> dict[str, str]:
        """Return {"id", "contents"} of one row."""
        start = int(self.starts[row])
        end = self._bytes.find(b"\n", start)
        return make_passage(self._bytes[start : end if end >= 0 else None], row)

    def contents(self) -> Iterator[str]:
        """Iterate over the text of all passages, in the order of rows."""
        return (self[row]["contents"] for row in range(len(self)))


def read_corpus(path: Path, track: Track, unpacked: Path | None = None) -> Corpus:
    """Check every line of a .jsonl or .jsonl.gz file and store its position.

    A compressed file is decompressed first, into the file `unpacked` or a temporary file.

    Raises:
        ServiceError: a line is not a passage, or there are no passages.
    """
    file = _unpack(path, unpacked) if path.suffix == ".gz" else open(path, "rb")
    starts, place = array("q"), 0
    for number, line in enumerate(
        track(file, description=f"reading {path.name}", total=None), start=1
    ):
        if line.strip():
            try:
                make_passage(line.rstrip(b"\r\n"), len(starts))
            except (ValueError, RecursionError) as error:
                raise ServiceError(f"{path}:{number}: {error}") from None
            starts.append(place)
        place += len(line)
    if not starts:
        raise ServiceError(
            f"{path}: has no passages; each line is one, "
            'as {"id": "0", "contents": "\\"Title\\"\\ntext"}'
        )
    return Corpus(file, np.frombuffer(starts, dtype=np.int64))


def _unpack(path: Path, unpacked: Path | None) -> BinaryIO:
    target = open(unpacked, "w+b") if unpacked else cast(BinaryIO, tempfile.TemporaryFile())
    try:
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, target, 1 << 20)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ServiceError(f"{path}: cannot be unpacked: {error}") from None
    target.flush()
    target.seek(0)
    return target


def make_passage(line: bytes, row: int) -> dict[str, str]:
    """Return {"id", "contents"} from a line {"id", "contents"} or {"id", "title", "text"}.

    The default id is the row.

    Raises:
        ValueError: the line is not a passage; the message has the reason.
    """
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{kind_of(value)}, expected an object")
    identity = value.get("id")
    if identity is None:
        identity = row
    elif isinstance(identity, bool) or not isinstance(identity, (str, int)):
        raise ValueError(f"id is {json.dumps(identity)}, expected text or a whole number")
    if "contents" in value:
        contents = _text(value, "contents")
    elif "title" in value and "text" in value:
        contents = f'"{" ".join(_text(value, "title").split())}"\n{_text(value, "text")}'
    else:
        raise ValueError(
            f"has neither contents nor title and text; it has {', '.join(value) or 'nothing'}"
        )
    return {"id": str(identity), "contents": contents}


def _text(value: dict[str, Any], key: str) -> str:
    text = value[key]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{key} is {json.dumps(text)[:40]}, expected text")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{key} has an unpaired surrogate, which is not a character") from None
    return text


def fingerprint(path: Path) -> dict[str, Any]:
    """Return size in bytes and SHA-256 of a file, which identify a corpus."""
    with open(path, "rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


FORMAT = 1
"""Version of index folders. Raise it if older folders would be misread, such as after a change of
`tokens`.
"""
MANIFEST = "verlite_index.json"

BLOCK = 1000
"""Number of scores in a block; see `best`."""

Hit = tuple[int, float]
"""Row of the passage, and its score."""


class Index(Protocol):
    """A retrieval method with its settings. It is empty until it is built or loaded."""

    name: str

    def settings(self) -> dict[str, Any]:
        """Return library, version and parameters. An index folder must have the same to be used."""
        ...

    def build(self, corpus: Corpus, track: Track) -> None: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None:
        """Load a folder. Raises OSError, ValueError or KeyError for files that cannot be read."""
        ...

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return at most `topk` passages for each query, best first."""
        ...


class BM25:
    """BM25 as in Lucene (Kamphuis et al., 2020).

    The score is the sum over the query's words of idf * tf / (tf + k1 * (1 - b + b * len / mean)),
    with idf = log(1 + (N - n + 0.5) / (n + 0.5)) for a word in n of N passages. A repeated word
    counts repeatedly. The defaults are those of Pyserini, which Search-R1 used, so that figures can
    be compared. Its passages have equal length, where b matters little. For passages of unequal
    length, k1=1.2, b=0.75 may find more (docs/retriever.md).
    """

    name = "bm25"

    def __init__(self, k1: float = 0.9, b: float = 0.4) -> None:
        import bm25s  # imported late: it imports numba if that is installed, which takes seconds

        self._bm25 = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")

    def settings(self) -> dict[str, Any]:
        version = importlib.metadata.version("bm25s")
        return {
            "retriever": self.name,
            "library": f"bm25s {version}",
            "k1": self._bm25.k1,
            "b": self._bm25.b,
        }

    def build(self, corpus: Corpus, track: Track) -> None:
        vocabulary: defaultdict[str, int] = defaultdict()
        vocabulary.default_factory = vocabulary.__len__  # a new word gets the next number
        ids, ends = array("i"), array("q", [0])
        for contents in track(
            corpus.contents(), description="splitting into words", total=len(corpus)
        ):
            ids.extend(map(vocabulary.__getitem__, tokens(contents)))
            ends.append(len(ids))
        if not vocabulary:
            raise ServiceError("no passage of the corpus has a word that can be searched for")
        self._bm25.index(
            _Words(ids, ends, dict(vocabulary), track),
            create_empty_token=False,
            show_progress=False,
        )

    def save(self, folder: Path) -> None:
        self._bm25.save(folder, show_progress=False)

    def load(self, folder: Path) -> None:
        self._bm25 = type(self._bm25).load(folder, mmap=True, show_progress=False, backend="numpy")
        scores = self._bm25.scores
        # Views, because indexing a memmap itself is slow.
        scores.update({name: np.asarray(scores[name]) for name in ("data", "indices", "indptr")})

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return [self._search(query, topk) for query in queries]

    def _search(self, query: str, topk: int) -> list[Hit]:
        known = self._bm25.get_tokens_ids(tokens(query))
        return best(self._bm25.get_scores_from_ids(known), topk) if known else []


def best(scores: np.ndarray, topk: int) -> list[Hit]:
    """Return the rows of the `topk` highest scores above 0, best first; of equal scores the lower
    row.

    A score of 0 means that the passage has none of the query's words.
    """
    # At least topk blocks have a score of at least `edge`, so lower scores are not among the best.
    # This is much faster than a selection from all scores.
    blocks = len(scores) // BLOCK
    highest = scores[: blocks * BLOCK].reshape(blocks, BLOCK).max(axis=1)
    edge = np.partition(highest, -topk)[-topk] if blocks >= topk else 0.0
    rows = np.flatnonzero(scores >= edge if edge > 0 else scores > 0)
    found = scores[rows]
    if len(rows) > topk:
        enough = found >= np.partition(found, -topk)[-topk]
        rows, found = rows[enough], found[enough]
    order = np.argsort(-found, kind="stable")[:topk]
    return list(zip(rows[order].tolist(), found[order].tolist(), strict=True))


WORD = re.compile(r"\w+")
STOP_WORDS = frozenset(  # Lucene's for English, and the s that remains of "Einstein's"
    "a an and are as at be but by for if in into is it no not of on or s such that the their "
    "then there these they this to was will with".split()
)


def tokens(text: str) -> list[str]:
    """Return the words of a text in lower case, without accents, stop words and plural endings."""
    if not text.isascii():
        text = "".join(
            letter
            for letter in unicodedata.normalize("NFKD", text)
            if not unicodedata.combining(letter)
        )
    return [singular(word) for word in WORD.findall(text.lower()) if word not in STOP_WORDS]


@lru_cache(1 << 18)
def singular(word: str) -> str:
    """Return a word without its plural ending: Harman's S stemmer (1991).

    On HotpotQA it gains most of what Porter's stemmer does, and needs no package.
    """
    if len(word) > 3:
        if word.endswith("ies") and not word.endswith(("eies", "aies")):
            return word[:-3] + "y"
        if word.endswith("es") and not word.endswith(("aes", "ees", "oes")):
            return word[:-1]
        if word.endswith("s") and not word.endswith(("us", "ss")):
            return word[:-1]
    return word


class _Words:
    """The word numbers of all passages in one array.

    bm25s accepts any object that behaves like a list of lists. Real lists need several times the
    memory.
    """

    def __init__(self, ids: array, ends: array, vocabulary: dict[str, int], track: Track) -> None:
        self.ids = self  # bm25s reads .ids and .vocab
        self.vocab = vocabulary
        self._ids = np.frombuffer(ids, dtype=np.int32)
        self._ends = ends
        self._track = track
        self._passes = 0

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[list[int]]:
        self._passes += 1
        rows = self._track(
            range(len(self)), description=f"indexing, pass {self._passes} of 3", total=len(self)
        )
        return (self._ids[self._ends[row] : self._ends[row + 1]].tolist() for row in rows)


def open_index(
    path: Path, index: Index, folder: Path | None, rebuild: bool, track: Track
) -> Corpus:
    """Read the corpus at `path`, and load its index from `folder` or build it there.

    Without a folder the index exists only in memory. `rebuild` always builds, and replaces the
    folder once that has succeeded.

    Raises:
        ServiceError: the corpus cannot be used; or the folder belongs to another corpus or other
            settings, is damaged, or is not an index.
        OSError: a file cannot be read or written.
    """
    if folder is None:
        corpus = read_corpus(path, track)
        index.build(corpus, track)
        return corpus
    folder = folder.absolute()
    wanted = {"format": FORMAT, "corpus": fingerprint(path), "index": index.settings()}
    found = _manifest(folder)
    if found is None or rebuild:
        _build(path, index, folder, wanted, track)
    elif found != wanted:
        raise ServiceError(
            f"--index {folder}: {_difference(found, wanted, path)}. "
            "--rebuild replaces it; another --index folder keeps both"
        )
    try:
        index.load(folder)
        text = folder / "corpus.jsonl" if path.suffix == ".gz" else path
        return Corpus(open(text, "rb"), np.load(folder / "starts.npy", mmap_mode="r"))
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise ServiceError(
            f"--index {folder}: is damaged ({error}). --rebuild makes it again"
        ) from None


def _build(path: Path, index: Index, folder: Path, wanted: dict[str, Any], track: Track) -> None:
    """Build in a folder beside `folder`, and rename it when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        new.mkdir()
        corpus = read_corpus(path, track, new / "corpus.jsonl")
        np.save(new / "starts.npy", corpus.starts)
        index.build(corpus, track)
        index.save(new)
        replace_file(new / MANIFEST, json.dumps(wanted, indent=2) + "\n")
        with suppress(FileNotFoundError):
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of an index folder. None if the folder is missing or empty.

    Raises:
        ServiceError: the folder is not an index.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        return json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ServiceError(
            f"--index {folder}: exists but is not a readable index ({error}). "
            "Give a folder that is new, empty or an index"
        ) from None


def _difference(found: dict[str, Any], wanted: dict[str, Any], path: Path) -> str:
    if found.get("corpus") != wanted["corpus"]:
        return (
            f"was made from another corpus than {path} as it is now "
            f"({found.get('corpus')}, not {wanted['corpus']})"
        )
    old, new = ({"format": side.get("format"), **side.get("index", {})} for side in (found, wanted))
    names = [name for name in dict.fromkeys([*new, *old]) if old.get(name) != new.get(name)]
    return "was made with " + ", ".join(
        f"{name}={old.get(name)} (now {new.get(name)})" for name in names
    )


ENCODED = 1024
"""Passages encoded at once. The encoder sorts them by length, so larger blocks need less padding.
"""
FILE = "dense.faiss"


class Dense:
    """Find passages by the cosine similarity of their embedding and the query's.

    Embeddings are normalized and compared by inner product.

    Args:
        model: a sentence-transformers name or folder.
        faiss_index: FAISS's name of the index type. Flat compares with every passage, HNSW64 with
        few of them, on a graph.
        query_prefix: text before each query. e5 models were trained with the two defaults.
        passage_prefix: text before each passage.

    Raises:
        ServiceError: the extra is not installed, or the model cannot be loaded.
    """

    name = "dense"

    def __init__(
        self,
        model: str = "intfloat/e5-base-v2",
        faiss_index: str = "Flat",
        query_prefix: str = "query: ",
        passage_prefix: str = "passage: ",
    ) -> None:
        try:
            import faiss
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ServiceError(
                f"--retriever dense: {error}. Install it: pip install 'verlite[dense]'"
            ) from None
        self._faiss = faiss
        self._model_name = model
        self._type = faiss_index
        self._prefixes = {"query_prefix": query_prefix, "passage_prefix": passage_prefix}
        try:
            self._encoder = SentenceTransformer(model)
        except (OSError, ValueError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ServiceError(f"--model {model}: cannot be loaded: {reason}") from None

    def settings(self) -> dict[str, Any]:
        library = f"faiss {self._faiss.__version__}"
        return {
            "retriever": self.name,
            "library": library,
            "model": self._model_name,
            "faiss_index": self._type,
            **self._prefixes,
        }

    def build(self, corpus: Corpus, track: Track) -> None:
        contents = iter(track(corpus.contents(), description="encoding", total=len(corpus)))
        # Measured, because the name of this attribute depends on the sentence-transformers version.
        width = self._encode([""], "passage_prefix").shape[1]
        self._index = self._faiss.index_factory(width, self._type, self._faiss.METRIC_INNER_PRODUCT)
        while block := list(islice(contents, ENCODED)):
            self._index.add(self._encode(block, "passage_prefix"))

    def save(self, folder: Path) -> None:
        self._faiss.write_index(self._index, str(folder / FILE))

    def load(self, folder: Path) -> None:
        try:
            self._index = self._faiss.read_index(str(folder / FILE))
        except RuntimeError as error:
            raise ValueError(str(error)) from None

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        scores, rows = self._index.search(self._encode(queries, "query_prefix"), topk)
        # FAISS pads with row -1 if it finds fewer than topk.
        return [
            [(int(row), float(score)) for row, score in zip(*found, strict=True) if row >= 0]
            for found in zip(rows, scores, strict=True)
        ]

    def _encode(self, texts: Sequence[str], prefix: str) -> np.ndarray:
        prefixed = [self._prefixes[prefix] + text for text in texts]
        vectors = self._encoder.encode(
            prefixed, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
        )
        return np.ascontiguousarray(vectors, dtype=np.float32)
