"""What a run directory says about samples and costs: the input of a simulation of the same run with
another trainer.mode."""

import itertools
import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from verlite.config.plan import Plan
from verlite.files import read_json_lines
from verlite.sizing.simulation import (
    WARM_UP,
    Costs,
    Sample,
    Settings,
    Turn,
    Work,
    Workload,
    simulate,
)
from verlite.trainer.tracking import METRICS, read_lines

MEASURED = (
    "timing_s/step", "timing_s/gen", "perf/total_num_tokens", "prompt_length/mean",
    "response_length/mean", "response_length/max",
)  # fmt: skip
"""Metrics that a step must have."""
FITS = 20
"""How often the engine's costs are fitted. Which samples run at the same time depends on them."""
FITTED = 2_000
"""Samples that are enough for that."""


@dataclass(frozen=True)
class Recorded:
    """A finished run, or the steps of one that still runs.

    Attributes:
        run_dir: where it is.
        lines: metrics of each step, without the warm-up.
        steps: number of steps, with the warm-up.
        samples: of each prompt.
        groups: samples of each prompt that was saved whole, by the prompt's number.
        pool: the samples to draw others from, with how many samples of the run each stands for.
        share: of the run's samples that `groups` has.
    """

    run_dir: Path
    lines: list[dict[str, Any]]
    steps: int
    samples: int
    groups: dict[int, list[Sample]]
    pool: list[tuple[Sample, float]]
    share: float

    def mean(self, key: str, default: float = 0.0) -> float:
        """Return the mean of a metric over the steps."""
        return fmean(line.get(key) or default for line in self.lines)

    def workload(self) -> Workload:
        """Return the samples by prompt: those of the run in their order, and after its end again.
        Samples that were not saved are drawn from those that were."""
        values, weights = zip(*self.pool, strict=True)
        total = list(itertools.accumulate(weights))
        drawn: dict[int, list[Sample]] = {}
        whole = sorted(self.groups)

        def group(number: int) -> Sequence[Sample]:
            if number in self.groups:
                return self.groups[number]
            if self.share == 1:
                return self.groups[whole[number % len(whole)]]
            if number not in drawn:
                draw = random.Random(number)
                drawn[number] = draw.choices(values, cum_weights=total, k=self.samples)
            return drawn[number]

        return group


def read_recorded(run_dir: Path, plan: Plan) -> Recorded:
    """Read a run's metrics and saved samples.

    Raises:
        ValueError: the directory has too few steps, or no samples.
    """
    lines = [line for line in read_lines(run_dir / METRICS) if line.get("timing_s/step")]
    if len(lines) <= WARM_UP:
        raise ValueError(
            f"{run_dir / METRICS} has {len(lines)} steps with timing_s/step. Costs are measured "
            f"after the first {WARM_UP}: give the directory of a main_ppo run with more steps."
        )
    groups: dict[int, list[Sample]] = {}
    pool: list[tuple[Sample, float]] = []
    for line in lines:
        for key in MEASURED:
            if not isinstance(line.get(key), int | float) or line[key] < 0:
                raise ValueError(
                    f"{run_dir / METRICS}: step {line['step']} has no {key}, or a wrong one. Give "
                    "the directory of a main_ppo run of this version."
                )
        path = run_dir / "rollouts" / f"step_{line['step']}.jsonl"
        records = []
        with suppress(FileNotFoundError):
            records = [record for record in read_json_lines(path)[0] if "uid" in record]
        prompt = round(line["prompt_length/mean"])
        is_whole = len(records) == plan.batch_size
        try:
            samples = [_sample(record, prompt) for record in records]
            if is_whole:
                for record, sample in zip(records, samples, strict=True):
                    step, place = map(int, record["uid"].split("-"))
                    groups.setdefault((step - 1) * plan.prompts + place, []).append(sample)
            pool += _weighted(records, samples, line, plan.batch_size, is_whole)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} has a line that is not a sample of this version ({error!r}). Move "
                "the file away: samples of other steps then stand for it."
            ) from error
    if not pool:
        raise ValueError(
            f"{run_dir / 'rollouts'} has no samples that were chosen at random. Run with "
            "trainer.rollouts_per_step=-1, which keeps all of them."
        )
    share = sum(map(len, groups.values())) / (len(lines) * plan.batch_size)
    return Recorded(
        run_dir, lines[WARM_UP:], len(lines), plan.samples_per_prompt, groups, pool, share
    )


