"""Weight transfer from actor to rollout workers, and generated samples, with fake engines."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.models import tiny_tokenizer
from verlite.engine.export import Sizes
from verlite.envs.factory import EnvFactory
from verlite.envs.step import Step, ToolError, encode_text
from verlite.protocol.data import DataProto, object_array
from verlite.rewards.result import RewardResult
from verlite.rewards.scorer import Stream
from verlite.rollout.types import Completion, Load, Sampling, WeightSyncError
from verlite.spec.roles import GenerationSpec, ModelSpec, PublishSpec, ScorerSpec
from verlite.spec.weight_routes import weight_routes
from verlite.weights import TransportError
from verlite.weights.fingerprint import fingerprint
from verlite.weights.ipc import read_trial
from verlite.weights.probe import Probe
from verlite.weights.transport import Export
from verlite.workers import rollout as rollouts
from verlite.workers.actor import ActorWorker, SyncedParts
from verlite.workers.inference import InferenceWorker
from verlite.workers.rollout import RolloutWorker
from verlite.workers.training import StepRows
from verlite.workers.weight_reader import WeightReader

WEIGHTS = [("a", torch.arange(6.0)), ("b", torch.ones(2, 2))]
ADAPTERS = [("q.lora_A.weight", torch.ones(1, 2)), ("q.lora_B.weight", torch.full((3, 1), 2.0))]
STORED = [
    ("q.lora_A.default.weight", torch.ones(1, 2) / 3),
    ("q.lora_B.default.weight", torch.ones(3, 1)),
]
PARTS = {"merged": WEIGHTS, "base": WEIGHTS, "adapters": ADAPTERS, "trained": STORED}
CPU = torch.device("cpu")


class OnCpu:
    device = CPU


class Actor(OnCpu, ActorWorker):
    """An actor worker without Ray."""


class Rollout(OnCpu, RolloutWorker):
    """A rollout worker without Ray."""


class Inference(OnCpu, InferenceWorker):
    """An inference worker without Ray."""


def plan(actor, rollout, transport="auto", inference=(), device="cuda"):
    """Return the part of a plan that a weight sync reads: two devices a node."""
    routes = weight_routes(actor, rollout, 1, 2, device, transport, inference)
    routes = routes.fallback or routes
    placement = {"actor": actor, "rollout": rollout} | (
        {"inference": inference} if inference else {}
    )
    return SimpleNamespace(
        rollout_dtype="bfloat16",
        train_dtype="bfloat16",
        sync_dtype="bfloat16",
        roles=tuple(placement),
        placement=placement,
        devices_per_node=2,
        weights=routes,
        syncs_adapters=False,
        max_model_len=8,
    )


def config(folder="unused", lora_rank=0):
    """Return what the specs of all roles have here."""
    model = ModelSpec(path="x", lora_rank=lora_rank)
    return SimpleNamespace(run_dir=str(folder), engine=SimpleNamespace(model=model))


def publishing(routes):
    """Return what the actor knows of weight syncs."""
    return PublishSpec(
        train_dtype=routes.train_dtype,
        rollout_dtype=routes.rollout_dtype,
        sync_dtype=routes.sync_dtype,
        sync_bucket_mb=1,
        engine_share=1.0,
        syncs_adapters=routes.syncs_adapters,
        has_inference="inference" in routes.roles,
        nodes=tuple(device // routes.devices_per_node for device in routes.placement["actor"]),
        max_model_len=routes.max_model_len,
    )


def actors(routes, settings):
    """Return the ranks of an actor, and the calls to the engine of each."""
    ranks = []
    for rank in range(len(routes.placement["actor"])):
        actor = Actor.__new__(Actor)
        actor.rank, actor._spec = rank, SimpleNamespace(address="127.0.0.1")
        actor.spec = SimpleNamespace(**vars(settings), publish=publishing(routes))
        actor._sync = SyncedParts(routes.syncs_adapters)
        actor._memory_files = actor._publisher = actor._sender = None
        actor.calls = []
        actor.engine = trainer_engine(actor.calls)
        actor.routes = routes.weights
        ranks.append(actor)
    return ranks


def trainer_engine(calls):
    def export(dtype, snapshot, target, part):
        calls.append(("gathers for", target))
        for name, tensor in PARTS[part]:
            if target is not None:
                yield name, tensor.to(dtype)

    return SimpleNamespace(
        onload=lambda: calls.append("onload"),
        offload=lambda: calls.append("offload"),
        export=export,
        fingerprint=lambda dtype, part: fingerprint(PARTS[part], dtype),
        own_fingerprint=lambda dtype: fingerprint(WEIGHTS + STORED, dtype),
    )


def engine_workers(routes, settings):
    """Return the engines' workers. Each records the weights that it loads."""
    ranks = []
    for rank in range(len(routes.placement["rollout"])):
        rollout = Rollout.__new__(Rollout)
        rollout.rank, rollout.spec = rank, None
        rollout._reader = reader(settings, "rollout", rank)
        rollout.calls = calls = []

        def load(named, version, expected, is_probed, calls=calls):
            assert not is_probed
            loaded = [(name, tensor.clone()) for name, tensor in named]
            assert fingerprint(loaded, torch.bfloat16) == expected
            calls.append((version, dict(loaded)))

        rollout.engine = SimpleNamespace(wake=calls.append, load_weights=load)
        ranks.append(rollout)
    return ranks


