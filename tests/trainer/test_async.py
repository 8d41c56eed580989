"""Whole runs of trainer.mode=async on CPU slots."""

import signal
from collections import Counter

import pytest
from safetensors.torch import load_file

from tests.rewards.test_remote import Service
from tests.trainer.runs import APART, digits, launch, one_thread, quiet, samples_of, wait_for, words

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_qwen2):
    return [
        *digits(tmp_path_factory.mktemp("sums"), tiny_qwen2),
        *APART,
        "data.max_response_length=16",
        "algorithm.rollout_correction.bypass_mode=true",
    ]


KILLED_IN_STEP = """
import os, signal
from verlite.controller.worker_group import group
from verlite.trainer import ppo
inner = ppo.assign_mini_batches
def faulty(run, batch):
    if run.step == 2:
        for worker in group(run.rollout).workers:
            os.kill(int(worker.pid), signal.SIGKILL)
    return inner(run, batch)
ppo.assign_mini_batches = faulty
"""


def test_age_0_is_sync_also_from_a_checkpoint_of_it(tmp_path, base, monkeypatch):
    one_thread(monkeypatch)
    base = [*base, "trainer.total_training_steps=4", "trainer.test_freq=2"]
    sync = launch(tmp_path, "sync", [*base, "trainer.save_freq=2"])
    assert sync.wait() == 0, sync.text()
    base += ["trainer.mode=async", "async_training.max_age=0"]
    run = launch(tmp_path, "async", base)
    assert run.wait() == 0, run.text()
    lines = [{k: v for k, v in quiet(line).items() if "async/" not in k} for line in run.metrics()]
    assert lines == [quiet(line) for line in sync.metrics()]
    assert samples_of(run) == samples_of(sync)
    expected, weights = (
        load_file(one.run_dir / "huggingface" / "model.safetensors") for one in (sync, run)
    )
    assert all(expected[name].equal(weights[name]) for name in expected)

    saved = f"trainer.resume_from_path={sync.run_dir / 'global_step_2'}"
    resumed = launch(tmp_path, "resumed", [*base, "trainer.resume_mode=resume_path", saved])
    assert resumed.wait() == 0, resumed.text()
    assert samples_of(resumed) == {step: samples_of(sync)[step] for step in (3, 4)}
    weights = load_file(resumed.run_dir / "huggingface" / "model.safetensors")
    assert all(expected[name].equal(weights[name]) for name in expected)


ALL_FINISHED = """
from verlite.trainer.stages import groups
wait_for_running = groups.wait_for_running
def waits(run):
    while run.step == 3 and run.groups.flow.counts()["running"]:
        groups.collect(run)
    wait_for_running(run)
groups.wait_for_running = waits
"""
"""Code for the driver: the checkpoint of step 3 has the samples of all groups that were started."""


def check_samples(run, steps, max_age):
    """Check that each prompt was trained in one step, and how old its samples are."""
    found = samples_of(run)
    assert sorted(found) == list(range(1, steps + 1))
    counts = Counter(record["uid"] for records in found.values() for record in records)
    assert set(counts.values()) == {4}, "a prompt was trained twice"
    expected = {f"{step}-{place}" for step in range(1, steps + 1) for place in range(8)}
    assert set(counts) == expected
    for step, records in found.items():
        for record in records:
            assert record["error"] is None
            oldest = record.get("oldest_version", record["weight_version"])
            assert step - max_age <= oldest <= record["weight_version"] <= step


def scores(body):
    """What `digits` gives, of the responses: the queries without their prompts."""
    texts = (q.removeprefix(p) for q, p in zip(body["query"], body["prompts"], strict=True))
    return {"rewards": [sum(c.isdigit() for c in text) / 4 for text in texts]}


def test_samples_are_trained_once_within_their_age(tmp_path, base, monkeypatch):
    """A killed driver, a stop, a reward service that is down for a while, engines that die after a
    step has taken their samples and while they sample: no prompt is lost or trained twice, and
    finished samples of a checkpoint are trained as they are."""
    one_thread(monkeypatch)
    monkeypatch.setenv("MORTAL", str(tmp_path / "deaths"))
    (tmp_path / "deaths").mkdir()
    with Service() as service:
        service.answer = lambda body: (service.health, scores(body))
        options = [
            *[one for one in base if not one.startswith("custom_reward_function")],
            f"reward.remote.url={service.url}",
            "reward.remote.outage_wait_s=600",
            "trainer.mode=async",
            "async_training.max_age=1",
            "actor_rollout_ref.rollout.name=tests.trainer.mortal:Mortal",
            "trainer.total_training_steps=15",
            "trainer.test_freq=5",
            "trainer.save_freq=3",
        ]
        run = launch(tmp_path, "run", options, before=KILLED_IN_STEP + ALL_FINISHED)
        run.until_step(4)
        assert run.text().count("Started again in") == 1, run.text()
        run.process.kill()
        run.process.wait()
        run.assert_nothing_left()
        kept = samples_of(run)[4]
        assert {record["weight_version"] for record in kept} == {3}
        (tmp_path / "deaths" / "step-40").touch()
        run = launch(tmp_path, "run", options)
        run.until_step(7)
        assert "8 finished prompts of the checkpoint are not sampled again" in words(run)
        assert samples_of(run)[4] == kept
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 75, run.text()
        saved = int((run.run_dir / "latest_checkpointed_iteration.txt").read_text())
        run = launch(tmp_path, "run", options, "async_training.min_eff_sample_size=0.9999999")
        assert run.wait() == 1, run.text()
        assert "less than async_training.min_eff_sample_size=0.9999999" in words(run)
        assert f"The checkpoint of step {saved} is from before it" in words(run)
        run = launch(tmp_path, "run", options, "reward.remote.deadline_s=1")
        run.until_step(saved + 1)
        service.health = 503
        wait_for(lambda: "samples lost their rewards" in words(run), run)
        service.health = 200
        assert run.wait() == 0, run.text()
    assert "the reward service recovered" in words(run)
    assert not list((tmp_path / "deaths").iterdir()), "no engine has died"
    check_samples(run, 15, max_age=1)
    ages = [line["async/age/max"] for line in run.metrics() if line["step"]]
    assert max(ages) == 1 and len(ages) == 15
    last = run.metrics()[-1]
    assert 0 < last["training/rollout_eff_sample_size_seq"] < 1
    assert 0 < last["training/rollout_eff_sample_size_token"] < 1
    assert 0 <= last["async/length_distance"] <= last["async/length_distance_limit"]
    for name in ("fully_async/trainer/idle_ratio", "fully_async/rollouter/idle_ratio"):
        assert 0 < last[name] <= 1
    assert 0 < last["async/idle_slots"] <= 1
    assert last["async/depth"] == 0.0, "there is no further step"
    assert 0.5 < last["async/reuse"] < 1, "samples were lost in the outage"
