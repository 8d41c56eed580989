"""Rollout workers: one engine each, with the environments and the scorer of its samples."""

import asyncio
import functools
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verlite.controller.dispatch import register
from verlite.controller.worker import Worker
from verlite.engine.folder import load_tokenizer
from verlite.envs.factory import EnvFactory, build_env_factory, check_env_factory, encoder
from verlite.envs.step import Env, ToolError
from verlite.protocol.data import DataProto, object_array
from verlite.protocol.metrics import Metrics
from verlite.rewards.process import FunctionError
from verlite.rewards.remote import RemoteStream
from verlite.rewards.result import RewardItem, RewardResult
from verlite.rewards.scorer import Scorer, Stream
from verlite.rollout.batched import build_engine
from verlite.rollout.loop import run_loop
from verlite.rollout.trajectory import Request, run_all, run_trajectory
from verlite.rollout.types import Load, Sampling, Status, Task, Trajectory
from verlite.spec.roles import RolloutSpec
from verlite.spec.weight_routes import WeightRoutes
from verlite.weights.ipc import TRIAL_S, BucketStream
from verlite.weights.transport import Export, Offer
from verlite.workers.background import Background, Waits
from verlite.workers.running import Running, as_rows, of_row
from verlite.workers.weight_reader import WeightReader

if TYPE_CHECKING:  # it needs an HTTP server, which other runs do not
    from verlite.gateway.agents import Agents

KEPT = (
    "prompt_ids",
    "response_ids",
    "response_mask",
    "rollout_log_probs",
    "credit",
    "text",
    "transcript",
    "agent_log",
)
"""Columns of samples that the driver has references to."""

RUNNING_S = 5.0
"""How long `running` waits for the samples, which a call may block."""
ANSWER_TURNS = 10
"""Turns of the event loop in which each answer of the engine that was there before reaches its
sample; it takes four."""


@dataclass(frozen=True)
class DecodedResponse:
    """A response as text.

    text: what the model wrote. transcript: (model or tool, text) per part of a multi-turn response.
    """

    text: str = ""
    transcript: Sequence[tuple[str, str]] = field(default_factory=list)


