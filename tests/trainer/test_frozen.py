"""A whole run in which a worker freezes in an update."""

import re
from pathlib import Path

import pytest

from tests.trainer.runs import Launch, write_sums

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

FREEZING = """
import os
import signal
import time
from verlite import progress
from verlite.algorithms.losses import gpg

def loss(inputs):
    if progress.here.turn == "micro-batch 2 of 4":
        time.sleep(5)  # for heartbeats from here
        os.kill(os.getpid(), signal.SIGSTOP)
    return gpg(inputs)
"""


def test_a_frozen_worker_is_named_and_ends_the_run(tmp_path, tiny_qwen2, monkeypatch):
    (tmp_path / "freezing.py").write_text(FREEZING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    command = [
        f"data.train_files={write_sums(tmp_path / 'train.parquet', 8)}",
        "data.train_batch_size=4",
        "data.max_prompt_length=48",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={tiny_qwen2}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.policy_loss.loss_mode=freezing:loss",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.total_training_steps=1",
        "trainer.export_hf=false",
        "trainer.val_before_train=false",
        "trainer.heartbeat_timeout_s=5",
    ]
    run = Launch(tmp_path / "run", command, tmp_path / "run.log", forked=True)
    assert run.wait() == 76
    text = run.text()
    assert "error: actor rank 0 failed in update (frozen): no heartbeat for " in text
    where = "update, mini-batch 1 of 1, micro-batch 2 of 4"
    assert f"the process is stopped by a signal. Last position: {where}" in text
    assert f"log: {run.run_dir}/logs/actor_0.log" in text
    stacks = Path(re.search(r"\S+/stacks_\S+\.txt", text)[0]).read_text()
    assert "rollout rank 0: process " in stacks and "main thread" in stacks
    run.assert_nothing_left()