def reader(settings, role, rank):
    folder = Path(settings.run_dir, "weights")
    return WeightReader(role, rank, folder, CPU)


def inference_workers(routes, settings):
    """Return the workers of `inference`. Each records the weights that it loads."""
    ranks = []
    for rank in range(len(routes.placement["inference"])):
        inference = Inference.__new__(Inference)
        inference.rank = rank
        inference.spec = SimpleNamespace(**vars(settings), max_model_len=8)
        inference.version, inference._not_ready = None, "no weight sync has reached it"
        inference.rank_rows, inference._dtype = StepRows(), torch.bfloat16
        inference._reader = reader(settings, "inference", rank)
        inference.loaded = loaded = {}

        def load(named, loaded=loaded):
            loaded.clear()
            loaded.update((name, tensor.clone()) for name, tensor in named)

        def own(dtype, loaded=loaded, has_adapters=settings.engine.model.lora_rank):
            return fingerprint([*(WEIGHTS if has_adapters else []), *loaded.items()], dtype)

        inference.engine = SimpleNamespace(
            onload=lambda: None, offload=lambda: None, load_weights=load, own_fingerprint=own
        )
        ranks.append(inference)
    return ranks


def sync(trainer, engines, version):
    """Do what trainer.stages.weights does, with a thread for each process."""
    offers = [actor.offer_weights(version, None, actor.routes) for actor in trainer]
    with ThreadPoolExecutor(8) as pool:
        publishing = [pool.submit(actor.publish_weights, offers[0]) for actor in trainer]
        fetching = [pool.submit(engine.fetch_weights, offers) for engine in engines]
        exports = [future.result(30) for future in [*publishing, *fetching]]
    for engine in engines:
        engine.load_weights(offers[0], exports)
    for worker in [*trainer, *engines]:
        worker.release_weights()
    return exports


PLACES = {
    "one node": ([0, 1], [0, 1], "auto"),
    "another node": ([0, 1], [2, 3], "auto"),
    "both": ([0, 1], [1, 2], "auto"),
    "the same device": ([0, 1], [0, 1], "ipc"),
    "CPUs, both": ([0, 1], [1, 2], "auto", (), "cpu"),
    "a folder": ([0, 1], [2, 4], "files"),
    "broadcast": ([0, 1], [0, 2, 3], "collective"),
}


@pytest.mark.parametrize("place", PLACES)
def test_every_engine_gets_the_weights_wherever_it_is(place, tmp_path):
    routes, settings = plan(*PLACES[place]), config(tmp_path)
    trainer, engines = actors(routes, settings), engine_workers(routes, settings)
    for version in (5, 6):
        exports = sync(trainer, engines, version)
        assert max(export.bytes for export in exports) == 2 * (6 + 4)
        for engine in engines:
            *_, (loaded_version, loaded), last = engine.calls
            assert engine.calls[-3] == "weights" and last == "kv_cache"
            assert loaded_version == version
            assert all(torch.equal(loaded[name], t.bfloat16()) for name, t in WEIGHTS)
    for actor in trainer:
        assert actor.calls[0] == "onload" and actor.calls[-1] == "offload"
        if actor._sender:
            actor._sender.abort("the test ends")


