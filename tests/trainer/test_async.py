"""Whole runs of trainer.mode=async on CPU slots."""

import json
import signal
from collections import Counter

import pytest
from safetensors.torch import load_file

from tests.trainer.runs import Launch, one_thread, quiet, write_reward, write_sums

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_qwen2):
    """Engines and actor on devices of their own. One thread per worker: see test_runs."""
    folder = tmp_path_factory.mktemp("sums")
    reward = write_reward(folder / "reward.py", "return sum(c.isdigit() for c in solution_str) / 4")
    return [
        f"data.train_files={write_sums(folder / 'train.parquet', 64)}",
        f"data.val_files={write_sums(folder / 'val.parquet', 8, 64)}",
        f"custom_reward_function.path={reward}",
        f"actor_rollout_ref.model.path={tiny_qwen2}",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.bypass_mode=true",
        "trainer.n_gpus_per_node=3",
        "cluster.component_placement={rollout: 0-1, actor: 2}",
        "trainer.rollouts_per_step=-1",
        "trainer.save_freq=-1",
    ]


KILLED_IN_STEP = """
import os, signal
from verlite.controller.worker_group import group
from verlite.trainer import asynchronous
inner = asynchronous.assign_mini_batches
def faulty(run, batch):
    if run.step == 2:
        for worker in group(run.rollout).workers:
            os.kill(int(worker.pid), signal.SIGKILL)
    return inner(run, batch)
asynchronous.assign_mini_batches = faulty
"""


def launch(tmp_path, name, options, before=""):
    return Launch(tmp_path / name, options, tmp_path / f"{name}.log", before, forked=True)


def samples(run):
    """Return the records of each step's samples."""
    found = {}
    for path in sorted(run.run_dir.glob("rollouts/step_*.jsonl")):
        step = int(path.stem.removeprefix("step_"))
        found[step] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


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
    assert samples(run) == samples(sync)
    expected, weights = (
        load_file(one.run_dir / "huggingface" / "model.safetensors") for one in (sync, run)
    )
    assert all(expected[name].equal(weights[name]) for name in expected)

    saved = f"trainer.resume_from_path={sync.run_dir / 'global_step_2'}"
    resumed = launch(tmp_path, "resumed", [*base, "trainer.resume_mode=resume_path", saved])
    assert resumed.wait() == 0, resumed.text()
    assert samples(resumed) == {step: samples(sync)[step] for step in (3, 4)}
    weights = load_file(resumed.run_dir / "huggingface" / "model.safetensors")
    assert all(expected[name].equal(weights[name]) for name in expected)


def check_samples(run, steps, max_age):
    """Check that each prompt was trained in one step, and how old its samples are."""
    found = samples(run)
    assert sorted(found) == list(range(1, steps + 1))
    counts = Counter(record["uid"] for records in found.values() for record in records)
    assert set(counts.values()) == {4}, "a prompt was trained twice"
    expected = {f"{step}-{place}" for step in range(1, steps + 1) for place in range(8)}
    assert set(counts) == expected
    for step, records in found.items():
        for record in records:
            oldest = record.get("oldest_version", record["weight_version"])
            assert step - max_age <= oldest <= record["weight_version"] <= step


def test_samples_are_trained_once_within_their_age(tmp_path, base, monkeypatch):
    """A stop, a killed driver, engines that die after a step has taken their samples and while
    they sample: no prompt is lost or trained twice."""
    one_thread(monkeypatch)
    monkeypatch.setenv("MORTAL", str(tmp_path / "deaths"))
    (tmp_path / "deaths").mkdir()
    (tmp_path / "deaths" / "step-70").touch()
    options = [
        *base,
        "trainer.mode=async",
        "async_training.max_age=1",
        "actor_rollout_ref.rollout.name=tests.trainer.mortal:Mortal",
        "trainer.total_training_steps=12",
        "trainer.test_freq=5",
        "trainer.save_freq=3",
    ]
    run = launch(tmp_path, "run", options, KILLED_IN_STEP)
    run.until_step(4)
    assert run.text().count("Started again in") == 1, run.text()
    run.process.kill()
    run.process.wait()
    run.assert_nothing_left()
    run = launch(tmp_path, "run", options)
    run.until_step(7)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 75, run.text()
    run = launch(tmp_path, "run", options)
    assert run.wait() == 0, run.text()
    assert not list((tmp_path / "deaths").iterdir()), "no engine has died"
    check_samples(run, 12, max_age=1)
    ages = [line["async/age/max"] for line in run.metrics() if line["step"]]
    assert max(ages) == 1 and len(ages) == 12
