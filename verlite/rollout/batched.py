"""One background thread that drives a batching generator, seen from outside as an asynchronous `Engine`.

A `Core` only knows how to advance everything it holds by one step. All its methods run on one thread, so that requests,
weight syncs and sleeping never overlap, and a Core needs no lock.
"""

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verlite.rollout.types import Completion, EngineError, Sampling, WeightSyncError

Waiter = asyncio.Future[Completion]


class Finished(NamedTuple):
    """A request that a step finished; fields as in Completion."""

    request_id: int
    ids: list[int]
    log_probs: list[float]
    finish_reason: str


class Core(Protocol):
    """A synchronous generator of many sequences at once."""

    tokenizer: PreTrainedTokenizerBase
    max_model_len: int
    vocab_size: int

    def add(self, request_id: int, prompt_ids: list[int], sampling: Sampling) -> None:
        """Queue a request, whose prompt was checked."""
        ...

    def abort(self, request_id: int) -> None:
        """Forget a request, if it is still there."""
        ...

    def pending(self) -> int:
        """Requests queued or running."""
        ...

    def step(self) -> list[Finished]:
        """Advance all running sequences, by one token or by a prompt."""
        ...

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights. Raises when one is missing, unknown or of another shape."""
        ...

    def reset_caches(self) -> None:
        """Forget everything computed with earlier weights."""
        ...

    def fingerprint(self) -> int:
        """Checksum of the weights that steps compute with."""
        ...

    def sleep(self) -> set[str]:
        """Free device memory; which of "weights" and "kv_cache" are gone."""
        ...

    def wake(self, tag: str) -> None:
        """Allocate again what sleep freed."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class BatchedEngine:
    """An `Engine` (see types.py) around a Core that `make_core` builds on the engine's own thread."""

    def __init__(
        self,
        make_core: Callable[[], Core],
        *,
        has_weights: bool = False,
        request_timeout_s: float = 1800.0,
    ):
        self.version = 0 if has_weights else -1
        self._timeout = request_timeout_s
        self._refusal = None if has_weights else "it has no weights yet: load_weights() comes first"
        self._asleep: set[str] = set()
        self._death: EngineError | None = None
        self._fingerprint: int | None = None
        self._jobs: queue.SimpleQueue[Callable[[Core], None]] = queue.SimpleQueue()
        self._starting: queue.SimpleQueue[Callable[[Core], None]] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._waiting: dict[int, Waiter] = {}
        self._request_ids = itertools.count()
        self._last_step = time.monotonic()
        self._closing = False
        started: Future[PreTrainedTokenizerBase] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make_core, started), name="verlite-generate", daemon=True
        )
        self._thread.start()
        self.tokenizer = started.result()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue a prompt; see `Engine.generate`.

        Requests of tasks that start together, or that the same step has woken, enter the core together, however slow the machine: which
        rows share a step decides the last bits of their numbers, and equal runs must have equal numbers.
        """
        self._check_ready()
        request_id, ids = next(self._request_ids), [int(i) for i in prompt_ids]
        waiter: Waiter = asyncio.get_running_loop().create_future()

        def add(core: Core) -> None:
            if waiter.cancelled():
                return
            try:
                self._check_ready()
                _check_prompt(ids, core)
                core.add(request_id, ids, sampling)
            except Exception as error:  # belongs to this request alone
                _answer([(waiter, error)])
            else:
                self._waiting[request_id] = waiter

        def abort(core: Core) -> None:
            self._waiting.pop(request_id, None)
            core.abort(request_id)

        self._starting.put(add)
        began = time.monotonic()
        try:
            await asyncio.sleep(
                0
            )  # until every task that was started or woken with this one has come here
            self._send_starting()
            if self._death is not None:  # the thread may have ended without seeing these jobs
                raise self._death
            while True:  # long queues are fine; an engine that finishes no step is not
                silent = time.monotonic() - max(began, self._last_step)
                if silent >= self._timeout:
                    raise EngineError(
                        f"the engine hangs: no generation step ended for {silent:.1f} s (rollout.request_timeout_s={self._timeout:g}) "
                        f"while {len(self._waiting)} requests waited"
                    )
                done, _ = await asyncio.wait([waiter], timeout=self._timeout - silent)
                if done:
                    return waiter.result()
        finally:
            if not waiter.done():
                waiter.cancel()
                self._jobs.put(abort)

    def _send_starting(self) -> None:
        together: list[Callable[[Core], None]] = []

        def add_all(core: Core) -> None:
            for add in together:
                add(core)

        with self._sending:  # whoever finds nothing to send must know that his own was sent
            while not self._starting.empty():
                together.append(self._starting.get())
            if together:
                self._jobs.put(add_all)

    def load_weights(
        self, named: Iterable[tuple[str, Tensor]], version: int, expected_fingerprint: int
    ) -> None:
        """Replace all weights, all or nothing; see `Engine.load_weights`. `named` is consumed on the engine's thread."""

        def load(core: Core) -> None:
            if core.pending():
                raise WeightSyncError(
                    f"{core.pending()} requests are still running; a sequence must not mix weight versions"
                )
            if "weights" in self._asleep:
                raise WeightSyncError(
                    'the engine sleeps: wake("weights") comes before load_weights()'
                )
            self._refusal = f"the sync to weight version {version} did not complete; sync again"
            try:
                core.load(named)
                core.reset_caches()
                found = core.fingerprint()
            except Exception as error:
                self._refusal = f"the sync to weight version {version} failed ({type(error).__name__}: {error}); sync again"
                raise WeightSyncError(
                    f"sync to weight version {version} failed: {type(error).__name__}: {error}. The engine stays at version "
                    f"{self.version} and refuses to generate until a sync succeeds"
                ) from error
            before, self._fingerprint = self._fingerprint, found
            if found != expected_fingerprint:
                stale = (
                    ", which are the weights from before the sync: loading had no effect"
                    if found == before
                    else ""
                )
                self._refusal = f"its weights after the sync to version {version} are not the trainer's; sync again"
                raise WeightSyncError(
                    f"sync to weight version {version}: the engine holds weights with fingerprint {found:08x}{stale}; the trainer's "
                    f"is {expected_fingerprint:08x}. The engine stays at version {self.version} and refuses to generate until a "
                    "sync succeeds"
                )
            self.version, self._refusal = version, None

        self._call(load)

    def fingerprint(self) -> int:
        """Checksum of the weights the engine computes with, taken now."""
        return self._call(lambda core: core.fingerprint())

    def sleep(self) -> None:
        """Free device memory; see `Engine.sleep`. Raises RuntimeError while requests run."""

        def sleep(core: Core) -> None:
            if core.pending():
                raise RuntimeError(
                    f"the engine cannot sleep: {core.pending()} requests are running"
                )
            self._asleep |= core.sleep()
            if "weights" in self._asleep:
                self._refusal = "sleep() freed its weights; wake it and sync again"

        self._call(sleep)

    def wake(self, tag: str) -> None:
        """Take back "weights" or "kv_cache"; nothing to do when they were not freed."""
        if tag not in ("weights", "kv_cache"):
            raise ValueError(f'wake("weights") or wake("kv_cache"), not wake({tag!r})')

        def wake(core: Core) -> None:
            if tag in self._asleep:
                core.wake(tag)
                self._asleep.remove(tag)

        self._call(wake)

    def close(self) -> None:
        """Stop the thread; running requests raise EngineError. May be called twice."""
        self._closing = True
        self._jobs.put(lambda core: None)  # wakes a thread that waits for work
        self._thread.join()

    def _check_ready(self) -> None:
        if self._death is not None:
            raise self._death
        if self._asleep or self._refusal:
            reason = self._refusal or f'it sleeps; wake("{min(self._asleep)}") comes first'
            raise EngineError(
                f"the engine (weight version {self.version}) refuses to generate: {reason}"
            )

    def _call(self, job: Callable[[Core], Any]) -> Any:
        """Run `job` on the engine's thread between two steps; its result or exception."""
        if self._death is not None:
            raise self._death
        future: Future[Any] = Future()

        def run(core: Core) -> None:
            try:
                if self._death is not None:
                    raise self._death
                future.set_result(job(core))
            except Exception as error:
                future.set_exception(error)

        self._jobs.put(run)
        while True:
            try:
                return future.result(timeout=1.0)
            except TimeoutError:
                if not future.done() and self._death is not None:
                    raise self._death from None

    def _run(
        self, make_core: Callable[[], Core], started: "Future[PreTrainedTokenizerBase]"
    ) -> None:
        try:
            core = make_core()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(core.tokenizer)
        try:
            while not self._closing:
                self._take_jobs(core)
                if core.pending():
                    self._resolve(core.step())
                    self._last_step = time.monotonic()
            self._death = EngineError("the engine was closed")
        except (
            BaseException
        ) as error:  # nothing may end this thread without a word to those who wait
            self._death = EngineError(
                f"the engine died in a generation step: {type(error).__name__}: {error}"
            )
            self._death.__cause__ = error
        while not self._jobs.empty():
            self._jobs.get()(core)
        _answer([(waiter, self._death) for waiter in self._waiting.values()])
        self._waiting.clear()
        core.close()

    def _take_jobs(self, core: Core) -> None:
        """Run what was asked for. With nothing to generate, wait for a job."""
        if not core.pending():
            self._jobs.get()(core)
        while not self._jobs.empty():
            self._jobs.get()(core)

    def _resolve(self, step: list[Finished]) -> None:
        done = [(self._waiting.pop(one.request_id, None), one) for one in step]
        _answer(
            [
                (waiter, Completion(*one[1:], self.version))
                for waiter, one in done
                if waiter is not None
            ]
        )


