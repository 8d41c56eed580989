"""Golden trajectories: short GRPO and PPO runs repeat the rewards and losses in golden/.

They catch drift that no other test looks for. To write them again, and then review the difference:

    python -m tests.trainer.test_golden
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tests.models import tiny_model
from tests.trainer.runs import Launch, write_reward, write_sums

GOLDEN = Path(__file__).with_name("golden")
METHODS = {
    "grpo": [
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.01",
    ],
    "ppo": [
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "critic.optim.lr=1e-3",
    ],
}
KEPT = (
    "critic/score/mean",
    "critic/rewards/mean",
    "critic/advantages/max",
    "critic/returns/mean",
    "critic/values/mean",
    "critic/vf_loss",
    "critic/grad_norm",
    "actor/pg_loss",
    "actor/pg_clipfrac",
    "actor/ppo_kl",
    "actor/entropy",
    "actor/kl_loss",
    "actor/reward_kl_penalty",
    "actor/grad_norm",
    "response_length/mean",
)


def machine() -> dict[str, str]:
    """Return what determines the order in which float32 values are summed."""
    return {
        "torch": torch.__version__.split("+")[0],
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def trajectory(method: str, folder: Path, model: str) -> list[dict[str, float]]:
    """Return the compared metrics of three steps of two updates each."""
    reward = write_reward(folder / "reward.py", "return sum(c.isdigit() for c in solution_str) / 4")
    policy = "actor_rollout_ref."
    actor = "actor_rollout_ref.actor."
    run = Launch(
        folder / method,
        [
            f"data.train_files={write_sums(folder / 'train.parquet', 64)}",
            f"custom_reward_function.path={reward}",
            f"{policy}model.path={model}",
            # Trees of prompts add the same numbers in another order (tests/engine/test_trees.py).
            f"{policy}model.share_prefixes=false",
            "critic.model.share_prefixes=false",
            "data.train_batch_size=8",
            "data.max_prompt_length=8",
            "data.max_response_length=8",
            f"{actor}ppo_mini_batch_size=4",
            f"{actor}ppo_micro_batch_size_per_gpu=3",
            f"{actor}optim.lr=1e-3",
            f"{policy}rollout.name=hf",
            f"{policy}rollout.n=4",
            "algorithm.adv_estimator=grpo",
            "trainer.n_gpus_per_node=1",
            "trainer.total_training_steps=3",
            "trainer.export_hf=false",
            "trainer.save_freq=-1",
            *METHODS[method],
        ],
        folder / f"{method}.log",
        forked=True,
    )
    assert run.wait() == 0, run.text()
    return [{key: line[key] for key in KEPT if key in line} for line in run.metrics()]


def write() -> None:
    """Write golden/ from this machine's runs."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "model", "qwen2")
        for method in METHODS:
            lines = [machine(), *trajectory(method, Path(folder), model)]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (GOLDEN / f"{method}.jsonl").write_text(text)
            print(GOLDEN / f"{method}.jsonl")


@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_repeats_its_golden_trajectory(method, tmp_path, tiny_qwen2):
    stored = (GOLDEN / f"{method}.jsonl").read_text().splitlines()
    written_on, *golden = [json.loads(line) for line in stored]
    # The same kernels repeat to the last digits. Others sum in another order, and Adam's first
    # steps depend only on a gradient's sign, so tiny differences grow to hundredths. A changed
    # formula moves these numbers by far more.
    tolerance = 1e-5 if written_on == machine() else 0.05
    lines = trajectory(method, tmp_path, tiny_qwen2)
    assert [line.keys() for line in lines] == [line.keys() for line in golden]
    for step, (line, expected) in enumerate(zip(lines, golden, strict=True), start=1):
        for key, value in line.items():
            close = pytest.approx(expected[key], rel=tolerance, abs=tolerance / 50)
            assert value == close, f"step {step}: {key}"


if __name__ == "__main__":
    sys.exit(write())
