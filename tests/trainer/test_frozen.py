"""Whole runs in which a worker freezes: in an update, and while generating."""

import re
import time
from pathlib import Path

import psutil
import pytest

from tests.trainer.runs import Launch, write_sums

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

FREEZING = """
import os
import signal
import time
from verlite import progress
from verlite.algorithms.losses import gpg
from verlite.envs.factory import EnvFactory
from verlite.envs.step import Step

def freeze(place):
    if os.environ["FREEZE"] == place:
        time.sleep(5)  # for heartbeats from here
        os.kill(os.getpid(), signal.SIGSTOP)

class Env:
    stop = ()
    async def step(self, text, last):
        freeze("generate")
        return Step("", done=last)

class Envs(EnvFactory):
    def env(self, extra_info):
        return Env()

def loss(inputs):
    if progress.here.turn == "micro-batch 2 of 4":
        freeze("update")
    return gpg(inputs)
"""


@pytest.mark.parametrize("place, role", [("update", "actor"), ("generate", "rollout")])
def test_a_frozen_worker_is_named_and_ends_the_run(tmp_path, tiny_qwen2, monkeypatch, place, role):
    (tmp_path / "freezing.py").write_text(FREEZING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    monkeypatch.setenv("FREEZE", place)
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
        "max_turns=1",
        "data.max_obs_length=8",
        "env.name=freezing:Envs",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.total_training_steps=1",
        "trainer.export_hf=false",
        "trainer.val_before_train=false",
        "trainer.heartbeat_timeout_s=5",
        "actor_rollout_ref.rollout.max_restarts=0",
    ]
    run = Launch(tmp_path / "run", command, tmp_path / "run.log", forked=True)
    log = run.run_dir / "logs" / f"{role}_0.log"
    frozen_at = None
    while run.process.poll() is None:
        if frozen_at is None and any(is_stopped(process) for process in run.processes()):
            frozen_at = time.monotonic()
        time.sleep(0.5)
    assert frozen_at is not None, run.text()
    print(f"{place}: ended after {time.monotonic() - frozen_at:.1f} s")
    text = run.text()
    assert run.wait() != 0
    assert f"error: {role} rank 0 failed in {place} (frozen): no heartbeat for " in text
    where = "update, mini-batch 1 of 1, micro-batch 2 of 4" if place == "update" else "generate"
    assert f"the process is stopped by a signal. Last position: {where}" in text
    assert f"log: {log}" in text
    stacks = Path(re.search(r"\S+/stacks_\S+\.txt", text)[0]).read_text()
    other = "rollout" if role == "actor" else "actor"
    assert f"{other} rank 0: process " in stacks and "main thread" in stacks
    run.assert_nothing_left()


def is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
