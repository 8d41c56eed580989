"""Scoring: user functions in separate processes, routing, scales, checks before the start."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from tests.controller.conftest import alive
from verlite.algorithms.advantages import overlong_penalty
from verlite.rewards import pool
from verlite.rewards.process import FunctionError
from verlite.rewards.result import RewardItem, RewardResult
from verlite.rewards.routing import UnknownDataSource, scale_of
from verlite.rewards.scorer import Scorer
from verlite.spec.roles import ScorerSpec

pytestmark = pytest.mark.process

MakeScorer = Callable[..., Scorer]
TOP = Path(__file__).parents[2]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeScorer]:
    """Build scorers from the source of a function, and close them after the test."""
    scorers = []

    def build(
        source: str = "",
        *,
        name: str = "compute_score",
        kwargs: dict | None = None,
        debug: bool = False,
        **reward: Any,
    ) -> Scorer:
        path = tmp_path / f"reward_{len(scorers)}.py"
        path.write_text(source)
        spec = ScorerSpec(
            path=str(path) if source else None, name=name, reward_kwargs=kwargs or {}, **reward
        )
        scorers.append(Scorer(spec, debug=debug))
        return scorers[-1]

    yield build
    for scorer in scorers:
        scorer.close()


def items(*solutions: str, source: str = "mine", truth: object = "1") -> list[RewardItem]:
    return [
        RewardItem(source, solution, truth, {"index": i}) for i, solution in enumerate(solutions)
    ]


MIXED = """
import asyncio, os, sys, time
{asynchronous}def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "raise": raise KeyError("lost")
    if solution_str == "none": return None
    if solution_str == "nan": return float("nan")
    if solution_str == "inf": return {{"score": float("inf")}}
    if solution_str == "huge": return 10**400
    if solution_str == "text": return "1.0"
    if solution_str == "list": return [1.0]
    if solution_str == "no score": return {{"acc": 1.0}}
    if solution_str == "exit": sys.exit(3)
    if solution_str == "die": os._exit(3)
    if solution_str == "segfault": os.kill(os.getpid(), 11)
    if solution_str == "loop":
        while True: pass
    if solution_str == "dict":
        return {{"score": 0.5, "acc": True, "n": 3, "pred": "x", "none": None, "huge": -(10**400)}}
    print("noise on stdout")
    return len(solution_str)
"""
BAD = {
    "raise": "KeyError",
    "none": "BadReturn",
    "nan": "BadReturn",
    "inf": "BadReturn",
    "huge": "BadReturn",
    "text": "BadReturn",
    "list": "BadReturn",
    "no score": "BadReturn",
    "exit": "SystemExit",
    "die": "Died",
    "segfault": "Died",
    "loop": "Timeout",
}


@pytest.mark.parametrize("asynchronous", ["", "async "])
def test_failed_calls_are_results_and_the_others_are_scored(
    make: MakeScorer, asynchronous: str
) -> None:
    scorer = make(MIXED.format(asynchronous=asynchronous), item_timeout_s=2.0)
    solutions = ["x" * n for n in range(20)]
    for place, bad in enumerate(BAD):
        solutions.insert(2 * place, bad)
    results = scorer.score(items(*solutions, "dict"))
    for solution, result in zip(solutions, results, strict=False):
        if solution in BAD:
            assert (result.score, result.error) == (None, BAD[solution]), solution
            assert result.traceback
        else:
            assert result == RewardResult(float(len(solution))), solution
    assert results[-1] == RewardResult(
        0.5, {"acc": 1.0, "n": 3.0, "pred": "x", "none": "None", "huge": -math.inf}
    )
    tracebacks = {
        solution: result.traceback for solution, result in zip(solutions, results, strict=False)
    }
    assert "lost" in tracebacks["raise"]
    assert "in compute_score" in tracebacks["raise"]
    assert tracebacks["die"] == "the reward process ended with exit code 3"
    assert tracebacks["segfault"] == "the reward process was killed by SIGSEGV"
    assert "returned '1.0'" in tracebacks["text"]
    assert "returned 'text'" not in tracebacks["text"]


def test_step_limit_ends_slow_calls_and_not_the_next_step(make: MakeScorer) -> None:
    source = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(float(solution_str))
    return 1
"""
    scorer = make(source, timeout_s=2.0, item_timeout_s=30.0)
    scorer.check_signature()
    start = time.monotonic()
    results = scorer.score(items("60", "60", "0", "0", "0"))
    assert 1.9 < time.monotonic() - start < 20.0
    assert {result.error for result in results if result.score is None} == {"Timeout"}
    assert scorer.score(items("0", "0")) == [RewardResult(1.0)] * 2


