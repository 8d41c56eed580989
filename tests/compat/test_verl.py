"""Files written for verl load without verl, if the environment variable asks for it."""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.compat.scores import DIFFERENT, EQUAL
from verlite.compat import attributes
from verlite.config.rules.context import Context
from verlite.config.rules.notes import notes
from verlite.config.schema import Config
from verlite.contracts.rewards import check_reward
from verlite.importing import VERL_VARIABLE, OwnCodeError, find, import_module
from verlite.rewards.process import load
from verlite.rewards.result import failure

REWARD = """
from verl.utils.reward_score import default_compute_score, gsm8k
from verl.utils.reward_score.math import last_boxed_only_string, remove_boxed


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    from verl.utils.reward_score import math_dapo

    boxed = last_boxed_only_string(solution_str)
    if boxed is not None and remove_boxed(boxed) == ground_truth:
        return 1.0
    if gsm8k.extract_solution(solution_str) == ground_truth:
        return default_compute_score("openai/gsm8k", solution_str, ground_truth)
    return math_dapo.compute_score(solution_str, ground_truth)["score"]
"""
BATCH = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    rows = zip(solution_strs, ground_truths)
    return [{"score": float(answer == truth) + bonus, "many": len(extra_infos)}
            for answer, truth in rows]
"""


@pytest.fixture
def reward(tmp_path: Path) -> str:
    file = tmp_path / "reward.py"
    file.write_text(REWARD)
    return str(file)


def test_without_the_variable_the_error_names_it(
    reward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VERL_VARIABLE, raising=False)
    with pytest.raises(OwnCodeError, match=f"{VERL_VARIABLE}=1"):
        import_module(reward)
    monkeypatch.setenv(VERL_VARIABLE, "yes")
    with pytest.raises(OwnCodeError, match="'yes' must be 1 or 0"):
        import_module(reward)


def test_an_import_in_a_call_names_the_variable() -> None:
    def compute_score() -> None:
        import verl  # noqa: F401

    with pytest.raises(ModuleNotFoundError) as caught:
        compute_score()
    result = failure(caught.value)
    assert result.error == "ModuleNotFoundError"
    assert f"{VERL_VARIABLE}=1" in (result.traceback or "")


def test_a_file_for_verl_scores(reward: str, compat: None) -> None:
    score = find(reward, "compute_score")
    assert score("", r"\boxed{42}", "42") == 1.0
    assert score("", "#### 42", "42") == 1.0
    assert score("", "Answer: 42", "42") == 1.0
    assert score("", "Answer: 41", "42") == -1.0


@pytest.mark.process
def test_a_file_for_verl_scores_in_a_reward_process(reward: str, compat: None) -> None:
    assert check_reward(reward) == []


def test_an_installed_verl_is_used(
    tmp_path: Path, compat: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("MINE = 1\n")
    file = tmp_path / "mine.py"
    file.write_text("from verl import MINE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert import_module(str(file)).MINE == 1
    with pytest.raises(ModuleNotFoundError, match="No module named 'verl.utils'"):
        importlib.import_module("verl.utils.reward_score")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("verl.experimental.agent_loop.tool_agent_loop", "Derive a loop of your own"),
        ("verl.utils.reward_score.my_fork", "docs/migration/verl.md"),
        ("verl.tools.search_tool", "env.name=search"),
        ("verl.utils.reward_score.prime_math.math_normalize", "prime_math.grade_answer"),
    ],
)
def test_a_missing_module_names_the_way_out(module: str, words: str, compat: None) -> None:
    import_module("json")
    with pytest.raises(ModuleNotFoundError, match=words):
        importlib.import_module(module)


def test_a_missing_name_names_the_way_out(tmp_path: Path, compat: None) -> None:
    file = tmp_path / "limited.py"
    file.write_text(
        "from verl.experimental.reward_loop.reward_manager import RateLimitedRewardManager"
    )
    with pytest.raises(OwnCodeError, match="RateLimitedRewardManager. Limit the calls in your own"):
        import_module(str(file))
    file.write_text("from verl.utils.py_functional import timeout_limit")
    with pytest.raises(OwnCodeError, match="has no verl.utils.py_functional.timeout_limit. docs/"):
        import_module(str(file))


def test_helpers(tmp_path: Path, compat: None) -> None:
    import_module("json")
    functional = importlib.import_module("verl.utils.py_functional")
    metrics = {"a/x": [1]}
    functional.append_to_dict(metrics, {"x": [2, 3], "a/x": 4, "y": 5}, prefix="a/")
    assert metrics == {"a/x": [1, 2, 3, 4], "a/y": [5]}
    rows = [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert functional.list_of_dict_to_dict_of_list(rows) == {"a": [1, 3], "b": [2, 4]}
    assert functional.list_of_dict_to_dict_of_list([]) == {}
    assert functional.union_two_dict({"a": 1}, {"a": 1, "b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="'a' is 1 and 2"):
        functional.union_two_dict({"a": 1}, {"a": 2})
    files = importlib.import_module("verl.utils.hdfs_io")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("1")
    files.makedirs(str(tmp_path / "b"), exist_ok=True)
    files.copy(str(tmp_path / "a"), str(tmp_path / "b" / "c"))
    assert (tmp_path / "b" / "c" / "x").read_text() == "1"
    with pytest.raises(ValueError, match="hdfs://n/x is not a local path"):
        files.exists("hdfs://n/x")


@pytest.mark.parametrize("wrap", [list, np.array, torch.tensor, lambda ids: {"input_ids": [ids]}])
def test_token_ids_of_one_text(wrap: Any, compat: None) -> None:
    import_module("json")
    tokenizer = importlib.import_module("verl.utils.tokenizer")
    assert tokenizer.normalize_token_ids(wrap([3, 4])) == [3, 4]
    with pytest.raises(TypeError, match="not the token ids of one text"):
        tokenizer.normalize_token_ids(wrap([[3], [4]]))


@pytest.mark.parametrize(
    ("text", "fixed"),
    [
        (r"\frac12", r"\frac{1}{2}"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (r"\frac{1}2", r"\frac{1}2"),
        (r"2\frac34+\frac56", r"2\frac{3}{4}+\frac{5}{6}"),
        (r"\frac12\frac{3}{4}", r"\frac{1}{2}\frac{3}{4}"),
        (r"\frac1", r"\frac1"),
    ],
)
def test_fractions_have_the_braces_that_verl_writes(text: str, fixed: str) -> None:
    from verlite.compat.math_scores import fix_fracs

    assert fix_fracs(text) == fixed  # recorded by running verl's function


def test_every_module_loads(compat: None) -> None:
    import_module("json")
    from verlite.compat import MODULES

    for name in MODULES:
        module = importlib.import_module(name)
        assert all(hasattr(module, entry) for entry in module.__all__), name
    assert sys.modules["verl"].DataProto.__name__ == "DataProto"


@pytest.mark.parametrize(("module", "response", "truth", "score"), EQUAL)
def test_scores_of_verl(module: str, response: str, truth: object, score: float) -> None:
    assert _score(module, response, truth) == score


@pytest.mark.parametrize(("module", "response", "truth", "verl", "here"), DIFFERENT)
def test_scores_that_differ(
    module: str, response: str, truth: object, verl: float, here: float
) -> None:
    assert _score(module, response, truth) == here != verl


def _score(module: str, response: str, truth: object) -> float:
    result = attributes(f"verl.utils.reward_score.{module}").compute_score(response, truth)
    if isinstance(result, tuple):
        result = result[0]
    return float(result["score"] if isinstance(result, dict) else result)


def test_generated_programs_are_not_run() -> None:
    from verlite.compat.scores import default_compute_score

    with pytest.raises(NotImplementedError, match="sandbox"):
        default_compute_score("codecontests", "print(1)", "{}")
    with pytest.raises(NotImplementedError, match="data_source='mine'"):
        default_compute_score("mine", "1", "1")


def test_a_batch_function_gets_lists_of_one(tmp_path: Path) -> None:
    file = tmp_path / "batch.py"
    file.write_text(BATCH)
    names = ["data_source", "solution_str", "ground_truth", "extra_info", "bonus"]
    function = load(f"{file}:compute_score", names)
    row = {"data_source": "d", "solution_str": "4", "ground_truth": "4", "extra_info": {}}
    assert function(**row, bonus=0.5) == {"score": 1.5, "many": 1}


def test_check_says_that_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    monkeypatch.delenv(VERL_VARIABLE, raising=False)
    assert not any(VERL_VARIABLE in line for line in notes(Context(config)))
    config.ray_kwargs.ray_init.runtime_env.env_vars[VERL_VARIABLE] = "1"
    assert any(VERL_VARIABLE in line for line in notes(Context(config)))
