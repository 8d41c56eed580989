"""verl.experimental.agent_loop: loops that ask the model by tokens, and the environment that runs
the loop of a verl YAML file.

    env.name=verlite.compat.loops:VerlLoops env.kwargs.agent_loop_config_path=FILE max_turns=1

What a loop samples is trained as it was sampled: `verlite.rollout.loop` finds the tokens that its
response_mask marks among those of the engine.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import yaml
from omegaconf import OmegaConf
from pydantic import BaseModel, Field

from verlite.chat_template import limited
from verlite.compat.datasets import RLHFDataset
from verlite.compat.tools import initialize_tools_from_config, shown
from verlite.compat.utils import get_event_loop
from verlite.envs.calculator import CALL
from verlite.envs.chat import Chat
from verlite.envs.factory import EnvFactory, Generate, Played
from verlite.importing import OwnCodeError, find

NEUTRAL = ("temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "skip_special_tokens")
"""Sampling parameters of a request that have no effect: the run decides them, because the trainer
computes log-probs for its temperature."""


class AgentLoopMetrics(BaseModel):
    """Seconds of a sample, and how often the engine interrupted it."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """A sample. response_mask is 1 on the model's tokens and 0 on others."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics
    extra_fields: dict[str, Any] = Field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None


class TokenOutput(BaseModel):
    """The engine's answer to a request."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = Field(default_factory=dict)


class LLMServerClient:
    """Asks the engine of this process: tokens in, tokens out."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate

    async def generate(
        self,
        request_id: Any,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Sample an answer.

        Of the sampling parameters max_tokens, max_new_tokens and stop count; NEUTRAL ones have no
        effect.

        Raises:
            ValueError: there are images, videos or audio, or another sampling parameter is set.
        """
        if image_data or video_data or audio_data:
            raise ValueError("a request has images, videos or audio; verlite trains on text only")
        given = {name: value for name, value in sampling_params.items() if name not in NEUTRAL}
        limits = [given.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
        limit = min((limit for limit in limits if limit is not None), default=None)
        if limit is not None and limit < 1:
            raise ValueError(
                f"sampling_params {dict(sampling_params)}: max_tokens must be at least 1"
            )
        stop = given.pop("stop", None) or ()
        if given.pop("repetition_penalty", None) not in (None, 1) or any(given.values()):
            raise ValueError(
                f"sampling_params {dict(sampling_params)}: a request may set max_tokens and stop; "
                "the run sets temperature, top_p and top_k"
            )
        found = await self._generate(
            list(prompt_ids), limit, (stop,) if isinstance(stop, str) else tuple(stop)
        )
        return TokenOutput(token_ids=found.ids, log_probs=found.log_probs, stop_reason="completed")


AsyncLLMServerManager = LLMServerClient


class AgentLoopBase:
    """A loop of verl 0.5 to 0.9. A sample has an instance of its own."""

    _class_initialized = False
    """For `init_class` of loops for verl 0.5 and 0.6."""

    def __init__(
        self,
        trainer_config: Any,
        server_manager: LLMServerClient,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: type[Any] = RLHFDataset,
        data_config: Any = None,
        **kwargs: Any,
    ) -> None:
        self.init_class(trainer_config.config, tokenizer, processor, **kwargs)
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = data_config.config if data_config else self.config.data
        self.apply_chat_template_kwargs = dict(self.data_config.apply_chat_template_kwargs or {})
        self.loop = get_event_loop()

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any, **kwargs: Any) -> None:
        """Prepare the class, as loops for verl 0.5 and 0.6 do."""

    @property
    def system_prompt(self) -> list[int]:
        """Tokens that the template writes before the first message."""
        message = {"role": "user", "content": ""}
        one, two = self._render([message], False), self._render([message] * 2, False)
        return one[: 2 * len(one) - len(two)]

    async def process_vision_info(self, messages: Any) -> dict[str, Any]:
        """Return {}: there are no images or videos."""
        return {}

    process_multi_modal_info = process_vision_info

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
        **options: Any,
    ) -> list[int]:
        """Return the tokens of messages, up to where the assistant begins."""
        ids = self._render(messages, True, tools)
        return ids[len(self.system_prompt) :] if remove_system_prompt else ids

    async def ct_build_initial_tokens(
        self, messages: Any, tools: Any = None, **options: Any
    ) -> list[int]:
        """Return the last `prompt_length` tokens of a prompt."""
        return self._render(messages, True, tools)[-self.rollout_config.prompt_length :]

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        assistant_logprobs: list[float] | None = None,
    ) -> Any:
        """Append what the model wrote. Return (tokens, mask, log-probs)."""
        merged = SimpleNamespace(token_ids=[*runtime_token_ids, *assistant_token_ids])
        mask = [*response_mask, *[1] * len(assistant_token_ids)]
        if response_logprobs is None or assistant_logprobs is None:
            return merged, mask, None
        return merged, mask, [*response_logprobs, *assistant_logprobs]

    async def ct_merge_non_assistant_msg(
        self,
        previous_messages: Sequence[Mapping[str, Any]],
        updated_messages: Sequence[Mapping[str, Any]],
        runtime_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        tools: Any = None,
    ) -> Any:
        """Append messages after the model's. Return (tokens, mask, log-probs).

        Raises:
            TemplateError: the template writes earlier messages differently after them.
        """
        *before, said = previous_messages
        after = updated_messages[len(previous_messages) :]
        chat = Chat(self.tokenizer, tools or (), self.apply_chat_template_kwargs)
        has_thoughts = "</think>" in str(said.get("content"))
        ids = chat.continuation(runtime_token_ids, before, after, has_thoughts)
        merged = SimpleNamespace(token_ids=[*runtime_token_ids, *ids])
        log_probs = None if response_logprobs is None else [*response_logprobs, *[0.0] * len(ids)]
        return merged, [*response_mask, *[0] * len(ids)], log_probs

    def _render(self, messages: Any, ask: bool, tools: Any = None) -> list[int]:
        options = ({"tools": tools} if tools else {}) | self.apply_chat_template_kwargs
        with limited(self.tokenizer, memory=False):
            text = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=ask, tokenize=False, **options
            )
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Play a sample. kwargs: `raw_prompt` (messages) and the other fields of its data row."""
        raise NotImplementedError


def register(agent_name: str) -> Callable[[type[Any]], type[Any]]:
    """Return a decorator that changes nothing: the YAML file names the class."""
    return lambda loop: loop


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Add the seconds inside to `timing_raw[name]`."""
    began = time.perf_counter()
    yield
    timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - began


class FunctionCall(BaseModel):
    """A call that the model wrote. arguments: JSON."""

    name: str
    arguments: str
    tool_call_id: str | None = None


class ToolParser:
    """Reads <tool_call>{"name": ..., "arguments": {...}}</tool_call> (format "hermes")."""

    stop_token_ids: Sequence[int] = ()

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> "ToolParser":
        """Return the parser of a format. Raises ValueError."""
        if name != "hermes":
            raise ValueError(f"multi_turn.format={name} must be hermes: parse others in your loop")
        return cls(tokenizer)

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        """Return the text around the calls, and the calls. One that is not JSON is left out."""
        text = str(self.tokenizer.decode(responses_ids))
        calls = []
        for written in CALL.findall(text):
            try:
                call = json.loads(written)
                arguments = json.dumps(call["arguments"], ensure_ascii=False)
                calls.append(FunctionCall(name=call["name"], arguments=arguments))
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
        return CALL.sub("", text), calls


class VerlLoops(EnvFactory):
    """Runs a loop of a verl YAML file (`agent.agent_loop_config_path`) for each sample."""

    plays = True

    def __init__(
        self,
        agent_loop_config_path: str,
        default_agent_loop: str | None = None,
        tool_config_path: str | None = None,
        config: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Find the loop's class, and create the tools.

        Args:
            agent_loop_config_path: the YAML file.
            default_agent_loop: name of the loop; None if the file has one.
            tool_config_path: YAML file of the tools that it gets.
            config: what it finds in its `config`.
            timeout_s: longest time of a sample, in seconds.

        Raises:
            ValueError: the file, the loop or a tool cannot be used.
        """
        self._loop, self._options = _loop(agent_loop_config_path, default_agent_loop)
        self._tools = initialize_tools_from_config(tool_config_path) if tool_config_path else []
        self.tools = shown(self._tools)
        self._config = OmegaConf.create(dict(config or {}))
        OmegaConf.set_struct(self._config, True)
        self._timeout_s = timeout_s

    async def play(
        self, row: Mapping[str, Any], tokenizer: Any, sampling: Any, generate: Generate
    ) -> Played:
        """See `EnvFactory.play`. Raises TimeoutError after `timeout_s`."""
        loop = self._loop(
            trainer_config=SimpleNamespace(config=self._config),
            server_manager=LLMServerClient(generate),
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=SimpleNamespace(config=self._config.data),
            hf_model_type=None,
            tools=SimpleNamespace(tools=self._tools),
            **self._options,
        )
        parameters = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")}
        running: Awaitable[Any] = loop.run(
            {**parameters, "repetition_penalty": 1.0, "logprobs": True}, **_fields(row)
        )
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                output = await running
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(
                f"{self._loop.__name__}.run did not end within env.kwargs.timeout_s="
                f"{self._timeout_s:g}"
            ) from error
        if not hasattr(output, "response_ids"):
            raise ValueError(
                f"{self._loop.__name__}.run returned {output!r:.200}, expected one AgentLoopOutput"
            )
        parts = output.extra_fields.get("reward_extra_info") or {}
        score = output.reward_score
        return Played(
            output.prompt_ids,
            output.response_ids,
            output.response_mask,
            score=None if score is None else {**parts, "score": score},
            turn_scores=output.extra_fields.get("turn_scores") or (),
        )


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a data row under verl's names."""
    extra = dict(row["extra_info"])
    return {
        "raw_prompt": list(row["prompt"]),
        "data_source": row["data_source"],
        "reward_model": {"ground_truth": row["ground_truth"]},
        "extra_info": extra,
        "uid": uuid4().hex,
        "index": extra.get("index", 0),
        "tools_kwargs": extra.get("tools_kwargs") or {},
        "interaction_kwargs": extra.get("interaction_kwargs") or {},
        "multi_modal_data": {},
    }


def _loop(file: str, name: str | None) -> tuple[type[Any], dict[str, Any]]:
    """Return the class of a loop and its own settings. Raises ValueError."""
    where = f"agent_loop_config_path={file}"
    try:
        entries = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
        by_name = {entry["name"]: dict(entry) for entry in entries}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{where} cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where} must be a list of entries with name and _target_") from error
    if name is None and len(by_name) == 1:
        (name,) = by_name
    if name not in by_name:
        raise ValueError(
            f"{where} has the loops {', '.join(by_name)}; set default_agent_loop to one of them, "
            f"not to {name}"
        )
    entry = by_name[name]
    target = str(entry.pop("_target_", ""))
    del entry["name"]
    module, _, attribute = target.rpartition(".")
    try:
        return find(module, attribute), entry
    except OwnCodeError as error:
        raise ValueError(f"{where}: the loop {name} has _target_: {target}: {error}") from error
