"""Warnings about a run that does not learn or drifts.

A detector looks at the metrics of a step and of earlier steps and returns what it saw and what
people usually do about it. A warning is due once the detector has seen it in
`trainer.detect.patience` steps in a row. It is due again only after as many steps without.
"""

import itertools
import math
import re
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from verlite.config.schema import DetectConfig
from verlite.trainer.tracking import is_held_out

Metrics = Mapping[str, float]
Detector = Callable[[Metrics, Sequence[Metrics], float], str | None]
"""(metrics of the step, those of earlier steps in order, threshold) -> text, None if all is well.
Missing: the run does not have a metric. A threshold of None turns a detector off."""

WARNINGS = "warnings.jsonl"
"""File of the run directory with one warning a line."""
START = 10
"""Steps at the beginning of a run that later ones are compared with."""
VALIDATIONS = 50
"""Validations that the newest is compared with."""
SMOOTHED = 3
"""Validations in a row whose mean is compared."""
WINDOW = 20
"""Newest steps in which a jump of length or format is looked for."""
ENDS = 5
"""Steps at both ends of the window whose medians are compared."""
NOISE = 6
"""A fall of the held-out score is at least as many standard deviations of such a mean."""


class Missing(Exception):
    """A step does not have a metric, or too few steps have it."""


class _Step(dict[str, float]):
    """The metrics of a step. Raises Missing, so that a KeyError is a detector's own mistake."""

    def __missing__(self, name: str) -> float:
        raise Missing(name)


@dataclass(frozen=True)
class Finding:
    """A warning of a step."""

    step: int
    name: str
    """The detector, and the key below trainer.detect that sets its threshold."""
    text: str


class Detectors:
    """All detectors of a run, with what they have seen so far.

    Args:
        limits: trainer.detect.
        history: the metrics of earlier steps of a resumed run, each with "step". Their warnings
            were given then. Their memory was that of other processes, so it is left out.
        ignored: metrics that mean nothing in this run (`ignored`).
    """

    def __init__(
        self,
        limits: DetectConfig,
        history: Sequence[Mapping[str, Any]] = (),
        ignored: Collection[str] = (),
    ) -> None:
        self._limits = limits
        self._ignored = ignored
        self._history: list[Metrics] = []
        self._steps = 0
        self._seen = dict.fromkeys(DETECTORS, 0)
        self._unseen = dict.fromkeys(DETECTORS, limits.patience)
        self._given = dict.fromkeys(DETECTORS, False)
        for metrics in history:
            if metrics["step"]:
                own = {key: value for key, value in metrics.items() if key not in MEMORY}
                self.check(metrics["step"], own)

    def check(
        self, step: int, metrics: Mapping[str, float | None], last: bool = False
    ) -> list[Finding]:
        """Add a step. Return the warnings that are due.

        Args:
            last: it is the run's last step. A run of fewer steps than `patience` is warned if none
                of them had a signal.
        """
        due = []
        self._steps += 1
        # metrics.jsonl has null for NaN, and a resumed run must decide as the run before did.
        now = _Step(
            (name, value)
            for name, value in metrics.items()
            if value is not None and math.isfinite(value) and name not in self._ignored
        )
        if self._limits.enable:
            for name, detector in DETECTORS.items():
                limit, text = getattr(self._limits, name), None
                with suppress(Missing):
                    text = None if limit is None else detector(now, self._history, limit)
                patience = self._limits.patience
                if last and name == "no_signal":
                    patience = min(patience, self._steps)
                if self._is_due(name, text is not None, patience) and text is not None:
                    due.append(Finding(step, name, text))
        self._history.append(
            {key: value for key, value in now.items() if key in USED or is_held_out(key)}
        )
        self._history = needed(self._history)
        return due

    def _is_due(self, name: str, seen: bool, patience: int) -> bool:
        self._seen[name] = self._seen[name] + 1 if seen else 0
        self._unseen[name] = 0 if seen else self._unseen[name] + 1
        if self._unseen[name] >= patience:
            self._given[name] = False
        if self._given[name] or self._seen[name] < patience:
            return False
        self._given[name] = True
        return True


def needed(history: list[Metrics]) -> list[Metrics]:
    """Return the steps that detectors read: the first ones, also of those with memory, the newest
    validations, and the newest steps. So a step costs the same however long the run is."""
    validated = [n for n, metrics in enumerate(history) if any(map(is_held_out, metrics))]
    own = [n for n, metrics in enumerate(history) if any(key in metrics for key in MEMORY)]
    newest = range(len(history) - WINDOW, len(history))
    kept = {*range(2 * START), *own[: 2 * START], *validated[-VALIDATIONS:], *newest}
    return [metrics for number, metrics in enumerate(history) if number in kept]


