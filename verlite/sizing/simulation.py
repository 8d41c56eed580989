"""A training run on a virtual clock: step time, waiting, utilization and age of tokens.

`simulate` does what `trainer.ppo` does in each mode, in the same order, and lets the real
`control.flow.Flow` decide which prompts are drawn, started and trained. Engines and the trainer are
cost curves. It is a pure function: no torch, file, process or clock.

Not modeled: failures, restarts, validation and checkpoints; dynamic sampling
(`algorithm.filter_groups`); preemption when the KV cache is full; the up to 0.25 s in which the
driver of several engines collects finished samples; processes that compete for the same cores.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from statistics import fmean
from typing import Any, NamedTuple

from verlite.control.flow import Flow

MODES = ("sync", "pipelined", "async")
"""Of trainer.mode. pipelined: within a step, the trainer's passes over a prompt's samples begin as
soon as these are finished, while the engines sample others. Those of later updates do not."""
LONGEST_S = 1e9
"""Of a cost, 30 years: the clock stays exact."""
WARM_UP = 2
"""Steps at the start that a summary leaves out, or as many as the depth if that is more."""


class Turn(NamedTuple):
    """A turn of the policy, and what the environment does after it.

    tokens: sampled. tool_s: seconds of `env.step`. observation: tokens that it adds.
    """

    tokens: int
    tool_s: float = 0.0
    observation: int = 0


class Sample(NamedTuple):
    """What a sample needs, whoever samples it.

    prompt: tokens. gen_s: in a recorded run, the seconds that it waited for the engine.
    """

    prompt: int
    turns: tuple[Turn, ...]
    gen_s: float | None = None

    @property
    def sampled(self) -> int:
        """Tokens that the policy samples."""
        return sum(turn.tokens for turn in self.turns)

    @property
    def tokens(self) -> int:
        """All tokens: prompt, sampled, and observations."""
        return self.prompt + sum(turn.tokens + turn.observation for turn in self.turns)


Workload = Callable[[int], Sequence[Sample]]
"""Returns the samples of a prompt, by the prompt's number in the order in which they are drawn."""


@dataclass(frozen=True)
class Costs:
    """Seconds. An engine that runs r samples needs decode_step_s + r * decode_sample_s for a token
    of each.

    Attributes:
        decode_step_s: of an engine's step, however many samples run.
        decode_sample_s: more for each sample that runs.
        prefill_token_s: for each token of a prompt, an observation, or a context computed again.
        update_token_s: device-seconds per token of all that is trained with: log-probs, values,
            and updates. Divided by the trainer's devices.
        update_s: of the same, and of the driver, in each step.
        sync_s: of a weight sync. The engines pause so long.
        reward_s: from a prompt's last sample to its scores.
        after_s: from the end of a step, with its metrics, to the next one.
    """

    decode_step_s: float
    decode_sample_s: float = 0.0
    prefill_token_s: float = 0.0
    update_token_s: float = 0.0
    update_s: float = 0.0
    sync_s: float = 0.0
    reward_s: float = 0.0
    after_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value <= LONGEST_S:
                raise ValueError(
                    f"costs: {name} is {value}, and must be from 0 to {LONGEST_S:g} seconds"
                )
        if not self.decode_step_s + self.decode_sample_s:
            raise ValueError("costs: decode_step_s or decode_sample_s must be above 0")

    def tokens_per_s(self, running: int) -> float:
        """Return the tokens per second of an engine that runs so many samples."""
        return running / (self.decode_step_s + running * self.decode_sample_s)