@pytest.mark.parametrize("how", ["", "other values"])
def test_engines_beside_the_actor_read_its_trial(how, monkeypatch, tmp_path):
    """Only those. A later sync has a stream of its own."""
    placed = plan([0, 1], [1, 2], "auto"), config(tmp_path)
    trainer, engines = actors(*placed), engine_workers(*placed)
    routes = weight_routes([0, 1], [1, 2], 1, 2, "cuda", "auto")
    if how:
        monkeypatch.setattr(
            "verlite.weights.ipc.open_buffer", lambda _: torch.zeros(1 << 16).byte()
        )
    for engine in engines:
        engine.engine.read_trial = read_trial
    addresses = [actor.open_trial(routes) for actor in trainer]
    assert [bool(address) for address in addresses] == [False, True]
    with ThreadPoolExecutor(8) as pool:
        publishing = [pool.submit(actor.publish_trial) for actor in trainer]
        reading = [pool.submit(engine.read_trial, routes, addresses) for engine in engines]
        assert [future.result(30) for future in publishing] == ["", ""]
        found = [future.result(30) for future in reading]
    reason = "the engine read other values than the actor had written"
    assert found == [reason if how else "", ""]
    trainer[1].open_trial(routes)
    assert trainer[1].offer_weights(1, None, routes.fallback).stream is None
    assert trainer[1]._publisher is None


@pytest.mark.parametrize("bucket_mb", [1, 512, 4096])
def test_ipc_wants_memory_for_the_engine_and_the_buckets(bucket_mb, monkeypatch):
    """A model of 2**30 weights in bfloat16, with layers of 2**26 and an embedding of 2**27: three
    buckets of at least the embedding's size and at most the model's, and two layers. An engine of
    two GPUs takes half of the weights, one that is awake none. 5% stay free."""
    (actor,) = actors(plan([0], [0]), config())
    actor.device = torch.device("cuda")
    actor.engine.sizes = lambda: Sizes(2**30, 2**26, 2**27)
    buffers = 3 * {1: 2**28, 512: 2**29, 4096: 2**31}[bucket_mb] + 2 * 2**27
    free, total = [0], 80 * 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2**20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2**20 - 512)
    for share, engine in ((1.0, 2**31), (0.5, 2**30), (0.0, 0)):
        spec = replace(actor.spec.publish, sync_bucket_mb=bucket_mb, engine_share=share)
        actor.spec = SimpleNamespace(**vars(config()), publish=spec)
        free[0] = buffers + engine + 4 * 2**30 - 512
        assert actor._lack_of_memory() == ""
        free[0] -= 1
        assert actor._lack_of_memory().startswith("The GPU of actor rank 0 has ")


def test_a_lack_of_memory_counts_only_where_there_is_a_fallback(monkeypatch):
    (actor,) = actors(plan([0], [0]), config())
    actor._lack_of_memory = lambda: "why"
    tried = weight_routes([0], [0], 1, 2, "cuda", "auto")
    asked = replace(tried, fallback=None)
    for routes, lack, streams in (
        (tried, "why", False),
        (asked, "", True),
        (tried.fallback, "", False),
    ):
        offer = actor.offer_weights(1, None, routes)
        assert (offer.lack, offer.stream is not None) == (lack, streams)


@pytest.mark.parametrize("place", PLACES)
def test_adapters_are_sent_alone_once_the_engines_have_the_base_model(place, tmp_path):
    """After a sync that failed in an engine, and for a new engine, the base model is sent again."""
    routes, settings = plan(*PLACES[place]), config(tmp_path)
    routes.syncs_adapters = True
    trainer, engines = actors(routes, settings), engine_workers(routes, settings)
    whole, alone = 2 * (6 + 4 + 2 + 3), 2 * (2 + 3)
    base = {name for name, _ in WEIGHTS}
    adapters = {name for name, _ in ADAPTERS}
    expected = fingerprint(WEIGHTS + ADAPTERS, torch.bfloat16)
    loads = []
    for engine in engines:

        def load(named, version, found, is_probed):
            loads.append({name for name, _ in named})
            assert found == expected
            if version == 4:
                raise RuntimeError("engine failed")

        engine.engine.load_weights = load
    found = []
    for version in range(1, 9):
        if version == 7:
            for actor in trainer:
                actor.engine_restarted()
        try:
            exports = sync(trainer, engines, version)
        except RuntimeError as error:
            assert version == 4 and "engine failed" in str(error)
            found.append(0)
        else:
            found.append(max(export.bytes for export in exports))
    assert found == [whole, alone, alone, 0, whole, alone, whole, alone]
    assert loads[0] == base | adapters and loads[-1] == adapters
    for actor in trainer:
        assert actor.calls.count("onload") == 3
        if actor._sender:
            actor._sender.abort("the test ends")


