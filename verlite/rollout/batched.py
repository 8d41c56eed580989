"""Asynchronous `Engine` around a synchronous, batching generator.

One background thread owns the generator (a `Core`). All methods of a Core run on that thread, so
requests, weight syncs and sleeping never overlap, and a Core needs no lock.
"""

import asyncio
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from verlite import progress
from verlite.rollout.types import (
    Completion,
    EngineDied,
    EngineError,
    EngineOptions,
    Load,
    Sampling,
    Spans,
    WeightSyncError,
    extend_spans,
)
from verlite.spec.catalog import ENGINES, resolve
from verlite.spec.roles import GenerationSpec, ModelSpec
from verlite.weights.ipc import BucketStream, error_line, read_trial
from verlite.weights.probe import Gap, Probe, gap

Waiter = asyncio.Future[Completion]

WAKE_TAGS = ("weights", "kv_cache")
_CALL_POLL_S = 1.0  # interval at which a blocked caller checks whether the engine died


class FinishedRequest(NamedTuple):
    """A request completed by a step, or what it has so far. The other fields are those of
    `Completion`."""

    request_id: int
    ids: list[int]
    log_probs: list[float]
    finish_reason: str


class Core(Protocol):
    """A synchronous generator that advances many sequences together."""

    tokenizer: PreTrainedTokenizerBase
    max_model_len: int
    vocab_size: int

    def add(
        self,
        request_id: int,
        prompt_ids: list[int],
        sampling: Sampling,
        so_far: Completion | None = None,
    ) -> None:
        """Queue a request with a validated prompt.

        so_far: its first tokens, with which it goes on. They count as its own: in
            sampling.max_tokens, `progress`, and what `step` returns.
        """
        ...

    def abort(self, request_id: int) -> None:
        """Drop a request. Unknown ids are ignored."""
        ...

    def pending(self) -> int:
        """Return the number of queued and running requests."""
        ...

    def step(self) -> list[FinishedRequest]:
        """Advance all running sequences by one token or by one prompt; return completed
        requests."""
        ...

    def progress(self) -> dict[int, int]:
        """Return {request: number of its tokens so far}; requests without tokens may be missing.

        What a later step returns was computed with the weights of that step.
        """
        ...

    def so_far(self) -> list[FinishedRequest]:
        """Return the tokens of all requests so far, with finish_reason "".

        Those that are complete have their reason. The next step returns them too.
        """
        ...

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights. Raises if a weight is missing, unknown or has another shape."""
        ...

    def reset_caches(self) -> None:
        """Drop what was computed with earlier weights.

        While requests run, their keys and values follow `GenerationSpec.kv_at_update`. fresh: they
        are computed again. salted: they stay, and no other request uses them. mixed: they stay.
        """
        ...

    def fingerprint(self) -> int:
        """Return the fingerprint of the weights that steps compute with."""
        ...

    def log_probs(self, ids: list[int]) -> list[float]:
        """Return the log-prob of each token but the first, at temperature 1 and without top-k and
        top-p. It must not change random numbers. If it advances running requests, those that
        complete are returned by the next step."""
        ...

    def sleep(self) -> set[str]:
        """Free device memory; return what was freed, a subset of {"weights", "kv_cache"}."""
        ...

    def wake(self, tag: str) -> None:
        """Reallocate what `sleep` freed."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class BatchedEngine:
    """An `Engine` (see types.py) around the Core that `make_core` builds on the engine's thread.

    Args:
        make_core: builds the Core. Its exceptions are raised by the constructor.
        has_weights: True if the Core starts with weights, which become version 0.
        swaps: whether weights may be loaded while requests run.
        request_timeout_s: seconds without a completed step after which a waiting request raises
            EngineDied.
        slots: how many requests a step generates at most.
    """

    def __init__(
        self,
        make_core: Callable[[], Core],
        *,
        has_weights: bool = False,
        swaps: bool = False,
        request_timeout_s: float = 1800.0,
        slots: float = math.inf,
    ):
        self.version = 0 if has_weights else -1
        self._version_before = self.version
        self._swaps, self._slots = swaps, slots
        self._awaits_probe = False
        self._timeout = request_timeout_s
        self._not_ready_reason: str | None = "it has no weights yet; call load_weights() first"
        if has_weights:
            self._not_ready_reason = None
        self._asleep: set[str] = set()
        self._fatal_error: EngineError | None = None
        self._fingerprint: int | None = None
        self._jobs: queue.SimpleQueue[Callable[[Core], None]] = queue.SimpleQueue()
        self._new_requests: queue.SimpleQueue[Callable[[Core], None]] = queue.SimpleQueue()
        self._submit_lock = threading.Lock()
        self._waiting: dict[int, Waiter] = {}
        self._spans: dict[int, Spans] = {}  # of tokens that running requests had at the last load
        self._names: dict[int, Any] = {}
        self._request_ids = itertools.count()
        self.last_step = time.monotonic()
        self._busy_s = self._sample_seconds = 0.0
        self._closing = False
        started: Future[PreTrainedTokenizerBase] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make_core, started), name="verlite-generate", daemon=True
        )
        self._thread.start()
        self.tokenizer = started.result()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        so_far: Completion | None = None,
        name: Any = None,
    ) -> Completion:
        """Generate a continuation; see `Engine.generate`.

        Requests issued in the same event-loop tick are submitted as one job, so batches are the
        same in every run. Batch composition affects the last bits of log-probs. A request that
        arrives during a weight sync waits for it.
        """
        request_id = next(self._request_ids)
        ids = [int(token) for token in prompt_ids]
        waiter: Waiter = asyncio.get_running_loop().create_future()

        def add(core: Core) -> None:
            if waiter.cancelled():
                return
            try:
                self._check_ready()
                _check_prompt(ids if so_far is None else ids + so_far.ids, core)
                # Without it a core of one's own that trainer.mode=sync alone uses has no so_far.
                core.add(request_id, ids, sampling, *(() if so_far is None else (so_far,)))
            except Exception as error:  # only this request fails
                _answer([(waiter, error)])
            else:
                self._waiting[request_id] = waiter
                self._names[request_id] = name
                if so_far is not None:
                    self._spans[request_id] = list(so_far.weight_versions)

        def abort(core: Core) -> None:
            self._forget(request_id)
            core.abort(request_id)

        self._new_requests.put(add)
        started_at = time.monotonic()
        try:
            # Let every task that was started or woken together with this one queue its request.
            await asyncio.sleep(0)
            self._submit_new_requests()
            if (
                self._fatal_error is not None
            ):  # the thread may have ended without running these jobs
                raise self._fatal_error
            await self._wait(waiter, started_at)
            return waiter.result()
        finally:
            if not waiter.done():
                waiter.cancel()
                self._jobs.put(abort)

    async def _wait(self, waiter: Waiter, started_at: float) -> None:
        """Wait for an answer. Raises EngineDied if the engine completes no step within the
        timeout.

        Time out only if the engine completes no step; queueing time does not count.
        """
        done: set[Waiter] = set()
        while not done:
            silence = time.monotonic() - max(started_at, self.last_step)
            if silence >= self._timeout:
                raise EngineDied(
                    f"the engine hangs: no generation step completed for {silence:.1f} s "
                    f"(rollout.request_timeout_s={self._timeout:g}) while "
                    f"{len(self._waiting)} requests waited"
                )
            done, _ = await asyncio.wait([waiter], timeout=self._timeout - silence)

    def _forget(self, request_id: int) -> tuple[Waiter | None, Spans]:
        """Forget a request. Return who waits for it, and the versions at the last load."""
        self._names.pop(request_id, None)
        return self._waiting.pop(request_id, None), self._spans.pop(request_id, [])

    def running(self) -> dict[Any, Completion]:
        """Return what running requests have so far; see `Engine.running`. Those that turn out to be
        complete are answered."""

        def look(core: Core) -> dict[Any, Completion]:
            self._note_versions(core)
            requests = core.so_far()
            self._resolve([one for one in requests if one.finish_reason])
            return {
                self._names[one.request_id]: Completion(
                    one.ids, one.log_probs, "", list(self._spans.get(one.request_id, []))
                )
                for one in requests
                if self._names.get(one.request_id) is not None
            }

        found: dict[Any, Completion] = self._call(look)
        return found

    def _submit_new_requests(self) -> None:
        """Send all queued requests to the engine's thread as one job."""
        additions: list[Callable[[Core], None]] = []

        def add_all(core: Core) -> None:
            for add in additions:
                add(core)

        # With the lock, an empty queue means that another caller has already sent our request.
        with self._submit_lock:
            while not self._new_requests.empty():
                additions.append(self._new_requests.get())
            if additions:
                self._jobs.put(add_all)

    def load_weights(
        self,
        named: Iterable[tuple[str, Tensor]],
        version: int,
        expected_fingerprint: int,
        is_probed: bool = False,
    ) -> None:
        """Replace all weights between two steps; see `Engine.load_weights`. `named` is consumed on
        the engine's thread."""

        def load(core: Core) -> None:
            self._load(core, named, version, expected_fingerprint)
            self._awaits_probe = is_probed

        self._call(load)

    def _load(
        self,
        core: Core,
        named: Iterable[tuple[str, Tensor]],
        version: int,
        expected_fingerprint: int,
    ) -> None:
        if core.pending() and not self._swaps:
            raise WeightSyncError(
                f"{core.pending()} requests are still running; "
                "a sequence must not mix weight versions"
            )
        if "weights" in self._asleep:
            raise WeightSyncError('the engine sleeps; call wake("weights") before load_weights()')
        self._not_ready_reason = (
            f"the sync to weight version {version} did not complete; sync again"
        )
        try:
            self._note_versions(core)
            core.load(named)
            core.reset_caches()
            found = core.fingerprint()
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            self._not_ready_reason = (
                f"the sync to weight version {version} failed ({cause}); sync again"
            )
            raise WeightSyncError(
                f"sync to weight version {version} failed: {cause}. {self._keeps_version()}"
            ) from error
        before = self._fingerprint
        self._fingerprint = found
        if found != expected_fingerprint:
            stale = ""
            if found == before:
                stale = ", the weights from before the sync: loading had no effect"
            self._not_ready_reason = (
                f"its weights after the sync to version {version} are not the trainer's; sync again"
            )
            raise WeightSyncError(
                f"sync to weight version {version}: the engine's weights have fingerprint "
                f"{found:08x}{stale}; the trainer's is {expected_fingerprint:08x}. "
                f"{self._keeps_version()}"
            )
        self._version_before = self.version
        self.version = version
        self._not_ready_reason = None
        self._moved(core)

    def _note_versions(self, core: Core) -> None:
        """Note that the current version sampled the newest tokens of running requests."""
        if core.pending():
            for request_id, count in core.progress().items():
                self._extend(self._spans.setdefault(request_id, []), count)

    def _extend(self, spans: Spans, count: int) -> None:
        """Note that the current version sampled the newest of `count` tokens."""
        extend_spans(spans, self.version, count - sum(tokens for _, tokens in spans))

    def check_log_probs(self, probe: Probe) -> Gap:
        """Score the probe's tokens with the weights just loaded; see `Engine.check_log_probs`."""

        def check(core: Core) -> Gap:
            self._check_ready()
            version = self.version
            found = gap(probe, core.log_probs(list(probe.ids)))
            if found.is_within(probe.limit):
                self._awaits_probe = False
                return found
            self._note_versions(core)
            self.version = self._version_before
            self._not_ready_reason = (
                f"its log-probs after the sync to version {version} are not the trainer's; "
                "sync again"
            )
            raise WeightSyncError(
                f"sync to weight version {version}: the engine has the trainer's weights, but "
                f"computes other log-probs with them: over {len(probe.log_probs)} tokens the "
                f"difference is {found}; the limits are {probe.limit:.1%} and twice that. A "
                "weight may be in the place of another, or transposed. If this is rounding, raise "
                "actor_rollout_ref.rollout.log_prob_gap_limit, to which the limit is "
                f"proportional. {self._keeps_version()}"
            )

        found: Gap = self._call(check)
        return found

    def _keeps_version(self) -> str:
        return (
            f"The engine stays at version {self.version} and refuses to generate "
            "until a sync succeeds"
        )

    def load(self) -> Load:
        """Return how much the engine has done."""
        return Load(time.monotonic(), self._busy_s, self._sample_seconds)

    def fingerprint(self) -> int:
        """Return the fingerprint of the weights the engine computes with, measured now."""
        return int(self._call(lambda core: core.fingerprint()))

    def read_trial(self, stream: BucketStream) -> str:
        """Read the trial of the transport ipc where weights would be read.

        Returns:
            Why that cannot be done; "" if it can.
        """
        # Only a core that reads weights in other processes has a method for it.
        try:
            return str(self._call(lambda core: getattr(core, "read_trial", read_trial)(stream)))
        except Exception as error:  # of the engine's processes: the run goes on without ipc
            return error_line(error)

    def sleep(self) -> None:
        """Free device memory; see `Engine.sleep`. Raises RuntimeError while requests run."""

        def sleep(core: Core) -> None:
            if core.pending():
                raise RuntimeError(
                    f"the engine cannot sleep: {core.pending()} requests are running"
                )
            if "weights" not in self._asleep:
                self._asleep |= core.sleep()
            if "weights" in self._asleep:
                self._not_ready_reason = "sleep() freed its weights; wake it and sync again"

        self._call(sleep)

    def wake(self, tag: str) -> None:
        """Reallocate "weights" or "kv_cache". Does nothing if that memory was not freed."""
        if tag not in WAKE_TAGS:
            raise ValueError(f"wake({tag!r}): the tag must be one of {', '.join(WAKE_TAGS)}")

        def wake(core: Core) -> None:
            if tag in self._asleep:
                core.wake(tag)
                self._asleep.remove(tag)

        self._call(wake)

    def close(self) -> None:
        """Stop the thread; running requests raise EngineError. May be called twice."""
        self._closing = True
        self._jobs.put(lambda core: None)  # wakes the thread if it waits for a job
        self._thread.join()

    def _check_ready(self) -> None:
        if self._fatal_error is not None:
            raise self._fatal_error
        reason = self._not_ready_reason
        if reason is None and self._asleep:
            reason = f'it sleeps; call wake("{min(self._asleep)}") first'
        if reason is not None:
            raise EngineError(
                f"the engine (weight version {self.version}) refuses to generate: {reason}"
            )

    def _call(self, job: Callable[[Core], Any]) -> Any:
        """Run `job` on the engine's thread between two steps; return its result or raise its
        exception."""
        if self._fatal_error is not None:
            raise self._fatal_error
        future: Future[Any] = Future()

        def run(core: Core) -> None:
            try:
                if self._fatal_error is not None:
                    raise self._fatal_error
                future.set_result(job(core))
            except Exception as error:
                future.set_exception(error)

        self._jobs.put(run)
        while True:
            try:
                return future.result(timeout=_CALL_POLL_S)
            except TimeoutError:
                if not future.done() and self._fatal_error is not None:
                    raise self._fatal_error from None

    def _run(
        self, make_core: Callable[[], Core], started: "Future[PreTrainedTokenizerBase]"
    ) -> None:
        """Body of the engine's thread."""
        try:
            core = make_core()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(core.tokenizer)
        try:
            while not self._closing:
                self._run_jobs(core)
                progress.here.requests = progress.here.pending = core.pending()
                if self._may_step(core):
                    began, running = time.monotonic(), min(core.pending(), self._slots)
                    finished = core.step()
                    seconds = time.monotonic() - began
                    self._busy_s += seconds
                    self._sample_seconds += running * seconds
                    self._resolve(finished)
                    self._moved(core)
            self._fatal_error = EngineError("the engine was closed")
        except BaseException as error:  # requests that wait must always receive an answer
            self._fatal_error = EngineDied(
                f"the engine died in a generation step: {type(error).__name__}: {error}"
            )
            self._fatal_error.__cause__ = error
        while not self._jobs.empty():
            self._jobs.get()(core)
        _answer([(waiter, self._fatal_error) for waiter in self._waiting.values()])
        self._waiting.clear()
        core.close()

    def _moved(self, core: Core) -> None:
        """Note that a step or a load has ended."""
        self.last_step = time.monotonic()
        progress.here.pending = core.pending()
        progress.here.steps += 1
        progress.tick()

    def _may_step(self, core: Core) -> bool:
        """Whether there are requests, and verified weights for them."""
        return core.pending() > 0 and self._not_ready_reason is None and not self._awaits_probe

    def _run_jobs(self, core: Core) -> None:
        """Run all queued jobs. If nothing can be generated, wait for a job first."""
        if not self._may_step(core):
            self._jobs.get()(core)
        while not self._jobs.empty():
            self._jobs.get()(core)

    def _resolve(self, step: list[FinishedRequest]) -> None:
        """Answer the requests that a step completed."""
        answers: list[tuple[Waiter, Completion | Exception]] = []
        for request in step:
            waiter, spans = self._forget(request.request_id)
            if waiter is not None:
                self._extend(spans, len(request.ids))
                completion = Completion(
                    request.ids, request.log_probs, request.finish_reason, spans
                )
                answers.append((waiter, completion))
        _answer(answers)


