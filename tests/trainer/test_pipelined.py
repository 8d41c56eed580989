"""Whole runs of trainer.mode=pipelined on CPU slots: updates are those of trainer.mode=sync."""

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.runs import launch, one_thread, quiet, write_reward, write_sums

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]
TOLERANCE = 1e-6
"""Relative, of weights: float32 sums of gradients in another order."""
STOP = """
import os, signal
from verlite.trainer.stages import overlap
accumulate = overlap.accumulate
def stopped(run, rows):
    if run.step == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return accumulate(run, rows)
overlap.accumulate = stopped
"""


@pytest.fixture
def base(tmp_path, tiny_qwen2):
    """Two engines, and two ranks of the actor, which are also the reference. Prompts with a sum of
    two digits take longer than the others. With the large eps of Adam, an update is about linear in
    the gradient; otherwise it has the size of lr also where the gradient is rounding."""
    body = "import time; time.sleep(0.4 * (len(ground_truth) > 1)); "
    body += "return sum(c.isdigit() for c in solution_str) / 4"
    return [
        f"data.train_files={write_sums(tmp_path / 'train.parquet', 64)}",
        f"data.val_files={write_sums(tmp_path / 'val.parquet', 8, 64)}",
        f"custom_reward_function.path={write_reward(tmp_path / 'reward.py', body)}",
        f"actor_rollout_ref.model.path={tiny_qwen2}",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.actor.shuffle=true",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.optim.lr=1e-1",
        "actor_rollout_ref.actor.optim.eps=1.0",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=4",
        "cluster.component_placement={rollout: 0-1, actor: 2-3, ref: 2-3}",
        "trainer.total_training_steps=3",
        "trainer.test_freq=2",
        "trainer.save_freq=-1",
    ]


def weights(run):
    found = load_file(run.run_dir / "huggingface" / "model.safetensors")
    return torch.cat([found[name].flatten().double() for name in sorted(found)])


def check_same(run, sync, tiny_qwen2):
    """Check weights and metrics, and that the updates were much larger than the tolerance."""
    begin = load_file(f"{tiny_qwen2}/model.safetensors")
    names = sorted(load_file(sync.run_dir / "huggingface" / "model.safetensors"))
    before = torch.cat([begin[name].flatten().double() for name in names])
    expected, found = weights(sync), weights(run)
    assert (expected - before).norm() > 1e3 * TOLERANCE * expected.norm()
    assert (found - expected).norm() < TOLERANCE * expected.norm()
    lines = run.metrics()
    assert [line["step"] for line in lines] == [line["step"] for line in sync.metrics()]
    for line, other in zip(lines, sync.metrics(), strict=True):
        own = {key: value for key, value in quiet(line).items() if "pipelined/" not in key}
        # Log-prob gaps are rounding themselves, up to 4e-6.
        assert own == pytest.approx(quiet(other), rel=1e-3, abs=1e-5), line["step"]


def test_updates_are_those_of_sync_also_after_a_stop_and_a_dead_engine(
    tmp_path, base, tiny_qwen2, monkeypatch
):
    """A stop after the first gradients gives the step up."""
    one_thread(monkeypatch)
    sync = launch(tmp_path, "sync", base)
    assert sync.wait() == 0, sync.text()
    monkeypatch.setenv("MORTAL", str(tmp_path / "deaths"))
    (tmp_path / "deaths").mkdir()
    (tmp_path / "deaths" / "step-20").touch()
    options = [
        *base,
        "trainer.mode=pipelined",
        "actor_rollout_ref.rollout.name=tests.trainer.mortal:Mortal",
    ]
    run = launch(tmp_path, "run", options, before=STOP)
    assert run.wait() == 75, run.text()
    assert (run.run_dir / "global_step_1").is_dir()
    run = launch(tmp_path, "run", options)
    assert run.wait() == 0, run.text()
    assert not list((tmp_path / "deaths").iterdir()), "no engine has died"
    check_same(run, sync, tiny_qwen2)
    steps = [line for line in run.metrics() if line["step"]]
    # On a machine that stalls, all prompts of a step may be found finished at once.
    assert any(0 < line["pipelined/early_prompts"] < 1 for line in steps)
    assert any(line["pipelined/overlapped_s"] > 0 for line in steps)
