"""A pool of reward processes. A process that hangs or dies is killed and replaced."""

import fcntl
import json
import math
import os
import pickle
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from verlite.breakpoints import REFUSE
from verlite.keeper import descendants, kill_group, kill_kept
from verlite.masking import without_secrets
from verlite.own_process import absolute_path, cause_of
from verlite.rewards.process import Call, FunctionError
from verlite.rewards.result import MAX_PARTS, RewardResult
from verlite.threads import COUNT, cores
from verlite.threads import share as divide

MAX_PROCESSES = 8
MAX_CONCURRENT_CALLS = 128
"""Calls of an asynchronous function that run at once in one process."""
LOAD_RETRIES = 3
"""Processes in a row that may die while they load a function that has loaded before."""
ASYNC_GRACE_S = 2.0
"""Asynchronous calls enforce their own limit. One that blocks the event loop is killed later."""
MAX_EVENT_BYTES = 2 << 20
"""Longest line in the pipe of the results. `result.MAX_CHARACTERS` keeps results shorter."""
MIN_MEMORY_GB = 4.0
ALONE_S = 0.01
"""How long a run's calls are served by its own thread and one process, before others help."""
MAX_CHILDREN = 32
"""A process that has started more processes and left them behind is replaced between two runs."""
LOOK_S = 1.0
"""Shortest time between two looks for such processes: each reads the state of every process of the
machine."""
END_S = 1.0
"""How long to wait for the end of a process that has closed its pipe."""


