"""A contract test for environments: play samples as training does, with scripted turns."""

import asyncio
import copy
import inspect
import json
import math
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verlite.envs.factory import EnvFactory, build_env_factory, check_env_factory
from verlite.envs.step import Env, Step, ToolError
from verlite.importing import CODE_ERRORS
from verlite.spec.roles import EnvSpec

TURNS = {
    "plain words": "The answer is 42.",
    "a number": "42",
    "an empty turn": "",
    "white space": " \n\t ",
    "half of a tool call": '<tool_call>{"name": "',
    "a call of an unknown tool": '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>',
    "random symbols": "}{\\frac{[(<|#### \u0000\ufffd 𝟜２ ٤٢",
    "a very long turn": "so 1 + 1 = 2, " * 5_000,
}
"""What a model may write, by what it is."""
SCRIPT = "your script"
STEP_LIMIT_S = 60.0
"""How long a step may take here."""
BLOCKED_S = 0.5
"""How long a step may keep the event loop, which all samples of a rollout worker share."""
ROWS_S = 30.0
"""How long further rows of the data are tried."""
EXTRA_INFO = {"index": 0, "split": "test"}

Play = list[tuple[Any, ...]]
"""What the model and training see of each step: texts, ends, validity and reward."""


@dataclass
class EnvReport:
    """What was seen."""

    problems: dict[str, list[str]] = field(default_factory=dict)
    """Each broken promise, and the turns that it was seen on; none: not about a turn."""
    turns: int = 0
    """How many kinds of turns were tried."""
    rows: int = 0
    """Rows of the data that were tried. The problems are of the last one."""
    answers: list[str] = field(default_factory=list)
    """A line for each turn of the script, played on the first row."""
    seconds: list[float] = field(default_factory=list)
    """Time of each step."""

    def add(self, problem: str, turn: str | None = None) -> None:
        turns = self.problems.setdefault(problem, [])
        if turn is not None and turn not in turns:
            turns.append(turn)

    def lines(self) -> list[str]:
        """Return one sentence per problem."""
        row = f" of row {self.rows - 1}" if self.rows > 1 else ""
        lines = []
        for problem, turns in self.problems.items():
            where = "all turns" if len(turns) == self.turns else ", ".join(turns)
            lines.append(f"on {where}{row}: {problem}" if turns else problem)
        return lines


def check_env(
    name: str,
    kwargs: dict[str, Any] | None = None,
    script: Sequence[str] = (),
    rows: Sequence[dict[str, Any]] = (),
) -> EnvReport:
    """Play samples of an environment and report the promises that it breaks. It must

    - be created, be an EnvFactory, and pass its own `check`;
    - give each sample an object of its own, with `stop` as a tuple of strings;
    - answer whatever the model writes with a Step of the right types, a finite reward, and an
      `info` that is JSON, without an exception;
    - use no tool in the last turn;
    - answer the same turns in the same way, alone and beside other samples;
    - leave extra_info as it is;
    - let other samples run while it waits, and answer within STEP_LIMIT_S;
    - leave no task behind when the factory is closed, be entered again in another event loop, and
      need no other call of `close`.

    Args:
        name: "package.module:Factory", "FILE.py:Factory", or an environment of verlite.
        kwargs: env.kwargs.
        script: turns of the model in one sample, in addition to samples that begin with each of
            TURNS.
        rows: extra_info of rows of the data. The first is tried in every way, the others once.

    Raises:
        ValueError: `name` has none of these forms.
    """
    place, colon, attribute = name.rpartition(":")
    if place.endswith(".py") and colon:
        file = Path(place).resolve()
        if not file.is_file():
            raise ValueError(f"{place} does not exist")
        sys.path.insert(0, str(file.parent))
        name = f"{file.stem}:{attribute}"
    elif name.endswith(".py"):
        raise ValueError(f"environment {name!r}: write FILE.py:Factory or package.module:Factory")
    report = EnvReport()
    try:
        factory = build_env_factory(EnvSpec(name, kwargs or {}))
        warning = check_env_factory(factory)
        if warning is not None:
            report.add(f"check(): {warning}")
    except (ValueError, ToolError) as error:
        report.add(str(error))
        return report
    _check_factory(factory, report)
    first = rows[0] if rows else dict(EXTRA_INFO)
    plays = _plays(factory, first, tuple(script), report, has_data=bool(rows))
    if not plays:
        return report
    report.turns = len(plays)
    seen = _session(factory, first, plays, report)
    report.answers = [
        _answer(turn, *step) for turn, step in zip(script, seen.get(SCRIPT, []), strict=False)
    ]
    report.rows = len(rows[:1])
    if not report.problems:
        _check_repeats(factory, first, plays, seen, report)
    deadline = time.monotonic() + ROWS_S
    for row in rows[1:]:
        if report.problems or time.monotonic() > deadline:
            break
        report.rows += 1
        _session(factory, row, plays, report)
    return report


