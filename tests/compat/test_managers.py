"""Reward manager classes written for verl score one response at a time."""

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny_tokenizer
from verlite.rewards.process import FunctionError, load
from verlite.rewards.result import BadReturn

CODE = """
import asyncio
from collections import defaultdict

import torch

from verl import DataProto
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.utils.reward_score import default_compute_score
import verl.experimental.reward_loop.reward_manager.naive as loop_manager
from verl.workers.reward_manager import (
    BatchRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
    register,
)
from verl.workers.reward_manager.abstract import AbstractRewardManager, RawRewardFn
from verl.workers.reward_manager.registry import REWARD_MANAGER_REGISTRY


def exact(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str == ground_truth), "source": data_source}


if "longer" in REWARD_MANAGER_REGISTRY:  # files for verl do so, because it refuses a second one
    del REWARD_MANAGER_REGISTRY["longer"]


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


class Dapo(DAPORewardManager):
    pass


class Prime(PrimeRewardManager):
    pass


class Batch(BatchRewardManager):
    def verify(self, data):
        return [asyncio.run(wait(score)) for score in super().verify(data)]


class LoopNaive(loop_manager.NaiveRewardManager):
    pass


class LoopShort(loop_manager.NaiveRewardManager):
    def __init__(self, config, tokenizer, compute_score, bonus=0.0, **kwargs):
        self.bonus = bonus + config.reward.reward_kwargs.bonus
        super().__init__(config, tokenizer, compute_score, None, **kwargs)

    async def run_single(self, data):
        result = await super().run_single(data)
        result["reward_score"] += self.bonus
        return result


class LoopDapo(loop_manager.DAPORewardManager):
    pass


async def wait(value):
    return value


def lists(data_sources, solution_strs, ground_truths, extra_infos, bonus):
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos)
    return [float(text == truth) + bonus for _, text, truth, _ in rows]


def by_position(source, text, truth, info):
    return text == truth, source


def turns(data_source, solution_str, ground_truth, extra_info, each=1):
    return extra_info["num_turns"] * each


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
            kwargs["compute_score"] = f"{file}:{kwargs.pop('scorer', 'exact')}"
        function = load(f"{file}:{name}", [*NAMES, *kwargs])
        row = dict(zip(NAMES, ("sums", solution, "42", {"num_turns": 4}), strict=True))
        result: Any = function(**row, **kwargs)
        return asyncio.run(result) if inspect.isawaitable(result) else result

    return call


def test_a_manager_that_is_called_with_a_batch(score: Any) -> None:
    assert score("Longer", "42", bonus=0.25) == {"score": 1.5, "length": 2}
    assert score("Longer", "421", bonus=0.25) == {"score": 0.75, "length": 3}
    assert score("Longer", "", bonus=0.25) == {"score": 0.0, "length": 0}


def test_a_manager_of_single_responses(score: Any) -> None:
    assert score("Single", "42?") == {"score": 1.5, "text": "42?"}


def test_the_naive_manager(score: Any) -> None:
    assert score("Naive", "42") == {"score": 1.0, "source": "sums"}


OVERLONG = {"enable": True, "len": 4, "penalty_factor": 2.0, "log": True}


@pytest.mark.parametrize("name", ["Dapo", "LoopDapo"])
def test_the_penalty_on_long_responses(score: Any, name: str) -> None:
    given = {"max_resp_len": 5, "overlong_buffer_cfg": OVERLONG}
    assert score(name, "42", **given)["score"] == 1 - 2 * (2 - (5 - 4)) / 4
    assert score(name, "42111", **given)["overlong_reward"] == -2 * (5 - (5 - 4)) / 4
    assert score(name, "4", **given) == {
        "score": 0.0,
        "source": "sums",
        "overlong_reward": 0.0,
        "overlong": False,
    }
    with pytest.raises(ValueError, match="len=4 must be 1 to max_resp_len=3"):
        score(name, "42", max_resp_len=3, overlong_buffer_cfg=OVERLONG)


def test_a_batch_manager_with_an_event_loop_of_its_own(score: Any) -> None:
    assert score("Batch", "42", scorer="lists", bonus=0.5) == {"score": 1.5}


def test_a_function_that_is_called_by_position(score: Any) -> None:
    assert score("Prime", "42", scorer="by_position") == {"score": 1.0}
    assert score("Prime", "41", scorer="by_position") == {"score": 0.0}


def test_the_asynchronous_naive_manager(score: Any) -> None:
    assert score("LoopNaive", "42") == {"score": 1.0, "source": "sums"}
    assert score("LoopNaive", "", scorer="turns") == {"score": 4, "acc": 4}
    assert score("LoopShort", "42", bonus=0.25)["score"] == 1.5


def test_arguments_of_the_function_that_a_manager_calls(score: Any) -> None:
    assert score("Naive", "42", scorer="turns", score_kwargs={"each": 0.5}) == {"score": 2.0}


def test_managers_that_block_are_called_one_after_another(tmp_path: Path, compat: None) -> None:
    file = tmp_path / "managers.py"
    file.write_text(CODE)
    names = [*NAMES, "tokenizer"]
    overlap = {
        name: inspect.iscoroutinefunction(load(f"{file}:{name}", names))
        for name in ("Longer", "Naive", "Batch", "Single", "LoopNaive")
    }
    assert overlap == {
        "Longer": False,
        "Naive": False,
        "Batch": False,
        "Single": True,
        "LoopNaive": True,
    }


def test_rewards_of_another_shape(score: Any) -> None:
    with pytest.raises(BadReturn, match="expected one per token"):
        score("Mean", "42")


def test_the_tokenizer_is_required(tmp_path: Path, compat: None) -> None:
    file = tmp_path / "managers.py"
    file.write_text(CODE)
    with pytest.raises(FunctionError, match="'tokenizer'"):
        load(f"{file}:Naive", NAMES)