def test_async_calls_run_together_and_time_out_alone(make: MakeScorer) -> None:
    source = """
import asyncio
async def compute_score(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(float(solution_str))
    return {"score": 1, "pid": __import__("os").getpid()}
"""
    scorer = make(source, item_timeout_s=3.0)
    scorer.check_signature()
    start = time.monotonic()
    results = scorer.score(items("60", *["0.5"] * 99))
    assert time.monotonic() - start < 20.0
    assert results[0].error == "Timeout"
    assert {result.score for result in results[1:]} == {1.0}
    again = scorer.score(items(*["0"] * 99))  # no process was killed for the timeout
    assert {result.parts["pid"] for result in again} <= {
        result.parts["pid"] for result in results[1:]
    }


def test_processes_that_die_between_steps_are_replaced(make: MakeScorer) -> None:
    scorer = make(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1"
    )
    long = items(*["x" * 10_000] * 100)
    assert scorer.score(long) == [RewardResult(1.0)] * 100
    children = [
        child
        for child in psutil.Process().children()
        if any("verlite.rewards.process" in word for word in child.cmdline())
    ]
    with_functions = [one for child in children for one in child.children()]
    for child in children:
        child.kill()
    assert not psutil.wait_procs(with_functions, 10)[1]  # they end with their parents
    assert children and scorer.score(long) == [RewardResult(1.0)] * 100


def test_only_the_call_that_kills_its_process_fails(make: MakeScorer) -> None:
    source = """
import asyncio, os
async def compute_score(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.2)
    if solution_str == "die": os._exit(3)
    await asyncio.sleep(0.2)
    return 1
"""
    results = make(source, timeout_s=20.0).score(items("a", "die", "b", "c", "d", "e"))
    assert [result.error for result in results] == [None, "Died", None, None, None, None]


def test_only_a_call_that_killed_its_process_is_made_twice(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("""
import os, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    with open(ground_truth, "a") as file: file.write(f"{solution_str} ")
    if solution_str == "die": os._exit(3)
    if solution_str == "raise": raise KeyError("lost")
    time.sleep({"wait": 1.2, "hang": 600}.get(solution_str, 0))
    return 1
""")
    names = list(RewardItem("", "", None).arguments())
    texts = ["wait", "wait", "raise", "die", "hang", "a"]
    one = pool.Pool(f"{path}:compute_score", names, 2.0, processes=1)
    ran = tmp_path / "ran"
    try:
        results = one.run([item.arguments() for item in items(*texts, truth=str(ran))], 60.0)
    finally:
        one.close()
    assert [result.error for result in results] == [
        *[None, None, "KeyError", "Died", "Timeout", None]
    ]
    assert sorted(ran.read_text().split()) == sorted([*texts, "die"])


def test_one_process_serves_fast_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "ALONE_S", 3600.0)
    path = tmp_path / "reward.py"
    path.write_text("def compute_score(**row): return 1")
    names = list(RewardItem("", "", None).arguments())
    one = pool.Pool(f"{path}:compute_score", names, 20.0, processes=4)
    try:
        one.start(60.0)
        results = one.run([item.arguments() for item in items(*"x" * 50)], 60.0)
        assert results == [RewardResult(1.0)] * 50
        assert len(one._idle) == 1
    finally:
        one.close()