def _plays(
    factory: EnvFactory,
    extra_info: dict[str, Any],
    script: tuple[str, ...],
    report: EnvReport,
    has_data: bool,
) -> dict[str, tuple[str, ...]]:
    """Return the turns of each sample to play, by what they are; {} if none can be played."""
    env = _new_env(factory, extra_info, report, has_data)
    if env is None:
        return {}
    if env is _new_env(factory, extra_info, report, has_data):
        report.add("env() returns one object for two samples: they would share its state")
        return {}
    if not _check_env_object(env, report):
        return {}
    made_up = TURNS | {f"its stop string {text!r}": text for text in env.stop[:4]}
    plays: dict[str, tuple[str, ...]] = {SCRIPT: script} if script else {}
    return plays | {name: (text, text) for name, text in made_up.items()}


def _session(
    factory: EnvFactory,
    extra_info: dict[str, Any],
    plays: dict[str, tuple[str, ...]],
    report: EnvReport,
) -> dict[str, Play]:
    """Play one sample after the other, as a step of training does: environments are made first, and
    the factory is entered in an event loop of its own."""
    before = copy.deepcopy(extra_info)
    envs = {name: _new_env(factory, extra_info, report) for name in plays}
    seen: dict[str, Play] = {}

    async def play_all() -> None:
        for name, texts in plays.items():
            env = envs[name]
            if env is not None:
                seen[name] = await _play(env, texts, name, report)

    _run(factory, play_all, report)
    if extra_info != before:
        report.add("a sample changes extra_info, which belongs to all samples of a row")
    return seen


def _run(factory: EnvFactory, play_all: Callable[[], Awaitable[None]], report: EnvReport) -> None:
    async def run() -> None:
        try:
            async with factory:
                await play_all()
        except CODE_ERRORS as error:
            report.add(f"`async with` of the factory raises {_text(error)}")
        left = [task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}]
        if left:
            report.add("tasks run on after the factory was closed: cancel them in __aexit__")

    asyncio.run(run())


def _check_factory(factory: EnvFactory, report: EnvReport) -> None:
    around: Any = factory.around
    if not (isinstance(around, tuple) and [type(text) for text in around] == [str, str]):
        report.add(f"around is {around!r:.100}: it must be two strings in a tuple")
    if not isinstance(factory.tools, tuple) or not all(isinstance(t, dict) for t in factory.tools):
        report.add("tools must be a tuple of JSON schemas")
    elif not _is_json(list(factory.tools)):
        report.add("tools have values that are not JSON")
    if type(factory.chat) is not bool:
        report.add(f"chat is {factory.chat!r:.100}: it must be True or False")


def _new_env(
    factory: EnvFactory, extra_info: dict[str, Any], report: EnvReport, has_data: bool = True
) -> Env | None:
    try:
        return factory.env(extra_info)
    except CODE_ERRORS as error:
        more = "" if has_data else ": try it on your data, --data FILE"
        report.add(f"env() raises {_text(error)} with extra_info {list(extra_info)}{more}")
        return None


def _check_env_object(env: Env, report: EnvReport) -> bool:
    """Return whether steps can be tried."""
    stop: Any = getattr(env, "stop", None)
    if not isinstance(stop, tuple) or not all(isinstance(text, str) and text for text in stop):
        report.add(f"stop is {stop!r:.100}: it must be a tuple of strings, such as ('\\n',) or ()")
    for name in ("close", "aclose", "__aexit__"):
        if hasattr(env, name):
            report.add(
                f"the environment of a sample has {name}, which nothing calls: release what it "
                "holds in its last step, and what samples share in the factory's __aexit__"
            )
    if not inspect.iscoroutinefunction(getattr(env, "step", None)):
        report.add("step is not a coroutine: write `async def step(self, text, last)`")
    return not report.problems


async def _play(env: Env, texts: tuple[str, ...], name: str, report: EnvReport) -> Play:
    """Play one sample, and report what is wrong with its steps."""
    play: Play = []
    for number, text in enumerate(texts, start=1):
        last = number == len(texts)
        step = await _step(env, text, last, name, report)
        if step is None or not _check_step(step, last, name, report):
            break
        play.append(_visible(step))
        if step.done:
            break
    return play