WITH_INFERENCE = {
    "one node": ([0], [1], "auto", [0, 1]),
    "inference on another node": ([0, 1], [0, 1], "auto", [2, 3]),
    "inference beside remote engines": ([0], [2, 4], "auto", [3, 5, 6]),
    "CPUs": ([0, 1], [0, 2], "auto", [1, 3], "cpu"),
    "ipc for engines": ([0, 1], [0, 1], "ipc", [1, 2]),
    "a folder": ([0, 1], [2], "files", [4]),
}


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("place", WITH_INFERENCE)
def test_one_pass_feeds_engines_and_inference(place, lora_rank, tmp_path):
    """With LoRA the engines get merged weights, and inference the adapters as they are stored."""
    routes, settings = plan(*WITH_INFERENCE[place]), config(tmp_path, lora_rank)
    trainer, engines = actors(routes, settings), engine_workers(routes, settings)
    inference = inference_workers(routes, settings)
    expected = STORED if lora_rank else WEIGHTS
    needs = [DataProto.from_dict({}, {}, {"version": version}) for version in (4, 5)]
    for worker in inference:
        with pytest.raises(WeightSyncError, match="no weight sync has reached it"):
            worker.check_version(needs[0])
    exports = sync(trainer, [*engines, *inference], 5)
    assert max(export.bytes for export in exports) == 2 * (10 + (2 + 3 if lora_rank else 0))
    for engine in engines:
        loaded = engine.calls[-2][1]
        assert loaded.keys() == dict(WEIGHTS).keys()
    for worker in inference:
        assert worker.loaded.keys() == dict(expected).keys()
        assert all(torch.equal(worker.loaded[name], t.bfloat16()) for name, t in expected)
        worker.check_version(needs[1])
        with pytest.raises(WeightSyncError, match=r"version 5\) refuses .* from version 4"):
            worker.check_version(needs[0])
    gathered = [call for call in trainer[0].calls if call[0] == "gathers for"]
    assert len(gathered) == 1 + bool(lora_rank), "one pass, and one over the adapters"
    for actor in trainer:
        if actor._sender:
            actor._sender.abort("the test ends")


def test_inference_refuses_weights_that_are_not_the_actors():
    """A value that differs is seen by the fingerprint, and two values exchanged by the probe."""
    routes, settings = plan([0], [0], inference=[1]), config()
    (actor,), (inference,) = actors(routes, settings), inference_workers(routes, settings)
    good = Probe((1, 2, 3), (-1.0, -2.0), limit=0.1)
    found = []
    inference.engine.probe = lambda limit, length: found[-1]

    def load(version, weights, own_log_probs):
        offer = replace(actor.offer_weights(version, None, actor.routes), probe=good)
        exports = [actor.publish_weights(offer)]
        found.append(replace(good, log_probs=own_log_probs))
        inference._reader = SimpleNamespace(published=lambda *_, trained: weights)
        inference.load_weights(offer, exports)
        actor.release_weights()

    load(1, WEIGHTS, (-1.0, -2.0))
    with pytest.raises(WeightSyncError, match="version 2: the weights of inference have finger"):
        load(2, [("a", torch.arange(6.0)), ("b", torch.tensor([[1.0, 1.0], [1.0, 2.0]]))], (-1, -2))
    needs = DataProto.from_dict({}, {}, {"version": 1})
    assert inference.version == 1
    with pytest.raises(WeightSyncError, match="the sync to version 2 did not complete"):
        inference.check_version(needs)
    with pytest.raises(WeightSyncError, match="A shard may be in the place of another"):
        load(2, [("a", torch.arange(5.0, -1, -1)), ("b", torch.ones(2, 2))], (-2.0, -1.0))
    load(2, WEIGHTS, (-1.0, -2.0))
    assert inference.version == 2


def test_ranks_that_only_help_to_gather_keep_nothing():
    routes = plan([0, 1], [0, 1])
    trainer = actors(routes, config())
    exports = [
        actor.publish_weights(actor.offer_weights(1, None, actor.routes)) for actor in trainer
    ]
    assert [actor.calls[1] for actor in trainer] == [("gathers for", CPU), ("gathers for", None)]
    assert [bool(export.paths) for export in exports] == [True, False]
    trainer[0].release_weights()
    assert trainer[0]._memory_files is None
    assert not any(os.path.exists(path) for path in exports[0].paths)