def test_the_processes_of_the_machine_are_not_searched_after_every_batch(
    make: MakeScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = []
    monkeypatch.setattr(pool, "LOOK_S", 3600.0)
    monkeypatch.setattr(pool, "descendants", lambda pid: searched.append(pid) or [])
    scorer = make("def compute_score(**row): return 1")
    for _ in range(5):
        assert scorer.score(items("a")) == [RewardResult(1.0)]
    assert len(searched) == 1


def test_functions_run_in_the_given_folder_if_it_exists(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        "import os\ndef compute_score(data_source, solution_str, ground_truth, extra_info): "
        "return {'score': 1, 'cwd': os.getcwd()}"
    )
    there = tmp_path / "there"
    there.mkdir()
    for folder, seen in (
        (str(there), str(there)),
        (str(tmp_path / "elsewhere"), os.getcwd()),
        (None, os.getcwd()),
    ):
        scorer = Scorer(ScorerSpec(path=str(path)), folder=folder)
        assert scorer.score(items("x"))[0].parts["cwd"] == seen
        scorer.close()


def test_pools_on_one_machine_divide_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        "import os, time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    folder, expected = ground_truth\n"
        "    open(f'{folder}/{os.getpid()}', 'w').close()\n"
        "    end = time.monotonic() + 25\n"
        "    while len(os.listdir(folder)) < expected and time.monotonic() < end:\n"
        "        time.sleep(0.01)\n"
        "    time.sleep(0.005)\n"
        "    return {'score': 1, 'pid': os.getpid()}\n"
    )
    monkeypatch.setattr(pool, "cores", lambda: 6)
    for share, processes in ((1, 6), (2, 3), (9, 1)):
        scorer = Scorer(ScorerSpec(path=str(path)), share=share)
        folder = tmp_path / str(share)
        folder.mkdir()
        truth = str(folder), processes  # each call waits until so many processes have begun one
        results = scorer.score(items(*"x" * 200, truth=truth))
        assert len({result.parts["pid"] for result in results}) == processes
        scorer.close()


def test_arguments_are_those_of_verl(make: MakeScorer) -> None:
    source = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": 1, "seen": repr((data_source, solution_str, ground_truth, extra_info, kwargs))}
"""
    item = RewardItem("src", "né \\ud800", {"target": ["a", "b"]}, {"index": 7})
    [result] = make(source, kwargs={"scale": 2}).score([item])
    assert result.parts["seen"] == repr(
        ("src", "né \\ud800", {"target": ["a", "b"]}, {"index": 7}, {"scale": 2})
    )


@pytest.mark.parametrize("asynchronous", ["", "async "])
@pytest.mark.parametrize("debug", [False, True])
def test_arguments_of_openrlhf(make: MakeScorer, asynchronous: str, debug: bool) -> None:
    """A function that names `queries` gets lists of one entry, and its lists are read."""
    source = f"""
{asynchronous}def reward_func(queries, prompts, labels, scale):
    if labels == ["raise"]: raise ValueError("bad")
    seen = repr((queries, prompts, labels, scale))
    return {{"rewards": [0.5], "scores": [1.0], "extra_logs": {{"seen": [seen]}}}}
"""
    scorer = make(source, name="reward_func", kwargs={"scale": 2}, debug=debug)
    scorer.check_signature()
    assert scorer.needs_prompts
    whole = RewardItem("s", "r", "7", {"index": 1}, "<p>", "<p>r<e>")
    bare = RewardItem("s", "r", {"target": ["7"]})
    first, second, third = scorer.score([whole, bare, RewardItem("s", "", "raise")])
    assert (first.score, first.parts["acc"]) == (0.5, 1.0)
    assert first.parts["seen"] == repr((["<p>r<e>"], ["<p>"], ["7"], 2))
    assert second.parts["seen"] == repr((["r"], [""], [{"target": ["7"]}], 2))
    assert (third.score, third.error) == (None, "ValueError")


def test_function_of_verl_with_queries_gets_the_arguments_of_verl(make: MakeScorer) -> None:
    source = "def compute_score(solution_str, queries=None, **row): return len(solution_str)"
    scorer = make(source)
    assert [result.score for result in scorer.score(items("abc"))] == [3.0]
    assert not scorer.needs_prompts and not make().needs_prompts


def test_functions_may_run_an_event_loop_and_import_files_beside_them(
    make: MakeScorer, tmp_path: Path
) -> None:
    (tmp_path / "neighbour.py").write_text("async def one(): return 1.0")
    source = """
import asyncio, neighbour
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return asyncio.run(neighbour.one())
"""
    assert make(source).score(items("a")) == [RewardResult(1.0)]


def test_file_named_like_a_library_does_not_shadow_it(make: MakeScorer, tmp_path: Path) -> None:
    """A file called decimal.py can import the library, and its classes can be pickled."""
    (tmp_path / "decimal.py").write_text("""
import dataclasses, fractions, math, pickle
from decimal import Decimal  # the library's, not this file
@dataclasses.dataclass
class Answer:
    text: str
