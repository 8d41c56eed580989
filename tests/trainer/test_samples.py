"""Which samples of a step are kept, and what is kept of their tokens."""

import io
import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verlite.protocol.data import DataProto, object_array
from verlite.trainer import samples
from verlite.trainer.samples import add_tokens, choose_rows, token_texts


def test_data_sources_and_choices_take_turns():
    scores = [0.1, 0.5, 0.9, None, 0.3, 0.2]
    sources = ["a", "a", "a", "a", "b", "b"]
    uids = ["1", "2", "3", "4", "5", "6"]
    chosen = choose_rows(scores, sources, uids, 4, seed="")
    # The failed row is the worst of a, row 5 of b; row 2 is the best of a, row 4 of b.
    assert chosen == [(3, "worst"), (5, "worst"), (2, "best"), (4, "best")]


def test_each_prompt_is_chosen_once_before_any_twice():
    """Four prompts of four samples each: the first prompt has both the best and the worst."""
    scores = [-9.0, 9.0, 8.0, 8.0, *[float(n) for n in range(12)][:12]]
    uids = [f"{row // 4}" for row in range(16)]
    chosen = [row for row, _ in choose_rows(scores, ["a"] * 16, uids, 4, seed="")]
    assert chosen[0] == 0 and {uids[row] for row in chosen} == {"0", "1", "2", "3"}
    more = [row for row, _ in choose_rows(scores, ["a"] * 16, uids, 7, seed="")]
    assert more[:4] == chosen and len(set(more)) == 7


def test_equal_scores_are_chosen_at_random_and_the_seed_decides():
    def first(seed: int) -> list[int]:
        uids = [str(row) for row in range(40)]
        return [row for row, _ in choose_rows([0.0] * 40, ["a"] * 40, uids, 3, seed=f"7/{seed}")]

    assert first(1) == first(1)
    assert len({tuple(first(seed)) for seed in range(20)}) > 15


@pytest.mark.parametrize("count", [None, 3, 9])
def test_all_rows_in_their_order(count):
    scores = [1.0, None, 0.0]
    assert choose_rows(scores, ["a", "b", "a"], ["1", "1", "1"], count, "") == [
        (0, "all"),
        (1, "all"),
        (2, "all"),
    ]


def test_no_row_is_chosen_if_none_is_wanted():
    assert choose_rows([1.0, 0.0], ["a", "a"], ["1", "2"], 0, "") == []


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, as byte-level BPE has it without merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("text", ["", "a", "plain words", "é\u20ac🙂x", "🙂🙂", " a  b\n"])
def test_token_texts_join_to_the_decoded_text(byte_tokenizer, text):
    ids = byte_tokenizer.encode(text, add_special_tokens=False)
    texts = token_texts(byte_tokenizer, ids)
    assert len(texts) == len(ids) == len(text.encode())
    assert "".join(texts) == text == byte_tokenizer.decode(ids)
    # Each character is with the token of its last byte.
    ends = np.cumsum([len(c.encode()) for c in text]) - 1
    assert [texts[end] for end in ends] == list(text)


def test_a_response_that_ends_inside_a_character(byte_tokenizer):
    ids = byte_tokenizer.encode("a🙂", add_special_tokens=False)[:-1]
    assert "".join(token_texts(byte_tokenizer, ids)) == byte_tokenizer.decode(ids) == "a\ufffd"


def token_batch() -> DataProto:
    return DataProto.from_dict(
        {"advantages": torch.tensor([[-0.5], [1.25]])},
        {
            "response_ids": object_array([np.array([5, 6, 7]), np.array([8])]),
            "response_mask": object_array([np.array([1, 0, 1], np.int8), np.array([1], np.int8)]),
            "loss_mask": object_array([np.array([1, 0, 0], np.int8), np.array([1], np.int8)]),
            "rollout_log_probs": object_array(
                [np.array([-0.1234567, 0, -2], np.float32), np.array([-1], np.float32)]
            ),
        },
    )


class OneLetter:
    def decode(self, ids: list[int]) -> str:
        return "".join(chr(90 + i) for i in ids)


