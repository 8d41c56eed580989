"""Weight transfer from actor to rollout workers, and generated samples, with fake engines."""

import time
from types import SimpleNamespace

import pytest
import torch

from tests.models import tiny_tokenizer
from verlite.config.schema import Config, DataConfig
from verlite.envs.factory import EnvFactory
from verlite.envs.step import Step, ToolError, encode_text
from verlite.protocol.data import DataProto, object_array
from verlite.rewards.result import RewardResult
from verlite.rollout.types import Completion, Sampling
from verlite.workers import rollout as rollouts
from verlite.workers.actor import ActorWorker, Export
from verlite.workers.rollout import RolloutWorker

WEIGHTS = [("a", torch.arange(6.0)), ("b", torch.ones(2, 2))]


class OnNode:
    node_id = "here"


class Actor(OnNode, ActorWorker):
    """An actor worker without Ray."""


class Rollout(OnNode, RolloutWorker):
    """A rollout worker without Ray."""


def exporter(local_rank: int) -> tuple[Actor, list]:
    """Return one rank of an actor, and the list of calls to its engine."""
    calls = []
    actor = Actor.__new__(Actor)
    actor.local_rank = local_rank
    actor._exported = None
    actor.engine = SimpleNamespace(
        onload=lambda: calls.append("onload"),
        offload=lambda: calls.append("offload"),
        export=lambda dtype, snapshot: (
            (name, calls.append(name) or tensor.to(dtype)) for name, tensor in WEIGHTS
        ),
        fingerprint=lambda dtype: ("fingerprint in", dtype),
    )
    actor.config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(sync_bucket_mb=1))
    )
    actor.plan = SimpleNamespace(rollout_dtype="bfloat16")
    return actor, calls


def test_one_rank_per_node_writes_weights_in_the_engines_dtype():
    first, first_calls = exporter(0)
    second, second_calls = exporter(1)
    exports = [first.export_weights(), second.export_weights()]
    assert second_calls == first_calls == ["onload", "a", "b", "offload"], (
        "every rank takes part in gathering, and offloads its weights afterwards"
    )
    assert [bool(e.paths) for e in exports] == [True, False] and exports[1].bytes == 0 < exports[
        0
    ].bytes
    assert all(e.fingerprint == ("fingerprint in", torch.bfloat16) for e in exports)

    calls = []
    rollout = Rollout.__new__(Rollout)
    rollout.engine = SimpleNamespace(
        wake=calls.append,
        load_weights=lambda named, version, found: calls.append((dict(named), version, found)),
    )
    elsewhere = Export("there", ["/nowhere"], 1, 0)
    rollout.load_weights([elsewhere, *exports[::-1]], 5)
    ((named, version, found),) = (call for call in calls if isinstance(call, tuple))
    assert calls == ["weights", (named, version, found), "kv_cache"], (
        "the KV cache is allocated after the weights are loaded"
    )
    assert (version, found) == (5, ("fingerprint in", torch.bfloat16))
    assert all(torch.equal(named[name], tensor.bfloat16()) for name, tensor in WEIGHTS)
    with pytest.raises(RuntimeError, match="no actor rank on node here"):
        rollout.load_weights([elsewhere, exports[1]], 6)

    first.release_export()
    first.release_export()
    assert first._exported is None


def test_engines_sleep_until_the_first_sync(tmp_path, monkeypatch):
    """So that the check of the first step sees weights that were loaded after a sleep."""
    calls = []
    engine = SimpleNamespace(
        sleep=lambda: calls.append("sleep"),
        wake=calls.append,
        load_weights=lambda named, version, found: calls.append(version),
    )
    monkeypatch.setattr(rollouts, "build_engine", lambda *args: engine)
    config = Config(data=DataConfig(train_files="x"))
    plan = SimpleNamespace(max_turns=0, rollout_name="hf", max_model_len=8)
    rollout = Rollout.__new__(Rollout)
    rollout._spec = SimpleNamespace(devices_on_node=1, devices=1, device_kind="cpu")
    rollout.__init__(config, plan)
    exporting, _ = exporter(0)
    rollout.load_weights([exporting.export_weights()], 1)
    exporting.release_export()
    rollout.scorer.close()
    assert calls == ["sleep", "weights", 1, "kv_cache"]


class Engine:
    """An engine that responds with the prompt's first id, twice. It fails on prompt [0]."""

    def __init__(self):
        self.slept = 0
        self.tokenizer = tiny_tokenizer()
        self.samplings = []

    async def generate(self, prompt_ids, sampling):
        self.samplings.append(sampling)
        if prompt_ids == [0]:
            raise ValueError("refused")
        return Completion([prompt_ids[0]] * 2, [-0.5, -1.5], "stop", 3)

    def sleep(self):
        self.slept += 1


FAILED = RewardResult(None, error="Timeout", traceback="it hung")


class Scores:
    """A scorer that returns these results in order, and records its inputs."""

    def __init__(self, *results):
        self.results = iter(results)
        self.scored = []

    def score(self, items, limit_s=None):
        self.scored += items
        return [next(self.results, RewardResult(1.0)) for _ in items]


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
    rollout.engine, rollout.env_factory, rollout.plan = (
        Engine(),
        EnvFactory(),
        SimpleNamespace(max_turns=0),
    )
    rollout.config, rollout.scorer = (
        Config(data=DataConfig(train_files="x")),
        Scores(RewardResult(0.5, parts={"acc": 1.0}), FAILED),
    )
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
    ] == [("s0", decode([7, 7]), 0, {"row": 0}), ("s2", decode([9, 9]), 2, {"row": 2})]
    assert answers.batch["weight_version"].tolist() == [3, -1, 3] and answers.batch[
        "turns"
    ].tolist() == [1, 0, 1]
    assert rollout.engine.slept == sleep_after
    assert "segments" not in columns and "gen_seconds" not in answers.batch.keys()


class SlowScores(Scores):
    def score(self, items, limit_s=None):
        time.sleep(0.3)
        return super().score(items, limit_s)


def test_reward_seconds_is_the_wait_for_the_last_rewards():
    rollout = Rollout.__new__(Rollout)
    rollout.engine, rollout.env_factory, rollout.plan = (
        Engine(),
        EnvFactory(),
        SimpleNamespace(max_turns=0),
    )
    rollout.config, rollout.scorer = Config(data=DataConfig(train_files="x")), SlowScores()
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
    rollout.plan = SimpleNamespace(max_turns=2, longest_sequence=20)
    rollout.config, rollout.scorer = (
        Config(data=DataConfig(train_files="x", max_obs_length=4)),
        Scores(),
    )
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
    trajectory = {"segments": columns["transcript"][0], "status": "max_turns", "turns": 3}
    assert scored[0].extra_info == {"secret": "ab", "trajectory": trajectory}
    assert batch.non_tensor_batch["extra_info"][0] == {"secret": "ab"}, (
        "the column of the request is not modified"
    )
    rollout.plan.longest_sequence = 12  # 9 response tokens fit; the last turn may have 1
    rollout.engine.samplings.clear()
    rollout.generate(batch[:1], False)
    assert [sampling.max_tokens for sampling in rollout.engine.samplings] == [5, 5, 1]