def _sample(record: dict[str, Any], prompt: int) -> Sample:
    """Return the lengths and times of a line of the sample log."""
    authors = [author for author, _ in record.get("transcript") or [["model", ""]]]
    turns = max(1, authors.count("model"))
    sampled = (record.get("tokens") or {}).get("sampled")
    if sampled:
        parts = [(mark, len(list(run))) for mark, run in itertools.groupby(sampled)]
        tokens = [count for mark, count in parts if mark == "1"]
        observations = [count for mark, count in parts if mark == "0"]
    else:
        tokens = [record["response_tokens"] if turns == 1 else record["trained_tokens"]]
        observations = [record["response_tokens"] - tokens[0]]
    if len(tokens) != turns:  # which tokens a turn has is not known
        tokens, observations = _even(sum(tokens), turns), _even(sum(observations), turns - 1)
    calls = max(1, turns - 1)
    seconds = [record.get("tool_seconds", 0.0) / calls] * calls
    pad = [0] * turns
    return Sample(
        prompt,
        tuple(map(Turn, tokens, [*seconds, *pad][:turns], [*observations, *pad][:turns])),
        record.get("gen_seconds"),
    )


def _even(number: int, parts: int) -> list[int]:
    return [number * (p + 1) // parts - number * p // parts for p in range(parts)]


def _weighted(
    records: Sequence[dict[str, Any]],
    samples: Sequence[Sample],
    line: dict[str, Any],
    count: int,
    is_whole: bool,
) -> list[tuple[Sample, float]]:
    """Return a step's random samples, each with an equal share of its `count` samples. Unless all
    are saved, the slowest one stands for itself: metrics have it."""
    if is_whole:
        return [(sample, 1.0) for sample in samples]
    chosen = [s for s, record in zip(samples, records, strict=True) if record["chosen"] == "random"]
    if not chosen:
        return []
    typical = max(chosen, key=lambda sample: len(sample.turns))
    tokens = line.get("rollout/slowest/tokens") or line.get("response_length/max")
    weighted = [(sample, (count - 1) / len(chosen)) for sample in chosen]
    if tokens is None:
        return weighted
    turns, calls = len(typical.turns), max(1, len(typical.turns) - 1)
    seconds = [(line.get("rollout/slowest/tool_s") or 0.0) / calls] * calls
    parts = map(Turn, _even(round(tokens), turns), [*seconds, 0.0][:turns])
    slowest = Sample(typical.prompt, tuple(parts), line.get("rollout/slowest/gen_s"))
    return [*weighted, (slowest, 1.0)]


# Costs


def measured_costs(recorded: Recorded, settings: Settings) -> Costs:
    """Return the costs of a run: the trainer's from its timings, the engine's by least squares from
    the time that its samples, or its steps, waited for it.

    settings: those of the run.

    Raises:
        ValueError: the run does not have what the fit needs.
    """
    if settings.mode == "pipelined":
        raise ValueError(
            f"{recorded.run_dir} is a run of trainer.mode=pipelined, whose timings do not tell the "
            "trainer's time from that of the engines. Give a run of trainer.mode=sync or async."
        )
    lines = recorded.lines
    others = ("timing_s/gen", "timing_s/update_weights")
    updates = [line["timing_s/step"] - sum(line.get(key, 0.0) for key in others) for line in lines]
    tokens = sum(line["perf/total_num_tokens"] for line in lines)
    if not tokens:
        raise ValueError(f"{recorded.run_dir / METRICS}: the steps have trained no tokens.")
    costs = Costs(
        decode_step_s=1.0,
        update_token_s=max(0.0, sum(updates)) * settings.trainer_devices / tokens,
        sync_s=recorded.mean("timing_s/update_weights"),
        reward_s=recorded.mean("timing_s/reward"),
        after_s=max(0.0, _between(lines)),
    )
    if any(sample.gen_s is not None for sample, _ in recorded.pool):
        return _fit_samples(recorded, settings, costs)
    if settings.mode != "sync":
        raise ValueError(
            f"{recorded.run_dir} is a run of trainer.mode={settings.mode} without tools, whose "
            "samples do not tell how fast the engines are. Give a run of trainer.mode=sync."
        )
    return _fit_steps(recorded, settings, costs)


def _between(lines: Sequence[dict[str, Any]]) -> float:
    """Return the seconds between a step's metrics and the next step, without validations and
    checkpoints."""
    parts = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")
    gaps = [
        after["time"] - before["time"] - sum(after.get(part, 0.0) for part in parts)
        for before, after in zip(lines, lines[1:], strict=False)
        if after["step"] == before["step"] + 1 and "time" in before and "time" in after
    ]
    return median(gaps) if gaps else 0.0


def _fit_samples(recorded: Recorded, settings: Settings, costs: Costs) -> Costs:
    """Fit the engine's costs to the seconds that each sample waited for it.

    Which samples run at the same time follows from the costs, so both are found in turn.
    """
    workload = recorded.workload()
    rates = [s.gen_s / max(1, s.sampled) for s, _ in recorded.pool if s.gen_s is not None]
    costs = replace(costs, decode_step_s=max(median(rates) / 2, 1e-9))
    steps = max(4, FITTED // (settings.prompts * recorded.samples))
    if recorded.share == 1:
        steps = min(recorded.steps, steps)
    best = math.inf, costs
    for _ in range(FITS):
        found = simulate(workload, costs, settings, steps, is_whole=steps == recorded.steps)
        rows = _rows(found.work)
        best = min(best, (_rest(rows, costs), costs), key=lambda one: one[0])
        fitted = _least_squares(rows)
        if all(math.isclose(value, getattr(costs, n), rel_tol=1e-3) for n, value in fitted.items()):
            break
        costs = replace(costs, **{n: (getattr(costs, n) + v) / 2 for n, v in fitted.items()})
    return best[1]


def _rest(rows: Sequence[tuple[float, ...]], costs: Costs) -> float:
    """Return the sum of the squared differences between measured and simulated seconds."""
    return sum((row[3] - Work(*row[:3]).seconds(costs)) ** 2 for row in rows)


def _rows(work: Sequence[tuple[Sample, Work]]) -> list[tuple[float, ...]]:
    """Return the mean work of the engine for each sample, and the seconds that it was measured. A
    sample that stands for others is simulated several times."""
    by_sample: dict[int, tuple[float, list[Work]]] = {}
    for sample, one in work:
        if sample.gen_s is not None:
            by_sample.setdefault(id(sample), (sample.gen_s, []))[1].append(one)
    return [
        (*(fmean(column) for column in list(zip(*ones, strict=True))[:3]),
         seconds - fmean(one.pause_s for one in ones))
        for seconds, ones in by_sample.values()
    ]  # fmt: skip


def _fit_steps(recorded: Recorded, settings: Settings, costs: Costs) -> Costs:
    """Fit the engine's costs to the seconds of each step's generation. All samples begin at once,
    so an engine makes as many steps as the longest sample has tokens."""
    samples = settings.prompts * recorded.samples
    rows = []
    for line in recorded.lines:
        tokens = line["response_length/mean"] * samples / settings.engines
        steps = max(line["response_length/max"], tokens / settings.max_num_seqs)
        prompts = line["prompt_length/mean"] * samples / settings.engines
        rows.append((steps, tokens, prompts, line["timing_s/gen"] - line.get("timing_s/reward", 0)))
    return replace(costs, **_least_squares(rows))


def _least_squares(rows: Sequence[tuple[float, ...]]) -> dict[str, float]:
    """Return the engine's costs, none below 0, that fit rows of (decode steps, tokens, prefill
    tokens, seconds) best."""
    import numpy as np

    names = ("decode_step_s", "decode_sample_s", "prefill_token_s")
    table = np.array(rows, dtype=np.float64)
    best: tuple[float, dict[str, float]] | None = None
    for places in ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,)):
        columns, target = table[:, places], table[:, 3]
        scale = np.maximum(np.abs(columns).max(axis=0), 1e-30)
        found = np.linalg.lstsq(columns / scale, target, rcond=None)[0] / scale
        if (found < 0).any() or found[: 1 + (1 in places)].sum() <= 0:
            continue
        rest = float(((columns @ found - target) ** 2).sum())
        if best is None or rest < best[0] * (1 - 1e-9):
            best = rest, dict(zip((names[p] for p in places), map(float, found), strict=True))
    if best is None:
        raise ValueError("the engines' costs cannot be measured: no time was spent in them")
    return dict.fromkeys(names, 0.0) | best[1]
