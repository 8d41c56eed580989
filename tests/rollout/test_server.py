"""Generation by a stock vLLM server. The module shares one server, which takes a minute to start,
and one engine, as a run has."""

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path

import psutil
import pytest
import torch

from tests.rollout.oracle import (
    ask,
    float64_model,
    largest_gap,
    model_with_two_ends,
    moved,
    naive_greedy,
    weights_of,
)
from tests.rollout.test_trajectory import Counter
from tests.rollout.test_vllm import some_prompts
from tests.rollout.vllm_servers import VLLMProcess
from tests.trainer.runs import Launch, write_reward, write_sums
from verlite.rollout.batched import build_engine
from verlite.rollout.trajectory import Request, run_all
from verlite.rollout.types import EngineError, Sampling, Trajectory, WeightSyncError
from verlite.spec.roles import GenerationSpec, ModelSpec
from verlite.weights.buckets import BucketFiles
from verlite.weights.files import FolderWriter, read_folder
from verlite.weights.fingerprint import fingerprint
from verlite.weights.probe import Probe, probe_ids

pytest.importorskip("vllm", reason="vLLM is an optional dependency")

pytestmark = pytest.mark.process

TOKEN = "a-token-of-the-test"
LONG = Sampling(max_tokens=20, ignore_eos=True)
PROMPT = [33, 44, 55]
SETTINGS = dict(enforce_eager=True, kv_cache_gb=0.25, max_num_seqs=32)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return model_with_two_ends(tmp_path_factory.mktemp("server") / "qwen2", PROMPT)


@pytest.fixture(scope="module")
def model(path):
    return float64_model(path)


@pytest.fixture(scope="module")
def server(path, tmp_path_factory):
    options = "--tensor_parallel_size 1 --max_model_len 200 --max_num_seqs 32 --kv_cache_gb 0.25"
    server = VLLMProcess(
        tmp_path_factory.mktemp("process"),
        "--model_path",
        path,
        *options.split(),
        "--enforce_eager",
        token=TOKEN,
    )
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def new_engine(path, server, **change):
    rollout = GenerationSpec(
        servers=[server.url],
        server_token_env="TEST_SERVER_TOKEN",
        server_wait_s=5,
        **SETTINGS,
        **change,
    )
    return build_engine("server", ModelSpec(path=path), rollout, 160, torch.device("cpu"), seed=1)


@pytest.fixture(scope="module")
def engine(path, server):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_SERVER_TOKEN", TOKEN)
        engine = new_engine(path, server)
        with pytest.raises(EngineError, match="no weights yet"):
            ask(engine, [[5]], LONG)
        yield engine
        engine.close()


@pytest.fixture
def synced(engine, model, tmp_path):
    """The shared engine, with the model's weights loaded again."""
    load(engine, model, tmp_path)
    return engine


def files_of(model, folder: Path) -> tuple[BucketFiles, int]:
    """Write the model's weights as the trainer's transport `files` does."""
    value = fingerprint(weights_of(model))
    writer = FolderWriter(folder, 1, value)
    weights = weights_of(model)
    for bucket in (weights[:5], weights[5:]):
        writer.add(bucket)
    writer.finish()
    return read_folder(folder, 1, value), value


def load(engine, model, folder: Path) -> None:
    files, value = files_of(model, folder)
    engine.load_weights(files, engine.version + 1, value)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.7), Sampling(0.0), Sampling(0.8, top_p=0.7), Sampling(1.2, top_k=5)],
    ids=str,
)
def test_log_probs_equal_naive(synced, model, sampling):
    prompts = some_prompts(12)
    sampling = dataclasses.replace(sampling, max_tokens=20, ignore_eos=True)
    answers = ask(synced, prompts, *(dataclasses.replace(sampling, seed=i) for i in range(12)))
    assert largest_gap(model, prompts, answers, sampling) < 1e-5
    assert {v for a in answers for v, _ in a.weight_versions} == {synced.version}


def test_samples_equal_those_of_the_engine_in_this_process(synced, model, path):
    """Equal seeds give equal tokens, and equal log-probs up to the order of sums. So do turns with
    an environment."""
    prompts = some_prompts(24, seed=2)
    samplings = [Sampling(0.9, 0.95, 50, 20, seed=i) for i in range(24)]
    answers = ask(synced, prompts, *samplings)
    turns = agents(synced, prompts)
    local = build_engine(
        "vllm", ModelSpec(path=path), GenerationSpec(**SETTINGS), 160, torch.device("cpu"), seed=1
    )
    try:
        local.load_weights(iter(weights_of(model)), 1, fingerprint(weights_of(model)))
        expected = ask(local, prompts, *samplings)
        expected_turns = agents(local, prompts)
    finally:
        local.close()
    assert [answer.ids for answer in answers] == [answer.ids for answer in expected]
    assert (
        max(
            abs(a - b)
            for one, other in zip(answers, expected, strict=True)
            for a, b in zip(one.log_probs, other.log_probs, strict=True)
        )
        < 1e-6
    )
    assert [one.finish_reason for one in answers] == [one.finish_reason for one in expected]
    assert {one.turns for one in turns} == {1, 2, 3}
    assert [outcome(one) for one in turns] == [outcome(one) for one in expected_turns]
    assert largest_gap_of_turns(turns, expected_turns) < 1e-6


