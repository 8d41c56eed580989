"""Generation behind Ray: one engine per worker, hundreds of trajectories at once."""

import asyncio
from typing import Any

import numpy as np
import torch

from verlite.config.plan import Plan
from verlite.config.schema import Config
from verlite.controller.dispatch import register
from verlite.controller.worker import Worker
from verlite.engine.model import load_tokenizer
from verlite.envs.step import Env, ToolError
from verlite.envs.world import World, build_world, checked, encoder
from verlite.protocol.data import DataProto, object_array
from verlite.protocol.weights import read_buckets
from verlite.rollout.build import build_engine
from verlite.rollout.trajectory import Request, run_all
from verlite.rollout.types import Sampling, Trajectory
from verlite.workers.actor import Export


class RolloutWorker(Worker):
    """One generation engine, and the world that its samples act in."""

    def __init__(self, config: Config, plan: Plan):
        policy = config.actor_rollout_ref
        self.config, self.plan = config, plan
        self.world = World()
        if plan.max_turns:
            self.world, tokenizer = build_world(config), load_tokenizer(policy.model)
            template = config.data.apply_chat_template_kwargs
            self.encode = encoder(self.world, tokenizer, template)
            checked(self.world)  # tools that the driver's machine reaches need not be in reach of this one
        self.engine = build_engine(plan.rollout_name, policy.model, policy.rollout, plan.max_model_len, self.device, policy.rollout.seed)

    @register("split")
    def generate(self, requests: DataProto, sleep_after: bool) -> DataProto:
        """Ragged answers to [b] requests: response_ids, response_mask, rollout_log_probs as arrays a row; status, error, turns, version.

        With turns also what the world reported: segments, turn_infos, invalid_turns, truncated_observations, gen_seconds, tool_seconds.
        """
        columns = requests.non_tensor_batch
        prompts = zip(columns["prompt_ids"], columns["sampling"], columns.get("extra_info", [{}] * len(requests)), strict=True)
        trajectories = asyncio.run(self._sample([self._request(*prompt) for prompt in prompts]))
        if sleep_after:
            self.engine.sleep()

        def numbers(name: str) -> torch.Tensor:
            return torch.tensor([getattr(t, name) for t in trajectories])

        told: dict[str, torch.Tensor] = {}
        turns: dict[str, np.ndarray] = {}
        if self.plan.max_turns:
            told = {name: numbers(name) for name in ("invalid_turns", "truncated_observations", "gen_seconds", "tool_seconds")}
            turns = {
                "segments": object_array([t.segments for t in trajectories]),
                "turn_infos": object_array([t.infos for t in trajectories]),
            }
        versions = [t.weight_versions[-1] if t.weight_versions else -1 for t in trajectories]
        return DataProto.from_dict(
            {"turns": numbers("turns"), "weight_version": torch.tensor(versions, dtype=torch.int64), **told},
            {
                "response_ids": [np.asarray(t.response_ids, dtype=np.int64) for t in trajectories],
                "response_mask": [np.asarray(t.response_mask, dtype=np.int8) for t in trajectories],
                "rollout_log_probs": [np.asarray(t.log_probs, dtype=np.float32) for t in trajectories],
                "status": [str(t.status) for t in trajectories],
                "error": [t.error for t in trajectories],
                **turns,
            },
        )

    def _request(self, prompt_ids: list[int], sampling: Sampling, extra_info: dict[str, Any]) -> Request:
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
            return self.world.env(extra_info)
        except Exception as error:  # a user's own, which may want of a row what it does not have
            raise ValueError(
                f"env.name={self.config.env.name} makes no environment for a row with extra_info {extra_info!r:.200}: "
                f"{type(error).__name__}: {error}"
            ) from error

    async def _sample(self, requests: list[Request]) -> list[Trajectory]:
        async with self.world:
            return await run_all(self.engine, requests)

    @register("all")
    def silent_tools(self) -> str | None:
        """Why this worker's tools cannot be used now."""
        try:
            checked(self.world)
        except ToolError as error:
            return str(error)
        return None

    @register("all")
    def sleep(self) -> None:
        """Free device memory until `wake`."""
        self.engine.sleep()

    @register("all")
    def load_weights(self, exports: list[Export], version: int) -> None:
        """Load this node's copy of the trainer's weights, compare fingerprints, reset caches, and only then take the version."""
        mine = next((e for e in exports if e.paths and e.node_id == self.node_id), None)
        if mine is None:
            raise RuntimeError(f"no actor rank on node {self.node_id} wrote weights there: place the actor on every node of the rollout")
        self.engine.load_weights(read_buckets(mine.paths), version, mine.fingerprint)

    def close(self) -> None:
        """End the engine and its processes, whose shared memory would otherwise outlive them."""
        if hasattr(self, "engine"):  # not if it failed to start
            self.engine.close()
        super().close()

    @register("all")
    def wake(self, what: str) -> None:
        """Bring back what sleep freed: "weights" or "kv_cache"."""
        self.engine.wake(what)
