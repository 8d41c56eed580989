"""Scores for a batch of responses: from the scorer of each row's data source, or from the user's own function."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from verlite.config.names import names_a_file
from verlite.config.schema import CustomRewardConfig, RewardConfig
from verlite.rewards.child import FunctionError, load
from verlite.rewards.pool import Pool
from verlite.rewards.result import RewardItem, RewardResult, failure, result_of
from verlite.rewards.routing import IN_PROCESS, UnknownDataSource, scorer_of, unknown

BUILT_IN_LIMIT_S = 10.0  # a built-in scorer needs milliseconds; what takes longer will not end


class Row(Protocol):
    """What the self-check needs of a dataset row."""

    @property
    def data_source(self) -> str: ...
    @property
    def ground_truth(self) -> Any: ...
    @property
    def extra_info(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class SelfCheck:
    """How the reward function scores the data's own answers."""

    checked: int
    """Ground-truth answers that were scored."""
    rejected: list[str] = field(default_factory=list)
    """One line for each that did not score above 0."""

    def warning(self) -> str | None:
        """What a person should know, with up to three examples; None when all answers scored above 0."""
        if not self.rejected:
            return None
        return (
            f"the reward function gives {len(self.rejected)} of {self.checked} ground-truth answers no score above 0, "
            'however they are written (plain, after "####", in \\boxed{}, in <answer> tags): is it the right function for this data? '
            "Examples: " + "; ".join(self.rejected[:3])
        )