def agents(engine, prompts) -> list[Trajectory]:
    """Sample trajectories of up to three turns. A turn ends at a digit, or with an EOS id."""
    stop = tuple("0123456789")
    requests = [
        Request(prompt, Sampling(seed=i, max_tokens=16), Counter(stop), 2, 60)
        for i, prompt in enumerate(prompts)
    ]
    return asyncio.run(run_all(engine, requests))


def outcome(one: Trajectory) -> tuple:
    return one.response_ids, one.response_mask, one.status, one.error, one.infos


def largest_gap_of_turns(some: list[Trajectory], others: list[Trajectory]) -> float:
    return max(
        abs(a - b)
        for one, other in zip(some, others, strict=True)
        for a, b in zip(one.log_probs, other.log_probs, strict=True)
    )


def test_finish_reasons(synced, model):
    """Every EOS id stops and is kept, stop strings too. Of generation_config.json only the EOS ids
    are used. The server allows longer sequences than the run."""
    expected = naive_greedy(model, PROMPT, 20)
    eos = json.loads((Path(model.name_or_path) / "generation_config.json").read_text())
    end = expected.index(eos["eos_token_id"][1]) + 1
    (answer,) = ask(synced, [PROMPT], Sampling(0.0, max_tokens=20))
    assert answer.ids == expected[:end] and answer.finish_reason == "stop"
    text = synced.tokenizer.decode(expected)
    (answer,) = ask(
        synced, [PROMPT], Sampling(0.0, max_tokens=20, ignore_eos=True, stop=(text[6:9],))
    )
    assert synced.tokenizer.decode(answer.ids) == text[: text.index(text[6:9]) + 3]
    (answer,) = ask(synced, [[7] * 155], Sampling(max_tokens=20, ignore_eos=True))
    assert len(answer.ids) == 5 and answer.finish_reason == "length"
    with pytest.raises(ValueError, match="160 tokens"):
        ask(synced, [[7] * 160], LONG)


def test_new_weights_are_used_and_no_cached_prefix_survives(synced, model, tmp_path):
    prompt = [some_prompts(1, longest=2)[0] * 140]
    before = ask(synced, prompt, Sampling(0.0, max_tokens=8, ignore_eos=True))
    assert largest_gap(model, prompt, before, Sampling(0.0)) < 1e-5
    other = moved(model, 0.2)
    load(synced, other, tmp_path / "other")
    after = ask(synced, prompt, Sampling(0.0, max_tokens=8, ignore_eos=True))
    assert largest_gap(other, prompt, after, Sampling(0.0)) < 1e-5
    (old, _), (new, _) = before[0].weight_versions + after[0].weight_versions
    assert new == old + 1


def test_other_weights_than_the_trainers_are_refused(synced, model, tmp_path):
    files, value = files_of(moved(model, 0.1), tmp_path / "moved")
    with pytest.raises(WeightSyncError, match="the trainer's is"):
        synced.load_weights(files, synced.version + 1, value + 1)
    with pytest.raises(EngineError, match="refuses to generate"):
        ask(synced, [PROMPT], LONG)


def test_a_failed_load_is_told_and_the_next_one_works(synced, model, tmp_path):
    """Also if a trainer died in the middle of an update."""
    files, value = files_of(model, tmp_path / "one")
    Path(files.paths[1]).write_bytes(b"no weights")
    with pytest.raises(WeightSyncError, match="no generation server loaded the weights"):
        synced.load_weights(files, synced.version + 1, value)
    load(synced, model, tmp_path / "two")
    assert len(ask(synced, [PROMPT], LONG)[0].ids) == 20


def test_an_update_that_a_dead_trainer_began_is_ended(synced, server, model, tmp_path):
    assert server.call("POST", "/pause?mode=abort").status_code == 200
    assert server.call("POST", "/start_weight_update").status_code == 200
    load(synced, model, tmp_path / "next")
    assert len(ask(synced, [PROMPT], LONG)[0].ids) == 20


@pytest.fixture(scope="module")
def remote(path, server, engine):
    """An engine that sends weights over the network."""
    remote = new_engine(path, server, weight_transport="collective", sync_bucket_mb=1)
    yield remote
    remote.close()