@pytest.mark.parametrize("frees", [True, False])
def test_an_actor_whose_reader_dies_frees_its_device_memory(frees, monkeypatch):
    """The reader's successor needs it while it is built. The first error is raised even if that
    fails, too."""
    (actor,) = actors(plan([0], [0], "ipc"), config())
    offer = actor.offer_weights(1, None, actor.routes)
    with socket.socket(socket.AF_UNIX) as reader:
        reader.connect(offer.stream)
    if not frees:
        offload = actor.engine.offload
        monkeypatch.setattr(actor.engine, "offload", lambda: (offload(), 1 / 0), raising=False)
    with pytest.raises(TransportError, match="is gone"):
        actor.publish_weights(offer)
    assert actor.calls[-1] == "offload"


def test_an_engine_reads_the_copy_of_its_own_node():
    routes = plan([0, 2], [0, 2])
    trainer, engines = actors(routes, config()), engine_workers(routes, config())
    offers = [actor.offer_weights(1, None, actor.routes) for actor in trainer]
    first, second = (actor.publish_weights(offers[0]) for actor in trainer)
    assert (first.node, second.node) == (0, 1)
    engines[1].load_weights(offers[0], [Export(0, ("/nowhere",), 20), second])
    assert [call[0] for call in engines[1].calls if isinstance(call, tuple)] == [1]
    with pytest.raises(ValueError):
        engines[1].load_weights(offers[0], [first])


def test_engines_sleep_until_the_first_sync(tmp_path, monkeypatch):
    """So that the check of the first step sees weights that were loaded after a sleep."""
    calls = []
    engine = SimpleNamespace(
        sleep=lambda: calls.append("sleep"),
        wake=calls.append,
        load_weights=lambda named, version, found, is_probed: calls.append(version),
    )
    monkeypatch.setattr(rollouts, "build_engine", lambda *args: engine)
    routes, settings = plan([0], [0]), config()
    spec = SimpleNamespace(
        model=settings.engine.model,
        engine="hf",
        generation=GenerationSpec(),
        seed=0,
        max_model_len=8,
        run_dir=settings.run_dir,
        engines=1,
        scorer=ScorerSpec(),
        env=None,
        debug=False,
        folder=None,
    )
    rollout = Rollout.__new__(Rollout)
    rollout._spec = SimpleNamespace(devices_on_node=1, devices=1, device_kind="cpu")
    rollout.rank = 0
    rollout.__init__(spec)
    (actor,) = actors(routes, settings)
    offer = actor.offer_weights(1, None, actor.routes)
    rollout.load_weights(offer, [actor.publish_weights(offer)])
    actor.release_weights()
    rollout.scorer.close()
    assert calls == ["sleep", "weights", 1, "kv_cache"]


class Engine:
    """An engine that responds with the prompt's first id, twice. It fails on prompt [0]."""

    def __init__(self):
        self.slept = 0
        self.tokenizer = tiny_tokenizer()
        self.samplings = []

    def load(self):
        return Load(0.0)

    async def generate(self, prompt_ids, sampling, so_far=None, name=None):
        self.samplings.append(sampling)
        if prompt_ids == [0]:
            raise ValueError("refused")
        return Completion([prompt_ids[0]] * 2, [-0.5, -1.5], "stop", [(3, 2)])

    def sleep(self):
        self.slept += 1


FAILED = RewardResult(None, error="Timeout", traceback="it hung")


class Scores:
    """A scorer that returns these results in order, and records its inputs."""

    needs_prompts = False

    def __init__(self, *results):
        self.results = iter(results)
        self.scored = []

    def score(self, items, limit_s=None):
        self.scored += items
        return [next(self.results, RewardResult(1.0)) for _ in items]

    def stream(self):
        return Stream(self, timeout_s=60)


def requests(prompts, **columns):
    defaults = {
        "prompt_ids": prompts,
        "sampling": [Sampling()] * len(prompts),
        "data_source": [f"s{i}" for i in range(len(prompts))],
        "ground_truth": list(range(len(prompts))),
        "extra_info": [{"row": i} for i in range(len(prompts))],
    }
    return DataProto.from_dict(
        {}, {name: object_array(values) for name, values in (defaults | columns).items()}
    )


