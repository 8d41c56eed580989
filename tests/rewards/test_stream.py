"""Scoring during generation: batches, time limits and failures."""

import threading
import time

import pytest

from verlite.rewards.process import FunctionError
from verlite.rewards.result import RewardItem, RewardResult
from verlite.rewards.scorer import Stream


class Scorer:
    """A scorer of numbers that waits for permission before each batch."""

    def __init__(self):
        self.batches = []
        self.limits = []
        self.may = threading.Semaphore(0)

    def score(self, items, limit_s):
        self.may.acquire(timeout=60)
        self.batches.append([item.solution_str for item in items])
        self.limits.append(limit_s)
        if "broken" in self.batches[-1]:
            raise FunctionError("cannot be loaded")
        return [RewardResult(float(item.solution_str)) for item in items]


def item(text):
    return RewardItem("sums", text, None)


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_items_added_during_a_batch_form_the_next_batch():
    scorer = Scorer()
    with Stream(scorer, 30.0) as stream:
        stream.add("a", item("1"))
        until(lambda: stream._queue.empty())  # it is being scored
        stream.add("b", item("2"))
        stream.add("c", item("3"))
        scorer.may.release()
        until(lambda: stream._queue.empty() and len(scorer.batches) == 1)
        stream.add("d", item("4"))
        scorer.may.release(9)
        results = stream.results()
    assert {key: result.score for key, result in results.items()} == {
        "a": 1,
        "b": 2,
        "c": 3,
        "d": 4,
    }
    assert scorer.batches[:2] == [["1"], ["2", "3"]]


def test_timeout_counts_from_the_last_item():
    scorer = Scorer()
    with Stream(scorer, 30.0) as stream:
        stream.add("a", item("1"))
        until(lambda: stream._queue.empty())
        stream.add("b", item("2"))
        threading.Timer(0.3, scorer.may.release, (9,)).start()
        stream.results()
    assert scorer.limits[0] == 30 and 25 < scorer.limits[1] < 29.8


def test_stream_without_items_returns_no_results():
    with Stream(Scorer(), 30.0) as stream:
        stream._scorer.may.release()
        assert stream.results() == {}


def test_scorer_failure_is_raised_by_add_and_results():
    scorer = Scorer()
    scorer.may.release(9)
    with Stream(scorer, 30.0) as stream:
        stream.add("a", item("broken"))
        until(stream._scored.done)
        with pytest.raises(FunctionError, match="cannot be loaded"):
            stream.add("b", item("1"))
        with pytest.raises(FunctionError, match="cannot be loaded"):
            stream.results()


def test_failed_generation_leaves_no_thread():
    scorer = Scorer()
    with pytest.raises(KeyError), Stream(scorer, 30.0) as stream:
        stream.add("a", item("1"))
        raise KeyError
    scorer.may.release(9)
    until(lambda: not any(thread.name.startswith("rewards") for thread in threading.enumerate()))