def test_weights_by_the_network(remote, server, model, tmp_path):
    """Twice, with other weights; the files are gone when a restarted server needs them."""
    load(remote, moved(model, 0.2), tmp_path / "first")
    load(remote, model, tmp_path / "second")
    shutil.rmtree(tmp_path / "second")
    prompts = some_prompts(4)
    answers = ask(remote, prompts, LONG)
    assert largest_gap(model, prompts, answers, LONG) < 1e-5
    assert server.call("POST", "/pause?mode=abort").status_code == 200
    assert server.call("POST", "/finish_weight_update", {"weight_version": "x"}).status_code == 500
    assert server.call("POST", "/start_weight_update").status_code == 200
    assert server.call("POST", "/finish_weight_update", {"weight_version": "x"}).status_code == 200
    answers = ask(remote, prompts, LONG)  # the server says that it has other weights
    assert largest_gap(model, prompts, answers, LONG) < 1e-5


def test_the_probe_compares_log_probs(synced, model):
    ids = probe_ids(130)
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    exact = tuple(rows.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1).tolist())
    assert synced.check_log_probs(Probe(tuple(ids), exact, 0.005)).relative < 1e-4
    wrong = Probe(tuple(ids), exact[::-1], 0.005)
    with pytest.raises(WeightSyncError, match="computes other log-probs"):
        synced.check_log_probs(wrong)


def test_the_gate(server):
    """Health is JSON and open; everything else needs the token, and most of vLLM's endpoints for
    developers do not exist."""
    health = server.call("GET", "/health", headers={})
    assert health.status_code == 200 and health.json() == {"status": "healthy"}
    assert server.call("GET", "/weight_info", headers={}).status_code == 401
    wrong = {"Authorization": f"Bearer {TOKEN[:-1]}"}
    assert server.call("POST", "/pause", headers=wrong).status_code == 401
    for path in ("/server_info", "/docs", "/openapi.json", "/is_sleeping"):
        assert server.call("GET", path).status_code == 404, path
    for path in ("/sleep", "/weight_checker", "/update_weight_version", "/abort_requests"):
        assert server.call("POST", path, {}).status_code == 404, path
    other = server.call("POST", "/collective_rpc", {"method": "load_model"})
    assert other.status_code == 403
    other = server.call("POST", "/collective_rpc", {"method": "verlite_settings", "args": ["x"]})
    assert other.status_code == 403
    settings = server.call("POST", "/collective_rpc", {"method": "verlite_settings"})
    assert settings.json()["results"][0]["max_model_len"] == 200


def test_settings_that_do_not_fit_are_refused(server, engine, path):
    with pytest.raises(ValueError, match="--max-model-len is 200, and sequences have up to 500"):
        build_engine(
            "server",
            ModelSpec(path=path),
            GenerationSpec(servers=[server.url], server_token_env="TEST_SERVER_TOKEN"),
            500,
            torch.device("cpu"),
            seed=1,
        )
    with pytest.raises(ValueError, match="--dtype is float32, and .*rollout.dtype bfloat16"):
        new_engine(path, server, dtype="bfloat16")


def test_a_run_trains_with_the_server(server, engine, path, tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_SERVER_TOKEN", TOKEN)
    reward = write_reward(tmp_path / "reward.py", "return sum(c.isdigit() for c in solution_str)")
    options = [
        f"data.train_files={write_sums(tmp_path / 'train.parquet', 16)}",
        f"custom_reward_function.path={reward}",
        f"actor_rollout_ref.model.path={path}",
        "actor_rollout_ref.rollout.name=server",
        f"actor_rollout_ref.rollout.servers=[{server.url}]",
        "actor_rollout_ref.rollout.server_token_env=TEST_SERVER_TOKEN",
        "actor_rollout_ref.rollout.weight_probe=always",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "data.train_batch_size=4",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.total_training_steps=2",
    ]
    run = Launch(tmp_path / "run", options, tmp_path / "run.log")
    assert run.wait() == 0, run.text()
    lines = run.metrics()
    assert [line["step"] for line in lines][-1] == 2
    assert max(line["training/log_prob_gap_max"] for line in lines if line["step"]) < 1e-4
    assert "1 vLLM server with devices of their own" in run.text()
    assert "actor on 0" in run.text() and "actor, rollout" not in run.text()
    run.assert_nothing_left()


def test_a_killed_server_leaves_no_process(server, engine):
    """Last, because it ends the module's server. vLLM alone would leave its engine running."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert children
    server.process.kill()
    server.process.wait()
    assert not psutil.wait_procs(children, timeout=60)[1]