@pytest.mark.parametrize("sleep_after", [True, False])
def test_a_failed_sample_or_reward_affects_its_row_only(sleep_after):
    rollout = Rollout.__new__(Rollout)
    rollout.engine, rollout.env_factory = Engine(), EnvFactory()
    rollout.spec = SimpleNamespace(agent=None, max_turns=0)
    rollout.scorer = Scores(RewardResult(0.5, parts={"acc": 1.0}), FAILED)
    answers = rollout.generate(requests([[7], [0], [9]]), sleep_after)
    columns = answers.non_tensor_batch
    assert [ids.tolist() for ids in columns["response_ids"]] == [[7, 7], [], [9, 9]]
    assert [mask.tolist() for mask in columns["response_mask"]] == [[1, 1], [], [0, 0]]
    assert [log_probs.tolist() for log_probs in columns["rollout_log_probs"]] == [
        [-0.5, -1.5],
        [],
        [-0.5, -1.5],
    ]
    assert [ids.tolist() for ids in columns["prompt_ids"]] == [[7], [0], [9]]
    assert columns["status"].tolist() == ["done", "error", "done"]
    assert columns["error"].tolist() == [None, "ValueError: refused", "reward: Timeout"]
    assert answers.batch["valid"].tolist() == [True, False, False] and answers.batch[
        "raw_scores"
    ].tolist() == [0.5, 0, 0]
    assert columns["reward_parts"].tolist() == [{"acc": 1.0}, {}, {}] and columns[
        "reward_traceback"
    ].tolist() == [None, None, "it hung"]
    lengths = {
        name: answers.batch[name].tolist()
        for name in ("prompt_length", "response_length", "sampled_tokens")
    }
    assert lengths == {
        "prompt_length": [1, 1, 1],
        "response_length": [2, 0, 2],
        "sampled_tokens": [2, 0, 0],
    }
    decode = rollout.engine.tokenizer.decode
    scored = rollout.scorer.scored
    assert columns["text"].tolist() == [decode([7, 7]), "", decode([9, 9])]
    assert [
        (item.data_source, item.solution_str, item.ground_truth, item.extra_info) for item in scored
    ] == [
        ("s0", decode([7, 7]), 0, {"row": 0, "num_turns": 2}),
        ("s2", decode([9, 9]), 2, {"row": 2, "num_turns": 2}),
    ]
    assert answers.batch["oldest_version"].tolist() == [3, -1, 3]
    assert columns["version_spans"].tolist() == [[(3, 2)], [], [(3, 2)]]
    assert answers.batch["weight_version"].tolist() == [3, -1, 3] and answers.batch[
        "turns"
    ].tolist() == [1, 0, 1]
    assert rollout.engine.slept == sleep_after
    assert "segments" not in columns and "gen_seconds" not in answers.batch.keys()


@pytest.mark.parametrize("needed", [True, False])
def test_prompt_and_sequence_with_special_tokens_if_they_are_needed(needed):
    rollout = Rollout.__new__(Rollout)
    rollout.engine, rollout.env_factory = Engine(), EnvFactory()
    rollout.spec = SimpleNamespace(agent=None, max_turns=0)
    rollout.scorer = Scores()
    rollout.scorer.needs_prompts = needed
    end = rollout.engine.tokenizer.eos_token_id
    rollout.generate(requests([[end, 7]]), False)
    (item,) = rollout.scorer.scored
    expected = [[end, 7], [end, 7, end, end]] if needed else [[], []]
    decode = rollout.engine.tokenizer.decode
    assert [item.prompt, item.sequence] == [decode(ids) for ids in expected]
    assert decode([end]) and item.solution_str == ""


class SlowScores(Scores):
    def score(self, items, limit_s=None):
        time.sleep(0.3)
        return super().score(items, limit_s)


def test_reward_seconds_is_the_wait_for_the_last_rewards():
    rollout = Rollout.__new__(Rollout)
    rollout.engine, rollout.env_factory = Engine(), EnvFactory()
    rollout.spec, rollout.scorer = SimpleNamespace(agent=None, max_turns=0), SlowScores()
    waited = rollout.generate(requests([[7]]), False).batch["reward_seconds"].tolist()
    assert len(waited) == 1 and 0.2 < waited[0] < 10


