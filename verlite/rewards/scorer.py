"""Score responses with the scorer of each row's data source, or with the user's own function."""

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from verlite.http.client import Unavailable
from verlite.importing import names_a_file
from verlite.rewards.pool import Pool
from verlite.rewards.process import FunctionError, load, takes_lists
from verlite.rewards.remote import RemoteScorer, RemoteStream
from verlite.rewards.result import ONE_TURN, RewardItem, RewardResult, failure, result_of
from verlite.rewards.routing import (
    IN_PROCESS,
    UnknownDataSource,
    check_scales,
    rescaled,
    scale_of,
    scorer_of,
    unknown,
)
from verlite.spec.roles import ScorerSpec

BUILT_IN_LIMIT_S = 10.0
"""Time limit of one call of a built-in scorer. They need milliseconds; slower calls never end."""


class CheckedRow(Protocol):
    """The fields of a dataset row that `Scorer.self_check` reads."""

    @property
    def data_source(self) -> str: ...
    @property
    def ground_truth(self) -> Any: ...
    @property
    def extra_info(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class SelfCheck:
    """Scores of the ground-truth answers of the data."""

    checked: int
    """Number of ground-truth answers that were scored."""
    rejected: list[str] = field(default_factory=list)
    """One line for each answer that did not score above 0."""

    def warning(self) -> str | None:
        """Return a warning with up to three examples, or None if all answers scored above 0."""
        if not self.rejected:
            return None
        return (
            f"the reward function gives {len(self.rejected)} of {self.checked} ground-truth "
            'answers no score above 0, however they are written (plain, after "####", in '
            "\\boxed{}, in <answer> tags): is it the right function for this data? "
            "Examples: " + "; ".join(self.rejected[:3])
        )


class Scorer:
    """Score responses.

    If reward.remote.url is set, that service scores every item. If custom_reward_function.path is
    set, that function does: verl's compute_score, or OpenRLHF's reward_func with lists of one
    entry. Otherwise the built-in scorer of the item's data source does, and `reward.score_scale`
    sets its range. reward_kwargs are passed to either. User code and math-verify run in separate
    processes, unless `debug` is on.
    """

    def __init__(
        self,
        spec: ScorerSpec,
        share: int = 1,
        folder: str | None = None,
        debug: bool = False,
    ) -> None:
        """Configure the scorer; nothing is loaded yet.

        Args:
            spec: who scores, and within which limits.
            share: number of scorers on this machine that divide its cores.
            folder: working directory of the reward processes, if it exists.
            debug: run all functions in this process, without time limits, so that its debugger can
                stop in them.

        Raises:
            FunctionError: reward.score_scale has an unknown value.
            TokenError: the variable of reward.remote.token_env is not set.
        """
        self._remote = RemoteScorer(spec.remote) if spec.remote else None
        self._custom = f"{_place(spec.path)}:{spec.name}" if spec.path else None
        self._kwargs = dict(spec.reward_kwargs)
        self._secret_env_vars = spec.secret_env_vars
        self._spec = spec
        self._scales = check_scales(spec.score_scale)
        self._share = share
        self._folder = folder if folder and Path(folder).is_dir() else None
        self._debug = debug
        self._runner = asyncio.Runner()
        self._one_call = threading.Lock()
        self._argument_names = list({**RewardItem("", "", None).arguments(), **self._kwargs})
        self._functions: dict[str, Callable[..., Any]] = {}
        self._pools: dict[str, Pool] = {}

    def check_service(self) -> str | None:
        """Check the reward service, if there is one. Return a warning about some of its servers.

        Raises:
            FunctionError: no server answers.
        """
        try:
            return self._remote.check() if self._remote else None
        except Unavailable as error:
            raise FunctionError(str(error)) from error

    def check_signature(self, data_sources: Iterable[str] = ()) -> None:
        """Load the functions that will score these data sources.

        Nothing is loaded if a service scores.

        Raises:
            FunctionError: the file or function is missing, cannot be loaded, or does not accept
                the arguments.
            UnknownDataSource: a data source has no built-in scorer.
        """
        if self._remote:
            return
        if self._custom:
            place = self._custom.rpartition(":")[0]
            if names_a_file(place) and not (place.endswith(".py") and Path(place).is_file()):
                raise FunctionError(
                    f"custom_reward_function.path={place} is not a Python file that exists"
                )
        for target in self._by_target(data_sources):
            try:
                if self._debug or target in IN_PROCESS:
                    self._function(target)
                else:
                    self._pool(target).start(self._spec.timeout_s)
            except FunctionError as error:
                raise FunctionError(f"custom_reward_function: {error}") from error

    def score(
        self, items: Sequence[RewardItem], limit_s: float | None = None
    ) -> list[RewardResult]:
        """Return one result per item, in order, within `limit_s` seconds.

        The default limit is reward.timeout_s. A failed call is a result with an error class and a
        traceback.

        Raises:
            FunctionError: the function cannot be loaded.
            UnknownDataSource: an item's data source has no built-in scorer.
        """
        if not items:
            return []
        limit_s = self._spec.timeout_s if limit_s is None else limit_s
        if self._remote:
            with self._remote.stream(limit_s) as stream:
                for number, item in enumerate(items):
                    stream.add(number, item)
                return list(stream.results().values())
        deadline = time.monotonic() + limit_s
        results: dict[int, RewardResult] = {}
        by_target = self._by_target(item.data_source for item in items)
        for target, numbers in by_target.items():
            lists = target == self._custom and self._takes_lists(target)
            calls = [
                {**(item.list_arguments() if lists else item.arguments()), **self._kwargs}
                for item in (items[number] for number in numbers)
            ]
            if self._debug or target in IN_PROCESS:
                scored = [self._call(self._function(target), call) for call in calls]
            else:
                left_s = max(0.0, deadline - time.monotonic())
                scored = self._pool(target).run(calls, left_s)
            results.update(zip(numbers, scored, strict=True))
        return [self._rescaled(item, results[number]) for number, item in enumerate(items)]

    @property
    def needs_prompts(self) -> bool:
        """Whether items need `prompt` and `sequence`: for a service or OpenRLHF's function.

        Raises:
            FunctionError: the user's function cannot be loaded.
        """
        return bool(self._remote or (self._custom and self._takes_lists(self._custom)))

    def self_check(self, rows: Sequence[CheckedRow]) -> SelfCheck:
        """Score the rows' own ground truths, written in the usual ways. The best score counts.

        Rows without a ground truth are skipped.

        Raises:
            FunctionError: every call failed, so no response could be scored either.
        """
        rows = [row for row in rows if row.ground_truth is not None]
        answers = [
            [
                RewardItem(row.data_source, text, row.ground_truth, row.extra_info | ONE_TURN)
                for text in _answers(row)
            ]
            for row in rows
        ]
        scored: list[list[RewardResult]] = [[] for _ in rows]
        undecided = list(range(len(rows)))
        while undecided:
            results = self.score([answers[i][len(scored[i])] for i in undecided])
            for i, result in zip(undecided, results, strict=True):
                scored[i].append(result)
            undecided = [
                i
                for i in undecided
                if len(scored[i]) < len(answers[i]) and not _decides(scored[i][-1])
            ]
        if rows and all(result.error for results in scored for result in results):
            raise FunctionError(
                f"{self._named(rows[0].data_source)} fails on the data's own answers, in all "
                f"{len(rows)} rows that were tried, so it would fail on every response. "
                f"The first failure:\n{(scored[0][0].traceback or '').rstrip()}\n"
                "Correct it, or start without this check: reward.check_ground_truth=false"
            )
        rejected = [
            _rejection(items[0], results[0])
            for items, results in zip(answers, scored, strict=True)
            if not any((result.score or 0.0) > 0 for result in results)
        ]
        return SelfCheck(len(rows), rejected)

    def stream(self) -> "Stream | RemoteStream":
        """Return a stream that scores samples while others are still generated."""
        if self._remote:
            return self._remote.stream(self._spec.timeout_s)
        return Stream(self, self._spec.timeout_s)

    def close(self) -> None:
        """End all processes and connections."""
        if self._remote:
            self._remote.close()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        self._runner.close()

    def _named(self, data_source: str) -> str:
        """Describe what scores a data source, in terms of the configuration."""
        if not self._custom:
            return f"the built-in scorer of data source {data_source!r}"
        path, _, name = self._custom.rpartition(":")
        return f"custom_reward_function.path={path}: {name}"

    def _by_target(self, data_sources: Iterable[str]) -> dict[str, list[int]]:
        """Return, for each function, the positions of the data sources that it scores."""
        targets: dict[str, list[int]] = {self._custom: []} if self._custom else {}
        missing: dict[str, None] = {}
        for number, source in enumerate(data_sources):
            try:
                targets.setdefault(self._custom or scorer_of(source), []).append(number)
            except UnknownDataSource:
                missing[source] = None
        if missing:
            raise unknown(missing)
        return targets

    def _function(self, target: str) -> Callable[..., Any]:
        if target not in self._functions:
            self._functions[target] = load(target, self._argument_names)
        return self._functions[target]

    def _takes_lists(self, target: str) -> bool:
        """Return whether the user's function is OpenRLHF's. Loads it if it is not loaded."""
        if self._debug:
            return takes_lists(self._function(target))
        pool = self._pool(target)
        if pool.takes_lists is None:
            pool.start(self._spec.timeout_s)
        return bool(pool.takes_lists)

    def _call(self, function: Callable[..., Any], arguments: dict[str, Any]) -> RewardResult:
        try:
            with self._one_call:  # streams of validation and of background samples are two threads
                value = function(**arguments)
                if inspect.isawaitable(value):  # with `debug`: no built-in function is
                    value = self._runner.run(_wait_for(value))
            return result_of(value)
        except Exception as error:  # such as a ground truth that is not a number
            return failure(error)

    def _pool(self, target: str) -> Pool:
        if target not in self._pools:
            limit_s = self._spec.item_timeout_s
            if target != self._custom:
                limit_s = min(limit_s, BUILT_IN_LIMIT_S)
            self._pools[target] = Pool(
                target,
                self._argument_names,
                limit_s,
                share=self._share,
                folder=self._folder,
                memory_gb=self._spec.process_memory_gb,
                secret_env_vars=self._secret_env_vars,
            )
        return self._pools[target]

    def _rescaled(self, item: RewardItem, result: RewardResult) -> RewardResult:
        if self._custom:
            return result
        return rescaled(result, scale_of(item.data_source, self._scales))


class Stream:
    """Score samples in a thread while others are still generated.

    Items are scored in the order in which they are added. All items that wait when the thread
    becomes free are scored together.
    """

    def __init__(self, scorer: Scorer, timeout_s: float) -> None:
        self._scorer = scorer
        self._timeout_s = timeout_s
        self._queue: queue.SimpleQueue[tuple[RewardItem, Future[RewardResult]] | None] = (
            queue.SimpleQueue()
        )
        self._added: dict[Any, Future[RewardResult]] = {}
        self._deadline = float("inf")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")
        self._scored = self._thread.submit(self._run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Stop. After a failure, the current batch finishes and no other batch starts."""
        self._deadline = min(self._deadline, time.monotonic())
        self._queue.put(None)
        self._thread.shutdown(wait=False)

    def score(self, item: RewardItem) -> "Future[RewardResult]":
        """Queue an item; the future completes with its batch.

        Raises the exception of an earlier batch that could not be scored.
        """
        if self._scored.done():
            self._scored.result()
        result: Future[RewardResult] = Future()
        self._queue.put((item, result))
        return result

    def add(self, key: Any, item: RewardItem) -> None:
        """Queue an item for `results`. Raises what `score` raises."""
        self._added[key] = self.score(item)

    def results(self) -> dict[Any, RewardResult]:
        """Return the results of `add` by key when all are scored, at most `timeout_s` from now.

        Raises what `Scorer.score` raises.
        """
        self._deadline = time.monotonic() + self._timeout_s
        self._queue.put(None)
        self._scored.result()
        return {key: result.result() for key, result in self._added.items()}

    def _run(self) -> None:
        while True:
            waiting = [self._queue.get()]
            while not self._queue.empty():
                waiting.append(self._queue.get())
            batch = [entry for entry in waiting if entry is not None]
            limit_s = min(self._timeout_s, self._deadline - time.monotonic())
            try:
                scored = self._scorer.score([item for item, _ in batch], limit_s)
            except BaseException as error:
                for _, result in batch:
                    result.set_exception(error)
                raise
            for (_, result), found in zip(batch, scored, strict=True):
                result.set_result(found)
            if None in waiting:
                return


def _place(path: str) -> str:
    """Return the absolute path of a file, or the dotted name of a module unchanged."""
    return str(Path(path).expanduser().absolute()) if names_a_file(path) else path


async def _wait_for(value: Awaitable[Any]) -> Any:
    return await value


def _decides(result: RewardResult) -> bool:
    """Return whether no other way to write the answer needs to be tried.

    After a timeout the other ways would probably take as long.
    """
    return result.error == "Timeout" or (result.score or 0.0) > 0


def _rejection(item: RewardItem, result: RewardResult) -> str:
    if result.error:
        outcome = f"{result.error} ({(result.traceback or '').splitlines()[-1]})"
    else:
        outcome = f"score {result.score:g}"
    truth = str(item.ground_truth)[:100]
    return f"{item.data_source}: {item.solution_str[:100]!r} for {truth!r}: {outcome}"


def _answers(row: CheckedRow) -> list[str]:
    """Return the ground truth in the forms in which a response may state it."""
    truth = row.ground_truth
    if isinstance(truth, dict):  # question answering: {"target": [accepted answers]}
        truth = truth.get("target", truth)
    if isinstance(truth, list) and truth:
        truth = truth[0]
    forms = [f"{truth}", f"#### {truth}", f"\\boxed{{{truth}}}", f"<answer>{truth}</answer>"]
    solutions = [row.extra_info.get(key) for key in ("answer", "solution")]
    return forms + [text for text in solutions if isinstance(text, str)]
