"""A whole run that stops in a worker's update, in a reward function and in an environment.

The numbers of its step are those of a run that does not stop.
"""

import re
import time
from pathlib import Path

import pytest

from tests.dap import Client
from tests.trainer.runs import Launch, quiet, write_sums

pytest.importorskip("debugpy")

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

STOPPING = """
import os
import torch.distributed as dist
from verlite.algorithms.losses import gpg
from verlite.envs.factory import EnvFactory
from verlite.envs.step import Step

stops = {"reward", "step", "loss"} if os.environ.get("STOP") else set()

def stops_now(place, rank=0):
    if place in stops and rank == 0:
        stops.remove(place)
        return True
    return False

def reward(solution_str, **row):
    score = sum(character.isdigit() for character in solution_str) / 4
    if stops_now("reward"):
        breakpoint()
    return score

class Env:
    stop = ()
    async def step(self, text, last):
        answer = f"{len(text)}"
        if stops_now("step"):
            breakpoint()
        return Step(answer, done=last)

class Envs(EnvFactory):
    def env(self, extra_info):
        return Env()

def loss(inputs):
    result = gpg(inputs)
    if stops_now("loss", dist.get_rank()):
        breakpoint()
    return result
"""


@pytest.fixture
def command(tmp_path, tiny_qwen2, monkeypatch) -> list[str]:
    (tmp_path / "stopping.py").write_text(STOPPING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    return [
        f"data.train_files={write_sums(tmp_path / 'train.parquet', 8)}",
        "data.train_batch_size=4",
        "data.max_prompt_length=48",
        "data.max_response_length=8",
        "custom_reward_function.path=stopping",
        "custom_reward_function.name=reward",
        f"actor_rollout_ref.model.path={tiny_qwen2}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.policy_loss.loss_mode=stopping:loss",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.adv_estimator=grpo",
        "max_turns=1",
        "data.max_obs_length=8",
        "env.name=stopping:Envs",
        "trainer.n_gpus_per_node=2",
        "trainer.device=cpu",
        "trainer.total_training_steps=1",
        "trainer.export_hf=false",
        "trainer.val_before_train=false",
    ]


def test_stops_leave_the_numbers_unchanged(tmp_path, command, monkeypatch):
    plain = Launch(tmp_path / "plain", command, tmp_path / "plain.log", forked=True)
    assert plain.wait() == 0, plain.text()
    monkeypatch.setenv("STOP", "1")
    # The limit of a call is shorter than the start of a worker takes, if it is not lifted.
    options = ["trainer.debug=true", "trainer.phase_timeout_s=0.001", "reward.timeout_s=0.001"]
    run = Launch(tmp_path / "run", [*command, *options], tmp_path / "run.log", forked=True)
    clients: dict[str, Client] = {}
    stopped = []
    # Once in each rollout worker: its reward function, and its environment if a sample has a second
    # turn. Then the loss on rank 0.
    while "loss" not in stopped:
        text = next_stop(run, len(stopped))
        address = re.search(r"(\S+:\d+)(?: has it)?$", text)[1]
        if address not in clients:
            clients[address] = Client(address)
        client = clients[address]
        thread, frame = client.stopped()
        stopped.append(frame["name"])
        if frame["name"] == "loss":
            assert client.evaluate("inputs.log_prob.shape[0] <= 8", frame) == "True"
            assert client.evaluate("result[0].shape", frame) == "torch.Size([])"
            assert " actor rank 0 " in text
        elif frame["name"] == "reward":
            assert client.evaluate("0 <= score", frame) == "True"
        else:
            assert client.evaluate("answer == str(len(text))", frame) == "True"
        client.go_on(thread)
    assert run.wait() == 0, run.text()
    assert set(stopped) == {"loss", "reward", "step"} and stopped.count("reward") == 2
    assert run.text().count("Time limits are lifted: trainer.phase_timeout_s") == 1
    (with_stops,), (without,) = run.metrics(), plain.metrics()
    # A stop changes which samples the engine computes together, and so the last bits of the
    # rollout's log-probs, which nothing in the update reads.
    assert exact(with_stops) == exact(without)
    assert with_stops["training/log_prob_gap"] < 1e-5
    assert with_stops["actor/grad_norm"] > 0
    run.assert_nothing_left()


def exact(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics that do not depend on time or on the rollout's log-probs."""
    others = ("rollout/slowest/", "training/")
    return {key: value for key, value in quiet(metrics).items() if not key.startswith(others)}


def next_stop(run: Launch, seen: int) -> str:
    """Return the line about a stop after the first `seen` ones."""
    deadline = time.monotonic() + 240
    while True:
        lines = [line for line in run.text().splitlines() if "waits at a breakpoint" in line]
        if len(lines) > seen:
            return lines[seen]
        assert run.process.poll() is None, run.text()
        assert time.monotonic() < deadline, run.text()
        time.sleep(0.1)