def test_details_of_tokens():
    records: list[dict] = [{}, {}]
    add_tokens(records, token_batch(), OneLetter())
    assert records[0]["tokens"] == {
        "id": [5, 6, 7],
        "text": ["_", "`", "a"],
        "sampled": "101",
        "trained": "100",
        "rollout_log_prob": [-0.12346, 0.0, -2.0],
        "advantage": -0.5,
    }
    assert records[1]["tokens"]["advantage"] == 1.25 and records[1]["tokens"]["text"] == ["b"]


def test_advantages_have_the_credit_of_their_tokens():
    credit = [np.array([0.5, 0, 2], np.float32), np.array([1], np.float32)]
    records: list[dict] = [{}, {}]
    add_tokens(records, token_batch().with_non_tensor(credit=object_array(credit)), OneLetter())
    assert records[0]["tokens"]["advantage"] == [-0.25, 0.0, -1.0]
    assert records[1]["tokens"]["advantage"] == 1.25
    batch = text_batch().with_non_tensor(credit=object_array(credit))
    content = samples.as_parquet(SimpleNamespace(tokenizer=OneLetter()), batch)
    first, second = pq.read_table(io.BytesIO(content)).to_pylist()
    assert first["advantages"] == [-0.25, 0.0, -1.0] and second["advantages"] == [1.25]


def text_batch() -> DataProto:
    """The rows of `token_batch` as they are at the end of a step."""
    texts = {
        "prompt_ids": [[1], [2]],
        "text": ["ab", "c\ud800"],
        "messages": [[{"role": "user", "content": "2+2="}]] * 2,
        "uid": ["1-0", "1-0"],
        "index": [7, 7],
        "data_source": ["sums", "sums"],
        "ground_truth": ["4", {"target": ["4", "four"]}],
        "reward_parts": [{"acc": 1.0}, {}],
        "status": ["done", "error"],
        "error": [None, "Timeout: 3 s"],
    }
    batch = token_batch().with_batch(
        valid=torch.tensor([True, False]),
        raw_scores=torch.tensor([0.5, 0.0]),
        scores=torch.tensor([0.25, 0.0]),
        sampled_tokens=torch.tensor([2, 0]),
        trained_tokens=torch.tensor([1, 0]),
        response_length=torch.tensor([3, 1]),
        weight_version=torch.tensor([4, 4]),
    )
    return batch.with_non_tensor(**{k: object_array(v) for k, v in texts.items()})


def test_a_sample_with_turns_says_how_long_it_waited():
    batch = text_batch()
    tokenizer = SimpleNamespace(tokenizer=OneLetter())
    assert "gen_seconds" not in samples.sample_records(tokenizer, batch)[0]
    waited = batch.with_batch(
        gen_seconds=torch.tensor([0.5, 2.25]), tool_seconds=torch.tensor([1.5, 0.1])
    )
    first, second = samples.sample_records(tokenizer, waited)
    assert (first["gen_seconds"], first["tool_seconds"]) == (0.5, 1.5)
    assert (second["gen_seconds"], second["tool_seconds"]) == (2.25, 0.1)


def test_all_samples_as_parquet():
    """Every token of every row, whatever the limits of the JSON lines are."""
    content = samples.as_parquet(SimpleNamespace(tokenizer=OneLetter()), text_batch())
    first, second = pq.read_table(io.BytesIO(content)).to_pylist()
    assert (first["prompt"], first["response"], first["score"], first["raw_score"]) == (
        "[",
        "ab",
        0.25,
        0.5,
    )
    assert first["ground_truth"] == "4"
    assert json.loads(second["ground_truth"]) == {"target": ["4", "four"]}
    assert json.loads(first["reward_parts"]) == {"acc": 1.0}
    assert second["score"] is None and second["error"] == "Timeout: 3 s"
    assert second["response"] == "c\\ud800"
    assert first["response_ids"] == [5, 6, 7] and second["response_ids"] == [8]
    assert first["response_mask"] == [1, 0, 1] and first["loss_mask"] == [1, 0, 0]
    assert first["rollout_log_probs"] == pytest.approx([-0.1234567, 0, -2])
    assert first["advantages"] == [-0.5] * 3 and second["advantages"] == [1.25]
    assert "old_log_probs" not in first


