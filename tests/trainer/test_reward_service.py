"""Whole runs with a reward service that is killed, restarted, and gives faulty answers."""

import json

import pytest

from tests.envs.retriever import free_port
from tests.rewards.test_remote import Service
from tests.trainer.runs import RAY_STARTED, Launch, quiet, write_reward, write_sums

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

SCORE = "return sum(c.isdigit() for c in solution_str) / 4"
FAULTS = ((500, b"boom"), (200, b"<html>"), (200, {"rewards": []}), (200, {"rewards": [1.0] * 99}))


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_qwen2):
    folder = tmp_path_factory.mktemp("sums")
    return [
        f"data.train_files={write_sums(folder / 'train.parquet', 64)}",
        f"actor_rollout_ref.model.path={tiny_qwen2}",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=3",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.export_hf=false",
        "trainer.rollouts_per_step=-1",
    ]


def rewards_of(body):
    """The same score as SCORE, of the response: the query without its prompt."""
    texts = [
        query.removeprefix(prompt)
        for query, prompt in zip(body["query"], body["prompts"], strict=True)
    ]
    return [sum(c.isdigit() for c in text) / 4 for text in texts]


def launch(tmp_path, name, base, *overrides, before=""):
    log = tmp_path / f"{name}.log"
    return Launch(tmp_path / name, [*base, *overrides], log, before, forked=True)


def samples(run, step):
    lines = (run.run_dir / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_faults_and_a_restart_of_the_service_change_no_numbers(tmp_path, base):
    reward = write_reward(tmp_path / "reward.py", SCORE)
    local = launch(tmp_path, "local", base, f"custom_reward_function.path={reward}")
    assert local.wait() == 0, local.text()
    faults = list(FAULTS)
    port = free_port()

    def answer(body):
        if remote.metrics():  # down from the end of step 1 on
            return 503, b"down"
        return faults.pop(0) if faults else (200, {"rewards": rewards_of(body)})

    with Service(port) as service:
        service.answer = answer
        remote = launch(tmp_path, "remote", base, f"reward.remote.url={service.url}")
        remote.until_step(1)
    with Service(port) as service:
        service.answer = lambda body: (200, {"rewards": rewards_of(body)})
        assert remote.wait() == 0, remote.text()
        assert service.requests, "the run ended before the service was started again"
    assert not faults, "every fault was met"
    assert [quiet(line) for line in remote.metrics()] == [quiet(line) for line in local.metrics()]
    remote.assert_nothing_left()


def test_a_row_without_a_reward_is_left_out_and_its_group_is_normalized_without_it(tmp_path, base):
    """One sample of each prompt has no reward; GRPO's advantages are those of the other three."""
    import statistics

    seen = {}

    def answer(body):
        rewards = []
        for prompt, reward in zip(body["prompts"], rewards_of(body), strict=True):
            seen[prompt] = seen.get(prompt, 0) + 1
            rewards.append(None if seen[prompt] == 2 else reward)
        return 200, {"rewards": rewards}

    options = ["trainer.total_training_steps=1", "reward.max_error_rate=0.3"]
    with Service() as service:
        service.answer = answer
        run = launch(tmp_path, "nulls", base, f"reward.remote.url={service.url}", *options)
        assert run.wait() == 0, run.text()
    (metrics,) = run.metrics()
    assert metrics["reward/error_rate"] == 0.25
    groups = {}
    for sample in samples(run, 1):
        groups.setdefault(sample["uid"], []).append(sample)
    assert len(groups) == 8
    advantages = []
    for group in groups.values():
        scored = [sample for sample in group if sample["error"] is None]
        assert len(scored) == 3
        assert [s["error"] for s in group if s not in scored] == ["reward: BadReturn"]
        scores = [sample["score"] for sample in scored]
        mean, deviation = statistics.mean(scores), statistics.stdev(scores)
        advantages += [(score - mean) / (deviation + 1e-6) for score in scores]
    assert max(advantages) > 0, "no group has different scores, so this test shows nothing"
    assert metrics["critic/advantages/max"] == pytest.approx(max(advantages), abs=1e-4)
    assert metrics["critic/advantages/min"] == pytest.approx(min(advantages), abs=1e-4)


def test_an_unreachable_service_is_refused_before_ray_starts(tmp_path, base):
    url = f"http://127.0.0.1:{free_port()}/get_reward"
    run = launch(tmp_path, "refused", base, f"reward.remote.url={url}", before=RAY_STARTED)
    assert run.wait() == 2, run.text()
    words = " ".join(run.text().split())
    assert f"the reward service at {url} does not answer" in words
    assert "verlite serve reward" in words and "Ray has started" not in words
