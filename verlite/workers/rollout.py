"""Generation behind Ray: one engine per worker, hundreds of trajectories at once, each scored when it is finished."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verlite.config.plan import Plan
from verlite.config.schema import Config
from verlite.controller.dispatch import register
from verlite.controller.worker import Worker
from verlite.engine.folder import load_tokenizer
from verlite.envs.factory import EnvFactory, build_env_factory, check_env_factory, encoder
from verlite.envs.step import Env, ToolError
from verlite.protocol.data import DataProto
from verlite.protocol.weights import read_buckets
from verlite.rewards.result import RewardItem, RewardResult
from verlite.rewards.scorer import Scorer, Stream
from verlite.rollout.build import build_engine
from verlite.rollout.trajectory import Request, run_all
from verlite.rollout.types import Sampling, Status, Trajectory
from verlite.workers.actor import Export


@dataclass(frozen=True)
class DecodedResponse:
    """A response as text. transcript: (model or tool, text), piece by piece."""

    text: str = ""
    transcript: list[tuple[str, str]] = field(default_factory=list)


class RolloutWorker(Worker):
    """One generation engine, the world that its samples act in, and what scores them. folder: in which reward functions run."""

    def __init__(self, config: Config, plan: Plan, folder: str | None = None):
        policy = config.actor_rollout_ref
        self.config, self.plan = config, plan
        self.env_factory = EnvFactory()
        if plan.max_turns:
            self.env_factory, tokenizer = build_env_factory(config), load_tokenizer(policy.model)
            template = config.data.apply_chat_template_kwargs
            self.encode = encoder(self.env_factory, tokenizer, template)
            check_env_factory(
                self.env_factory
            )  # tools that the driver's machine reaches need not be in reach of this one
        engines_here = max(1, self._spec.devices_on_node // self._spec.devices)
        self.scorer = Scorer(
            config.custom_reward_function, config.reward, share=engines_here, folder=folder
        )
        self.scorer.check_signature()  # the driver has looked at it too, but this may be another machine
        self.engine = build_engine(
            plan.rollout_name,
            policy.model,
            policy.rollout,
            plan.max_model_len,
            self.device,
            policy.rollout.seed,
        )

    @register(
        "split",
        keep_remote=(
            "prompt_ids",
            "response_ids",
            "response_mask",
            "rollout_log_probs",
            "text",
            "transcript",
        ),
    )
    def generate(self, requests: DataProto, sleep_after: bool) -> DataProto:
        """Answers to [b] requests with their rewards: ragged prompt_ids, response_ids, response_mask, rollout_log_probs, and numbers of
        each row. A sample is scored as soon as it is finished, while others go on; one whose reward fails is not valid.

        With turns also what the world reported: segments, turn_infos, invalid_turns, truncated_observations, gen_seconds, tool_seconds.
        """
        columns = requests.non_tensor_batch
        prompts = zip(
            columns["prompt_ids"], columns["sampling"], columns["extra_info"], strict=True
        )
        told = [DecodedResponse()] * len(requests)
        with Stream(self.scorer, self.config.reward.timeout_s) as rewards:

            def finished(row: int, trajectory: Trajectory) -> None:
                told[row] = self._told(trajectory)
                if trajectory.status != Status.ERROR:
                    rewards.add(row, self._item(columns, row, trajectory, told[row]))

            trajectories = asyncio.run(
                self._sample([self._request(*prompt) for prompt in prompts], finished)
            )
            if sleep_after:
                self.engine.sleep()
            began = time.monotonic()
            results = rewards.results()
            waited = time.monotonic() - began
        return as_columns(trajectories, told, results, waited, with_turns=self.plan.max_turns > 0)

    def _told(self, trajectory: Trajectory) -> "DecodedResponse":
        """What the model wrote, as text without special tokens; with turns also who wrote what."""

        def text(ids: list[int]) -> str:
            return str(self.engine.tokenizer.decode(ids, skip_special_tokens=True))

        written = text(
            [
                token
                for token, own in zip(
                    trajectory.response_ids, trajectory.response_mask, strict=True
                )
                if own
            ]
        )
        if not self.plan.max_turns:
            return DecodedResponse(written)
        ids = iter(trajectory.response_ids)
        return DecodedResponse(
            written,
            [(who, text(list(itertools.islice(ids, count)))) for who, count in trajectory.segments],
        )

    def _item(
        self, columns: Mapping[str, Any], row: int, trajectory: Trajectory, told: "DecodedResponse"
    ) -> RewardItem:
        extra = columns["extra_info"][row]
        if self.plan.max_turns:
            trajectory_info = {
                "segments": told.transcript,
                "status": str(trajectory.status),
                "turns": trajectory.turns,
            }
            extra = {**extra, "trajectory": trajectory_info}
        return RewardItem(
            columns["data_source"][row], told.text, columns["ground_truth"][row], extra
        )

    def _request(
        self, prompt_ids: list[int], sampling: Sampling, extra_info: dict[str, Any]
    ) -> Request:
        if not self.plan.max_turns:
            return Request(prompt_ids, sampling)
        return Request(
            prompt_ids,
            sampling,
            self._env(extra_info),
            max_turns=self.plan.max_turns,
            max_response_tokens=self.plan.longest_sequence - len(prompt_ids),
            max_observation_tokens=self.config.data.max_obs_length,
            encode_observation=self.encode,
        )

    def _env(self, extra_info: dict[str, Any]) -> Env:
        try:
            return self.env_factory.env(extra_info)
        except Exception as error:  # a user's own, which may want of a row what it does not have
            raise ValueError(
                f"env.name={self.config.env.name} makes no environment for a row with extra_info {extra_info!r:.200}: "
                f"{type(error).__name__}: {error}"
            ) from error

    async def _sample(
        self, requests: list[Request], finished: Callable[[int, Trajectory], None]
    ) -> list[Trajectory]:
        async with self.env_factory:
            return await run_all(self.engine, requests, finished)

    @register("all")
    def tool_health(self) -> str | None:
        """Why this worker's tools cannot be used now."""
        try:
            check_env_factory(self.env_factory)
        except ToolError as error:
            return str(error)
        return None

    @register("all")
    def sleep(self) -> None:
        """Free device memory until `load_weights`."""
        self.engine.sleep()

    @register("all")
    def load_weights(self, exports: list[Export], version: int) -> None:
        """Take back the weights' memory, load this node's copy of the trainer's weights, reset caches, compare fingerprints, and only then
        take the version; last, take back the caches' memory."""
        mine = next((e for e in exports if e.paths and e.node_id == self.node_id), None)
        if mine is None:
            raise RuntimeError(
                f"no actor rank on node {self.node_id} wrote weights there: place the actor on every node of the rollout"
            )
        self.engine.wake("weights")
        self.engine.load_weights(read_buckets(mine.paths), version, mine.fingerprint)
        self.engine.wake(
            "kv_cache"
        )  # only now: on a device it needs the room that loading has used

    def close(self) -> None:
        """End the engine and its processes, whose shared memory would otherwise outlive them."""
        if hasattr(self, "engine"):  # not if it failed to start
            self.engine.close()
            self.scorer.close()
        super().close()


