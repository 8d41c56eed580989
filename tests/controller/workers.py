"""Worker classes for the tests. They import torch only where needed, to start quickly."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from verlite import progress
from verlite.controller.dispatch import register
from verlite.controller.worker import Worker

if TYPE_CHECKING:
    from verlite.protocol.data import DataProto


class Unpicklable(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.socket = socket.socket()


class Light(Worker):
    """Methods without batches; the process never imports torch."""

    def __init__(self, fail_on_rank: int | None = None) -> None:
        if self.rank == fail_on_rank:
            raise FileNotFoundError("no such model")
        print(f"{self.role} {self.rank} is running")

    @register("all")
    def spec(self) -> tuple[int, int, int, str]:
        return self.rank, self.world_size, self.local_rank, self.node_id

    @register("all")
    def environment(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    @register("all")
    def runtime_env(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_runtime_env_string())

    @register("all")
    def imported(self, module: str) -> bool:
        return module in sys.modules

    @register("rank_zero")
    def add(self, a: int, b: int = 0) -> int:
        return a + b

    @register("all")
    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    @register("all")
    def die_once(self, path: str) -> tuple[int, int]:
        """Rank 1 kills itself if the file exists, which it removes. Rank 0 answers later. Returns
        (process id, calls of this method in this process)."""
        self.calls = getattr(self, "calls", 0) + 1
        if self.rank == 0:
            time.sleep(2)
        elif os.path.exists(path):
            os.unlink(path)
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid(), self.calls

    @register("all")
    def child(self, own_session: bool = True) -> int:
        """Start a process, outside the worker's process group, as servers do; return its id."""
        return subprocess.Popen(["sleep", "1000"], start_new_session=own_session).pid

    @register("all")
    def fail(self, rank: int, how: str) -> None:
        """One rank fails. The others wait, as in a collective."""
        if self.rank != rank:
            time.sleep(1000)
        if how == "exception":
            raise ValueError("bad batch")
        if how == "unpicklable":
            raise Unpicklable("cannot travel")
        if how == "memory":
            raise MemoryError("cannot allocate")
        if how == "segfault":
            ctypes.string_at(0)
        if how == "exit":
            sys.exit(3)
        numbers = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}
        os.kill(os.getpid(), numbers[how])
        time.sleep(1000)

    @register("all")
    def lose(self, rank: int) -> None:
        """One rank dies, and the others notice before the driver does."""
        if self.rank != rank:
            raise RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:2345")
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    @register("all")
    def turns(self, count: int, seconds: float) -> None:
        """Make progress `count` times, with pauses of `seconds`."""
        for i in range(count):
            progress.tick(f"turn {i + 1} of {count}")
            time.sleep(seconds)

    @register("all")
    def hold_lock(self, seconds: int) -> None:
        """Run native code that does not release Python's lock, so that no thread can run."""
        ctypes.PyDLL(None).sleep(seconds)

    def not_registered(self) -> None: ...


class Echo(Worker):
    """Methods with batches and collectives."""

    @register("split")
    def double(self, data: "DataProto", *, plus: int = 0) -> "DataProto":
        """Return 2x + plus, and the rank that computed each row."""
        import torch

        ranks = torch.full((len(data),), self.rank)
        return data.with_batch(y=data.batch["x"] * 2 + plus, rank=ranks)

    @register("split")
    def samples(self, data: "DataProto", n: int) -> "DataProto":
        """Return n rows for each row."""
        import torch

        copies = data.repeat(n)
        return copies.with_batch(sample=torch.arange(n).repeat(len(data)))

    @register("split", keep_remote=("tokens", "text", "absent"))
    def produce(self, data: "DataProto") -> "DataProto":
        """For each row return x tokens, each equal to x, and the text "x!"."""
        import numpy as np

        from verlite.protocol.data import DataProto

        numbers = data.batch["x"][:, 0].tolist()
        columns = {
            "tokens": [np.full(x, x, dtype=np.int32) for x in numbers],
            "text": [f"{x}!" for x in numbers],
            "producer": [self.rank] * len(data),
        }
        return DataProto.from_dict({}, columns)

    @register("all", keep_remote=("tokens",))
    def produce_own(self) -> "DataProto":
        """Return `rank` rows, each with `rank` tokens."""
        from verlite.protocol.data import DataProto

        tokens = [[self.rank] * self.rank] * self.rank
        return DataProto.from_dict({}, {"tokens": tokens, "producer": [self.rank] * self.rank})

    @register("split")
    def consume(self, data: "DataProto") -> "DataProto":
        """Return the sum of each row's tokens, its text, and the rank that read it."""
        import torch

        from verlite.protocol.data import DataProto

        columns = data.non_tensor_batch
        sums = [int(tokens.sum()) for tokens in columns["tokens"]]
        return DataProto.from_dict(
            {"sum": torch.tensor(sums, dtype=torch.int64)},
            {"text_read": list(columns["text"]), "consumer": [self.rank] * len(data)},
        )

    @register("split", fetch=False)
    def consume_text(self, data: "DataProto") -> "DataProto":
        """Fetch the text only. Return it, and whether each row's tokens are still a reference."""
        from verlite.controller.columns import Ref, fetch
        from verlite.protocol.data import DataProto

        columns = fetch(data, ["text"]).non_tensor_batch
        is_ref = [isinstance(tokens, Ref) for tokens in columns["tokens"]]
        return DataProto.from_dict({}, {"text_read": list(columns["text"]), "is_ref": is_ref})

    @register("split")
    def lose_a_row(self, data: "DataProto") -> "DataProto":
        return data[1:]

    @register("split")
    def rows(self, data: "DataProto", extra: int) -> tuple[int, int, dict[str, object]]:
        return len(data), extra, data.meta_info

    @register("all")
    def total(self, data: "DataProto") -> float:
        return float(data.batch["x"].sum())

    @register("all")
    def threads(self) -> int:
        import torch

        return torch.get_num_threads()

    @register("all")
    def all_reduce(self, die_on: int | None = None) -> float:
        """Return the sum of rank + 1 over ranks. Rank `die_on` dies first."""
        import torch
        import torch.distributed as dist

        self.init_distributed()
        if self.rank == die_on:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        value = torch.tensor([self.rank + 1.0])
        dist.all_reduce(value)
        return value.item()

    @register("all")
    def all_reduce_without(self, rank: int) -> None:
        """All ranks but one wait for that one."""
        import torch
        import torch.distributed as dist

        self.init_distributed()
        if self.rank != rank:
            dist.all_reduce(torch.zeros(1))

    @register("all")
    def all_reduce_late(self, rank: int, seconds: float) -> None:
        """All ranks meet in a collective. One of them does something else for `seconds` first."""
        import torch
        import torch.distributed as dist

        self.init_distributed()
        if self.rank == rank:
            time.sleep(seconds)
        dist.all_reduce(torch.zeros(1))
