"""verl.tools: BaseTool with its schemas, and the environment that plays tools of a verl YAML file.

    env.name=verlite.compat.tools:VerlTools env.kwargs.tool_config_path=FILE max_turns=4

The model calls a tool with <tool_call>{"name": ..., "arguments": {...}}</tool_call>. A turn without
a call is the answer and ends the sample.
"""

import importlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import yaml
from pydantic import BaseModel, ConfigDict, Field

from verlite.compat.scores import gsm8k_compute_score
from verlite.envs.calculator import CALL
from verlite.envs.factory import EnvFactory
from verlite.envs.step import Env, Step
from verlite.importing import CODE_ERRORS, SignalExit, offer_verl, verl_hint


class _Schema(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")  # other entries of JSON Schema


class OpenAIFunctionPropertySchema(_Schema):
    """A parameter."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Schema):
    """All parameters."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(_Schema):
    """A function."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=OpenAIFunctionParametersSchema
    )
    strict: bool = False


class OpenAIFunctionToolSchema(_Schema):
    """A tool, as the chat template shows it to the model."""

    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """The answer of a tool. Images and videos are refused when it is shown to the model."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not self.image and not self.video


class BaseTool:
    """A tool. A call creates an instance, executes it and releases it."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema; tools whose YAML has none must define this."""
        schema: OpenAIFunctionToolSchema | None = getattr(self, "tool_schema", None)
        if schema is None:
            raise ValueError(f"{type(self).__name__} has no tool_schema, neither here nor in YAML")
        return schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """Return (id, ToolResponse) of a new instance."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Return (ToolResponse, reward, metrics)."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of the instance's state."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Free what the instance holds."""


class Gsm8kTool(BaseTool):
    """Checks an answer to a question of GSM8K. An answer that is not right costs 0.05."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        super().__init__(config, tool_schema)
        self._truths: dict[str, str] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """Return (id, ToolResponse). `ground_truth` is an argument or among create_kwargs."""
        instance, response = await super().create(instance_id)
        given = {**(kwargs.get("create_kwargs") or {}), **kwargs}
        self._truths[instance] = str(given.get("ground_truth"))
        return instance, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Score `answer`, a number with or without "#### "."""
        answer = str(parameters.get("answer", ""))
        reward = await self.calc_reward(instance_id, answer=answer)
        response = ToolResponse(text=f"Current parsed {answer=} {reward=}")
        return response, 0.0 if reward > 0 else -0.05, {}

    async def calc_reward(self, instance_id: str, answer: str = "", **kwargs: Any) -> float:
        """Return 1.0 for the right answer, else 0.0."""
        text = answer if answer.startswith("#### ") else f"#### {answer}"
        return gsm8k_compute_score(text, self._truths[instance_id], method="flexible")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the answer."""
        del self._truths[instance_id]


class SandboxFusionTool(BaseTool):
    """verl's client of a sandbox for programs, which verlite does not have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "verlite has no SandboxFusionTool: derive your tool from BaseTool and call the sandbox "
            "in its execute()"
        )


def initialize_tools_from_config(tools_config_file: str) -> list[Any]:
    """Create the tools of a YAML file.

    Raises:
        ValueError: the file or a tool cannot be used. The message names both.
    """
    path = Path(tools_config_file).expanduser()
    where = f"tool_config_path={tools_config_file}"
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))["tools"]
        assert isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{where} cannot be read: {error}") from error
    except (KeyError, TypeError, AssertionError) as error:
        raise ValueError(f"{where} has no list `tools`") from error
    return [_tool(entry, f"{where}: tool {entry.get('class_name')}") for entry in entries]


def shown(tools: list[Any]) -> tuple[dict[str, Any], ...]:
    """Return tools as the chat template shows them to the model."""
    options = {"exclude_unset": True, "exclude_none": True}
    return tuple(tool.tool_schema.model_dump(**options) for tool in tools)