def ignored(
    compares: bool,
    cuts_prompts: bool,
    is_async: bool = False,
    filters: bool = False,
    rewards: bool = True,
) -> set[str]:
    """Return the metrics that mean nothing in a run.

    Args:
        compares: whether the advantage estimator compares the samples of a prompt. If it does not,
            groups with equal scores train, too.
        cuts_prompts: whether prompts are cut to data.max_prompt_length. If not, one with as many
            tokens is whole.
        is_async: whether samples are trained with newer weights than those that sampled them,
            which is a difference of log-probs without a fault.
        filters: whether prompts are left out on purpose, which may have other lengths.
        rewards: whether rewards are trained. With a teacher alone, equal scores train, too.
    """
    uses = (
        *((GROUPS, compares and rewards), (f"{SCORE}/min", rewards), (PROMPTS_CUT, cuts_prompts)),
        *((GAP, not is_async), (LENGTHS, not filters)),
    )
    return {key for key, used in uses if not used}


SCORE = "critic/score"
ADVANTAGE = "critic/advantages"
GROUPS = "rollout/zero_variance_groups"
GRAD = "actor/grad_norm"
CUT = "response_length/clip_ratio"
PROMPTS_CUT = "prompt_length/clip_ratio"
LENGTH = "response_length/mean"
FORMAT = "env/format_valid"
STRAGGLER = "perf/straggler/"
ENTROPY = "actor/entropy"
KLS = ("actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty")
GAP = "training/log_prob_gap"
SAMPLE_SIZE = "training/rollout_eff_sample_size_token"
AGE = "async/age/mean"
LENGTHS = "async/length_distance"
LENGTHS_CHANCE = "async/length_distance_limit"
TRAINER_IDLE = "fully_async/trainer/idle_ratio"
ENGINES_IDLE = "fully_async/rollouter/idle_ratio"
ERRORS = "reward/error_rate"
NONFINITE = "actor/nonfinite"
REWARD_TIME = "timing_s/reward"
TOOL_TIME = "rollout/slowest/tool_s"
STEP_TIME = "timing_s/step"
MEMORY = ("perf/driver_max_rss_gb", "actor/perf/cpu_memory_used_gb")
RANGE = (f"{SCORE}/min", f"{SCORE}/max")
USED = {f"{SCORE}/mean", *RANGE, ENTROPY, GAP, LENGTH, FORMAT, *MEMORY}
"""Metrics of earlier steps that a detector reads, besides those of validation."""


def no_signal(now: Metrics, before: Sequence[Metrics], limit: float) -> str | None:
    """No score differs from another, so that advantages are zero."""
    # gdpo compares the parts of the reward, which may differ although the scores are equal.
    parts = [key.removesuffix("/min") for key in now if re.fullmatch(r"gdpo/.+/min", key)]
    compared = parts or [SCORE]
    values = {key: now.get(f"{key}/min") for key in compared}
    if all(low is not None and low == now.get(f"{key}/max") for key, low in values.items()):
        shown = ", ".join(f"{key.removeprefix('gdpo/')} {low:g}" for key, low in values.items())
        what = f"reward parts {shown}" if parts else f"score {values[SCORE]:g}"
        return (
            f"all samples of a step have the {what}. Read some of them: is the answer in "
            "the format that the reward function expects, and does the chat template fit the "
            "model? If the task is too easy, choose other prompts. If it is too hard, start with "
            "easier prompts, supervised training, or a reward with partial credit"
        )
    groups = now.get(GROUPS)
    # With one sample per prompt every group is equal, and other prompts are the baseline.
    alone = groups == 1 and now.get(f"{ADVANTAGE}/min") != now.get(f"{ADVANTAGE}/max")
    if groups is not None and groups >= limit and not alone:
        return (
            f"the samples of {groups:.0%} of the prompts all have the same "
            f"{'reward parts' if parts else 'score'}, so only "
            f"{1 - groups:.0%} of the prompts train the policy. Raise "
            "actor_rollout_ref.rollout.n, set algorithm.filter_groups.enable=true, or choose "
            "prompts of another difficulty"
        )
    if now.get(GRAD) == 0:
        return (
            "the gradient is zero although scores differ. Check the learning rate, "
            "algorithm.mask_truncated and algorithm.rollout_correction: do they leave tokens to "
            "train on?"
        )
    return None


