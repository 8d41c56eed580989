"""An hf engine that kills its own process at given points, for whole runs with rollout.name.

The environment variable MORTAL names a folder with one file for each death: "step-40" kills the
first process whose engine does its 40th generation step, "load-2" the first that is in the middle
of its second load of weights, and "sleep-3" the first that has been put to sleep three times. A
death removes its file, so it happens once; "step-40-always" stays.
"""

import os
import signal
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from verlite.rollout.batched import FinishedRequest
from verlite.rollout.engines.hf import HFCore
from verlite.rollout.types import EngineOptions


class Mortal(HFCore):
    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self.counts: Counter[str] = Counter()

    def step(self) -> list[FinishedRequest]:
        self.may_die("step")
        return super().step()

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        def half() -> Iterable[tuple[str, Tensor]]:
            for number, weight in enumerate(named):
                if number == 3:
                    self.may_die("load")
                yield weight

        super().load(half())

    def sleep(self) -> set[str]:
        freed = super().sleep()
        self.may_die("sleep")
        return freed

    def may_die(self, where: str) -> None:
        self.counts[where] += 1
        point = Path(os.environ["MORTAL"], f"{where}-{self.counts[where]}")
        if point.with_name(point.name + "-always").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            point.unlink()
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
