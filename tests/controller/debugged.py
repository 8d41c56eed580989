"""A worker that stops at breakpoints."""

import subprocess
import sys
import threading

from verlite.controller.dispatch import register
from verlite.controller.worker import Worker


class Debugged(Worker):
    """Stops inside an update between two collectives, in a thread, and at a failure."""

    def __init__(self) -> None:
        self.init_distributed(timeout_s=2.0)

    @register("all")
    def update(self, stop_on: int | None) -> float:
        """Return a loss after one gradient step of a model that all ranks share."""
        import torch
        import torch.distributed as dist

        weights = torch.arange(6.0).reshape(2, 3).requires_grad_()
        inputs = torch.full((4, 2), self.rank + 1.0)
        loss = (inputs @ weights).square().mean()
        loss.backward()
        gradient = weights.grad
        if self.rank == stop_on:
            breakpoint()
        dist.all_reduce(gradient)
        with torch.no_grad():
            stepped = weights - 0.01 * gradient
        return float((inputs @ stepped).square().mean())

    @register("all")
    def in_thread(self) -> int:
        """Stop on rank 0 in a thread, as a reward function does."""
        found = []

        def score() -> None:
            secret = 41
            breakpoint()
            found.append(secret)

        if self.rank == 0:
            thread = threading.Thread(target=score)
            thread.start()
            thread.join()
        return sum(found)

    @register("all")
    def refused(self) -> str:
        """Call breakpoint() in a child process; return the last line of its output."""
        code = "def child():\n    breakpoint()\nchild()"
        child = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        return child.stderr.splitlines()[-1]

    @register("all")
    def fail(self) -> None:
        """Fail on rank 1, while rank 0 waits for it."""
        import torch
        import torch.distributed as dist

        if self.rank == 1:
            wrong = {"answer": 42}
            raise KeyError(f"not in {sorted(wrong)}")
        dist.all_reduce(torch.zeros(1))