class Scorer:
    """Scores responses.

    With custom_reward_function.path every item goes to that function, else to the scorer in `routing` that belongs to its
    data source; reward_kwargs are added to the arguments of either. User code and math-verify run in processes of their own, as many
    as a `share`-th of the machine's cores, with `folder` as their working directory where there is such a one.
    """

    def __init__(
        self,
        custom: CustomRewardConfig,
        reward: RewardConfig,
        share: int = 1,
        folder: str | None = None,
    ) -> None:
        self._custom = f"{_place(custom.path)}:{custom.name}" if custom.path else None
        self._kwargs, self._reward, self._share = dict(custom.reward_kwargs), reward, share
        self._folder = folder if folder and Path(folder).is_dir() else None
        self._names = list({**RewardItem("", "", None).arguments(), **self._kwargs})
        self._functions: dict[str, Callable[..., Any]] = {}
        self._pools: dict[str, Pool] = {}

    def check_signature(self, data_sources: Iterable[str] = ()) -> None:
        """Load what will score these data sources, before anything is spent on responses.

        Raises FunctionError (missing file or function, a file that cannot be loaded, parameters that do not fit) or
        UnknownDataSource, each with one line that says what is wrong.
        """
        if self._custom:
            place = self._custom.rpartition(":")[0]
            if names_a_file(place) and not (place.endswith(".py") and Path(place).is_file()):
                raise FunctionError(
                    f"custom_reward_function.path={place} is not a Python file that exists"
                )
        for target in self._by_target(data_sources):
            try:
                if target in IN_PROCESS:
                    self._function(target)
                else:
                    self._pool(target).start(self._reward.timeout_s)
            except FunctionError as error:
                raise FunctionError(f"custom_reward_function: {error}") from error

    def score(
        self, items: Sequence[RewardItem], limit_s: float | None = None
    ) -> list[RewardResult]:
        """One result per item, in order, within limit_s, or reward.timeout_s where it is None.

        A failed call is a result with an error class and a traceback. Raises FunctionError when the function cannot be
        loaded at all, and UnknownDataSource.
        """
        deadline = time.monotonic() + (self._reward.timeout_s if limit_s is None else limit_s)
        results: dict[int, RewardResult] = {}
        for target, numbers in (
            self._by_target(item.data_source for item in items).items() if items else ()
        ):
            calls = [{**items[number].arguments(), **self._kwargs} for number in numbers]
            if target in IN_PROCESS:
                scored = [_call(self._function(target), call) for call in calls]
            else:
                scored = self._pool(target).run(calls, max(0.0, deadline - time.monotonic()))
            results.update(zip(numbers, scored, strict=True))
        return [results[number] for number in range(len(items))]

    def self_check(self, rows: Sequence[Row]) -> SelfCheck:
        """Score the rows' own ground truths, each written in the usual ways; the best way counts. Rows without one are left out.

        Raises FunctionError when every call failed: then no response could be scored either.
        """
        rows = [row for row in rows if row.ground_truth is not None]
        answers = [
            [
                RewardItem(row.data_source, text, row.ground_truth, row.extra_info)
                for text in _answers(row)
            ]
            for row in rows
        ]
        scored: list[list[RewardResult]] = [[] for _ in rows]
        undecided = list(range(len(rows)))
        while undecided:
            for i, result in zip(
                undecided, self.score([answers[i][len(scored[i])] for i in undecided]), strict=True
            ):
                scored[i].append(result)
            undecided = [
                i
                for i in undecided
                if len(scored[i]) < len(answers[i]) and not _decides(scored[i][-1])
            ]
        if rows and all(result.error for results in scored for result in results):
            raise FunctionError(
                f"{self._named(rows[0].data_source)} fails on the data's own answers, in all {len(rows)} rows that were tried, "
                f"so it would fail on every response. The first failure:\n{(scored[0][0].traceback or '').rstrip()}\n"
                "Correct it, or start without this check: reward.check_ground_truth=false"
            )
        rejected = []
        for items, results in zip(answers, scored, strict=True):
            if not any((result.score or 0.0) > 0 for result in results):
                item, result = items[0], results[0]
                outcome = (
                    f"{result.error} ({(result.traceback or '').splitlines()[-1]})"
                    if result.error
                    else f"score {result.score:g}"
                )
                rejected.append(
                    f"{item.data_source}: {item.solution_str[:100]!r} for {str(item.ground_truth)[:100]!r}: {outcome}"
                )
        return SelfCheck(len(rows), rejected)

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _named(self, data_source: str) -> str:
        """What scores a data source, in the words of the configuration."""
        if not self._custom:
            return f"the built-in scorer of data source {data_source!r}"
        path, _, name = self._custom.rpartition(":")
        return f"custom_reward_function.path={path}: {name}"

    def _by_target(self, data_sources: Iterable[str]) -> dict[str, list[int]]:
        """Which function scores which of the data sources, given and returned by position."""
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
            self._functions[target] = load(target, self._names)
        return self._functions[target]

    def _pool(self, target: str) -> Pool:
        if target not in self._pools:
            limit = (
                self._reward.item_timeout_s
                if target == self._custom
                else min(self._reward.item_timeout_s, BUILT_IN_LIMIT_S)
            )
            self._pools[target] = Pool(
                target, self._names, limit, share=self._share, folder=self._folder
            )
        return self._pools[target]


def _place(path: str) -> str:
    """A file with its whole path, or a module's dotted name as it is."""
    return str(Path(path).expanduser().absolute()) if names_a_file(path) else path


def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> RewardResult:
    try:
        return result_of(function(**arguments))
    except (
        Exception
    ) as error:  # also of our own scorers: a ground truth that is no number, for example
        return failure(error)


def _decides(result: RewardResult) -> bool:
    """No other way to write the answer needs to be tried: it was accepted, or it hung, and the others would take as long."""
    return result.error == "Timeout" or (result.score or 0.0) > 0


def _answers(row: Row) -> list[str]:
    """The ground truth as a response could state it."""
    truth = row.ground_truth
    if isinstance(truth, dict):  # question answering: {"target": [accepted answers]}
        truth = truth.get("target", truth)
    if isinstance(truth, list) and truth:
        truth = truth[0]
    forms = [f"{truth}", f"#### {truth}", f"\\boxed{{{truth}}}", f"<answer>{truth}</answer>"]
    return forms + [
        text for key in ("answer", "solution") if isinstance(text := row.extra_info.get(key), str)
    ]
