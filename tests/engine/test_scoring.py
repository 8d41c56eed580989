"""The model of the reference service on real processes, compared with transformers."""

import os
import signal
import time
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models import tiny_model
from verlite import threads
from verlite.engine import family
from verlite.engine.scoring import ScoringError, ScoringSettings, TokenScorer, _parts, _serve

pytestmark = pytest.mark.process


def test_sequences_are_divided_by_tokens():
    assert _parts([5, 1, 4, 2], 2) == [[0, 1], [2, 3]]
    assert _parts([], 2) == [[], []] and _parts([3], 2) == [[0], []]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def naive(path, ids, last, temperature):
    """Return log-probs of the last tokens, one sequence without padding at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = torch.tensor(np.array(ids, np.int64))
    with torch.no_grad():
        logits = model(tokens[None]).logits[0] / temperature
    log_probs = logits.double().log_softmax(-1)[:-1]
    return log_probs.gather(1, tokens[1:, None])[-last:, 0].numpy()


@pytest.fixture(scope="module")
def scorer(model):
    """Two processes that share the weights and 4 threads; passes of at most 64 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(threads.COUNT, "4")
        patch.setenv(threads.OURS, "4")
        made = TokenScorer(ScoringSettings(model, ranks=2, batch_tokens=64))
    yield made
    made.close()


def test_a_model_without_a_small_copy_is_warned_about(model, monkeypatch, caplog):
    monkeypatch.setattr(family, "small_config", lambda config, **options: None)
    caller, end = Pipe()
    caller.close()
    with pytest.raises(BrokenPipeError):
        _serve(0, ScoringSettings(model).resolved(), end)
    assert caplog.text.count("no small copy of a qwen2 model can be built") == 1


def test_ranks_divide_the_threads(scorer):
    for process in scorer._processes:
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        assert b"OMP_NUM_THREADS=2" in environment


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_transformers(scorer, model, temperature):
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, 128, rng.integers(2, 90)).astype(np.int32) for _ in range(11)]
    scored = [int(rng.integers(1, len(row))) for row in sequences]
    found = scorer.log_probs(sequences, scored, temperature)
    for ids, last, values in zip(sequences, scored, found, strict=True):
        np.testing.assert_allclose(values, naive(model, ids, last, temperature), atol=1e-5)


def test_one_sequence_leaves_a_rank_without_work(scorer, model):
    ids = np.array([5, 9, 7], np.int32)
    (values,) = scorer.log_probs([ids], [2], 1.0)
    np.testing.assert_allclose(values, naive(model, ids, 2, 1.0), atol=1e-5)


def test_facts_identify_the_weights(scorer, model, tmp_path):
    assert scorer.facts["vocab_size"] == 128 and scorer.facts["shape"]["num_hidden_layers"] == 2
    assert list(scorer.facts["fingerprints"]) == ["float32", "bfloat16", "float16"]
    assert scorer.identity.startswith("float32 float32:")
    other = TokenScorer(ScoringSettings(tiny_model(tmp_path, seed=1), model_dtype="bfloat16"))
    try:
        assert list(other.facts["fingerprints"]) == ["bfloat16"]
        different = other.facts["fingerprints"]["bfloat16"]
        assert different != scorer.facts["fingerprints"]["bfloat16"]
    finally:
        other.close()


def test_process_that_dies_is_noticed(model):
    one = TokenScorer(ScoringSettings(model))
    pid = one._processes[0].pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ScoringError, match="process 0 of the model .* has ended"):
        one.log_probs([np.array([1, 2], np.int32)], [1], 1.0)
    one.close()


def test_model_that_cannot_be_loaded_is_an_error(tmp_path, capfd):
    begin = time.monotonic()
    with pytest.raises(ScoringError, match="its error is above"):
        TokenScorer(ScoringSettings(str(tmp_path / "nowhere")))
    assert time.monotonic() - begin < 60
    assert "nowhere" in capfd.readouterr().err
