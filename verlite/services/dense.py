"""Dense retrieval: a sentence-transformers encoder and a FAISS index. Needs the extra `dense`."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from verlite.http.server import ServiceError
from verlite.services.index import Corpus, Hit, Track

BLOCK = 1024
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
        while block := list(islice(contents, BLOCK)):
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