def _answer(answers: list[tuple[Waiter, Completion | Exception]]) -> None:
    """Wake those who wait in other threads: all of one event loop in the same turn of it."""

    def wake(mine: list[tuple[Waiter, Completion | Exception]]) -> None:
        for waiter, answer in mine:
            if waiter.done():  # it was cancelled
                continue
            if isinstance(answer, Exception):
                waiter.set_exception(answer)
            else:
                waiter.set_result(answer)

    for loop in {waiter.get_loop(): None for waiter, _ in answers}:
        with suppress(RuntimeError):  # the loop was closed, and with it all who waited
            loop.call_soon_threadsafe(
                wake, [(waiter, answer) for waiter, answer in answers if waiter.get_loop() is loop]
            )


def _check_prompt(ids: list[int], core: Core) -> None:
    if not ids:
        raise ValueError("the prompt is empty")
    if len(ids) >= core.max_model_len:
        raise ValueError(
            f"the prompt has {len(ids)} tokens; with max_model_len={core.max_model_len} there is no room to answer"
        )
    if min(ids) < 0 or max(ids) >= core.vocab_size:
        raise ValueError(
            f"the prompt has token {min(ids) if min(ids) < 0 else max(ids)}; the model's ids are 0 to {core.vocab_size - 1}"
        )