def compute_score(data_source, solution_str, ground_truth, extra_info):
    same = pickle.loads(pickle.dumps(Answer(solution_str))) == Answer(ground_truth)
    if solution_str == "raise": raise ValueError("here")
    return float(same) + float(Decimal(2)) + math.floor(0.5)
""")
    scorer = make("x")
    scorer._custom = f"{tmp_path / 'decimal.py'}:compute_score"
    one, other, raised = scorer.score(items("1", "2", "raise"))
    assert (one.score, other.score) == (3.0, 2.0), one
    assert f'File "{tmp_path}/decimal.py", line 9, in compute_score' in raised.traceback


@pytest.mark.parametrize(
    ("source", "name", "expected"),
    [
        (
            "def compute_score(solution, truth): return 1",
            "compute_score",
            "compute_score(solution, truth) cannot be called with data_s",
        ),
        (
            "def other(): pass",
            "compute_score",
            "has no function 'compute_score'; its functions are other",
        ),
        (
            "import nowhere_to_be_found",
            "compute_score",
            "ModuleNotFoundError: No module named 'nowhere_to_be_found' (/",
        ),
        (
            "def reward_func(queries, prompts): return 1",
            "reward_func",
            "reward_func(queries, prompts) cannot be called with queries, prompts, labels",
        ),
        (
            "def reward(completions, **kw): return 1",
            "reward",
            "or **kwargs. TRL's reward functions score a list of completions, these one "
            "response: docs/migration/trl.md",
        ),
        ("def f(:", "compute_score", "SyntaxError"),
        (
            "import os; os._exit(9)",
            "compute_score",
            "ended with exit code 9 while loading it",
        ),
    ],
)
def test_unusable_function_is_a_one_line_error_before_the_start(
    make: MakeScorer, source: str, name: str, expected: str
) -> None:
    with pytest.raises(FunctionError) as caught:
        make(source, name=name).check_signature()
    message = str(caught.value)
    assert (
        expected in message
        and "reward_0.py" in message
        and message.startswith("custom_reward_function")
    )


def test_missing_file_is_a_one_line_error(tmp_path: Path) -> None:
    scorer = Scorer(ScorerSpec(path=str(tmp_path / "none.py")))
    with pytest.raises(
        FunctionError,
        match="custom_reward_function.path=.*none.py is not a Python file that exists",
    ):
        scorer.check_signature()


def test_wrong_reward_kwargs_of_built_in_scorers_are_errors(make: MakeScorer) -> None:
    make(kwargs={"method": "flexible"}).check_signature(["openai/gsm8k"])
    with pytest.raises(FunctionError, match="unexpected keyword argument 'methd'"):
        make(kwargs={"methd": "flexible"}).check_signature(["openai/gsm8k"])


def test_sources_are_routed_and_unknown_ones_are_errors(make: MakeScorer) -> None:
    scorer = make()
    mixed = [
        *items(" 12 ", source="verlite/arithmetic", truth="12"),
        *items("#### 72", source="openai/gsm8k", truth="72"),
        *items("\\boxed{0.5}", source="aime2024", truth="\\frac12"),
        *items("so\nAnswer: $\\frac12$", source="math", truth="0.5"),
        *items("so\nAnswer: 7", source="math_dapo_reasoning", truth="7"),
        *items("13", source="verlite/arithmetic", truth="12"),
    ]
    assert [result.score for result in scorer.score(mixed)] == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    with pytest.raises(
        UnknownDataSource,
        match=(
            "'pub-quiz', 'trivia'; built-in scorers know openai/gsm8k.*custom_reward_function.path"
        ),
    ):
        scorer.check_signature(["openai/gsm8k", "pub-quiz", "trivia", "pub-quiz"])


def test_flexible_gsm8k_through_reward_kwargs(make: MakeScorer) -> None:
    assert make(kwargs={"method": "flexible"}).score(
        items("it is 72", source="openai/gsm8k", truth="72")
    ) == [RewardResult(1.0)]


def test_invalid_ground_truth_is_an_error_and_not_a_zero(make: MakeScorer) -> None:
    [result] = make().score(items("#### 72", source="openai/gsm8k", truth="seventy"))
    assert (result.score, result.error) == (None, "InvalidOperation")


def test_self_check_warns_about_a_wrong_function_only(make: MakeScorer) -> None:
    rows = [
        *items("", "", source="openai/gsm8k", truth="72"),
        *items("", source="lighteval/MATH", truth="\\frac{1}{2}"),
        *items("", source="verlite/arithmetic", truth="5"),
        *items("", source="openai/gsm8k", truth=None),
    ]
    check = make().self_check(rows)
    assert (check.checked, check.warning()) == (4, None)
    wrong = make(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return 0.0"
    ).self_check(rows)
    assert wrong.warning().startswith(
        "the reward function gives 4 of 4 ground-truth answers no score above 0"
    )
    assert wrong.warning().count("score 0") == 3  # examples


def test_endless_math_is_killed(make: MakeScorer) -> None:
    scorer = make(item_timeout_s=3.0)
    towers = items(
        "\\boxed{9^{9^{9^{9}}}+1}",
        "\\boxed{\\frac{2}{4}}",
        source="lighteval/MATH",
        truth="\\frac12",
    )
    tower, half = scorer.score(towers)
    assert half == RewardResult(1.0)
    assert tower.error == "Timeout" or tower.score == 0.0


def test_reward_processes_do_not_import_torch_and_end_with_a_killed_trainer(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("""
import os, sys
def compute_score(data_source, solution_str, ground_truth, extra_info):
    heavy = [name for name in ("torch", "numpy", "omegaconf", "ray") if name in sys.modules]
    if solution_str == "hang":
        open(ground_truth, "w").write(f"{os.getpid()}")
        while True: pass
    return {"score": 1, "heavy": ",".join(heavy)}