def cut_share(now: Metrics, before: Sequence[Metrics], limit: float) -> str | None:
    """Many responses end at the length limit."""
    share = now[CUT]
    if share < limit:
        return None
    return (
        f"{share:.0%} of the responses are cut at data.max_response_length, mostly before their "
        "answer. Raise it, penalize length with reward.overlong_buffer, or check that the model "
        "ends its responses (tokenizer, chat template)"
    )


def prompts_cut(now: Metrics, before: Sequence[Metrics], limit: float) -> str | None:
    """Many prompts lose a part."""
    share = now[PROMPTS_CUT]
    if share < limit:
        return None
    return (
        f"{share:.0%} of the prompts are cut at data.max_prompt_length, so the policy does not see "
        "all of the question. Raise it, or leave them out with data.filter_overlong_prompts=true"
    )


def entropy_low(now: Metrics, before: Sequence[Metrics], limit: float) -> str | None:
    """The policy has nearly stopped exploring."""
    entropy, start = now[ENTROPY], _start(before, ENTROPY)
    if entropy >= limit * start:
        return None
    return (
        f"the entropy is {entropy:.2g} nats per token, from {start:.2g} at the start: samples of a "
        "prompt become equal. Lower the learning rate, raise clip_ratio_high, or add "
        "actor_rollout_ref.actor.entropy_coeff"
    )


def entropy_floor(now: Metrics, before: Sequence[Metrics], limit: float) -> str | None:
    """The policy hardly explores, whatever its entropy was at the start."""
    entropy = now[ENTROPY]
    if entropy >= limit:
        return None
    return (
        f"the entropy is {entropy:.2g} nats per token: nearly every sample of a prompt is the same "
        "text. Check actor_rollout_ref.rollout.temperature and top_p, start from a checkpoint with "
        "less supervised training, or end the run if its score is as high as it can be"
    )


def entropy_high(now: Metrics, before: Sequence[Metrics], limit: float) -> str | None:
    """The policy becomes random."""
    entropy, start = now[ENTROPY], _start(before, ENTROPY)
    if entropy <= start + limit:
        return None
    return (
        f"the entropy is {entropy:.2g} nats per token, from {start:.2g} at the start: the policy "
        "becomes random. Lower the learning rate or entropy_coeff, and compare the log-prob gap"
    )


def kl(now: Metrics, before: Sequence[Metrics], limit: float) -> str | None:
    """The policy runs away from the old or the reference policy."""
    far = {key: now[key] for key in KLS if key in now and abs(now[key]) > limit}
    if not far:
        return None
    key, value = max(far.items(), key=lambda item: abs(item[1]))
    return (
        f"{key} is {value:.3g} nats per token: the policy moves away fast. Lower the learning "
        "rate, use fewer ppo_epochs, or raise the KL coefficient"
    )


def gap(now: Metrics, before: Sequence[Metrics], limit: float) -> str | None:
    """Trainer and rollout engine compute more and more different log-probs."""
    value, start = now[GAP], _start(before, GAP)
    if value < 0.01 or value < limit * start:
        return None
    return (
        f"the log-prob gap between trainer and rollout engine is {value:.2g}, from {start:.2g} at "
        "the start. Use algorithm.rollout_correction, a higher precision in "
        "actor_rollout_ref.rollout.dtype, or a lower learning rate"
    )


def eff_sample_size(now: Metrics, before: Sequence[Metrics], limit: float) -> str | None:
    """Few tokens decide the update: the weights that sampled are too different."""
    size = now[SAMPLE_SIZE]
    if AGE not in now or size >= limit:
        return None
    return (
        f"the effective sample size is {size:.2g} of a step's tokens: the weights that sampled and "
        "those that train differ so much that few tokens decide the update. Lower "
        "async_training.max_age or the learning rate. async_training.min_eff_sample_size ends a "
        "run in which it falls further"
    )


def length_bias(now: Metrics, before: Sequence[Metrics], limit: float) -> str | None:
    """The responses that are trained are not as long as those that were sampled."""
    distance, chance = now[LENGTHS], now[LENGTHS_CHANCE]
    if distance <= max(limit, chance):
        return None
    return (
        f"the lengths of trained and of sampled responses differ: {distance:.2g} "
        f"(Kolmogorov-Smirnov), where chance gives up to {chance:.2g}. Are long samples left out? "
        "Look for rewards or tools that fail on them, and for samples that are lost with an engine"
    )


