"""Ranks in child processes.

Starting them takes longer than most tests, so a module's tests share them. They do not outlive a
module, because idle ranks keep polling.
"""

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_S = 120


class Ranks:
    """A group of child processes.

    `call(function, *args)` runs a module-level function on each rank and returns their results,
    rank 0's first. gpus: each rank has a GPU of its own, and NCCL beside gloo.
    """

    def __init__(self, folder: Path, size: int = 2, gpus: bool = False):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["tests.engine.programs"]
        )  # so that torch and transformers are imported once for all ranks
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, size, str(folder / "rendezvous"), theirs, gpus),
                daemon=True,
            )
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        results = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(TIMEOUT_S):
                self.close()
                raise TimeoutError(
                    f"rank {rank} did not finish {function.__name__} in {TIMEOUT_S} s"
                )
            ok, value = pickle.loads(pipe.recv_bytes())
            if not ok:
                self.close()  # the others may wait for this one in a collective
                raise RuntimeError(f"rank {rank} failed in {function.__name__}:\n{value}")
            results.append(value)
        return results

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(rank: int, size: int, rendezvous: str, pipe: Connection, gpus: bool) -> None:
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpus else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the tests that used it are over
            return
        try:
            answer = (True, function(*args))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
