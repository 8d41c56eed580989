"""verl's keys for the user's own code, with the compatibility package on."""

from pathlib import Path
from typing import Any

import pytest

from verlite.config import ConfigError
from verlite.config.load import compose
from verlite.config.plan import make_plan
from verlite.importing import VERL_VARIABLE

MANAGER = """
from verl.workers.reward_manager import NaiveRewardManager, register


@register("mine")
class Mine(NaiveRewardManager):
    pass


def exact(data_source, solution_str, ground_truth, extra_info, weight=1.0):
    return weight * (solution_str == ground_truth)
"""
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
TOOLS = f"{MULTI_TURN}.tool_config_path=tools.yaml"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VERL_VARIABLE, raising=False)
    (tmp_path / "managers.py").write_text(MANAGER)
    return tmp_path


def load(*given: str) -> Any:
    base = ["actor_rollout_ref.model.path=model", "data.train_files=rows.parquet"]
    return compose(None, [*base, *given], check=False)


@pytest.mark.parametrize("section", ["reward.reward_manager", "reward_manager"])
def test_a_manager_class_of_a_file(section: str, compat: None) -> None:
    name = f"{section}.name=Mine"
    path = f"{section}.module.path=managers.py"
    given = [f"{section}.source=importlib", name, path, "reward.reward_kwargs.top=2"]
    own = load(*given).config.custom_reward_function
    assert (own.path, own.name) == ("managers.py", "Mine")
    assert own.reward_kwargs == {"tokenizer": "model", "top": 2}


@pytest.mark.parametrize(
    "key", ["reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name"]
)
@pytest.mark.parametrize("value", ["managers.py:Mine", "mine"])
def test_a_manager_class_with_the_function_that_it_calls(
    key: str, value: str, compat: None, folder: Path
) -> None:
    function = "custom_reward_function"
    given = [f"{key}={value}", f"{function}.path=managers.py", f"{function}.name=exact"]
    loaded = load(*given, f"+{function}.reward_kwargs.weight=0.5")
    own = loaded.config.custom_reward_function
    assert (own.path, own.name) == ("managers.py", "Mine")
    assert own.reward_kwargs == {
        "tokenizer": "model",
        "compute_score": f"{folder}/managers.py:exact",
        "score_kwargs": {"weight": 0.5},
    }
    assert any(f"{key}={value} sets {function}.path" in str(note) for note in loaded.notes)


def test_the_file_of_a_manager_needs_no_function(compat: None, folder: Path) -> None:
    (folder / "only.py").write_text(MANAGER.partition("def ")[0])
    given = ["custom_reward_function.path=only.py", "reward_model.reward_manager=mine"]
    own = load(*given, "reward_model.reward_kwargs.top=2").config.custom_reward_function
    assert (own.path, own.name) == ("only.py", "Mine")
    assert own.reward_kwargs == {"tokenizer": "model", "top": 2}


def test_a_name_that_nothing_registers(compat: None) -> None:
    with pytest.raises(ConfigError, match="custom_reward_function.name=CLASS"):
        load("reward_model.reward_manager=other", "custom_reward_function.path=managers.py")


@pytest.mark.parametrize(
    ("limits", "calls"),
    [
        (["max_assistant_turns=5"], 4),
        (["max_user_turns=3"], 3),
        (["max_assistant_turns=5", "max_user_turns=2"], 2),
    ],
)
def test_a_file_of_tools(limits: list[str], calls: int, compat: None) -> None:
    given = [f"{MULTI_TURN}.{limit}" for limit in limits]
    config = load(TOOLS, f"{MULTI_TURN}.enable=True", *given).config
    assert config.env.name == "verlite.compat.tools:VerlTools"
    assert config.env.kwargs == {"tool_config_path": "tools.yaml"}
    assert config.max_turns == calls
    assert load(TOOLS, *given, "max_turns=7").config.max_turns == 7


@pytest.mark.parametrize("more", [[], [f"{MULTI_TURN}.max_assistant_turns=1"]])
def test_tools_need_turns(more: list[str], compat: None) -> None:
    with pytest.raises(ConfigError, match="max_assistant_turns.* must be at least 2"):
        load(TOOLS, *more)


def test_the_variable_among_the_workers_variables() -> None:
    variable = f"+ray_kwargs.ray_init.runtime_env.env_vars.{VERL_VARIABLE}=1"
    config = load(variable, TOOLS, f"{MULTI_TURN}.max_user_turns=1").config
    assert config.env.name == "verlite.compat.tools:VerlTools"


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        (TOOLS, "env.name=verlite.compat.tools:VerlTools env.kwargs.tool_config_path=FILE"),
        ("reward_model.reward_manager=mine", "custom_reward_function.name=CLASS"),
        ("reward.reward_manager.source=importlib", "custom_reward_function.name=CLASS"),
        ("reward.reward_manager.module.path=managers.py", "custom_reward_function.name=CLASS"),
    ],
)
def test_without_the_variable_the_remedy_names_it(key: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(key)
    (problem,) = caught.value.problems
    assert f"{VERL_VARIABLE}=1" in problem.remedy and remedy in problem.remedy


LOOPS = "actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml"


def test_a_file_of_agent_loops(compat: None) -> None:
    turns = f"{MULTI_TURN}.max_assistant_turns=5"
    named = "actor_rollout_ref.rollout.agent.default_agent_loop=mine"
    own = f"+{MULTI_TURN}.chunk=3"
    loaded = load(LOOPS, turns, named, own, TOOLS, "data.max_response_length=77")
    kwargs = dict(loaded.config.env.kwargs)
    config = kwargs.pop("config")
    assert loaded.config.env.name == "verlite.compat.loops:VerlLoops"
    assert kwargs == {
        "agent_loop_config_path": "loops.yaml",
        "default_agent_loop": "mine",
        "tool_config_path": "tools.yaml",
    }
    rollout = config["actor_rollout_ref"]["rollout"]
    assert config["actor_rollout_ref"]["model"]["path"] == "model"
    assert rollout["response_length"] == config["data"]["max_response_length"] == 77
    assert (rollout["multi_turn"]["max_assistant_turns"], rollout["multi_turn"]["chunk"]) == (5, 3)
    assert rollout["multi_turn"]["format"] == "hermes"  # verl's default
    assert rollout["agent"]["num_workers"] == 8
    plan = make_plan(loaded.config, "cpu", count_rows=False)
    assert plan.longest_response == plan.longest_sequence - 1
    assert "the agent loop of loops.yaml: answers of up to 77 tokens" in plan.turns


def test_verls_own_loop_for_tools_is_the_environment_of_tools(compat: None) -> None:
    named = "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"
    config = load(TOOLS, named, f"{MULTI_TURN}.max_user_turns=2").config
    assert (config.env.name, config.max_turns) == ("verlite.compat.tools:VerlTools", 2)
    with pytest.raises(ConfigError, match="default_agent_loop"):
        load(named)
