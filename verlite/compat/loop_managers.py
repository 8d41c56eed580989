"""verl.experimental.reward_loop: managers that score one response, asynchronously."""

import inspect
from typing import Any

from verlite.compat import managers
from verlite.compat.managers import RewardManagerBase, get_reward_manager_cls, register
from verlite.protocol.data import DataProto

__all__ = [
    "DAPORewardManager",
    "NaiveRewardManager",
    "RewardManagerBase",
    "get_reward_manager_cls",
    "register",
]


class NaiveRewardManager(RewardManagerBase):
    """Calls compute_score, in a thread unless it is asynchronous."""

    scorer: type[Any] = managers.NaiveRewardManager

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        self.reward_router_address = reward_router_address
        self.reward_model_tokenizer = reward_model_tokenizer
        self.is_async_reward_score = inspect.iscoroutinefunction(self.compute_score)
        given = (config.get("reward") or {}).get("reward_kwargs") or {}
        self._scorer = self.scorer(tokenizer, compute_score=self.compute_score, **given)

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        (call,) = self._scorer._calls(data)
        if self.is_async_reward_score:
            score = await self.compute_score(**call)
        else:
            score = await self.loop.run_in_executor(None, lambda: self.compute_score(**call))
        entries = dict(score) if isinstance(score, dict) else {"score": score, "acc": score}
        (length,) = managers._lengths(data)
        reward = self._scorer.reward(entries, length)
        return {"reward_score": reward, "reward_extra_info": entries}


class DAPORewardManager(NaiveRewardManager):
    """Also subtracts the penalty on long responses of `config.reward.reward_kwargs`."""

    scorer = managers.DAPORewardManager