@dataclass(frozen=True)
class Settings:
    """How a run is set up. Names are those of the keys.

    Attributes:
        mode: trainer.mode, one of MODES.
        prompts: data.train_batch_size.
        engines: generation engines.
        trainer_devices: devices that train.
        devices: all devices of the run, for the throughput of one.
        max_num_seqs: samples that an engine runs at once; others wait in its queue.
        updates: optimizer steps of a step, each over an equal part of it.
    """

    mode: str
    prompts: int
    engines: int
    trainer_devices: int
    devices: int
    max_num_seqs: int = 1024
    updates: int = 1
    max_age: int = 1
    depth: int = 1
    partial_rollout: bool = True
    kv_cache: str = "fresh"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"trainer.mode={self.mode} is not one of {', '.join(MODES)}")
        for name in ("prompts", "engines", "trainer_devices", "devices", "max_num_seqs", "updates"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least 1")

    @property
    def name(self) -> str:
        """The mode in words."""
        if self.mode != "async":
            return self.mode
        return f"async, max_age {self.max_age}, depth {self.depth}"


@dataclass(frozen=True)
class Step:
    """One simulated step. Seconds.

    Attributes:
        step_s: timing_s/step. gen_s: timing_s/gen, the time that the step waits for samples.
        update_s: in which the trainer works.
        period_s: from the step's begin to that of the next.
        tokens: trained, with prompts.
        busy_s: in which an engine runs samples, mean over the engines.
        running: samples in an engine, mean over the time and the engines.
        age_mean, age_max: async/age, of the trained tokens.
    """

    step_s: float
    gen_s: float
    update_s: float
    period_s: float
    tokens: int
    busy_s: float
    running: float
    age_mean: float
    age_max: float


class Work(NamedTuple):
    """What an engine did while a sample waited for it.

    steps: decode steps. tokens: of all samples that ran. prefill: tokens. pause_s: seconds without
    work, in weight syncs.
    """

    steps: float = 0.0
    tokens: float = 0.0
    prefill: float = 0.0
    pause_s: float = 0.0

    def plus(self, done: "Work", mark: "Work") -> "Work":
        """Return this and what was done since the mark."""
        return Work(
            self.steps + done.steps - mark.steps,
            self.tokens + done.tokens - mark.tokens,
            self.prefill + done.prefill - mark.prefill,
            self.pause_s + done.pause_s - mark.pause_s,
        )

    def seconds(self, costs: Costs) -> float:
        """Return how long it took."""
        decoding = self.steps * costs.decode_step_s + self.tokens * costs.decode_sample_s
        return decoding + self.prefill * costs.prefill_token_s + self.pause_s


_NOTHING = Work()


@dataclass(frozen=True)
class Simulated:
    """A simulated run. work: of each finished sample, in the order in which they finish."""

    settings: Settings
    steps: list[Step]
    work: list[tuple[Sample, Work]] = field(repr=False)

    def metrics(self) -> dict[str, float]:
        """Return means over the steps after the warm-up, under the names of a run's metrics.

        utilization/engines: share of the time in which an engine runs samples.
        utilization/trainer: in which the trainer works.
        """
        begin = min(max(WARM_UP, self.settings.depth), len(self.steps) - 1)
        steps = self.steps[begin:]
        step_s, period_s = fmean(s.step_s for s in steps), fmean(s.period_s for s in steps)
        tokens = fmean(s.tokens for s in steps)
        return {
            "timing_s/step": step_s,
            "timing_s/gen": fmean(s.gen_s for s in steps),
            "perf/throughput": tokens / (step_s * self.settings.devices),
            "utilization/engines": fmean(s.busy_s for s in steps) / period_s,
            "utilization/trainer": fmean(s.update_s for s in steps) / period_s,
            "async/age/mean": fmean(s.age_mean for s in steps),
            "async/age/max": max(s.age_max for s in steps),
            "running": fmean(s.running for s in steps),
        }


def simulate(
    workload: Workload, costs: Costs, settings: Settings, steps: int = 20, *, is_whole: bool = False
) -> Simulated:
    """Simulate the first steps of a run.

    is_whole: the run ends after them, so that no prompt is drawn that they do not train.
    """
    run = _Run(workload, costs, settings, steps if is_whole else None)
    run.begin()
    return Simulated(settings, [run.step() for _ in range(steps)], run.work)


class _Running:
    """A sample that has begun."""

    __slots__ = ("sample", "tokens", "number", "engine", "turn", "context", "cached", "began",
                 "counted", "mark", "work", "oldest", "versions", "sampled")  # fmt: skip

    def __init__(self, sample: Sample, number: int, engine: "_Engine") -> None:
        self.sample, self.number, self.engine = sample, number, engine
        self.tokens = sample.tokens
        self.turn = 0
        self.context = sample.prompt
        self.cached = 0
        """The weight version whose keys and values the engine has of the context; 0: none."""
        self.began = self.counted = 0.0
        self.mark = self.work = _NOTHING
        self.oldest: int | None = None
        self.versions = self.sampled = 0.0
        """Sum of the versions of its tokens, and their number."""

    def count(self, tokens: float, version: int) -> None:
        """Note that a version sampled so many of its tokens."""
        if tokens > 0:
            self.oldest = version if self.oldest is None else self.oldest
            self.versions += tokens * version
            self.sampled += tokens


class _Engine:
    """An engine whose samples all get a token in each step. Between two events their number does
    not change, so `steps` grows evenly."""

    def __init__(self, costs: Costs, settings: Settings) -> None:
        self.costs, self.slots = costs, settings.max_num_seqs
        self.kv_cache = settings.kv_cache
        self.version = 0
        self.now = self.busy_s = self.sample_s = 0.0
        self.steps = self.tokens = self.prefilled = self.paused_s = 0.0
        self.prefill = 0.0
        """Tokens of contexts that are computed before the next decode step."""
        self.running: list[tuple[float, int, _Running]] = []
        self.queue: deque[_Running] = deque()
        self.stamp = 0
        """Changes with the time of the next event."""
        self._order = itertools.count()

    def advance(self, now: float) -> None:
        """Work until now. Nothing happens before `self.now`: there it pauses."""
        seconds, running = now - self.now, len(self.running)
        if seconds <= 0:
            return
        self.now = now
        if not running:
            return
        self.busy_s += seconds
        self.sample_s += seconds * running
        if self.prefill:
            each = self.costs.prefill_token_s
            computed = min(self.prefill, seconds / each) if each else self.prefill
            self.prefill -= computed
            self.prefilled += computed
            seconds -= computed * each
        if seconds > 0:
            decoded = seconds / self._step_s(running)
            self.steps += decoded
            self.tokens += decoded * running

    @property
    def done(self) -> Work:
        """Its work since the start."""
        return Work(self.steps, self.tokens, self.prefilled, self.paused_s)

    def _step_s(self, running: int) -> float:
        return self.costs.decode_step_s + running * self.costs.decode_sample_s

    def due(self) -> float | None:
        """Return when the next turn ends."""
        if not self.running:
            return None
        steps = max(0.0, self.running[0][0] - self.steps)
        seconds = self.prefill * self.costs.prefill_token_s
        return self.now + seconds + steps * self._step_s(len(self.running))

    def add(self, now: float, samples: Sequence[_Running]) -> None:
        """Begin a turn of each sample, or let it wait for a place."""
        self.advance(now)
        mark = self.done
        for sample in samples:
            sample.mark = mark
        self.queue.extend(samples)
        self._begin()

    def _begin(self) -> None:
        while self.queue and len(self.running) < self.slots:
            sample = self.queue.popleft()
            turns, turn = sample.sample.turns, sample.turn
            is_cached = sample.cached == self.version or (
                sample.cached and self.kv_cache == "mixed"
            )
            self.prefill += turns[turn - 1].observation if is_cached else sample.context
            sample.cached = self.version
            sample.began, sample.counted = self.steps, 0.0
            end = sample.began + turns[turn].tokens
            heappush(self.running, (end, next(self._order), sample))
        self.stamp += 1

    def finish(self, now: float) -> list[_Running]:
        """Return the samples whose turn ends now. It is the time that `due` said."""
        self.advance(now)
        self.steps = max(self.steps, self.running[0][0])  # it may be less by rounding
        done, found = self.done, []
        while self.running and self.running[0][0] <= self.steps * (1 + 1e-12):
            sample = heappop(self.running)[2]
            turn = sample.sample.turns[sample.turn]
            sample.count(turn.tokens - sample.counted, self.version)
            sample.context += turn.tokens + turn.observation
            sample.work = sample.work.plus(done, sample.mark)
            sample.turn += 1
            found.append(sample)
        self._begin()
        return found

    def swap(self, now: float, pause_s: float, version: int) -> None:
        """Pause, and go on with other weights."""
        self.advance(now)
        for _, _, sample in self.running:
            tokens = int(self.steps - sample.began)
            sample.count(tokens - sample.counted, self.version)
            sample.counted = tokens
            if self.kv_cache == "fresh":
                self.prefill += sample.context + tokens
                sample.cached = version
        self.version = version
        if self.running:
            self.paused_s += pause_s
        self.now = max(self.now, now + pause_s)
        self.stamp += 1


@dataclass
class _Group:
    """A prompt whose samples have begun."""

    samples: list[_Running]
    left: int


class _Run:
    """The driver of a run, and what happens meanwhile."""

    def __init__(
        self, workload: Workload, costs: Costs, settings: Settings, total_steps: int | None
    ) -> None:
        self.workload, self.costs, self.settings = workload, costs, settings
        is_async = settings.mode == "async"
        self.flow = Flow(
            groups_per_step=settings.prompts,
            bound=settings.max_age if is_async else 0,
            depth=settings.depth if is_async else 0,
            engines=settings.engines,
            swaps=settings.partial_rollout,
            total_steps=total_steps,
        )
        self.engines = [_Engine(costs, settings) for _ in range(settings.engines)]
        self.groups: dict[int, _Group] = {}
        self.scored: list[int] = []
        """Prompts that are finished, and that the driver has not collected."""
        self.passed_at = 0.0
        """With mode=pipelined: when the passes of the first update over finished samples end."""
        self.work: list[tuple[Sample, Work]] = []
        self.now = 0.0
        self.coming: list[tuple[float, int, Callable[..., None], Any, int]] = []
        self._order = itertools.count()

    # The driver

    def begin(self) -> None:
        """Give the engines their first weights."""
        self._publish()

    def step(self) -> Step:
        """Train one step."""
        flow, began = self.flow, self.now
        busy_s, sample_s = self._engine_seconds()
        self._collect()
        self._start()
        while (numbers := flow.choose()) is None:
            self._wait()
            self._start()
        gen_s = self.now - began
        samples = [sample for number in numbers for sample in self.groups.pop(number).samples]
        tokens = sum(sample.tokens for sample in samples)
        ages = self._ages(samples)
        update_s = self.costs.update_s + self._passes_s(samples)
        early_s = 0.0
        if self.settings.mode == "pipelined":
            early_s = self._passes_s(samples) / self.settings.updates
            self._pass(self.passed_at - self.now)
        self._pass(update_s - early_s)
        flow.trained(numbers)
        updated = self.now
        self._collect()
        while not flow.may_publish():
            self._wait()
        gen_s += self.now - updated
        self._publish()
        if self.settings.mode == "async" and self.settings.max_age:
            self._start()
        step_s = self.now - began
        self._pass(self.costs.after_s)
        busy_now, sample_now = self._engine_seconds()
        period_s, engines = self.now - began, len(self.engines)
        running = (sample_now - sample_s) / (period_s * engines) if period_s else 0.0
        busy_s = (busy_now - busy_s) / engines
        return Step(step_s, gen_s, update_s, period_s, tokens, busy_s, running, *ages)

    def _start(self) -> None:
        """Draw the prompts that may be drawn now, and start those that may be sampled now."""
        flow = self.flow
        flow.draw(flow.wanted())
        for place, numbers in flow.assign().items():
            engine, begun = self.engines[place], []
            for number in numbers:
                samples = [_Running(sample, number, engine) for sample in self.workload(number)]
                self.groups[number] = _Group(samples, len(samples))
                begun += samples
            engine.add(self.now, begun)
            self._expect(engine)

    def _wait(self) -> None:
        """Wait until a prompt is finished."""
        while not self.scored:
            if not self.coming:
                raise RuntimeError(f"nothing happens any more in step {self.flow.step + 1}")
            self._pass(self.coming[0][0] - self.now)
        self._collect()

    def _collect(self) -> None:
        for number in self.scored:
            oldest = [s.oldest for s in self.groups[number].samples if s.oldest is not None]
            self.flow.finished(number, min(oldest, default=None))
        self.scored.clear()

    def _publish(self) -> None:
        for engine in self.engines:
            engine.swap(self.now, self.costs.sync_s, self.flow.step + 1)
            self._expect(engine)
        self._pass(self.costs.sync_s)
        self.flow.published()

    def _ages(self, samples: Sequence[_Running]) -> tuple[float, float]:
        """Return the mean and the largest age of the tokens, when the next step trains them."""
        step = self.flow.step + 1
        tokens = sum(sample.sampled for sample in samples)
        versions = sum(sample.versions for sample in samples)
        oldest = min((s.oldest for s in samples if s.oldest is not None), default=step)
        return (step - versions / tokens if tokens else 0.0), float(step - oldest)

    def _engine_seconds(self) -> tuple[float, float]:
        for engine in self.engines:
            engine.advance(self.now)
        return sum(e.busy_s for e in self.engines), sum(e.sample_s for e in self.engines)

    # What happens meanwhile

    def _pass(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + seconds
        while self.coming and self.coming[0][0] <= until:
            at, _, what, about, stamp = heappop(self.coming)
            self.now = max(self.now, at)
            what(about, stamp)
        self.now = max(self.now, until)

    def _after(self, seconds: float, what: Callable[..., None], about: Any, stamp: int = 0) -> None:
        heappush(self.coming, (self.now + seconds, next(self._order), what, about, stamp))

    def _expect(self, engine: _Engine) -> None:
        due = engine.due()
        if due is not None:
            entry = (due, next(self._order), self._turn_ends, engine, engine.stamp)
            heappush(self.coming, entry)

    def _turn_ends(self, engine: _Engine, stamp: int) -> None:
        if stamp != engine.stamp:  # something else has happened there
            return
        again = []
        for running in engine.finish(self.now):
            seconds = running.sample.turns[running.turn - 1].tool_s
            if seconds:
                self._after(seconds, self._tool_answers, running)
            elif running.turn < len(running.sample.turns):
                again.append(running)
            else:
                self._sample_ends(running)
        engine.add(self.now, again)
        self._expect(engine)

    def _tool_answers(self, running: _Running, stamp: int) -> None:
        if running.turn < len(running.sample.turns):
            running.engine.add(self.now, [running])
            self._expect(running.engine)
        else:
            self._sample_ends(running)

    def _sample_ends(self, running: _Running) -> None:
        self.work.append((running.sample, running.work))
        group = self.groups[running.number]
        group.left -= 1
        if not group.left:
            self._after(self.costs.reward_s, self._is_scored, running.number)

    def _is_scored(self, number: int, stamp: int) -> None:
        self.scored.append(number)
        early_s = self._passes_s(self.groups[number].samples) / self.settings.updates
        self.passed_at = max(self.passed_at, self.now) + early_s

    def _passes_s(self, samples: Sequence[_Running]) -> float:
        """Return the seconds of the trainer's passes over samples."""
        tokens = sum(running.tokens for running in samples)
        return tokens * self.costs.update_token_s / self.settings.trainer_devices