async def _step(env: Env, text: str, last: bool, name: str, report: EnvReport) -> Any:
    """Return what a step returns, None if it fails."""
    heart = _Heart()
    beating = asyncio.create_task(heart.beat())
    await asyncio.sleep(0)
    began = time.monotonic()
    try:
        async with asyncio.timeout(STEP_LIMIT_S) as limit:
            step = await env.step(text, last)
    except CODE_ERRORS as error:
        if limit.expired():  # not a TimeoutError of the step's own
            report.add(f"step takes more than {STEP_LIMIT_S:g} s", name)
            return None
        where = f"raises {type(error).__name__}{_line(env, error)}"
        known = next((text for text in report.problems if text.startswith(where)), None)
        problem = (
            f"{where}: {error}. The sample would be excluded from training; a mistake of the model "
            "is a Step with valid=False"
        )
        report.add(known or problem, name)
        return None
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
    report.seconds.append(time.monotonic() - began)
    blocked = heart.longest_pause()
    if blocked > BLOCKED_S:
        report.add(
            f"step keeps the event loop for {blocked:.1f} s, and all other samples wait: await "
            "something asynchronous, or asyncio.to_thread(...)",
            name,
        )
    if step is None:
        report.add("step returned None, not a Step", name)
    return step


def _line(env: Env, error: BaseException) -> str:
    """Return the line of the environment's file that an exception came through."""
    file = inspect.getsourcefile(type(env))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


class _Heart:
    """Measures how long the event loop runs nothing else."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._longest = 0.0

    async def beat(self) -> None:
        while True:
            self.longest_pause()
            await asyncio.sleep(0.01)

    def longest_pause(self) -> float:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._last = now
        return self._longest


def _check_step(step: Any, last: bool, name: str, report: EnvReport) -> bool:
    """Return whether the sample can go on after this step."""
    if not isinstance(step, Step):
        report.add(f"step returned a {type(step).__name__}, not a Step", name)
        return False
    kinds = {"obs": str, "before": str, "after": str, "done": bool, "valid": bool, "info": dict}
    for key, kind in kinds.items():
        value = getattr(step, key)
        if not isinstance(value, kind):
            shown = f"{value!r:.60}"
            report.add(
                f"Step.{key} is {shown}, a {type(value).__name__}, not {kind.__name__}", name
            )
    try:
        finite = math.isfinite(float(step.reward))
    except (TypeError, ValueError):
        finite = False
    if not finite:
        report.add(f"Step.reward is {step.reward!r:.60}, not a finite number", name)
    if isinstance(step.info, dict):
        _check_info(step.info, last, name, report)
    return True


def _check_info(info: dict[str, Any], last: bool, name: str, report: EnvReport) -> None:
    if not _is_json(info):
        report.add("Step.info has keys or values that are not JSON", name)
    for key in ("seconds", "retries"):
        if key in info and type(info[key]) not in (int, float):
            report.add(f"Step.info[{key!r}] is {info[key]!r:.60}, not a number", name)
    if last and info.get("called"):
        report.add("a tool is called in the last turn, whose answer the model does not see", name)


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def _check_repeats(
    factory: EnvFactory,
    extra_info: dict[str, Any],
    plays: dict[str, tuple[str, ...]],
    seen: dict[str, Play],
    report: EnvReport,
) -> None:
    """Play every sample again, then twice at the same time, turn by turn."""
    again = _session(factory, extra_info, plays, report)
    if report.problems:
        return
    for name in plays:
        if again[name] != seen[name]:
            report.add(
                "the same turns get other answers when they are played again: they depend on "
                "chance, on time, or on state that samples share, such as attributes of a class",
                name,
            )
    if report.problems:
        return
    made = [_new_env(factory, extra_info, report) for _ in range(2 * len(plays))]
    envs = [env for env in made if env is not None]
    if report.problems:
        return
    pairs = {name: (envs[2 * i], envs[2 * i + 1]) for i, name in enumerate(plays)}

    async def play_pairs() -> None:
        for name, texts in plays.items():
            both: tuple[Play, Play] = ([], [])
            for number in range(len(seen[name])):
                for env, play in zip(pairs[name], both, strict=True):
                    last = number + 1 == len(texts)
                    step = await _step(env, texts[number], last, name, report)
                    play.append(_visible(step) if isinstance(step, Step) else ())
            if both != (seen[name], seen[name]):
                report.add(
                    "the same turns get other answers while another sample is played: samples "
                    "share state",
                    name,
                )

    _run(factory, play_pairs, report)


def _visible(step: Step) -> tuple[Any, ...]:
    return (step.obs, step.before, step.after, step.done, step.valid, step.reward)


def _answer(turn: str, *step: Any) -> str:
    obs, before, after, done, _, reward = step  # of any type
    answer = "ends the sample" if done else "is answered " + repr(f"{before}{obs}{after}")
    return f"{turn!r} {answer}, reward {reward}"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
