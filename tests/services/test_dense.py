"""Dense retrieval with a tiny random encoder: scores and order equal those of plain transformers.

Needs the extra `dense`.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.services.passages import WORDS, passages, write
from verlite.http.server import ServiceError
from verlite.services.index import Dense, open_index

pytestmark = pytest.mark.process


def track(items, **shown):
    return items


def test_missing_packages_are_an_error_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(
        ServiceError,
        match=r"--retriever dense: .*faiss.*\. Install it: pip install 'verlite\[dense\]'",
    ):
        Dense()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a BERT with random weights that knows only the corpus's words and prefixes."""
    pytest.importorskip("faiss")
    pytest.importorskip("sentence_transformers")
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = str(tmp_path_factory.mktemp("encoder"))
    known = ["[PAD]", "[UNK]", "query", "passage", ":", '"', *WORDS]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.5,
    }
    BertModel(
        BertConfig(vocab_size=len(known), max_position_embeddings=64, **sizes)
    ).save_pretrained(folder)
    return folder


def embed(folder: str, text: str) -> np.ndarray:
    """Return the mean of a text's last hidden states, scaled to length 1."""
    import torch
    from transformers import AutoTokenizer, BertModel

    with torch.no_grad():
        states = (
            BertModel.from_pretrained(folder)
            .eval()(**AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt"))
            .last_hidden_state
        )
    mean = states[0].mean(0).numpy()
    return mean / np.linalg.norm(mean)


@pytest.mark.parametrize("kind", ["Flat", "HNSW64"])
def test_dense_scores_equal_inner_products(tmp_path: Path, encoder: str, kind: str) -> None:
    path = write(tmp_path / "corpus.jsonl", passages())
    index = Dense(encoder, kind)
    loaded = Dense(encoder, kind)
    open_index(path, index, tmp_path / "index", False, track)
    vectors = np.stack(
        [embed(encoder, f"passage: {passage['contents']}") for passage in passages()]
    )
    queries = ["amber birch", "feather"]
    found = index.search(queries, 4)
    for query, hits in zip(queries, found, strict=True):
        scores = vectors @ embed(encoder, f"query: {query}")
        assert [row for row, _ in hits] == np.argsort(-scores)[:4].tolist()
        assert [score for _, score in hits] == pytest.approx(
            sorted(scores, reverse=True)[:4], abs=1e-5
        )
    open_index(path, loaded, tmp_path / "index", False, track)
    assert loaded.search(queries, 4) == found
    with pytest.raises(ServiceError, match=r"was made with query_prefix=query:  \(now q \)"):
        open_index(path, Dense(encoder, kind, query_prefix="q "), tmp_path / "index", False, track)
    (tmp_path / "index/dense.faiss").write_bytes(b"IxFI")
    with pytest.raises(ServiceError, match="index: is damaged"):
        open_index(path, loaded, tmp_path / "index", False, track)


def test_topk_above_the_corpus_size_returns_every_row_once(tmp_path: Path, encoder: str) -> None:
    index = Dense(encoder)
    open_index(write(tmp_path / "corpus.jsonl", passages(3)), index, None, False, track)
    assert sorted(row for row, _ in index.search(["amber"], 10)[0]) == [0, 1, 2]


def test_unusable_model_is_a_one_line_error(encoder: str, tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"--model .*/nothing: cannot be loaded: [^\n]*$"):
        Dense(str(tmp_path / "nothing"))
