"""Reward manager classes written for verl score one response at a time."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny_tokenizer
from verlite.rewards.process import FunctionError, load
from verlite.rewards.result import BadReturn

CODE = """
from collections import defaultdict

import torch

from verl import DataProto
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import NaiveRewardManager, register
from verl.workers.reward_manager.abstract import AbstractRewardManager


def exact(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str == ground_truth), "source": data_source}


@register("longer")
class Longer(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source",
                 bonus=0.0, **kwargs):
        self.tokenizer = tokenizer
        self.compute_score = compute_score or default_compute_score
        self.key = reward_fn_key
        self.bonus = bonus

    def __call__(self, data: DataProto, return_dict=False):
        scores = self._extract_reward_from_rm_scores(data, return_dict)
        if scores is not None:
            return scores
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra = defaultdict(list)
        for i in range(len(data)):
            item = data[i]
            start = item.batch["prompts"].shape[-1]
            length = item.batch["attention_mask"][start:].sum()
            text = self.tokenizer.decode(item.batch["responses"][:length])
            truth = item.non_tensor_batch["reward_model"]["ground_truth"]
            source = item.non_tensor_batch[self.key]
            score = self.compute_score(
                data_source=source, solution_str=text, ground_truth=truth,
                extra_info=item.non_tensor_batch.get("extra_info", {}))
            rewards[i, length - 1] = score["score"] + self.bonus * length
            extra["length"].append(int(length))
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards


class Single(RewardManagerBase):
    async def run_single(self, data: DataProto):
        ids = data[0].batch["responses"]
        text = await self.loop.run_in_executor(None, lambda: self.tokenizer.decode(ids))
        return {"reward_score": len(text) / 2, "reward_extra_info": {"text": text}}


class Naive(NaiveRewardManager):
    pass


class Mean(Naive):
    def __call__(self, data, return_dict=False):
        return torch.zeros(len(data))
"""
NAMES = ["data_source", "solution_str", "ground_truth", "extra_info"]


@pytest.fixture
def score(tmp_path: Path, compat: None) -> Any:
    file = tmp_path / "managers.py"
    file.write_text(CODE)
    tiny_tokenizer().save_pretrained(tmp_path / "model")

    def call(name: str, solution: str, **kwargs: Any) -> dict[str, Any]:
        kwargs["tokenizer"] = str(tmp_path / "model")
        if name != "Single":
            kwargs["compute_score"] = f"{file}:exact"
        function = load(f"{file}:{name}", [*NAMES, *kwargs])
        row = dict(zip(NAMES, ("sums", solution, "42", {}), strict=True))
        result: dict[str, Any] = asyncio.run(function(**row, **kwargs))
        return result

    return call


def test_a_manager_that_is_called_with_a_batch(score: Any) -> None:
    assert score("Longer", "42", bonus=0.25) == {"score": 1.5, "length": 2}
    assert score("Longer", "421", bonus=0.25) == {"score": 0.75, "length": 3}
    assert score("Longer", "", bonus=0.25) == {"score": 0.0, "length": 0}


def test_a_manager_of_single_responses(score: Any) -> None:
    assert score("Single", "42?") == {"score": 1.5, "text": "42?"}


def test_the_naive_manager(score: Any) -> None:
    assert score("Naive", "42") == {"score": 1.0, "source": "sums"}


def test_rewards_of_another_shape(score: Any) -> None:
    with pytest.raises(BadReturn, match="expected one per token"):
        score("Mean", "42")


def test_the_tokenizer_is_required(tmp_path: Path, compat: None) -> None:
    file = tmp_path / "managers.py"
    file.write_text(CODE)
    with pytest.raises(FunctionError, match="'tokenizer'"):
        load(f"{file}:Naive", NAMES)
