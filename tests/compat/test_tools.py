"""Tools written for verl, with their YAML file."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from verlite.contracts.envs import check_env
from verlite.envs.factory import build_env_factory
from verlite.spec.roles import EnvSpec

TOOL = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score import gsm8k
from verl.utils.rollout_trace import rollout_trace_op

RELEASED = []


class Judge(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._truths = {}

    async def create(self, instance_id=None, **kwargs):
        instance, response = await super().create(instance_id)
        self._truths[instance] = kwargs.get("create_kwargs", {}).get("ground_truth")
        return instance, response

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        if parameters.get("answer") == "crash":
            raise OSError("no answer today")
        reward = await self.calc_reward(instance_id, answer=parameters.get("answer", ""))
        return ToolResponse(text=f"reward {reward:g}"), reward * self.config["weight"], {}

    async def calc_reward(self, instance_id, answer="", **kwargs):
        return gsm8k.compute_score("#### " + answer, self._truths[instance_id] or "0")

    async def release(self, instance_id, **kwargs):
        RELEASED.append(self._truths.pop(instance_id))
"""
YAML = """
tools:
  - class_name: judge_tool.Judge
    config: {type: native, weight: 0.5}
    tool_schema:
      type: function
      function:
        name: judge
        description: Check an answer.
        parameters:
          type: object
          properties:
            answer: {type: string, description: Your answer., maxLength: 9}
          required: [answer]
"""
CALL = '<tool_call>{"name": "judge", "arguments": {"answer": "%s"}}</tool_call>'
NAME = "verlite.compat.tools:VerlTools"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compat: None) -> str:
    (tmp_path / "judge_tool.py").write_text(TOOL)
    (tmp_path / "tools.yaml").write_text(YAML)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "judge_tool", raising=False)
    return str(tmp_path / "tools.yaml")


def factory(path: str) -> Any:
    return build_env_factory(EnvSpec(NAME, {"tool_config_path": path}))


def test_a_sample_with_tools(tools: str) -> None:
    made = factory(tools)
    (schema,) = made.tools
    assert schema["function"]["parameters"]["properties"]["answer"]["maxLength"] == 9
    env = made.env({"tools_kwargs": {"judge": {"create_kwargs": {"ground_truth": "42"}}}})

    async def play() -> list[Any]:
        turns = [CALL % 42, CALL % 41, CALL % "crash", "<tool_call>{", CALL.replace("judge", "x")]
        steps = [await env.step(turn, last=False) for turn in turns]
        return [*steps, await env.step(CALL % 42, last=True), await env.step("It is 42.", False)]

    right, wrong, crash, broken, unknown, last, answer = asyncio.run(play())
    assert (right.obs, right.reward, right.info["called"]) == ("reward 1", 0.5, True)
    assert (wrong.obs, wrong.reward, wrong.valid) == ("reward 0", 0.0, True)
    assert crash.obs == "Error executing tool 'judge': no answer today" and not crash.valid
    assert not broken.valid and "one <tool_call>" in broken.obs
    assert not unknown.valid and "no tool is called 'x'" in unknown.obs
    assert (last.obs, last.reward, answer.done) == ("", 0.0, True)
    import judge_tool  # type: ignore[import-not-found]

    assert judge_tool.RELEASED == ["42"] * 3


def test_the_tool_of_verls_gsm8k_example(tools: str) -> None:
    text = YAML.replace("judge_tool.Judge", "verl.tools.gsm8k_tool.Gsm8kTool")
    Path(tools).write_text(text)
    kwargs = {"tools_kwargs": {"judge": {"create_kwargs": {"ground_truth": "42"}}}}
    env = factory(tools).env(kwargs)

    async def play() -> list[Any]:
        return [await env.step(CALL % answer, last=False) for answer in ("42", "#### 42", "41")]

    steps = asyncio.run(play())
    assert [step.reward for step in steps] == [0.0, 0.0, -0.05]
    assert steps[0].obs == "Current parsed answer='42' reward=1.0"


def test_the_contract_of_environments_holds(tools: str) -> None:
    report = check_env(NAME, {"tool_config_path": tools}, script=[CALL % 42])
    assert report.lines() == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("judge_tool.Judge", "judge_tool.Missing", "tool judge_tool.Missing cannot be created"),
        ("judge_tool.Judge", "no_module.Judge", "No module named 'no_module'"),
        ("native", "mcp", "type 'mcp'; only native"),
        ("tools:", "others:", "has no list `tools`"),
        ("judge_tool.Judge", "verl.tools.sandbox_fusion_tools.SandboxFusionTool", "BaseTool"),
    ],
)
def test_wrong_files(tools: str, old: str, new: str, words: str) -> None:
    Path(tools).write_text(YAML.replace(old, new))
    with pytest.raises(ValueError, match=words):
        factory(tools)
