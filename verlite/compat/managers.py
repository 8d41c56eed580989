"""verl.workers.reward_manager and verl.experimental.reward_loop.reward_manager.

    custom_reward_function.path=FILE.py custom_reward_function.name=MyManager
    custom_reward_function.reward_kwargs.tokenizer=FOLDER_OF_THE_MODEL

calls a manager class with one response at a time. Its prompt is empty, and the tokens of its
response are made from the text. reward_kwargs.compute_score=FILE.py:NAME is the function that it
calls, and reward_kwargs.score_kwargs are arguments of that.
"""

import functools
import importlib
import inspect
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from omegaconf import OmegaConf

from verlite.compat.scores import default_compute_score
from verlite.compat.utils import get_event_loop, hf_tokenizer
from verlite.importing import find
from verlite.protocol.data import DataProto
from verlite.rewards.result import BadReturn

RawRewardFn = Callable[..., Any]
"""A reward function."""
REWARD_MANAGER_REGISTRY: dict[str, type] = {}


def register(name: str) -> Callable[[type], type]:
    """Return a decorator that records a manager class."""

    def decorate(cls: type) -> type:
        REWARD_MANAGER_REGISTRY[name] = cls
        return cls

    return decorate


def get_reward_manager_cls(name: str) -> type:
    """Return the class that was registered under a name. Raises ValueError."""
    if name not in REWARD_MANAGER_REGISTRY:
        known = ", ".join(REWARD_MANAGER_REGISTRY)
        raise ValueError(f"no reward manager {name!r}; registered: {known}")
    return REWARD_MANAGER_REGISTRY[name]


class AbstractRewardManager(ABC):
    """A manager that scores a batch."""

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        """Return rewards [B, R], or {"reward_tensor", "reward_extra_info"}."""

    def _extract_reward_from_rm_scores(self, data: DataProto, return_dict: bool = False) -> None:
        """Return None: there are no scores of a reward model."""
        return None


class RewardManagerBase(ABC):
    """A manager that scores one response, asynchronously."""

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any = None, **_: Any) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.compute_score = compute_score or default_compute_score
        self.loop = get_event_loop()
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """Prepare what the instances share."""
        return None

    @abstractmethod
    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Return {"reward_score", "reward_extra_info"}."""


class _Manager(AbstractRewardManager):
    """Gives each response the score that `verify` returns for it, at its last token."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: Any = None,
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score: RawRewardFn = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.reward_kwargs = reward_kwargs

    @abstractmethod
    def verify(self, data: DataProto) -> Sequence[Any]:
        """Return a score, or a dict with "score", for each response."""

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra: dict[str, list[Any]] = defaultdict(list)
        scores = self.verify(data)
        if len(scores) != len(data):
            raise BadReturn(f"returned {len(scores)} scores for {len(data)} responses")
        for i, (length, score) in enumerate(zip(_lengths(data), scores, strict=True)):
            entries = dict(score) if isinstance(score, dict) else {"score": score}
            rewards[i, length - 1] = self.reward(entries, length)
            for name, value in entries.items():
                extra[name].append(value)
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards

    def reward(self, entries: dict[str, Any], length: int) -> float:
        """Return the reward of a response of `length` tokens."""
        return float(entries["score"])

    def _calls(self, data: DataProto) -> Iterator[dict[str, Any]]:
        """Yield the arguments of compute_score for each response."""
        for i, length in enumerate(_lengths(data)):
            row = {name: column[i] for name, column in data.non_tensor_batch.items()}
            ids = data.batch["responses"][i, :length]
            yield {
                "data_source": row[self.reward_fn_key],
                "solution_str": self.tokenizer.decode(ids, skip_special_tokens=True),
                "ground_truth": row["reward_model"]["ground_truth"],
                "extra_info": row.get("extra_info") or {},
            }


def _lengths(data: DataProto) -> list[int]:
    start = data.batch["prompts"].shape[-1]
    lengths: list[int] = data.batch["attention_mask"][:, start:].sum(-1).tolist()
    return lengths


@register("naive")
class NaiveRewardManager(_Manager):
    """Calls compute_score for each response."""

    def verify(self, data: DataProto) -> Sequence[Any]:
        return [self.compute_score(**call) for call in self._calls(data)]


