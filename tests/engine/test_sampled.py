"""Consistency of rollout engine and trainer: log-probs, trained tokens, and synced weights."""

import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.engine import programs
from tests.engine.batches import engine as train_engine
from tests.engine.batches import ragged_batch
from tests.models import tiny_model
from tests.rollout.oracle import ask, float64_model, largest_gap, naive_greedy, naive_log_probs
from verlite.data.dataset import PromptRow
from verlite.engine.micro import MicroBatching
from verlite.envs.factory import EnvFactory
from verlite.protocol.data import DataProto
from verlite.protocol.ragged import padded
from verlite.rewards.result import RewardResult
from verlite.rewards.scorer import Stream
from verlite.rollout.batched import BatchedEngine, build_engine
from verlite.rollout.types import Sampling
from verlite.spec.roles import GenerationSpec, ModelSpec
from verlite.trainer.batch import requests
from verlite.workers.rollout import RolloutWorker

pytestmark = pytest.mark.process

EOS = 1


def rollout_engine(path: str, pretrained: bool = True) -> BatchedEngine:
    return build_engine(
        "hf",
        ModelSpec(path=path),
        GenerationSpec(),
        64,
        torch.device("cpu"),
        0,
        pretrained=pretrained,
    )


def rollout_worker(path: str, pretrained: bool = True) -> RolloutWorker:
    """A worker without Ray, whose rewards are all 0."""
    worker = RolloutWorker.__new__(RolloutWorker)
    worker.spec = SimpleNamespace(max_turns=0, agent=None)
    worker.env_factory = EnvFactory()
    worker.engine = rollout_engine(path, pretrained)
    zeros = SimpleNamespace(score=lambda items, limit_s: [RewardResult(0.0)] * len(items))
    worker.scorer = SimpleNamespace(needs_prompts=False, stream=lambda: Stream(zeros, timeout_s=60))
    return worker


def answered(worker: RolloutWorker, asked: DataProto) -> DataProto:
    """Return the batch that a run trains on."""
    return padded(
        asked.pop(non_tensor_batch_keys=["prompt_ids"])[1].union(
            worker.generate(asked, sleep_after=False)
        )
    )


def sampled(path: str, sampling: Sampling, longest: int) -> DataProto:
    """Return a training batch: 48 prompts of 1 to 12 tokens, responses of 1 to `longest` tokens."""
    rng = random.Random(0)
    prompts = [[rng.randrange(4, 128) for _ in range(rng.randrange(1, 13))] for _ in range(48)]
    samplings = [
        dataclasses.replace(sampling, seed=i, max_tokens=1 + i % longest) for i in range(48)
    ]
    asked = requests(
        [PromptRow(i, ids, [], "s", "1") for i, ids in enumerate(prompts)],
        [f"u{i}" for i in range(48)],
        samplings,
    )
    worker = rollout_worker(path)
    try:
        return answered(worker, asked)
    finally:
        worker.engine.close()


@pytest.fixture(params=["qwen2", "gpt2"])
def path(request: pytest.FixtureRequest, tiny_qwen2: str, tiny_gpt2: str) -> str:
    """Folder of a model with rotary positions, and one with learned positions."""
    return {"qwen2": tiny_qwen2, "gpt2": tiny_gpt2}[request.param]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_trainer_log_probs_equal_the_engines(path: str, temperature: float) -> None:
    batch = sampled(path, Sampling(temperature), longest=16)
    mask = batch.batch["response_mask"].bool()
    for packed, micro in ((True, MicroBatching(max_tokens=60)), (False, MicroBatching(size=5))):
        again = train_engine(path, use_remove_padding=packed).forward(batch, micro, temperature)[
            "log_probs"
        ]
        # Two float32 forward passes through two layers: a few times eps of log-probs up to 10.
        torch.testing.assert_close(
            again[mask], batch.batch["rollout_log_probs"][mask], atol=1e-5, rtol=0
        )


def test_response_is_trained_exactly_to_its_end(tmp_path) -> None:
    """The EOS is trained, and padding is not. A truncated response is trained completely."""
    path = tiny_model(tmp_path, "qwen2", initializer_range=0.05)
    batch = sampled(path, Sampling(1.3), longest=40)
    t = batch.batch
    model = float64_model(path)
    log_probs = train_engine(path).forward(batch, MicroBatching(size=7), 1.3)["log_probs"]
    ended = 0
    for i, sampling in enumerate(batch.non_tensor_batch["sampling"]):
        done = batch.non_tensor_batch["status"][i] == "done"
        length = int(t["response_mask"][i].sum())
        ids = t["responses"][i, :length].tolist()
        assert (
            (ids[-1] == EOS and length <= sampling.max_tokens)
            if done
            else (EOS not in ids and length == sampling.max_tokens)
        )
        assert EOS not in ids[:-1]
        width = t["responses"].shape[1]
        assert t["response_mask"][i].tolist() == [1] * length + [0] * (width - length)
        assert t["attention_mask"][i, -width:].tolist() == t["response_mask"][i].tolist()
        assert t["responses"][i, length:].tolist() == [0] * (width - length)
        prompt = t["prompts"][i, -t["prompt_length"][i] :].tolist()
        np.testing.assert_allclose(
            log_probs[i, :length], naive_log_probs(model, prompt, ids, sampling), atol=1e-5
        )
        assert (log_probs[i, length:] == 0).all()
        ended += done
    assert 4 < ended < 44, "the test has no power unless answers end in both ways"


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
def test_engine_samples_with_the_trained_weights(
    tiny_qwen2: str, tiny_llama: str, tmp_path, arch: str
) -> None:
    """Two updates with a sync after each. Llama's embeddings are tied.

    Fingerprints agree and change, and greedy responses equal those of the saved model.
    """
    path = {"qwen2": tiny_qwen2, "llama": tiny_llama}[arch]
    trainer = train_engine(path, train=True, lr=1e-2)
    engine = rollout_engine(path, pretrained=False)
    prompts = [[5, 6, 7], [40]]
    greedy = Sampling(0.0, max_tokens=12, ignore_eos=True)
    seen = [trainer.fingerprint()]
    answers = []
    try:
        for version in (1, 2):
            trainer.update(
                ragged_batch(), MicroBatching(size=3), 1.0, programs.weighted_loss("token-mean")
            )
            engine.load_weights(trainer.export(), version, trainer.fingerprint())
            seen.append(engine.fingerprint())
            assert seen[-1] == trainer.fingerprint()
            trainer.save_pretrained(tmp_path / str(version))
            model = float64_model(str(tmp_path / str(version)))
            answers.append(ask(engine, prompts, greedy))
            assert [a.ids for a in answers[-1]] == [
                naive_greedy(model, prompt, 12) for prompt in prompts
            ]
            assert largest_gap(model, prompts, answers[-1], greedy) < 1e-5
            assert {v for a in answers[-1] for v, _ in a.weight_versions} == {version}
    finally:
        engine.close()
    assert len(set(seen)) == 3 and answers[0][0].log_probs != answers[1][0].log_probs