""")
    driver = f"""
from verlite.rewards.scorer import Scorer
from verlite.rewards.result import RewardItem
from verlite.spec.roles import ScorerSpec
scorer = Scorer(ScorerSpec(path={str(reward)!r}))
print(scorer.score([RewardItem("s", "ok", None)])[0].parts, flush=True)
scorer.score([RewardItem("s", "hang", {str(tmp_path / "pid")!r})])
"""
    process = subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline().strip() == "{'heavy': ''}"
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    child = int((tmp_path / "pid").read_text())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not alive(child))


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_math_dapo_scores_plus_and_minus_one_with_acc(make: MakeScorer) -> None:
    rows = [
        *items("Answer: 7", "Answer: 8", "no answer", source="math_dapo", truth="7"),
        *items("Answer: 7", source="aime2024", truth="7"),
        *items("\\boxed{7}", "\\boxed{8}", source="lighteval/MATH", truth="7"),
    ]
    assert make().score(rows) == [
        RewardResult(1.0, {"acc": 1.0}),
        RewardResult(-1.0, {"acc": 0.0}),
        RewardResult(-1.0, {"acc": 0.0}),
        RewardResult(1.0, {"acc": 1.0}),
        RewardResult(1.0),
        RewardResult(0.0),
    ]
    zero_one = make(score_scale={"default": "zero_one"})
    assert [result.score for result in zero_one.score(rows)] == [1, 0, 0, 1, 1, 0]
    assert all(result.parts == {} for result in zero_one.score(rows))


def test_score_scale_is_chosen_per_source(make: MakeScorer) -> None:
    rows = [
        *items("5", "6", source="verlite/arithmetic", truth="5"),
        *items("#### 6", source="openai/gsm8k", truth="5"),
        *items("<answer>no</answer>", source="nq", truth={"target": ["Paris"]}),
    ]
    scorer = make(score_scale={"verlite/*": "signed", "default": "signed", "nq": "zero_one"})
    signed = scorer.score(rows)
    assert [result.score for result in signed] == [1, -1, -1, 0]
    assert [result.parts["acc"] for result in signed] == [1, 0, 0, 0]
    with pytest.raises(FunctionError, match="reward.score_scale.nq=percent is not one of zero_one"):
        make(score_scale={"nq": "percent"})


@pytest.mark.parametrize(
    ("source", "scales", "scale"),
    [
        ("math_dapo", {}, "signed"),
        ("math", {}, "signed"),
        ("aime2025", {}, "signed"),
        ("openai/gsm8k", {}, "zero_one"),
        ("mathematics", {}, "zero_one"),
        ("math_dapo", {"default": "zero_one"}, "zero_one"),
        ("aime2025", {"default": "signed", "aime*": "zero_one"}, "zero_one"),
        ("aime2025", {"a*": "signed", "aime*": "zero_one"}, "zero_one"),
        ("aime2025", {"aime2025": "signed", "aime*": "zero_one"}, "signed"),
    ],
)
def test_the_most_specific_score_scale_counts(
    source: str, scales: dict[str, str], scale: str
) -> None:
    assert scale_of(source, scales) == scale


def test_a_custom_function_is_not_rescaled(make: MakeScorer) -> None:
    source = "def compute_score(data_source, solution_str, ground_truth, extra_info): return 0.0"
    scorer = make(source, score_scale={"default": "signed"})
    assert scorer.score(items("x", source="math_dapo")) == [RewardResult(0.0)]


def test_a_failed_call_is_not_rescaled(make: MakeScorer) -> None:
    scorer = make(score_scale={"default": "signed"})
    [result] = scorer.score(items("#### 72", source="openai/gsm8k", truth="seventy"))
    assert (result.score, result.error, result.parts) == (None, "InvalidOperation", {})


def test_with_dapo_a_right_overlong_answer_beats_a_wrong_short_one(make: MakeScorer) -> None:
    reward = yaml.safe_load((TOP / "conf" / "dapo.yaml").read_text(encoding="utf-8"))["reward"]
    factor = reward["overlong_buffer"]["penalty_factor"]
    lengths = torch.tensor([100, 10])  # of at most 100 tokens; the last 20 are penalized
    for source, scales in (("math_dapo", {}), ("openai/gsm8k", reward["score_scale"])):
        responses = items("Answer: 7\n#### 7", "Answer: 8\n#### 8", source=source, truth="7")
        scores = torch.tensor(
            [result.score for result in make(score_scale=scales).score(responses)]
        )
        right_overlong, wrong_short = scores + overlong_penalty(lengths, 100, 20, factor)
        assert right_overlong > wrong_short


def test_breakpoint_in_a_reward_process_is_an_error(make: MakeScorer) -> None:
    """Its input is not a terminal, so pdb would end at once with a riddle."""
    scorer = make("def compute_score(**row):\n    breakpoint()\n    return 1.0")
    (result,) = scorer.score(items("1"))
    assert result.error == "NoDebugger"
    assert "breakpoint() at" in result.traceback and "trainer.debug=true" in result.traceback


DEBUGGABLE = """
import asyncio, os, threading
client = asyncio.Lock()
def compute_score(solution_str, **row):
    if solution_str == "raise":
        raise ValueError("bad")
    return {"score": float(solution_str), "process": os.getpid(), "thread": threading.get_ident()}