class Pool:
    """Processes that call one function. They are started when first needed.

    A call that takes longer than `call_limit_s` gets the error Timeout. The calls of a process that
    dies are repeated once, each alone: something else may have killed it, or another asynchronous
    call of the same process. A call whose process dies again gets the error Died.
    """

    def __init__(
        self,
        target: str,
        argument_names: Sequence[str],
        call_limit_s: float,
        share: int = 1,
        folder: str | None = None,
        processes: int | None = None,
        memory_gb: float | None = None,
        secret_env_vars: Sequence[str] = (),
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
            memory_gb: limit of each process, in GiB; None for its share of half of the machine's
                memory, at least MIN_MEMORY_GB.
            secret_env_vars: variables that the processes get although their names look like those
                of secrets.
        """
        self.target = target
        self.argument_names = list(argument_names)
        self.call_limit_s = call_limit_s
        self.folder = folder
        self.takes_lists: bool | None = None
        """Whether the function is OpenRLHF's. None: not loaded yet."""
        self.size = processes or min(divide(cores(), share), MAX_PROCESSES)
        if memory_gb is None:
            memory_gb = max(MIN_MEMORY_GB, _memory_gb() / 2 / share / self.size)
        self._memory_bytes = int(memory_gb * (1 << 30))
        self._secret_env_vars = frozenset(secret_env_vars)
        self._looked_at = -math.inf
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._has_loaded = False
        self._lock = threading.Lock()
        self._job: _Job | None = None
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
            try:
                self._work(job)
                wait(job.helpers, return_when=FIRST_EXCEPTION)
            finally:
                if not all(helper.done() for helper in job.helpers):
                    self._cancel(job)
                    wait(job.helpers)
            for helper in job.helpers:
                helper.result()
            if time.monotonic() - self._looked_at >= LOOK_S:
                self._looked_at = time.monotonic()
                self._replace_parents()
        return job.in_order()

    def _replace_parents(self) -> None:
        """Kill idle processes with too many processes that calls left behind."""
        for process in list(self._idle):
            left = len(process.descendants()) - 1
            if left > MAX_CHILDREN:
                print(
                    f"{self.target} left {left} processes running; they are killed",
                    file=sys.stderr,
                )
                self._idle.remove(process)
                process.kill()

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

    def _help(self, job: "_Job") -> None:
        """Let other threads work on the job, with a process each."""
        if job.alone_until < math.inf:
            job.alone_until = math.inf
            count = min(self.size, len(job.calls)) - 1
            job.helpers += [self._threads.submit(self._work, job) for _ in range(count)]

    def _work(self, job: "_Job") -> None:
        """Score calls of the job in one process at a time, until none is left."""
        while job.has_work() or not (job.calls or self._idle):
            if not self._idle or time.monotonic() >= job.alone_until:
                self._help(job)
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
            # In a thread that lives as long as the pool, because the kernel ends a process together
            # with the thread that started it. One is free, because the run's own thread works too.
            process = self._threads.submit(self._open).result()
            self._busy.add(process)
            try:
                event = process.next_event(job.deadline)
            except TimeoutError:
                process.kill()
                return None
            except ValueError as error:
                event = {"failed": f"{self.target}: while loading it, {error}"}
            finally:
                self._busy.discard(process)
            if event is not None and "failed" not in event:
                process.concurrent = event["concurrent"]
                self.takes_lists = event["takes_lists"]
                self._has_loaded = True
                return process
            process.wait_end()
            process.kill()
            if job.is_over():
                return None
            if event is not None:
                raise FunctionError(self._with_hint(event["failed"]))
        cause = process.cause_of_death()
        raise FunctionError(f"{self.target}: the reward process {cause} while loading it")

    def _score(self, process: "_Process", batch: list[Call], job: "_Job") -> bool:
        """Run calls in a process and store their results. False if the process must be replaced."""
        unfinished = dict(batch)
        grace_s = ASYNC_GRACE_S if process.concurrent else 0.0
        call_deadline = time.monotonic() + self.call_limit_s + grace_s
        self._busy.add(process)
        try:
            process.send(batch, min(call_deadline, job.deadline))
            while unfinished:
                deadline = min(call_deadline, job.deadline)
                try:
                    event = process.next_event(min(deadline, job.alone_until))
                except TimeoutError:
                    if time.monotonic() >= deadline:
                        raise
                    self._help(job)
                    continue
                if event is None:
                    process.wait_end()
                    process.kill()
                    reason = f"the reward process {process.cause_of_death()}"
                    repeated = job.fail(unfinished, False, "Died", reason)
                    if repeated and not job.is_over():
                        print(
                            f"warning: {self.target}: {reason}; {repeated} unfinished calls are "
                            "repeated, each alone",
                            file=sys.stderr,
                        )
                    return False
                number, result = _read_result(event)
                if number not in unfinished:
                    raise ValueError(f"it answered call {number!r:.40}, which it was not given")
                if result.traceback:
                    result = replace(result, traceback=self._with_hint(result.traceback))
                job.results[number] = result
                del unfinished[number]
        except ValueError as error:
            is_read = process.has_read()
            job.fail(unfinished, is_read, "Died", f"the reward process was killed: {error}")
            return False
        except TimeoutError:
            if not job.is_over():
                reason = f"no score within {self.call_limit_s:g} s; its process was killed"
                job.fail(unfinished, process.has_read(), "Timeout", reason)
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
            str(self._memory_bytes),
            json.dumps(absolute_path()),
        ]
        return _Process(
            subprocess.Popen(
                [sys.executable, "-P", "-c", program, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=self.folder,
                # Several processes share the cores. None has a terminal for pdb.
                env=self._environment() | {COUNT: "1", "PYTHONBREAKPOINT": REFUSE},
                start_new_session=True,  # Ctrl-C is for the trainer; the group is killed as one
            )
        )

    def _with_hint(self, text: str) -> str:
        """Add the remedy to a message that names a hidden variable."""
        for name in os.environ.keys() - self._environment().keys():
            if name in text:
                return (
                    f"{text.rstrip()}\n{name} is hidden from reward functions, because its name "
                    "looks like that of a secret: add it to custom_reward_function.secret_env_vars"
                )
        return text

    def _environment(self) -> dict[str, str]:
        """Return this process's environment without secrets."""
        return without_secrets(os.environ, self._secret_env_vars)


class _Job:
    """The calls of one `Pool.run` and their results so far."""

    def __init__(self, calls: Sequence[dict[str, Any]], size: int, deadline: float) -> None:
        self.calls = calls
        self.deadline = deadline
        self.alone_until = time.monotonic() + ALONE_S  # inf: others help
        self.helpers: list[Future[None]] = []
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
        self, unfinished: dict[int, dict[str, Any]], is_at_fault: bool, error: str, reason: str
    ) -> int:
        """Handle the calls of a process that died, hung or wrote what is not a result.

        A call fails if it was the only one and is at fault, or if it was repeated before. Other
        calls are repeated once, each alone, because another call may be the cause, or something
        else has killed the process.

        Args:
            is_at_fault: whether a call of this process is known to be the cause.

        Returns:
            How many calls are repeated.
        """
        is_cause = is_at_fault and len(unfinished) == 1
        repeated = 0
        for number, arguments in sorted(unfinished.items()):
            if is_cause or number in self._suspects:
                self.results[number] = RewardResult(None, error=error, traceback=reason)
            else:
                self._suspects.add(number)
                self._repeated.append((number, arguments))
                repeated += 1
        return repeated

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
        os.set_blocking(self._input.fileno(), False)
        self._poll = select.poll()
        self._poll.register(self._output, select.POLLIN)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, batch: list[Call], deadline: float) -> None:
        """Send calls. Raises TimeoutError if the process does not read them."""
        data = pickle.dumps(batch)
        left = memoryview(struct.pack("<Q", len(data)) + data)
        poll = select.poll()
        poll.register(self._input, select.POLLOUT)
        with suppress(BrokenPipeError):  # it has died; `next_event` reports that
            while left:
                _wait(poll, deadline)
                left = left[os.write(self._input.fileno(), left) :]

    def has_read(self) -> bool:
        """Return whether the process has read, and so begun, all calls that it was sent."""
        unread = fcntl.ioctl(self._input, termios.FIONREAD, bytes(4))
        return not any(unread)

    def next_event(self, deadline: float) -> dict[str, Any] | None:
        """Wait for the next event; None if the process ended.

        Raises:
            TimeoutError: none came in time.
            ValueError: something else is in the pipe.
        """
        while b"\n" not in self._received:
            _wait(self._poll, deadline)
            data = os.read(self._output.fileno(), 1 << 20)
            if not data:
                return None
            self._received += data
            if len(self._received) > MAX_EVENT_BYTES and b"\n" not in self._received:
                raise ValueError("it wrote a line without end to the pipe of its results")
        line, _, self._received = self._received.partition(b"\n")
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise ValueError(f"it wrote {line!r:.80} to the pipe of its results")
        return event

    def descendants(self) -> list[int]:
        """Return the ids of the processes that this one and its children started."""
        return descendants(self._process.pid)

    def wait_end(self) -> None:
        """Give a process that has closed its pipe the time to end."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)

    def signal_kill(self) -> None:
        """Kill the process and all that it started; see `keeper.kill_kept`."""
        kill_kept(self._process.pid)

    def kill(self) -> None:
        """Kill the process and what it started, and free its pipes."""
        if self._output.closed:
            return
        self.signal_kill()
        self.wait_end()
        kill_group(self._process.pid)
        self._process.wait()
        with suppress(BrokenPipeError):  # what `send` could not deliver
            self._input.close()
        self._output.close()

    def cause_of_death(self) -> str:
        return cause_of(self._process.returncode)


def _wait(poll: "select.poll", deadline: float) -> None:
    """Wait until the pipe is ready. Raises TimeoutError."""
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _read_result(event: dict[str, Any]) -> tuple[Any, RewardResult]:
    """Return the number and the result of a finished call.

    Raises:
        ValueError: the event is not a result. User code can write to the pipe, too.
    """
    try:
        result = RewardResult(event["score"], event["parts"], event["error"], event["traceback"])
        scored = isinstance(result.score, float | int) and math.isfinite(result.score)
        if scored != (result.error is None) or (not scored and result.score is not None):
            raise ValueError
        if not all(isinstance(part, float | str) for part in result.parts.values()):
            raise ValueError
        if len(result.parts) > MAX_PARTS:
            raise ValueError
        if not all(isinstance(text, str | None) for text in (result.error, result.traceback)):
            raise ValueError
        return event["done"], result
    except (KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"it wrote {event!r:.80} to the pipe of its results") from error


def _memory_gb() -> float:
    """Return the memory of this machine in GiB, or of this process's group if that is less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no limit is the word max
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory / (1 << 30)
