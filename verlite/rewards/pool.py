"""A pool of reward processes. A process that hangs or dies is killed and replaced."""

import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from verlite.breakpoints import REFUSE
from verlite.rewards.process import Call, FunctionError
from verlite.rewards.result import RewardResult

MAX_PROCESSES = 8
MAX_CONCURRENT_CALLS = 128
"""Calls of an asynchronous function that run at once in one process."""
LOAD_RETRIES = 3
"""Processes in a row that may die while they load a function that has loaded before."""
ASYNC_GRACE_S = 2.0
"""Asynchronous calls enforce their own limit. One that blocks the event loop is killed later."""


class Pool:
    """Processes that call one function. They are started when first needed.

    A call that takes longer than `call_limit_s` gets the error Timeout. A call whose process dies
    gets the error Died. If several asynchronous calls were running in that process, each of them is
    repeated alone, so that only the faulty one fails.
    """

    def __init__(
        self,
        target: str,
        argument_names: Sequence[str],
        call_limit_s: float,
        share: int = 1,
        folder: str | None = None,
        processes: int | None = None,
    ) -> None:
        """Configure the pool; no process starts yet.

        Args:
            target: the function, as `file.py:name` or `package.module:name`.
            argument_names: the keyword arguments of every call. A function that `takes_lists` gets
                OpenRLHF's in place of verl's.
            call_limit_s: seconds that one call may take.
            share: number of pools on this machine that divide its cores.
            folder: working directory of the processes; None for the current one.
            processes: how many; None for one per core of this pool's share.
        """
        self.target = target
        self.argument_names = list(argument_names)
        self.call_limit_s = call_limit_s
        self.folder = folder
        self.takes_lists: bool | None = None
        """Whether the function is OpenRLHF's. None: not loaded yet."""
        self.size = processes or min(max(1, _cores() // share), MAX_PROCESSES)
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._has_loaded = False
        self._lock = threading.Lock()
        self._job: _Job | None = None
        # The kernel ends a process together with the thread that started it. These threads live as
        # long as the pool.
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="reward-pool")

    def start(self, limit_s: float) -> None:
        """Load the function in one process.

        Raises:
            FunctionError: loading failed or took longer than `limit_s` seconds.
        """
        self.run([], limit_s)
        if not self._idle:
            raise FunctionError(f"{self.target} was not loaded within {limit_s:g} s")

    def run(self, calls: Sequence[dict[str, Any]], limit_s: float) -> list[RewardResult]:
        """Return one result per call's keyword arguments, in order.

        Calls without a result after `limit_s` seconds get the error Timeout.
        """
        with self._lock:
            self._job = job = _Job(calls, self.size, time.monotonic() + limit_s)
            workers = min(self.size, max(1, len(calls)))
            futures = [self._threads.submit(self._work, job) for _ in range(workers)]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                if not all(future.done() for future in futures):
                    self._cancel(job)
                    wait(futures)
            for future in futures:
                future.result()
        return job.in_order()

    def stop(self) -> None:
        """End the `run` in progress in another thread. Calls without a result get Timeout."""
        job = self._job
        if job is not None:
            self._cancel(job)

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            while self._idle:
                self._idle.pop().kill()
            self._threads.shutdown()

    def _cancel(self, job: "_Job") -> None:
        job.deadline = time.monotonic()
        for process in list(self._busy):
            process.signal_kill()  # wakes the thread that waits for it

    def _work(self, job: "_Job") -> None:
        """Score calls of the job in one process at a time, until none is left."""
        while job.has_work() or not (job.calls or self._idle):
            process = self._take_process(job)
            if process is None:
                return
            batch = job.take(MAX_CONCURRENT_CALLS if process.concurrent else 1)
            if not batch or self._score(process, batch, job):
                self._idle.append(process)
            else:
                process.kill()

    def _take_process(self, job: "_Job") -> "_Process | None":
        """Return an idle process, or a new one. None if the job ended while it was loading."""
        while self._idle:
            with suppress(IndexError):  # another thread may have taken the last one
                process = self._idle.pop()
                if process.is_alive():
                    return process
                process.kill()
        attempts = 1 + LOAD_RETRIES if self._has_loaded else 1
        for _ in range(attempts):
            process = self._open()
            self._busy.add(process)
            try:
                event = process.next_event(job.deadline)
            except TimeoutError:
                process.kill()
                return None
            finally:
                self._busy.discard(process)
            if event is not None and "failed" not in event:
                process.concurrent = event["concurrent"]
                self.takes_lists = event["takes_lists"]
                self._has_loaded = True
                return process
            process.kill()
            if job.is_over():
                return None
            if event is not None:
                raise FunctionError(event["failed"])
        cause = process.cause_of_death()
        raise FunctionError(f"{self.target}: the reward process {cause} while loading it")

    def _score(self, process: "_Process", batch: list[Call], job: "_Job") -> bool:
        """Run calls in a process and store their results. False if the process must be replaced."""
        unfinished = dict(batch)
        has_started = False
        grace_s = ASYNC_GRACE_S if process.concurrent else 0.0
        call_deadline = time.monotonic() + self.call_limit_s + grace_s
        self._busy.add(process)
        try:
            process.send(batch)
            while unfinished:
                event = process.next_event(min(call_deadline, job.deadline))
                if event is None:
                    process.kill()
                    reason = f"the reward process {process.cause_of_death()}"
                    job.fail(unfinished, has_started, "Died", reason)
                    return False
                if "start" in event:
                    has_started = True
                    continue
                number = event.pop("done")
                job.results[number] = RewardResult(**event)
                del unfinished[number]
        except TimeoutError:
            if not job.is_over():
                reason = f"no score within {self.call_limit_s:g} s; its process was killed"
                job.fail(unfinished, has_started, "Timeout", reason)
            return False
        finally:
            self._busy.discard(process)
        return True

    def _open(self) -> "_Process":
        # The process gets sys.path as an argument. An environment variable would also reach the
        # programs that user code starts.
        program = (
            "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
            "from verlite.rewards.process import main; main()"
        )
        arguments = [
            self.target,
            json.dumps(self.argument_names),
            str(self.call_limit_s),
            str(os.getpid()),
            json.dumps([str(Path(entry or ".").resolve()) for entry in sys.path]),
        ]
        return _Process(
            subprocess.Popen(
                [sys.executable, "-P", "-c", program, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=self.folder,
                # Several processes share the cores. None has a terminal for pdb.
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONBREAKPOINT": REFUSE},
                start_new_session=True,  # Ctrl-C is for the trainer; the group is killed as one
            )
        )


class _Job:
    """The calls of one `Pool.run` and their results so far."""

    def __init__(self, calls: Sequence[dict[str, Any]], size: int, deadline: float) -> None:
        self.calls = calls
        self.deadline = deadline
        self.results: dict[int, RewardResult] = {}
        self._waiting = deque(enumerate(calls))
        self._repeated: deque[Call] = deque()
        self._suspects: set[int] = set()
        self._share = -(-len(calls) // size)
        self._lock = threading.Lock()

    def is_over(self) -> bool:
        """Return whether the deadline has passed."""
        return time.monotonic() >= self.deadline

    def has_work(self) -> bool:
        """Return whether calls wait and may still start."""
        return bool(self._waiting or self._repeated) and not self.is_over()

    def take(self, most: int) -> list[Call]:
        """Remove and return the next calls, at most `most`. A repeated call comes alone."""
        with self._lock:
            if self._repeated:
                return [self._repeated.popleft()]
            count = min(most, self._share, len(self._waiting))
            return [self._waiting.popleft() for _ in range(count)]

    def fail(
        self, unfinished: dict[int, dict[str, Any]], has_started: bool, error: str, reason: str
    ) -> None:
        """Handle the calls of a process that died or hung.

        A call fails if it was the only one and had started, or if it was repeated before. Other
        calls are repeated once, each alone, because another call may be the cause, or the process
        may have died while it was idle.
        """
        is_cause = has_started and len(unfinished) == 1
        for number, arguments in sorted(unfinished.items()):
            if is_cause or number in self._suspects:
                self.results[number] = RewardResult(None, error=error, traceback=reason)
            else:
                self._suspects.add(number)
                self._repeated.append((number, arguments))

    def in_order(self) -> list[RewardResult]:
        """Return the results by call. A call without one ran out of the step's time."""
        late = RewardResult(
            None,
            error="Timeout",
            traceback="the time for this step's rewards was over before this one was scored",
        )
        return [self.results.get(number, late) for number in range(len(self.calls))]


class _Process:
    """A running reward process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None  # both are pipes
        self.concurrent = False
        self._process = process
        self._input = process.stdin
        self._output = process.stdout
        self._received = b""
        self._poll = select.poll()
        self._poll.register(self._output, select.POLLIN)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, batch: list[Call]) -> None:
        data = pickle.dumps(batch)
        with suppress(BrokenPipeError):  # it has died; `next_event` reports that
            self._input.write(struct.pack("<Q", len(data)) + data)
            self._input.flush()

    def next_event(self, deadline: float) -> dict[str, Any] | None:
        """Wait for the next event; None if the process ended. Raises TimeoutError."""
        while b"\n" not in self._received:
            left_s = max(0.0, deadline - time.monotonic())
            if not self._poll.poll(left_s * 1000):
                raise TimeoutError
            data = os.read(self._output.fileno(), 1 << 16)
            if not data:
                return None
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
        return event

    def signal_kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process and what it started, and free its pipes."""
        if self._output.closed:
            return
        self.signal_kill()
        self._process.wait()
        with suppress(BrokenPipeError):  # what `send` could not deliver
            self._input.close()
        self._output.close()

    def cause_of_death(self) -> str:
        code = self._process.returncode
        if code >= 0:
            return f"ended itself with exit code {code}"
        cause = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            cause += ", perhaps for lack of memory"
        return cause


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