def idle(now: Metrics, before: Sequence[Metrics], limit: float) -> str | None:
    """Trainer and engines wait for each other."""
    trainer, engines = now[TRAINER_IDLE], now[ENGINES_IDLE]
    if not now[STEP_TIME]:
        return None
    least = max(limit, 1.0 / now[STEP_TIME])
    if trainer > least:
        return (
            f"the trainer waits for samples in {trainer:.0%} of a step's time. Give the engines "
            "more devices (cluster.component_placement), or let slow samples take several steps: "
            "async_training.max_age"
        )
    if engines > least:
        return (
            f"the engines have nothing to generate in {engines:.0%} of the time. Give the trainer "
            "more devices (cluster.component_placement), or let them sample further ahead: "
            "async_training.depth"
        )
    return None


def hacking(now: Metrics, before: Sequence[Metrics], limit: float) -> str | None:
    """The training score rises while the held-out score falls.

    Both are means over SMOOTHED validations, and a fall must exceed the held-out score's noise:
    the best of many validations of few prompts is far above their mean.
    """
    steps = [*before, now]
    spread = _spread(steps)
    for key in sorted({key for metrics in steps for key in metrics if is_held_out(key)}):
        found = _with_score(steps, key)
        if len(found) < 2 * SMOOTHED or not spread:
            continue
        held_out = _means([held for held, _ in found])
        score_then = _means([score for _, score in found])
        best = max(range(len(held_out)), key=lambda number: held_out[number])
        jumps = [abs(b[0] - a[0]) for a, b in itertools.pairwise(found)]
        noise = statistics.fmean(jumps) / math.sqrt(SMOOTHED)
        least = limit * (spread if "/reward/" in key else 1.0)
        fall, rise = held_out[best] - held_out[-1], score_then[-1] - score_then[best]
        if fall >= max(least, NOISE * noise) and rise >= limit * spread:
            return (
                f"the score rose from {score_then[best]:.3g} to {score_then[-1]:.3g} while {key} "
                f"fell from {held_out[best]:.3g} to {held_out[-1]:.3g} (means of {SMOOTHED} "
                "validations). Read the best samples: the policy may exploit the reward function, "
                "or learn the training prompts by heart"
            )
    return None


def _means(values: list[float]) -> list[float]:
    """Return the mean of each SMOOTHED values in a row."""
    return [
        sum(values[end - SMOOTHED : end]) / SMOOTHED for end in range(SMOOTHED, len(values) + 1)
    ]


def _with_score(steps: Sequence[Metrics], key: str) -> list[tuple[float, float]]:
    """Return a metric and the mean score of each step that has both."""
    score = f"{SCORE}/mean"
    return [(step[key], step[score]) for step in steps if key in step and score in step]


def _spread(steps: Sequence[Metrics]) -> float:
    """Return the range of all scores of these steps."""
    scores = [step[key] for step in steps for key in RANGE if key in step]
    return max(scores, default=0.0) - min(scores, default=0.0)


@dataclass(frozen=True)
class _Change:
    """A metric and the score, at the beginning and the end of the newest WINDOW steps."""

    before: float
    now: float
    score_before: float
    score_now: float
    rise: float
    """Of the score, as a share of the range of scores."""


def _change(now: Metrics, before: Sequence[Metrics], key: str) -> _Change | None:
    """Return medians of the first and last ENDS steps of the window that have the metric."""
    steps = [*before[1 - WINDOW :], now]
    found = _with_score(steps, key)
    spread = _spread(steps)
    if len(found) < 2 * ENDS or not spread:
        return None
    values, scores = zip(*found, strict=True)
    first, last = scores[:ENDS], scores[-ENDS:]
    score_before, score_now = statistics.median(first), statistics.median(last)
    return _Change(
        statistics.median(values[:ENDS]),
        statistics.median(values[-ENDS:]),
        score_before,
        score_now,
        (score_now - score_before) / spread,
    )


RISE = 0.1
"""Rise of the score within the window, as a share of its range, that may come from a trick."""


def hacking_length(now: Metrics, before: Sequence[Metrics], limit: float) -> str | None:
    """The score rises while responses become much longer within a few steps."""
    change = _change(now, before, LENGTH)
    if change is None or change.rise < RISE or change.now < limit * change.before:
        return None
    return (
        f"the score rose from {change.score_before:.3g} to {change.score_now:.3g} while responses "
        f"grew from {change.before:.0f} to {change.now:.0f} tokens, within {WINDOW} steps. Read "
        "the best samples: does the reward function pay for length or repetition? "
        "reward.overlong_buffer penalizes length"
    )