class Echoes(EnvFactory):
    """Environments that return the secret of their row. It counts how often it is opened."""

    def __init__(self):
        self.created = []
        self.open = 0
        self.times_opened = 0

    def env(self, extra_info):
        self.created.append(extra_info)
        return Echo(extra_info["secret"])

    async def __aenter__(self):
        self.open += 1
        self.times_opened += 1
        return self

    async def __aexit__(self, *error):
        self.open -= 1


class Echo:
    """An environment whose observation is its secret."""

    stop = ("!",)

    def __init__(self, secret):
        self.secret = secret

    async def step(self, text, last):
        if self.secret == "none":
            raise ToolError("no secret")
        return Step(self.secret, valid=self.secret != "odd", info={"secret": self.secret})


def test_each_multi_turn_sample_has_the_environment_of_its_row():
    """Sequences have at most 20 tokens, 3 of them the prompt. Observations have at most 4."""
    rollout = Rollout.__new__(Rollout)
    rollout.engine, rollout.env_factory = Engine(), Echoes()
    rollout.spec = SimpleNamespace(agent=None, max_turns=2, longest_sequence=20, max_obs_length=4)
    rollout.scorer = Scores()
    rollout.encode = encode_text(rollout.engine.tokenizer)
    secrets = ["ab", "odd", "longer", "none"]
    batch = requests(
        [[7, 8, 9]] * 4,
        sampling=[Sampling(max_tokens=5, seed=1)] * 4,
        extra_info=[{"secret": secret} for secret in secrets],
    )
    answers = rollout.generate(batch, False)
    t, columns = answers.batch, answers.non_tensor_batch
    assert [info["secret"] for info in rollout.env_factory.created] == secrets
    assert rollout.env_factory.open == 0
    assert rollout.env_factory.times_opened == 1, "all samples share one open factory"
    model_ids = [7, 7]
    encode = rollout.engine.tokenizer.encode
    assert columns["response_ids"][0].tolist() == [
        *model_ids,
        *encode("ab"),
        *model_ids,
        *encode("ab"),
        *model_ids,
    ]
    assert columns["response_mask"][0].tolist() == [1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    assert columns["response_mask"][3].tolist() == [0, 0] and columns["status"].tolist() == [
        "max_turns"
    ] * 3 + ["error"]
    assert columns["segments"][2] == [
        ("model", 2),
        ("tool", 4),
        ("model", 2),
        ("tool", 4),
        ("model", 2),
    ]
    assert columns["error"][3] == "ToolError: no secret"
    assert t["turns"].tolist() == [3, 3, 3, 1] and t["invalid_turns"].tolist() == [0, 3, 0, 0]
    assert t["num_turns"].tolist() == [6, 6, 6, 2], "with the prompt and the answers of the tool"
    assert t["truncated_observations"].tolist() == [0, 0, 2, 0]
    assert [len(infos) for infos in columns["turn_infos"]] == [3, 3, 3, 0] and columns[
        "turn_infos"
    ][1][0] == {"secret": "odd"}
    assert all(sampling.stop == ("!",) for sampling in rollout.engine.samplings)
    assert min(sampling.max_tokens for sampling in rollout.engine.samplings) == 5
    decode = rollout.engine.tokenizer.decode
    scored = rollout.scorer.scored
    assert columns["transcript"][0] == [("model", decode(model_ids)), ("tool", "ab")] * 2 + [
        ("model", decode(model_ids))
    ]
    assert columns["transcript"][3] == [("model", decode(model_ids))] and columns[
        "text"
    ].tolist() == [decode(model_ids * 3)] * 3 + [""]
    assert [item.solution_str for item in scored] == [decode(model_ids * 3)] * 3, (
        "the scorer gets the model's text without tool text, and no failed sample"
    )
    trajectory = {
        "segments": columns["transcript"][0],
        "status": "max_turns",
        "turns": 3,
        "turn_scores": [0.0, 0.0, 0.0],
    }
    info = scored[0].extra_info
    assert info == {"secret": "ab", "trajectory": trajectory, "num_turns": 6}, (
        "the prompt, 3 turns of the model and 2 answers of the tool"
    )
    assert batch.non_tensor_batch["extra_info"][0] == {"secret": "ab"}, (
        "the column of the request is not modified"
    )
    rollout.spec.longest_sequence = 12  # 9 response tokens fit; the last turn may have 1
    rollout.engine.samplings.clear()
    rollout.generate(batch[:1], False)
    assert [sampling.max_tokens for sampling in rollout.engine.samplings] == [5, 5, 1]
