"""Scoring beside generation: what is scored together, how long it may take, and what a failure does."""

import threading
import time

import pytest

from verlite.rewards.process import FunctionError
from verlite.rewards.result import RewardItem, RewardResult
from verlite.rewards.scorer import Stream


class Scorer:
    """Scores a number by itself, once it may."""

    def __init__(self):
        self.batches, self.limits, self.may = [], [], threading.Semaphore(0)

    def score(self, items, limit_s):
        self.may.acquire(timeout=10)
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


def test_each_batch_is_what_has_come_since_the_one_before():
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


def test_what_is_left_at_the_end_has_the_time_of_one_step():
    """timeout_s counts from the last sample on, also for a batch that begins later than that."""
    scorer = Scorer()
    with Stream(scorer, 30.0) as stream:
        stream.add("a", item("1"))
        until(lambda: stream._queue.empty())
        stream.add("b", item("2"))
        threading.Timer(0.3, scorer.may.release, (9,)).start()
        stream.results()
    assert scorer.limits[0] == 30 and 25 < scorer.limits[1] < 29.8


def test_nothing_to_score():
    with Stream(Scorer(), 30.0) as stream:
        stream._scorer.may.release()
        assert stream.results() == {}


def test_a_scorer_that_fails_is_heard_of():
    scorer = Scorer()
    scorer.may.release(9)
    with Stream(scorer, 30.0) as stream:
        stream.add("a", item("broken"))
        until(stream._scored.done)
        with pytest.raises(FunctionError, match="cannot be loaded"):
            stream.add("b", item("1"))
        with pytest.raises(FunctionError, match="cannot be loaded"):
            stream.results()


def test_a_generation_that_fails_leaves_no_thread():
    scorer = Scorer()
    with pytest.raises(KeyError), Stream(scorer, 30.0) as stream:
        stream.add("a", item("1"))
        raise KeyError
    scorer.may.release(9)
    until(lambda: not any(thread.name.startswith("rewards") for thread in threading.enumerate()))
