"""A pool of reward processes: calls go out in chunks, results come back one by one, and what hangs or dies is replaced."""

import json
import os
import pickle
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from verlite.rewards.child import Call, FunctionError
from verlite.rewards.result import RewardResult

MAX_PROCESSES = 8
SYNC_CHUNK = 16  # calls per message: enough to hide the pipe, few enough to keep all processes busy to the end
ASYNC_CHUNK = 128  # calls in flight at once in one process
LOAD_RETRIES = (
    3  # processes in a row that may die while they load a function that has loaded before
)
ASYNC_GRACE_S = 2.0  # asynchronous calls end themselves at their limit; one that blocks its event loop is killed this much later


class Pool:
    """Processes that call one function, started when first needed.

    A call that takes longer than `call_limit_s`, or whose process dies, becomes a result with error Timeout or Died, and
    its process is replaced. When several calls were under way in that process, as asynchronous ones are, each is tried once
    more, alone.
    """

    def __init__(
        self,
        target: str,
        argument_names: Sequence[str],
        call_limit_s: float,
        size: int | None = None,
        share: int = 1,
        folder: str | None = None,
    ) -> None:
        self.target, self.argument_names, self.call_limit_s, self.folder = (
            target,
            list(argument_names),
            call_limit_s,
            folder,
        )
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        self.size = size or min(max(1, cores // share), MAX_PROCESSES)
        self._children: list[_Child] = []
        self._load_retries = 0  # what has never loaded fails at once
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        # The kernel ends a child with the thread that started it, so that thread must live as long as the pool.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="reward-pool")

    def start(self, limit_s: float) -> None:
        """Load the function in one process. Raises FunctionError when that fails or takes longer than `limit_s`."""
        self.run([], limit_s)
        if not any(child.ready for child in self._children):
            raise FunctionError(f"{self.target} was not loaded within {limit_s:g} s")

    def run(self, calls: Sequence[dict[str, Any]], limit_s: float) -> list[RewardResult]:
        """One result per call's keyword arguments, in order, within `limit_s` (what is left then is a Timeout)."""
        with self._lock:
            return self._run(calls, time.monotonic() + limit_s)

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            for child in list(self._children):
                self._end(child)
            self._starter.shutdown()

    def _run(self, calls: Sequence[dict[str, Any]], deadline: float) -> list[RewardResult]:
        results: dict[int, RewardResult] = {}
        waiting, alone = deque(enumerate(calls)), deque[Call]()

        def give_up(child: _Child, error: str, text: str) -> None:
            self._end(child)
            under_way = child.started & child.unfinished.keys() or set(child.unfinished)
            waiting.extendleft(
                call
                for number, call in reversed(child.unfinished.items())
                if number not in under_way
            )
            if len(under_way) == 1:
                results[under_way.pop()] = RewardResult(None, error=error, traceback=text)
            else:  # one of several is guilty
                alone.extend(child.unfinished[number] for number in sorted(under_way))

        try:
            while len(results) < len(calls) or not (
                calls or any(child.ready for child in self._children)
            ):
                self._hand_out(waiting, alone)
                next_limit = min([deadline, *(child.deadline for child in self._children)])
                for key, _ in self._selector.select(max(0.0, next_limit - time.monotonic())):
                    child = key.data
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        self._end(child)
                        if not child.ready:
                            if not self._load_retries:
                                raise FunctionError(
                                    f"{self.target}: the reward process {child.cause_of_death()} while loading it"
                                )
                            self._load_retries -= 1
                        give_up(child, "Died", f"the reward process {child.cause_of_death()}")
                    for event in child.events(data):
                        self._take(child, event, results)
                now = time.monotonic()
                if now >= deadline:
                    self._end_busy()
                    break
                for child in [child for child in self._children if child.deadline <= now]:
                    give_up(
                        child,
                        "Timeout",
                        f"no score within {self.call_limit_s:g} s; its process was killed",
                    )
        except BaseException:
            self._end_busy()
            raise
        late = RewardResult(
            None,
            error="Timeout",
            traceback="the time for this step's rewards was over before this one was scored",
        )
        return [results.get(number, late) for number in range(len(calls))]

    def _hand_out(self, waiting: deque[Call], alone: deque[Call]) -> None:
        wanted = len(waiting) + len(alone) or int(not self._children)
        idle = sum(not child.unfinished for child in self._children)
        for _ in range(min(wanted - idle, self.size - len(self._children))):
            child = _Child(self._starter.submit(self._open).result())
            self._children.append(child)
            self._selector.register(child.output, selectors.EVENT_READ, child)
        for child in self._children:
            if not child.ready or child.unfinished or not (waiting or alone):
                continue
            share = min(
                ASYNC_CHUNK if child.concurrent else SYNC_CHUNK, -(-len(waiting) // self.size)
            )
            child.send(
                [alone.popleft()] if alone else [waiting.popleft() for _ in range(share)],
                self.call_limit_s,
            )

    def _take(
        self, child: "_Child", event: dict[str, Any], results: dict[int, RewardResult]
    ) -> None:
        match event:
            case {"failed": message}:
                raise FunctionError(message)
            case {"ready": _, "concurrent": concurrent}:
                child.ready, child.concurrent = True, concurrent
                self._load_retries = LOAD_RETRIES
            case {"start": number}:
                child.started.add(number)
                child.deadline = (
                    time.monotonic()
                    + self.call_limit_s
                    + (ASYNC_GRACE_S if child.concurrent else 0.0)
                )
            case {"done": number, **values}:
                results[number] = RewardResult(**values)
                del child.unfinished[number]
                if not child.unfinished:
                    child.deadline = float("inf")

    def _open(self) -> subprocess.Popen[bytes]:
        # The child gets our sys.path as it is: an environment variable would reach the programs that user code starts.
        start = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from verlite.rewards.child import main; main()"
        arguments = [
            self.target,
            json.dumps(self.argument_names),
            str(self.call_limit_s),
            str(os.getpid()),
        ]
        path = json.dumps([str(Path(entry or ".").resolve()) for entry in sys.path])
        return subprocess.Popen(
            [sys.executable, "-P", "-c", start, *arguments, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # several processes share the cores
            start_new_session=True,  # Ctrl-C is the trainer's to handle; and the group is killed as a whole
        )

    def _end_busy(self) -> None:
        """End the processes that work or load: nobody will read what they say."""
        for child in [child for child in self._children if child.unfinished or not child.ready]:
            self._end(child)

    def _end(self, child: "_Child") -> None:
        if child in self._children:
            self._children.remove(child)
            self._selector.unregister(child.output)
            child.kill()


class _Child:
    """What the pool knows of one process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None  # both are pipes
        self.process, self.input, self.output = process, process.stdin, process.stdout
        self.ready = self.concurrent = False
        self.unfinished: dict[int, Call] = {}
        self.started: set[int] = set()
        self.deadline = float("inf")
        self._rest = b""

    def send(self, chunk: list[Call], limit_s: float) -> None:
        self.unfinished, self.started = {call[0]: call for call in chunk}, set()
        self.deadline = (
            time.monotonic() + limit_s + ASYNC_GRACE_S
        )  # until the first call reports its start
        data = pickle.dumps(chunk)
        with suppress(
            BrokenPipeError
        ):  # it has died: its output ends too, and that is where this is handled
            self.input.write(struct.pack("<Q", len(data)) + data)
            self.input.flush()

    def events(self, data: bytes) -> list[dict[str, Any]]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with suppress(BrokenPipeError):  # what `send` could not deliver
            self.input.close()
        self.output.close()

    def cause_of_death(self) -> str:
        code = self.process.returncode
        if code >= 0:
            return f"ended itself with exit code {code}"
        return f"was killed by {signal.Signals(-code).name}" + (
            ", perhaps for lack of memory" if -code == signal.SIGKILL else ""
        )