@register("dapo")
class DAPORewardManager(NaiveRewardManager):
    """Also subtracts a penalty that grows linearly in the last tokens before max_resp_len.

    It is penalty_factor * (length - (max_resp_len - len)) / len, at least 0.
    """

    def __init__(
        self,
        *args: Any,
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.max_resp_len = max_resp_len
        self.overlong_buffer_cfg = overlong_buffer_cfg and OmegaConf.create(overlong_buffer_cfg)
        buffer = self.overlong_buffer_cfg
        if buffer and buffer.enable and not 0 < buffer.len <= (max_resp_len or 0):
            raise ValueError(
                f"overlong_buffer_cfg.len={buffer.len} must be 1 to max_resp_len={max_resp_len}"
            )

    def reward(self, entries: dict[str, Any], length: int) -> float:
        buffer, reward = self.overlong_buffer_cfg, float(entries["score"])
        if not buffer or not buffer.enable:
            return reward
        assert self.max_resp_len is not None  # __init__ checks it
        excess = (length - (self.max_resp_len - buffer.len)) / buffer.len
        penalty = min(-excess * buffer.penalty_factor, 0.0)
        if buffer.get("log"):
            entries |= {"overlong_reward": penalty, "overlong": penalty < 0}
        return reward + float(penalty)


@register("batch")
class BatchRewardManager(_Manager):
    """Calls compute_score once, with lists."""

    def verify(self, data: DataProto) -> Sequence[Any]:
        calls = list(self._calls(data))
        lists = {_PLURAL[name]: [call[name] for call in calls] for name in _PLURAL}
        scores: Sequence[Any] = self.compute_score(**lists, **self.reward_kwargs)
        return scores


@register("prime")
class PrimeRewardManager(_Manager):
    """Calls compute_score by position and uses the first entry of a tuple. An error is not a 0."""

    def verify(self, data: DataProto) -> Sequence[Any]:
        results = [self.compute_score(*call.values()) for call in self._calls(data)]
        return [float(r[0] if isinstance(r, tuple | list) else r) for r in results]


_PLURAL = {
    "data_source": "data_sources",
    "solution_str": "solution_strs",
    "ground_truth": "ground_truths",
    "extra_info": "extra_infos",
}
"""Argument of compute_score -> the list of it that BatchRewardManager passes."""


def score_with(cls: type) -> Callable[..., Any]:
    """Return a manager class as a reward function.

    It is asynchronous, so that its calls overlap, only if the class has `run_single`. Other classes
    block; each of their calls has the whole time limit.
    """
    # Slow to import: done here, because the first call has a time limit.
    importlib.import_module("transformers.models.auto.tokenization_auto")
    made: list[Any] = []

    def create(tokenizer: str, compute_score: str | None, kwargs: dict[str, Any]) -> Any:
        place, _, name = (compute_score or "").rpartition(":")
        scorer = find(place, name) if compute_score else default_compute_score
        score_kwargs = kwargs.pop("score_kwargs", None)
        config = OmegaConf.create({"reward": {"reward_kwargs": kwargs}, "reward_model": {}})
        # What verl passes to every class of the kind, and what a class gets that names it.
        given = {
            "tokenizer": hf_tokenizer(tokenizer),
            "compute_score": functools.partial(scorer, **score_kwargs) if score_kwargs else scorer,
        }
        batch = {"num_examine": 0, "reward_fn_key": "data_source", **kwargs}
        if hasattr(cls, "run_single"):
            given, named = {**given, "config": config}, batch
        else:
            given, named = {**given, **batch}, {"config": config}
        parameters = inspect.signature(cls).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        chosen = {name: value for name, value in given.items() if takes_all or name in parameters}
        return cls(**chosen, **{name: named[name] for name in named if name in parameters})

    def prepare(
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: dict[str, Any],
        tokenizer: str,
        compute_score: str | None = None,
        **kwargs: Any,
    ) -> tuple[Any, DataProto]:
        if not made:
            made.append(create(tokenizer, compute_score, kwargs))
        (manager,) = made
        row = (data_source, solution_str, ground_truth, extra_info)
        return manager, _one_row(manager.tokenizer, *row)

    async def score_single(**arguments: Any) -> dict[str, Any]:
        manager, data = prepare(**arguments)
        result = await manager.run_single(data)
        return {**(result.get("reward_extra_info") or {}), "score": result["reward_score"]}

    def score_batch(**arguments: Any) -> dict[str, Any]:
        manager, data = prepare(**arguments)
        result = manager(data, return_dict=True)
        rewards: Any = result
        extra: dict[str, Any] = {}
        if isinstance(result, dict):
            rewards, extra = result["reward_tensor"], result.get("reward_extra_info") or {}
        if rewards.shape != data.batch["responses"].shape:
            raise BadReturn(f"returned rewards {list(rewards.shape)}, expected one per token")
        return {
            **{name: values[0] for name, values in extra.items()},
            "score": float(rewards.sum()),
        }

    score: Any = score_single if hasattr(cls, "run_single") else score_batch
    score.__signature__ = inspect.signature(prepare)
    return score  # type: ignore[no-any-return]


def _one_row(
    tokenizer: Any, data_source: str, text: str, ground_truth: Any, extra_info: dict[str, Any]
) -> DataProto:
    """Return a batch of one response: prompts [1, 1], responses [1, R], attention_mask [1, 1 + R].

    An empty response has one token of padding.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    pad = tokenizer.pad_token_id or 0
    responses = torch.tensor([ids or [pad]])
    mask = torch.ones(1, 1 + responses.shape[1], dtype=torch.long)
    mask[0, 0] = 0
    mask[0, 1:] = int(bool(ids))
    tensors = {"prompts": torch.full((1, 1), pad), "responses": responses, "attention_mask": mask}
    columns = {
        "data_source": [data_source],
        "reward_model": [{"style": "rule", "ground_truth": ground_truth}],
        "extra_info": [extra_info],
        "uid": ["0"],
        "__num_turns__": [extra_info.get("num_turns")],
    }
    return DataProto.from_dict(tensors, non_tensors=columns)
