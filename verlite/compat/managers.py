"""verl.workers.reward_manager and verl.experimental.reward_loop.reward_manager.

    custom_reward_function.path=FILE.py custom_reward_function.name=MyManager
    custom_reward_function.reward_kwargs.tokenizer=FOLDER_OF_THE_MODEL

calls a manager class with one response at a time. Its prompt is empty, and the tokens of its
response are made from the text.
"""

import inspect
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from omegaconf import OmegaConf

from verlite.compat.reward_score import default_compute_score
from verlite.compat.utils import get_event_loop, hf_tokenizer
from verlite.importing import find
from verlite.protocol.data import DataProto
from verlite.rewards.result import BadReturn

REGISTRY: dict[str, type] = {}


def register(name: str) -> Callable[[type], type]:
    """Return a decorator that records a manager class."""

    def decorate(cls: type) -> type:
        REGISTRY[name] = cls
        return cls

    return decorate


def get_reward_manager_cls(name: str) -> type:
    """Return the class that was registered under a name. Raises ValueError."""
    if name not in REGISTRY:
        raise ValueError(f"no reward manager {name!r}; registered: {', '.join(REGISTRY)}")
    return REGISTRY[name]


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


@register("naive")
class NaiveRewardManager(AbstractRewardManager):
    """Gives each response the score of compute_score at its last token."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: Any = None,
        reward_fn_key: str = "data_source",
        **_: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra: dict[str, list[Any]] = defaultdict(list)
        start = data.batch["prompts"].shape[-1]
        for i in range(len(data)):
            row = data[i].non_tensor_batch
            length = int(data.batch["attention_mask"][i, start:].sum())
            result = self.compute_score(
                data_source=row[self.reward_fn_key],
                solution_str=self.tokenizer.decode(
                    data.batch["responses"][i, :length], skip_special_tokens=True
                ),
                ground_truth=row["reward_model"]["ground_truth"],
                extra_info=row.get("extra_info") or {},
            )
            entries = result if isinstance(result, dict) else {"score": result}
            rewards[i, length - 1] = entries["score"]
            for name, value in entries.items():
                extra[name].append(value)
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards


def score_with(cls: type) -> Callable[..., Any]:
    """Return a manager class as an asynchronous reward function."""
    made: list[Any] = []

    def create(tokenizer: str, compute_score: str | None, kwargs: dict[str, Any]) -> Any:
        place, _, name = (compute_score or "").rpartition(":")
        given = {
            "tokenizer": hf_tokenizer(tokenizer),
            "compute_score": find(place, name) if compute_score else default_compute_score,
            "num_examine": 0,
            "reward_fn_key": "data_source",
            "config": OmegaConf.create({"reward": {"reward_kwargs": kwargs}, "reward_model": {}}),
            **kwargs,
        }
        parameters = inspect.signature(cls).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return cls(**given)
        return cls(**{name: value for name, value in given.items() if name in parameters})

    async def score(
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: dict[str, Any],
        tokenizer: str,
        compute_score: str | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if not made:
            made.append(create(tokenizer, compute_score, kwargs))
        (manager,) = made
        data = _one_row(manager.tokenizer, data_source, solution_str, ground_truth, extra_info)
        if hasattr(manager, "run_single"):
            result = await manager.run_single(data)
            reward, extra = result["reward_score"], result.get("reward_extra_info") or {}
        else:
            result = manager(data, return_dict=True)
            if isinstance(result, dict):
                rewards, extra = result["reward_tensor"], result.get("reward_extra_info") or {}
            else:
                rewards, extra = result, {}
            if rewards.shape != data.batch["responses"].shape:
                raise BadReturn(f"returned rewards {list(rewards.shape)}, expected one per token")
            reward = float(rewards.sum())
            extra = {name: values[0] for name, values in extra.items()}
        return {**extra, "score": reward}

    return score


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
    }
    return DataProto.from_dict(tensors, non_tensors=columns)
