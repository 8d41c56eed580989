"""Publishing through several transports at once."""

import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from verlite.weights.transport import publish


class Sink:
    """Records what it is given; fails at bucket `broken`."""

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken
        self.calls: list[str] = []

    def add(self, bucket) -> None:
        if len(self.calls) == self.broken:
            raise OSError("no space left")
        self.calls.append("add")

    def finish(self) -> None:
        self.calls.append("finish")

    def abort(self, reason: str) -> None:
        self.calls.append("abort")


def weights(gathered: list[int], number: int = 6):
    """Yield weights of 16 bytes; each is gathered with the other ranks."""
    for i in range(number):
        gathered.append(i)
        yield f"w{i}", torch.full((4,), float(i))


def test_every_sink_gets_every_bucket() -> None:
    sinks = [Sink(), Sink()]
    assert publish(weights([]), sinks, 32) == 6 * 16
    assert [sink.calls for sink in sinks] == [["add"] * 3 + ["finish"]] * 2


def test_failed_sink_leaves_the_ranks_in_step() -> None:
    """A rank that stopped to gather would leave the others waiting, and its next sync would meet
    their collectives of this one."""
    gathered: list[int] = []
    sinks = [Sink(), Sink(broken=1)]
    with pytest.raises(OSError, match="no space left"):
        publish(weights(gathered), sinks, 32)
    assert gathered == list(range(6))
    assert sinks[0].calls == ["add", "add", "abort"] and sinks[1].calls == ["add", "abort"]


def test_the_first_error_is_raised_whatever_the_cleanup_does() -> None:
    gathered: list[int] = []
    sinks = [Sink(broken=1), Sink()]
    sinks[0].abort = lambda reason: 1 / 0

    def gathering():
        yield from weights(gathered)
        raise RuntimeError("another rank has failed")

    with pytest.raises(OSError, match="no space left"):
        publish(gathering(), sinks, 32)
    assert gathered == list(range(6)) and sinks[1].calls == ["add", "abort"]


def test_shutdown_does_not_wait_for_the_rest() -> None:
    gathered: list[int] = []
    sink = Sink()

    def interrupted():
        yield from weights(gathered, 2)
        raise SystemExit

    with pytest.raises(SystemExit):
        publish(interrupted(), [sink], 16)
    assert sink.calls[-1] == "abort"


def test_one_bucket_is_in_memory_beside_the_weight_that_is_gathered() -> None:
    made: list[weakref.ref[np.ndarray]] = []
    living = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(9):
            memory = np.zeros(4, dtype=np.float32)
            made.append(weakref.ref(memory))
            living.append(sum(one() is not None for one in made))
            yield str(number), torch.from_numpy(memory)
            del memory

    publish(weights(), [], 32)
    assert max(living) == 3  # two weights are a bucket