def test_a_row_whose_tokens_are_lost_keeps_its_other_columns():
    batch = text_batch()
    batch.non_tensor_batch["response_ids"][0] = None
    content = samples.as_parquet(SimpleNamespace(tokenizer=OneLetter()), batch)
    lost, kept = pq.read_table(io.BytesIO(content)).to_pylist()
    assert lost["response_ids"] is None and kept["response_ids"] == [8]
    assert lost["response_mask"] == [1, 0, 1] and lost["loss_mask"] == [1, 0, 0]
    assert lost["rollout_log_probs"] == pytest.approx([-0.1234567, 0, -2])
    assert lost["advantages"] is None  # one number for all tokens, whose count is lost
    assert kept["advantages"] == [1.25]


def test_details_are_kept_for_so_many_tokens_of_a_step(monkeypatch):
    monkeypatch.setattr(samples, "TOKENS_PER_STEP", 3)
    records: list[dict] = [{}, {}]
    add_tokens(records, token_batch(), OneLetter())
    assert ["tokens" in record for record in records] == [True, False]


def test_numbers_that_are_lost_with_their_worker_are_left_out():
    """The actor of a lost node had them; the run still has to name the loss."""
    records: list[dict] = [{}, {}]
    batch = token_batch()
    complete: list[dict] = [{}, {}]
    add_tokens(complete, batch, OneLetter())
    for name in ("response_mask", "rollout_log_probs"):
        batch.non_tensor_batch[name][0] = None
    add_tokens(records, batch, OneLetter())
    lost = {"sampled", "rollout_log_prob"}
    assert complete[0]["tokens"].keys() - records[0]["tokens"].keys() == lost
    assert records[1] == complete[1]


def test_a_sample_of_a_dead_engine_keeps_its_prompt():
    """The engine had prompt and response; the run has the data set's row and the score."""
    batch = text_batch()
    for name in ("prompt_ids", "text"):
        batch.non_tensor_batch[name][0] = None  # as `columns.fetch` returns what is lost
    lost, kept = samples.sample_records(SimpleNamespace(tokenizer=OneLetter()), batch)
    assert (lost["prompt"], lost["response"], lost["score"]) == ("2+2=", "", 0.25)
    assert lost["error"].startswith("the response is lost with a rollout engine that died")
    assert (kept["prompt"], kept["error"]) == ("\\", "Timeout: 3 s")


def test_a_long_response_does_not_take_the_details_of_the_others(monkeypatch):
    monkeypatch.setattr(samples, "TOKENS_PER_STEP", 2)
    records: list[dict] = [{}, {}]
    add_tokens(records, token_batch(), OneLetter())
    assert ["tokens" in record for record in records] == [False, True]


def test_tokens_that_are_no_text_cost_no_more_than_others(byte_tokenizer):
    """A broken model repeats the first byte of a character."""

    class Counting:
        decoded = 0

        def decode(self, ids: list[int]) -> str:
            self.decoded += len(ids)
            return byte_tokenizer.decode(ids)

    tokenizer = Counting()
    ids = byte_tokenizer.encode("é", add_special_tokens=False)[:1] * 1000
    assert len(token_texts(tokenizer, ids)) == 1000
    assert tokenizer.decoded < 50 * 1000


def test_choices_spread_over_the_scores():
    """Of many rows, a third is from each end."""
    scores = [float(row) for row in range(300)]
    uids = [str(row) for row in range(300)]
    chosen = choose_rows(scores, ["a"] * 300, uids, 30, seed="x")
    assert Counter(reason for _, reason in chosen) == {"worst": 10, "best": 10, "random": 10}
    assert {row for row, reason in chosen if reason == "worst"} <= set(range(12))
    assert {row for row, reason in chosen if reason == "best"} <= set(range(288, 300))