def _answer(answers: list[tuple[Waiter, Completion | Exception]]) -> None:
    """Resolve futures of other threads. All futures of one event loop are resolved in the same
    iteration of it."""

    def resolve(batch: list[tuple[Waiter, Completion | Exception]]) -> None:
        for waiter, answer in batch:
            if waiter.done():  # cancelled
                continue
            if isinstance(answer, Exception):
                waiter.set_exception(answer)
            else:
                waiter.set_result(answer)

    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Waiter, Completion | Exception]]] = {}
    for waiter, answer in answers:
        by_loop.setdefault(waiter.get_loop(), []).append((waiter, answer))
    for loop, batch in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed, so nothing waits there anymore
            loop.call_soon_threadsafe(resolve, batch)


def _check_prompt(ids: list[int], core: Core) -> None:
    if not ids:
        raise ValueError("the prompt is empty")
    if len(ids) >= core.max_model_len:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, but max_model_len={core.max_model_len} must leave "
            "at least one token for the response"
        )
    if min(ids) < 0 or max(ids) >= core.vocab_size:
        invalid = min(ids) if min(ids) < 0 else max(ids)
        raise ValueError(
            f"the prompt has token {invalid}; valid ids are 0 to {core.vocab_size - 1}"
        )


# Start an engine by its name

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def engine_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype of an engine's weights for rollout.dtype.

    "auto" means bfloat16 on a GPU and float32 on a CPU.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in _DTYPES:
        raise ValueError(f"rollout.dtype={dtype!r} must be one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def eos_ids(path: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every id that ends a sequence, by generation_config.json, the model's config or the
    tokenizer."""
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # the folder has no such file
        generation = GenerationConfig.from_model_config(config)
    found: set[int] = set()
    for ids in (
        generation.eos_token_id,
        getattr(config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return sorted(found)


def build_engine(
    name: str,
    model: ModelSpec,
    rollout: GenerationSpec,
    max_model_len: int,
    device: torch.device,
    seed: int,
    *,
    pretrained: bool = False,
) -> BatchedEngine:
    """Start a generation engine.

    Args:
        name: rollout.name: an entry of the catalog, or the user's own "package.module:name".
        model: the model to generate with.
        rollout: the engine's settings.
        max_model_len: maximum number of prompt and response tokens of one sequence.
        device: where the engine computes.
        seed: seed of requests that have none of their own.
        pretrained: start with the checkpoint's weights as version 0. Otherwise the engine refuses
            to generate until `load_weights`.

    Raises:
        ValueError: the name or a setting is not supported. Other exceptions of the engine's
            constructor are passed on.
    """
    make_core: Callable[[EngineOptions], Core] = resolve(name, ENGINES, "rollout.name")
    options = EngineOptions(
        model=model,
        rollout=rollout,
        dtype=engine_dtype(rollout.dtype, device),
        device=device,
        max_model_len=max_model_len,
        seed=seed,
        pretrained=pretrained,
    )
    return BatchedEngine(
        lambda: make_core(options),
        has_weights=pretrained,
        swaps=bool(rollout.kv_at_update),
        request_timeout_s=rollout.request_timeout_s,
        slots=rollout.max_num_seqs,
    )