def _tool(entry: Mapping[str, Any], where: str) -> Any:
    config = entry.get("config") or {}
    kind = config.get("type", "native")
    if kind != "native":
        raise ValueError(f"{where} has type {kind!r}; only native is supported")
    module, _, name = str(entry.get("class_name")).rpartition(".")
    offer_verl()
    try:
        schema = entry.get("tool_schema")
        create = getattr(importlib.import_module(module), name)
        return create(
            config=config, tool_schema=schema and OpenAIFunctionToolSchema.model_validate(schema)
        )
    except SignalExit:
        raise
    except CODE_ERRORS as error:
        raise ValueError(
            f"{where} cannot be created: {type(error).__name__}: {error}{verl_hint(error)}. Its "
            "module must be on the Python path of every worker"
        ) from error


class VerlTools(EnvFactory):
    """Plays the tools of a verl YAML file (`multi_turn.tool_config_path`)."""

    chat = True

    def __init__(self, tool_config_path: str) -> None:
        """Create the tools. Raises ValueError if one cannot be created."""
        made = initialize_tools_from_config(tool_config_path)
        self._by_name = {tool.name: tool for tool in made}
        if len(self._by_name) < len(made):
            raise ValueError(f"tool_config_path={tool_config_path} has two tools of one name")
        self.tools = shown(made)

    def env(self, extra_info: Mapping[str, Any]) -> Env:
        return _ToolCalls(self._by_name, extra_info.get("tools_kwargs") or {})


class _ToolCalls:
    """The environment of one sample."""

    stop: tuple[str, ...] = ()

    def __init__(self, tools: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
        self._tools = tools
        self._kwargs = kwargs

    async def step(self, text: str, last: bool) -> Step:
        """See `Env.step`. A tool that raises answers with its error, as in verl."""
        end = text.rfind("</tool_call>") + len("</tool_call>")
        calls = CALL.findall(text[:end])
        if not calls and "<tool_call>" not in text:
            return Step(done=True, info={"action": "answer"})
        try:
            if len(calls) != 1:
                raise ValueError("write one <tool_call> in a turn, and close it")
            name, arguments = _parsed(calls[0])
            if name not in self._tools:
                raise ValueError(f"no tool is called {name!r:.100}")
        except (ValueError, RecursionError) as error:
            return Step(f"Error: {error}", valid=False, info=_info("invalid"))
        if last:
            return Step(info=_info(f"{name} not executed"))
        try:
            answer, reward = await self._run(self._tools[name], arguments)
        except SignalExit:
            raise
        except CODE_ERRORS as error:
            return Step(f"Error executing tool {name!r}: {error}", valid=False, info=_info(name))
        return Step(answer, reward=reward, info=_info(name) | {"called": True})

    async def _run(self, tool: Any, arguments: dict[str, Any]) -> tuple[str, float]:
        """Call a tool on a new instance. Return its text and reward."""
        kwargs = self._kwargs.get(tool.name) or {}
        created = await tool.create(create_kwargs=kwargs.get("create_kwargs") or {})
        instance = created[0] if isinstance(created, tuple) else created
        try:
            response, reward, *_ = await tool.execute(instance, arguments)
        finally:
            released = tool.release(instance)
            if inspect.isawaitable(released):
                await released
        if getattr(response, "image", None) or getattr(response, "video", None):
            raise ValueError("the tool answers with images; verlite trains on text only")
        text = getattr(response, "text", response)
        return str(text or ""), float(reward or 0.0)


def _info(action: str) -> dict[str, Any]:
    return {"action": action}


def _parsed(call: str) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a call. Raises ValueError."""
    value = json.loads(call)
    arguments = value.get("arguments") if isinstance(value, dict) else None
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict) or not isinstance(value.get("name"), str):
        raise ValueError('a call must be {"name": "...", "arguments": {...}}')
    return value["name"], arguments