class RolloutWorker(Worker):
    """One generation engine, the environments its samples act in, and the scorer."""

    _background: Background[DataProto] | None = None
    """Samples the groups of `start`, with environments of its own."""
    _apart = Load(0.0)
    """What the engine did in `generate`, which is not for those groups: validations."""

    def __init__(self, spec: RolloutSpec) -> None:
        self.spec = spec
        self.env_factory = EnvFactory()
        if spec.env is not None:
            self.env_factory = build_env_factory(spec.env)
            tokenizer = load_tokenizer(spec.model)
            self.encode = encoder(self.env_factory, tokenizer, spec.template_kwargs)
            # The driver checked its own access to the tools; this machine's may differ.
            check_env_factory(self.env_factory)
        engines_on_node = max(1, self._spec.devices_on_node // self._spec.devices)
        engines_on_node = min(engines_on_node, spec.engines)
        self.scorer = Scorer(
            spec.scorer, share=engines_on_node, folder=spec.folder, debug=spec.debug
        )
        folder_of_weights = Path(spec.run_dir, "weights")
        self._reader = WeightReader("rollout", self.rank, folder_of_weights, self.device)
        self.scorer.check_signature()  # again: the file may differ on this machine
        self.scorer.check_service()
        self.engine = build_engine(
            spec.engine, spec.model, spec.generation, spec.max_model_len, self.device, spec.seed
        )
        # The first sync wakes the engine as all later ones do; until then its memory is the
        # trainer's, and an engine that does not survive sleep fails the check of the first step.
        self.engine.sleep()

    @register("split", keep_remote=KEPT)
    def generate(self, requests: DataProto, sleep_after: bool) -> DataProto:
        """Sample a response to each request, and score each as soon as it is finished.

        Returns:
            Ragged prompt_ids, response_ids, response_mask and rollout_log_probs, and per row the
            score, status and lengths (see protocol.fields). With turns also what the environment
            reported: segments, turn_infos, invalid_turns, truncated_observations, gen_seconds,
            tool_seconds.
        """
        columns = requests.non_tensor_batch
        decoded = [DecodedResponse()] * len(requests)
        load = self.engine.load().since(self._apart)
        with self.scorer.stream() as rewards:

            def on_finished(row: int, trajectory: Trajectory) -> None:
                decoded[row] = self._decode(trajectory)
                if trajectory.status != Status.ERROR and trajectory.score is None:
                    rewards.add(row, self._reward_item(columns, row, trajectory, decoded[row]))

            world = self._agents() or self.env_factory
            prepared_requests = self._requests(columns, world)
            trajectories = asyncio.run(self._sample(world, prepared_requests, on_finished))
            if sleep_after:
                self.engine.sleep()
            began = time.monotonic()
            results = rewards.results()
            waited_s = time.monotonic() - began
        self._apart = self.engine.load().since(load)
        results |= {row: t.score for row, t in enumerate(trajectories) if t.score is not None}
        return as_columns(
            trajectories, decoded, results, waited_s, self._multi_turn, self._programs
        )

    @register("split")
    def start(self, requests: DataProto) -> None:
        """Begin to sample groups in the background: the rows with the same `uid`.

        `generate` and weight syncs work meanwhile. On an idle engine a group is sampled as by
        `generate`, bit for bit.

        Args:
            requests: of whole groups, in order. With a column `so_far`: what `running` of another
                worker has returned of a sample, as a dict by column; it goes on after that. None:
                it has nothing yet.

        Raises:
            EngineError: a group that was started earlier could not be sampled. All others have
                ended with it. `abandon` makes the worker ready to start again.
        """
        if self._background is None:
            env = self.spec.env if self.spec.max_turns else None
            factory = EnvFactory() if env is None else build_env_factory(env)
            self._rewards = self.scorer.stream()
            self._background_world = self._agents() or factory
            self._waits = Waits(self.spec.phase_timeout_s)
            self._samples: dict[str, list[Running]] = {}
            self._background = Background(self._background_world)
        columns = requests.non_tensor_batch
        prepared_requests = self._requests(columns, self._background_world)
        so_far = columns.get("so_far", itertools.repeat(None))
        groups: dict[str, list[int]] = {}
        for row, (uid, request, prompt_ids, begun) in enumerate(
            zip(columns["uid"], prepared_requests, columns["prompt_ids"], so_far, strict=False)
        ):
            rows = groups.setdefault(uid, [])
            name = (uid, len(rows))
            rows.append(row)
            self._waits.note(name, "its start")
            sample = Running(name, Trajectory(list(prompt_ids)), request=request)
            if begun is not None:
                sample = of_row(begun, name, request)
            self._samples.setdefault(uid, []).append(sample)
        group = functools.partial(self._sample_group, self._rewards, self._waits, columns)
        self._background.start(
            [functools.partial(group, self._samples[uid], rows) for uid, rows in groups.items()]
        )

    @register("all")
    def finished(self, wait_s: float) -> DataProto:
        """Return the groups of `start` of which every sample has finished and been scored since the
        last call.

        Waits up to `wait_s` seconds for the first one.

        Returns:
            The columns of `generate`, `uid`, and `sample_index`: the row's place in its group. 0
            rows if there are none. Rows of a group are in the order of `start`; groups in the order
            in which they finished. meta_info: `load`, what the engine has done
            outside of `generate`.

        Raises:
            EngineError: as `start`.
            EngineDied, SamplesStuck: samples make no progress; see `Waits.check`.
        """
        groups = [] if self._background is None else self._background.finished(wait_s)
        if self._background is not None and not groups:
            self._waits.check(self.engine.last_step, self._background.blocked_at)
        for one in groups:
            del self._samples[one.non_tensor_batch["uid"][0]]
        answer = DataProto.concat(groups or [self._as_group([], [], [], [], 0.0)])
        return answer.with_meta(load=self.engine.load().since(self._apart))

    @register("all")
    def running(self) -> DataProto:
        """Return the samples of the groups that `finished` has not returned, as they are now.

        Those that nothing was sampled of are left out, and those that no other worker can go on
        with (`trajectory.goes_on`). Nothing is changed.

        Returns:
            The rows of `workers.running`. 0 rows if the samples do not answer within RUNNING_S.
        """
        samples: list[Running] = []
        if self._background is not None:
            with suppress(TimeoutError, RuntimeError):  # `finished` says why
                return self._background.ask(self._look, RUNNING_S)
        return as_rows(samples)

    async def _look(self) -> DataProto:
        so_far = await asyncio.to_thread(self.engine.running)
        for _ in range(ANSWER_TURNS):
            await asyncio.sleep(0)
        samples = [
            replace(one, so_far=so_far.get((one.name, one.trajectory.turns), one.so_far))
            for group in self._samples.values()
            for one in group
        ]
        return as_rows([one for one in samples if one.goes_on])

    @register("all")
    def abandon(self) -> None:
        """End all samples of `start`, and drop those that `finished` has not returned."""
        if self._background is not None:
            self._background.close()
            with self._rewards:  # starts no other batch
                pass
            self._background = None

    async def _sample_group(
        self,
        rewards: Stream | RemoteStream,
        waits: Waits,
        columns: Mapping[str, Any],
        samples: Sequence[Running],
        rows: Sequence[int],
    ) -> DataProto:
        """Sample and score the rows of a group."""
        ended_at = time.monotonic()
        sampler = self._sampler(self._background_world)

        async def sample(
            row: int, one: Running
        ) -> tuple[Trajectory, DecodedResponse, RewardResult]:
            nonlocal ended_at
            note = functools.partial(waits.note, one.name)
            if not one.is_finished:
                own = (one,) if isinstance(one.request, Request) else ()
                one.trajectory = await sampler(one.request, note, *own)
                one.is_finished = True
                ended_at = time.monotonic()
            decoded = self._decode(one.trajectory)
            if one.trajectory.status == Status.ERROR:
                one.result = RewardResult(None)
            elif one.trajectory.score is not None:
                one.result = one.trajectory.score
            if one.result is None:
                note("its reward")
                reward = rewards.score(self._reward_item(columns, row, one.trajectory, decoded))
                # Shielded, because the thread that scores completes the future in any case.
                one.result = await asyncio.shield(asyncio.wrap_future(reward))
            note(None)
            return one.trajectory, decoded, one.result

        async with asyncio.TaskGroup() as tasks:
            jobs = [tasks.create_task(sample(*both)) for both in zip(rows, samples, strict=True)]
        waited_s = time.monotonic() - ended_at
        trajectories, decoded, results = zip(*(job.result() for job in jobs), strict=True)
        uids = [columns["uid"][row] for row in rows]
        return self._as_group(uids, trajectories, decoded, results, waited_s)

    def _as_group(
        self,
        uids: Sequence[str],
        trajectories: Sequence[Trajectory],
        decoded: Sequence[DecodedResponse],
        results: Sequence[RewardResult],
        waited_s: float,
    ) -> DataProto:
        """Convert a group's samples to columns."""
        scores = dict(enumerate(results))
        kind = (self._multi_turn, self._programs)
        batch = as_columns(trajectories, decoded, scores, waited_s, *kind)
        return batch.with_batch(sample_index=torch.arange(len(uids))).with_non_tensor(
            uid=object_array(uids)
        )

    @property
    def _programs(self) -> bool:
        """Whether samples are those of agent programs."""
        return self.spec.agent is not None

    @property
    def _multi_turn(self) -> bool:
        """Whether samples may have several turns of the model."""
        return self.spec.max_turns > 0 or self._programs

    def _decode(self, trajectory: Trajectory) -> DecodedResponse:
        """Decode what the model wrote, without special tokens; with turns also the transcript."""

        def text(ids: list[int]) -> str:
            return str(self.engine.tokenizer.decode(ids, skip_special_tokens=True))

        tokens = zip(trajectory.response_ids, trajectory.response_mask, strict=True)
        sampled = text([token for token, mask in tokens if mask])
        if not self._multi_turn:
            return DecodedResponse(sampled)
        ids = iter(trajectory.response_ids)
        transcript: list[tuple[str, str]] = [
            (author, text(list(itertools.islice(ids, count))))
            for author, count in trajectory.segments
        ]
        return DecodedResponse(sampled, transcript)

    def _reward_item(
        self,
        columns: Mapping[str, Any],
        row: int,
        trajectory: Trajectory,
        decoded: DecodedResponse,
    ) -> RewardItem:
        extra_info = {**columns["extra_info"][row], "num_turns": trajectory.num_turns}
        if self._multi_turn:
            info = {
                "segments": decoded.transcript,
                "status": str(trajectory.status),
                "turns": trajectory.turns,
                "turn_scores": trajectory.turn_scores,
            }
            extra_info = {**extra_info, "trajectory": info}
        item = RewardItem(
            columns["data_source"][row], decoded.text, columns["ground_truth"][row], extra_info
        )
        if not self.scorer.needs_prompts:
            return item
        prompt, sequence = (
            str(self.engine.tokenizer.decode(ids, skip_special_tokens=False))
            for ids in (trajectory.prompt_ids, trajectory.prompt_ids + trajectory.response_ids)
        )
        return replace(item, prompt=prompt, sequence=sequence)

    def _agents(self) -> "Agents | None":
        """Return what runs agent programs, None if the run has none."""
        if self.spec.agent is None:
            return None
        from verlite.gateway.agents import Agents

        folder = self.spec.folder if Path(self.spec.folder).is_dir() else None
        longest = self.spec.longest_sequence
        return Agents(self.spec.agent, self.engine, longest, self.spec.template_kwargs, folder)

    def _sampler(self, world: "EnvFactory | Agents") -> Callable[..., Awaitable[Trajectory]]:
        """Return what makes a trajectory of a prepared request, and says what it waits for."""
        if not isinstance(world, EnvFactory):
            return world.sample
        if world.plays:
            return functools.partial(run_loop, self.engine, world, self.spec.longest_sequence)
        return functools.partial(run_trajectory, self.engine)

    def _requests(self, columns: Mapping[str, Any], world: "EnvFactory | Agents") -> list[Any]:
        if not isinstance(world, EnvFactory) or world.plays:
            return self._tasks(columns)
        prompts = zip(
            columns["prompt_ids"], columns["sampling"], columns["extra_info"], strict=True
        )
        return [self._request(*prompt, world) for prompt in prompts]

    def _tasks(self, columns: Mapping[str, Any]) -> list[Task]:
        names = {name: name for name in ("data_source", "ground_truth", "extra_info")}
        names = {"prompt": "messages", **names}  # as the data files have them
        return [
            Task(
                {name: columns[column][row] for name, column in names.items()},
                columns["prompt_ids"][row],
                columns["sampling"][row],
            )
            for row in range(len(columns["sampling"]))
        ]

    def _request(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        extra_info: dict[str, Any],
        factory: EnvFactory,
    ) -> Request:
        if not self.spec.max_turns:
            return Request(prompt_ids, sampling)
        return Request(
            prompt_ids,
            sampling,
            self._env(extra_info, factory),
            max_turns=self.spec.max_turns,
            max_response_tokens=self.spec.longest_sequence - len(prompt_ids),
            max_observation_tokens=self.spec.max_obs_length,
            encode_observation=self.encode,
        )

    def _env(self, extra_info: dict[str, Any], factory: EnvFactory) -> Env:
        try:
            return factory.env(extra_info)
        except Exception as error:  # a user's factory may raise anything
            name = self.spec.env.name if self.spec.env else ""
            raise ValueError(
                f"env.name={name} cannot build an environment for a row with "
                f"extra_info {extra_info!r:.200}: {type(error).__name__}: {error}"
            ) from error

    async def _sample(
        self,
        world: "EnvFactory | Agents",
        requests: list[Any],
        on_finished: Callable[[int, Trajectory], None],
    ) -> list[Trajectory]:
        async with world:
            return await run_all(self.engine, requests, on_finished, self._sampler(world))

    @register("all")
    def tool_health(self) -> str | None:
        """Return why this worker's tools cannot be used now, None if they can."""
        try:
            check_env_factory(self.env_factory)
        except ToolError as error:
            return str(error)
        return None

    @register("all")
    def reward_health(self) -> str | None:
        """Return why this worker's reward service cannot be used now, None if it can."""
        try:
            self.scorer.check_service()
        except FunctionError as error:
            return str(error)
        return None

    @register("all")
    def sleep(self) -> None:
        """Free device memory until `load_weights`."""
        self.engine.sleep()

    @register("all")
    def read_trial(self, routes: WeightRoutes, addresses: list[str]) -> str:
        """Read what the actor publishes in `publish_trial`.

        Args:
            routes: by which engines would get their weights.
            addresses: of the actor's ranks.

        Returns:
            Why this engine cannot read it; "" if it can, or has another transport.
        """
        ranks = self._reader.streams(routes)
        if not ranks:
            return ""
        stream = BucketStream(tuple(addresses[rank] for rank in ranks), timeout_s=TRIAL_S)
        return self.engine.read_trial(stream)

    @register("all")
    def fetch_weights(self, offers: list[Offer]) -> Export:
        """Take weights that have to be taken while the trainer publishes them.

        A ipc engine loads them. With the transport collective, one reader of each node
        receives the node's copy.

        Args:
            offers: of the actor's ranks.

        Returns:
            The node's copy, if this engine received it.
        """
        ranks = self._reader.streams(offers[0].routes)
        if ranks:
            addresses = tuple(offers[rank].stream or "" for rank in ranks)
            self._load(BucketStream(addresses), offers[0])
        return self._reader.receive(offers)

    @register("all")
    def load_weights(self, offer: Offer, exports: list[Export]) -> Metrics:
        """Load the published weights as the offer's version.

        The engine compares the fingerprint before it accepts the version. The KV cache is allocated
        last: on a GPU it takes memory that loading needs. If the offer has a log-prob probe, the
        engine then checks it, and returns to the version before if it fails.

        Args:
            offer: of the version.
            exports: of all processes; one has the copy of this node.

        Returns:
            The probe's metrics; {} without a probe.
        """
        if not self._reader.streams(offer.routes):  # fetch_weights has loaded those
            self._load(self._reader.published(offer, exports), offer)
        self.engine.wake("kv_cache")
        if offer.probe is None:
            return {}
        began = time.monotonic()
        gap = self.engine.check_log_probs(offer.probe)
        seconds = offer.probe.seconds + time.monotonic() - began
        return {"perf/weight_probe_gap": gap.nats, "perf/weight_probe_seconds": seconds}

    def _load(self, named: Iterable[tuple[str, torch.Tensor]], offer: Offer) -> None:
        self.engine.wake("weights")
        is_probed = offer.probe is not None
        self.engine.load_weights(named, offer.version, offer.fingerprint, is_probed)

    @register("all")
    def release_weights(self) -> None:
        """Free this node's copy, after all its readers have loaded it."""
        self._reader.release()

    def close(self) -> None:
        """Stop the engine and its processes, whose shared memory would otherwise remain."""
        if hasattr(self, "engine"):  # missing if it failed to start
            self.abandon()
            self.engine.close()
            self.scorer.close()
        super().close()


def as_columns(
    trajectories: Sequence[Trajectory],
    decoded: Sequence[DecodedResponse],
    results: Mapping[int, RewardResult],
    waited_s: float,
    multi_turn: bool,
    programs: bool = False,
) -> DataProto:
    """Convert trajectories and their rewards to columns.

    Rows whose generation or reward failed are not valid, and their response_mask is 0.

    Args:
        results: Reward of each scored row by row number.
        waited_s: Time that the worker waited for rewards after its last sample.
        multi_turn: samples may have several turns.
        programs: samples are those of agent programs.
    """
    scored = [results.get(row, RewardResult(None)) for row in range(len(trajectories))]
    valid = [result.score is not None for result in scored]
    masks = [
        np.asarray(t.response_mask, dtype=np.int8) * ok
        for t, ok in zip(trajectories, valid, strict=True)
    ]
    versions = [[version for version, _ in t.weight_versions] for t in trajectories]
    tensors = {
        "prompt_length": _int_tensor(len(t.prompt_ids) for t in trajectories),
        "response_length": _int_tensor(len(t.response_ids) for t in trajectories),
        "sampled_tokens": _int_tensor(mask.sum() for mask in masks),
        "valid": torch.tensor(valid, dtype=torch.bool),
        "raw_scores": torch.tensor([result.score or 0.0 for result in scored], dtype=torch.float32),
        "reward_seconds": torch.full((len(trajectories),), waited_s),
        "turns": _int_tensor(t.turns for t in trajectories),
        "num_turns": _int_tensor(t.num_turns for t in trajectories),
        "weight_version": _int_tensor(row[-1] if row else -1 for row in versions),
        "oldest_version": _int_tensor(min(row, default=-1) for row in versions),
    }
    columns = {
        "prompt_ids": [np.asarray(t.prompt_ids, dtype=np.int32) for t in trajectories],
        "response_ids": [np.asarray(t.response_ids, dtype=np.int32) for t in trajectories],
        "response_mask": masks,
        "rollout_log_probs": [np.asarray(t.log_probs, dtype=np.float32) for t in trajectories],
        "status": [str(t.status) for t in trajectories],
        "error": [
            f"reward: {result.error}" if result.error else t.error
            for t, result in zip(trajectories, scored, strict=True)
        ],
        "reward_parts": [result.parts for result in scored],
        "reward_traceback": [result.traceback or result.error for result in scored],
        "text": [response.text for response in decoded],
        "version_spans": [t.weight_versions for t in trajectories],
    }
    if multi_turn:
        tensors |= {
            "invalid_turns": _int_tensor(t.invalid_turns for t in trajectories),
            "truncated_observations": _int_tensor(t.truncated_observations for t in trajectories),
            "gen_seconds": torch.tensor([t.gen_seconds for t in trajectories]).float(),
            "tool_seconds": torch.tensor([t.tool_seconds for t in trajectories]).float(),
        }
        columns |= {
            "segments": [t.segments for t in trajectories],
            "turn_infos": [t.infos for t in trajectories],
            "transcript": [response.transcript for response in decoded],
        }
    if programs:
        columns |= {
            "session": [t.session for t in trajectories],
            "branches": [
                t.branches or [(len(t.prompt_ids), len(t.response_ids))] for t in trajectories
            ],
            "credit": [_credit(t) for t in trajectories],
            "requests": [t.requests for t in trajectories],
            "agent_log": [t.log for t in trajectories],
        }
    return DataProto.from_dict(tensors, columns)


def _credit(trajectory: Trajectory) -> np.ndarray:
    """Return the factor of the advantage of each response token, 0 on those of others."""
    turns = iter(trajectory.requests)
    parts = [
        (next(turns)["credit"] if author == "model" else 0.0, n)
        for author, n in trajectory.segments
    ]
    return np.asarray([factor for factor, n in parts for _ in range(n)], dtype=np.float32)


def _int_tensor(numbers: Iterable[int]) -> torch.Tensor:
    return torch.tensor([int(number) for number in numbers], dtype=torch.int64)