def as_columns(
    trajectories: Sequence[Trajectory],
    told: Sequence[DecodedResponse],
    results: Mapping[int, RewardResult],
    waited: float,
    with_turns: bool,
) -> DataProto:
    """Trajectories and the rewards of those that were scored, as columns. waited: seconds for the last rewards."""
    scored = [results.get(row, RewardResult(None)) for row in range(len(trajectories))]
    valid = [result.score is not None for result in scored]
    tensors = {
        "prompt_length": _whole(len(t.prompt_ids) for t in trajectories),
        "response_length": _whole(len(t.response_ids) for t in trajectories),
        "trained_tokens": _whole(
            sum(t.response_mask) * ok for t, ok in zip(trajectories, valid, strict=True)
        ),
        "valid": torch.tensor(valid, dtype=torch.bool),
        "raw_scores": torch.tensor([result.score or 0.0 for result in scored], dtype=torch.float32),
        "reward_seconds": torch.full((len(trajectories),), waited),
        "turns": _whole(t.turns for t in trajectories),
        "weight_version": _whole(
            t.weight_versions[-1] if t.weight_versions else -1 for t in trajectories
        ),
    }
    columns = {
        "prompt_ids": [np.asarray(t.prompt_ids, dtype=np.int32) for t in trajectories],
        "response_ids": [np.asarray(t.response_ids, dtype=np.int32) for t in trajectories],
        "response_mask": [np.asarray(t.response_mask, dtype=np.int8) for t in trajectories],
        "rollout_log_probs": [np.asarray(t.log_probs, dtype=np.float32) for t in trajectories],
        "status": [str(t.status) for t in trajectories],
        "error": [
            f"reward: {result.error}" if result.error else t.error
            for t, result in zip(trajectories, scored, strict=True)
        ],
        "reward_parts": [result.parts for result in scored],
        "reward_traceback": [result.traceback or result.error for result in scored],
        "text": [one.text for one in told],
    }
    if with_turns:
        tensors |= {
            name: _whole(getattr(t, name) for t in trajectories)
            for name in ("invalid_turns", "truncated_observations")
        }
        seconds = {
            name: [getattr(t, name) for t in trajectories]
            for name in ("gen_seconds", "tool_seconds")
        }
        tensors |= {
            name: torch.tensor(values, dtype=torch.float32) for name, values in seconds.items()
        }
        columns |= {
            "segments": [t.segments for t in trajectories],
            "turn_infos": [t.infos for t in trajectories],
            "transcript": [one.transcript for one in told],
        }
    return DataProto.from_dict(tensors, columns)


def _whole(numbers: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64)
