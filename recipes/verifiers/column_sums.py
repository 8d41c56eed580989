"""A taskset of verifiers as it could have been written for any trainer: written column addition.

It knows nothing of verlite. The answer is the work of `recipes/quickstart/make.py`: for 47+48 the
columns from right to left, each with its digit and its carry, "5190".
"""

import random

import verifiers.v1 as vf

HELD_OUT = 512


class SumsConfig(vf.TasksetConfig):
    held_out: bool = False
    """Whether the tasks are the sums held out, which the quickstart does not train on, either."""


class SumData(vf.TaskData):
    a: int
    b: int


def work(a: int, b: int) -> str:
    """Return the written addition of two two-digit numbers."""
    written, carry = "", 0
    for place in (1, 10):
        column = a // place % 10 + b // place % 10 + carry
        carry = column // 10
        written += f"{column % 10}{carry}"
    return written


class Sum(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "") == work(self.data.a, self.data.b))


class ColumnSums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        every = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        random.Random(0).shuffle(every)
        for a, b in every[:HELD_OUT] if self.config.held_out else every[HELD_OUT:]:
            yield Sum(SumData(prompt=f"{a}+{b}=", a=a, b=b), self.config.task)


__all__ = ["ColumnSums"]