def hacking_format(now: Metrics, before: Sequence[Metrics], limit: float) -> str | None:
    """The score rises while fewer samples are well-formed."""
    change = _change(now, before, FORMAT)
    if change is None or change.rise < RISE or change.before - change.now < limit:
        return None
    return (
        f"the score rose from {change.score_before:.3g} to {change.score_now:.3g} while the share "
        f"of well-formed samples fell from {change.before:.0%} to {change.now:.0%}, within "
        f"{WINDOW} steps. Read the best samples: does the reward function pay for answers in a "
        "wrong format?"
    )


def reward_errors(now: Metrics, before: Sequence[Metrics], limit: float) -> str | None:
    """The reward function fails on some samples."""
    rate = now[ERRORS]
    if rate <= limit:
        return None
    return (
        f"the reward failed for {rate:.0%} of the samples, which are left out of training. Try "
        "`verlite contract reward` with your function, and read the samples with status error"
    )


def nonfinite(now: Metrics, before: Sequence[Metrics], limit: float) -> str | None:
    """Updates are skipped because a loss or gradient is not finite."""
    share = now[NONFINITE]
    if share <= limit:
        return None
    return (
        f"{share:.0%} of the updates are skipped because their gradient is not finite. Lower the "
        "learning rate, or use bfloat16 or float32 in place of float16"
    )


def waiting(now: Metrics, before: Sequence[Metrics], limit: float) -> str | None:
    """Most of a step is spent waiting for rewards, tools or agent programs."""
    step = now[STEP_TIME]
    if not step:
        return None
    tools = ("the tools of one sample", "Add servers: retriever.url takes a list")
    if "agent/requests" in now:
        tools = (
            "the program of one sample, beside those that run with it",
            "Import less in it, or once for all samples (agent.preload), give it more CPU "
            "cores, or update meanwhile: trainer.mode=async",
        )
    for key, what, remedy in (
        (REWARD_TIME, "rewards", "Make the reward function faster, or give it more processes"),
        (TOOL_TIME, *tools),
    ):
        seconds = now.get(key, 0.0)
        if seconds > max(1.0, limit * step):
            return f"{seconds:.0f} of {step:.0f} s of a step are spent waiting for {what}. {remedy}"
    return None


def straggler(now: Metrics, before: Sequence[Metrics], limit: float) -> str | None:
    """One rank keeps the others of its role waiting."""
    step = now[STEP_TIME]
    late = {key: seconds for key, seconds in now.items() if key.startswith(STRAGGLER)}
    if not step or max(late.values(), default=0.0) <= max(1.0, limit * step):
        return None
    key, seconds = max(late.items(), key=lambda item: item[1])
    return (
        f"the slowest rank of the role {key.removeprefix(STRAGGLER)} works {seconds:.0f} s longer "
        f"than the median of its others, in steps of {step:.0f} s. Is its device shared, throttled "
        "or slower? `verlite stacks` shows what it does; trainer.balance_batch=true balances tokens"
    )


def memory(now: Metrics, before: Sequence[Metrics], limit: float) -> str | None:
    """The memory of a process grows and grows."""
    for key in MEMORY:
        values = [step[key] for step in before if key in step]
        if key not in now or len(values) < 2 * START:
            continue
        start = values[START]
        if start and now[key] > limit * start and now[key] > start + 1:
            return (
                f"{key} is {now[key]:.1f} GB, from {start:.1f} GB at step {START + 1} of this "
                "process. Look for lists that grow in your reward function or environment"
            )
    return None


DETECTORS: dict[str, Detector] = {
    detector.__name__: detector
    for detector in (
        *(no_signal, cut_share, prompts_cut, entropy_low, entropy_floor, entropy_high),
        *(kl, gap, eff_sample_size, length_bias, idle, hacking, hacking_length),
        *(hacking_format, reward_errors, nonfinite, waiting, straggler, memory),
    )
}
"""By the key of the threshold."""


def _start(before: Sequence[Metrics], key: str) -> float:
    """Return the median of the first steps. Raises Missing until there are enough."""
    values = [step[key] for step in before[:START] if key in step]
    if len(values) < START // 2:
        raise Missing(key)
    return statistics.median(values)