async def later(solution_str, **row):
    async with client:  # an object of the event loop of its first call
        await asyncio.sleep(0.01)
        return compute_score(solution_str)
"""


@pytest.mark.parametrize("name", ["compute_score", "later"])
def test_with_debug_functions_run_here_without_time_limits(make: MakeScorer, name: str) -> None:
    limits = {"timeout_s": 1e-9, "item_timeout_s": 1e-9}
    scorer = make(DEBUGGABLE, name=name, debug=True, **limits)
    scorer.check_signature()
    for _ in range(2):
        results = scorer.score(items("1", "raise", "0.5"))
        assert [result.score for result in results] == [1.0, None, 0.5]
        assert results[1].error == "ValueError"
        assert results[0].parts == {"process": os.getpid(), "thread": threading.get_ident()}


MEETING = """
import asyncio
inside = 0
async def compute_score(solution_str, **row):
    global inside
    inside += 1
    for _ in range(20):
        await asyncio.sleep(0.002)
        assert inside == 1
    inside -= 1
    return float(solution_str)
"""


def test_with_debug_two_streams_score_one_call_at_a_time(make: MakeScorer) -> None:
    """Validation and background samples have a stream each, and one event loop."""
    scorer = make(MEETING, debug=True)
    scorer.check_signature()
    with scorer.stream() as validation, scorer.stream() as background:
        for number, item in enumerate(items("1", "0.5", "0.25")):
            validation.add(number, item)
            background.add(number, item)
        for stream in (validation, background):
            results = stream.results()
            assert [result.traceback for result in results.values()] == [None] * 3
            assert [result.score for result in results.values()] == [1.0, 0.5, 0.25]
