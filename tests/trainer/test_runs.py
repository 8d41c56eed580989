"""Whole runs through Ray, FSDP2 and the embedded engine: they learn the same numbers however they are cut, stop and resume cleanly,
and fail with their first cause."""

import json
import os
import signal

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.runs import Launch, quiet, write_reward, write_sums
from verlite.report.export import export_checkpoint
from verlite.trainer.build import STEP_FILE, exported_step

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_qwen2):
    folder = tmp_path_factory.mktemp("sums")
    # A score that any text earns some of, so that advantages are not all 0.
    reward = write_reward(folder / "reward.py", "return sum(c.isdigit() for c in solution_str) / 4")
    return [
        f"data.train_files={write_sums(folder / 'train.parquet', 64)}",
        f"data.val_files={write_sums(folder / 'val.parquet', 8, 64)}",
        f"custom_reward_function.path={reward}",
        f"actor_rollout_ref.model.path={tiny_qwen2}",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=1",
        "trainer.test_freq=2",
        "trainer.rollouts_per_step=-1",
    ]


def launch(tmp_path, name, base, *overrides, before=""):
    return Launch(tmp_path / name, [*base, *overrides], tmp_path / f"{name}.log", before)


def at_metrics_of(step, action):
    """A driver that does something to itself when it is about to (or has just) logged a step."""
    return f"""
import os, signal
from verlite.trainer.tracking import Tracking
log = Tracking.log
def faulty(self, step, metrics):
    {action}
Tracking.log = faulty
""".replace("STEP", str(step))


@pytest.mark.parametrize("mini_batch", [4, 8], ids=["two_updates_a_step", "one_update_a_step"])
def test_a_killed_run_resumes_to_the_numbers_of_one_that_was_not(tmp_path, base, mini_batch):
    options = [
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        "trainer.max_actor_ckpt_to_keep=1",
    ]
    options.append(f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch}")
    if mini_batch == 4:  # with a reference, which stays the model of the first step
        options.append("actor_rollout_ref.actor.use_kl_loss=true")
    whole = launch(tmp_path, "whole", base, *options)
    assert whole.wait() == 0, whole.text()
    assert [line["step"] for line in whole.metrics()] == [0, 1, 2, 3, 4]

    killed = launch(tmp_path, "killed", base, *options)
    killed.until_step(3)
    killed.process.kill()
    killed.process.wait()
    killed.assert_nothing_left()
    resumed = launch(tmp_path, "killed", base, *options)
    assert resumed.wait() == 0, resumed.text()
    assert "resumed from" in resumed.text() and "step 2 of 4" in resumed.text()

    assert [quiet(line) for line in resumed.metrics()] == [quiet(line) for line in whole.metrics()]
    assert all(
        "actor/entropy" in line and "training/log_prob_gap_max" in line
        for line in whole.metrics()[1:]
    )
    for step in (3, 4):
        samples = [
            (run.run_dir / "rollouts" / f"step_{step}.jsonl").read_text()
            for run in (whole, resumed)
        ]
        assert samples[0] == samples[1]
    weights = [
        (run.run_dir / "huggingface" / "model.safetensors").read_bytes() for run in (whole, resumed)
    ]
    assert weights[0] == weights[1]
    assert sorted(p.name for p in resumed.run_dir.glob("global_step_*")) == ["global_step_4"]
    resumed.assert_nothing_left()

    if mini_batch == 4:
        return
    no_ray = "import ray\ndef init(*args, **kwargs): raise AssertionError('Ray is not needed')\nray.init = init"
    again = launch(tmp_path, "killed", base, *options, before=no_ray)
    assert again.wait() == 0 and "already complete" in again.text()

    changed = launch(
        tmp_path, "killed", base, *options[1:], "trainer.total_training_steps=6", "data.seed=7"
    )
    assert changed.wait() == 2
    assert "data.seed: 42 in the checkpoint, 7 now" in changed.text()


def test_adapters_learn_beside_their_own_reference_and_resume_exactly(tmp_path, base, tiny_qwen2):
    """GRPO with a KL to the policy without its adapters: no worker holds a reference, and the engine samples with the merged weights."""
    options = [
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.save_freq=2",
    ]
    options += [
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.val_before_train=false",
    ]
    whole = launch(tmp_path, "whole", base, *options, "trainer.total_training_steps=4")
    assert whole.wait() == 0, whole.text()
    lines = whole.metrics()
    assert lines[0]["actor/kl_loss"] == 0 and all(
        line["actor/kl_loss"] > 1e-4 for line in lines[1:]
    )  # B starts at 0
    assert all(
        line["actor/grad_norm"] > 0 and line["training/log_prob_gap"] < 1e-5 for line in lines
    )
    assert lines[-1]["critic/score/mean"] > lines[0]["critic/score/mean"]
    assert not [log for log in (whole.run_dir / "logs").iterdir() if log.name.startswith("ref")]

    half = launch(tmp_path, "half", base, *options, "trainer.total_training_steps=2")
    assert half.wait() == 0, half.text()
    resumed = launch(tmp_path, "half", base, *options, "trainer.total_training_steps=4")
    assert resumed.wait() == 0, resumed.text()
    assert "step 2 of 4" in resumed.text()
    assert [quiet(line) for line in resumed.metrics()[2:]] == [quiet(line) for line in lines[2:]]
    weights = [
        load_file(run.run_dir / "huggingface" / "model.safetensors") for run in (whole, resumed)
    ]
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())
    start = load_file(f"{tiny_qwen2}/model.safetensors")
    assert {
        name.split(".")[-2] for name in start if not torch.equal(start[name], weights[0][name])
    } == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    assert (whole.run_dir / "huggingface" / "lora_adapter" / "adapter_config.json").is_file()
    assert export_checkpoint(whole.run_dir / "global_step_4", tmp_path / "exported") < 1e-5
    changed = launch(
        tmp_path,
        "half",
        base,
        *options,
        "trainer.total_training_steps=6",
        "actor_rollout_ref.model.lora_alpha=8",
    )
    assert (
        changed.wait() == 2
        and "actor_rollout_ref.model.lora_alpha: 16 in the checkpoint, 8 now" in changed.text()
    )


def test_a_kill_between_checkpoint_and_metrics_loses_neither_the_line_nor_the_export(
    tmp_path, base
):
    options = [
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        "trainer.val_before_train=false",
    ]
    kill = at_metrics_of(
        2, "os.kill(os.getpid(), signal.SIGKILL) if step == STEP else log(self, step, metrics)"
    )
    killed = launch(tmp_path, "late", base, *options, before=kill)
    killed.wait()
    assert [line["step"] for line in killed.metrics()] == [1] and (
        killed.run_dir / "global_step_2"
    ).is_dir()
    again = launch(tmp_path, "late", base, *options)
    assert again.wait() == 0, again.text()
    assert [line["step"] for line in again.metrics()] == [
        1,
        2,
    ] and "critic/score/mean" in again.metrics()[1]
    assert (again.run_dir / "huggingface" / "model.safetensors").exists()
    again.assert_nothing_left()
    assert exported_step(again.run_dir) == 2
    # An export of an earlier total is no reason to be complete.
    (again.run_dir / "huggingface" / STEP_FILE).write_text("1")
    third = launch(tmp_path, "late", base, *options)
    assert third.wait() == 0 and "already complete" not in third.text(), third.text()
    assert exported_step(third.run_dir) == 2 and [line["step"] for line in third.metrics()] == [
        1,
        2,
    ]
    assert not list(third.run_dir.glob(".*_huggingface"))


def test_a_stop_that_comes_after_the_step_is_saved_all_the_same(tmp_path, base):
    stop = at_metrics_of(
        2, "log(self, step, metrics); step == STEP and os.kill(os.getpid(), signal.SIGTERM)"
    )
    run = launch(tmp_path, "stopped", base, "trainer.total_training_steps=500", before=stop)
    assert run.wait() == 75, run.text()
    assert (run.run_dir / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_a_sync_that_does_nothing_is_caught_and_leaves_nothing(tmp_path, base):
    """The engine gets the weights of before the last update, under the next version and the trainer's fingerprint."""
    stale = """
import dataclasses
from verlite.trainer.stages import weights
from verlite.trainer.run import Run
inner, first = weights.sync_weights, []
class Stale:
    def __init__(self, actor): self.actor = actor
    def __getattr__(self, name): return getattr(self.actor, name)
    def export_weights(self):
        fresh = self.actor.export_weights()
        first.append(fresh[0].fingerprint)
        return [dataclasses.replace(e, fingerprint=e.fingerprint + (len(first) == 2)) for e in fresh]
def planted(run):
    if not isinstance(run.actor, Stale): run.workers['actor'] = Stale(run.actor)
    inner(run)
import verlite.trainer.ppo
verlite.trainer.ppo.sync_weights = planted
"""
    shm = set(os.listdir("/dev/shm"))
    run = launch(
        tmp_path,
        "stale",
        base,
        "trainer.total_training_steps=5",
        "trainer.val_before_train=false",
        before=stale,
    )
    assert run.wait() == 1, run.text()
    assert (
        "error: rollout rank 0 failed in load_weights" in run.text() and "fingerprint" in run.text()
    )
    assert "release_export" not in run.text()
    run.assert_nothing_left()
    assert not {name for name in set(os.listdir("/dev/shm")) - shm if name.startswith("verlite")}


def test_a_save_that_the_disk_refuses_costs_a_warning(tmp_path, base):
    """In step 1 the workers find a file where their folder should be."""
    full = """
from verlite.trainer import checkpoints
write = checkpoints.write
def faulty(run_dir, step, state, save_parts):
    blocker = run_dir / f".tmp_global_step_{step}" / "actor"
    def refused(folder):
        if step == 1:
            blocker.write_text("a file where a folder should be")
        save_parts(folder)
    return write(run_dir, step, state, refused)
checkpoints.write = faulty
"""
    options = [
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        "trainer.val_before_train=false",
    ]
    run = launch(tmp_path, "full", base, *options, before=full)
    assert run.wait() == 0, run.text()
    assert "warning: checkpoint of step 1 was not written" in run.text()
    assert sorted(p.name for p in run.run_dir.glob("global_step_*")) == ["global_step_2"]


def test_two_devices_learn_what_one_does(tmp_path, base):
    options = [
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=3",
    ]
    one = launch(tmp_path, "one", base, *options)
    assert one.wait() == 0, one.text()
    keys = [
        "actor/pg_loss",
        "actor/kl_loss",
        "actor/entropy",
        "actor/grad_norm",
        "critic/vf_loss",
        "critic/grad_norm",
        "critic/score/mean",
    ]
    apart: list[str] = []
    together = [
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "critic.ulysses_sequence_parallel_size=2",
    ]
    for name, how in (
        ("apart", apart),
        ("together", together),
    ):  # each with rows of its own, or on all rows with half of their tokens
        two = launch(tmp_path, name, base, *options, "trainer.n_gpus_per_node=2", *how)
        assert two.wait(400) == 0, two.text()
        assert ("1 group of 2 devices" in two.text()) == bool(how)
        for a, b in zip(one.metrics()[1:], two.metrics()[1:], strict=True):
            assert a.keys() == b.keys()
            # float32 sums in another order; three steps of Adam amplify that a little
            assert {k: a[k] for k in keys} == pytest.approx(
                {k: b[k] for k in keys}, rel=2e-3, abs=1e-5
            )
    # The policy starts as the reference, to float32, and leaves it behind: were the reference updated too, this would stay 0.
    first, *_, last = (line["actor/reward_kl_penalty"] for line in one.metrics()[1:])
    assert abs(first) < 1e-5 and abs(last) > 1e-3


def test_sigterm_saves_at_the_step_boundary_and_says_resumable(tmp_path, base):
    run = launch(tmp_path, "term", base, "trainer.total_training_steps=500")
    run.until_step(2)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 75, run.text()
    last = run.metrics()[-1]["step"]
    assert (run.run_dir / "latest_checkpointed_iteration.txt").read_text() == str(last)
    assert (
        json.loads((run.run_dir / f"global_step_{last}" / "state.json").read_text())["step"] == last
    )
    run.assert_nothing_left()


def test_a_killed_worker_ends_the_run_with_its_name(tmp_path, base):
    run = launch(tmp_path, "crash", base, "trainer.total_training_steps=500")
    run.until_step(1)
    victims = [
        p
        for p in run.processes()
        if p.pid != run.process.pid and any("actor_0.log" in f for f in open_files(p))
    ]
    assert victims
    victims[0].kill()
    assert run.wait(60) == 1, run.text()
    assert "actor rank 0" in run.text()
    run.assert_nothing_left()


def open_files(process: psutil.Process) -> list[str]:
    try:
        return [
            os.readlink(f"/proc/{process.pid}/fd/{name}")
            for name in os.listdir(f"/proc/{process.pid}/fd")
        ]
    except OSError:
        return []


def test_too_many_failed_rewards_stop_the_run_with_the_first_traceback(tmp_path, base):
    reward = write_reward(tmp_path / "bad.py", "raise ZeroDivisionError('the scorer broke')")
    options = ["reward.check_ground_truth=false", "trainer.val_before_train=false"]
    run = launch(tmp_path, "reward", base, f"custom_reward_function.path={reward}", *options)
    assert run.wait() == 1, run.text()
    assert (
        "reward.max_error_rate" in run.text()
        and "ZeroDivisionError" in run.text()
        and "the scorer broke" in run.text()
    )
    run.assert_nothing_left()


def test_a_refused_run_leaves_nothing_of_what_it_had_begun(tmp_path, base):
    """Ray and the workers' processes start while the driver is still reading its prompts."""
    run = launch(tmp_path, "refused", base, "data.max_prompt_length=1")
    assert run.wait() == 2, run.text()
    assert "data.max_prompt_length" in run.text() and (tmp_path / "refused" / "logs").exists()
    run.assert_nothing_left()


def test_what_can_be_seen_without_torch_is_refused_before_ray_starts(tmp_path, base):
    (tmp_path / "bad.py").write_text(
        "1 / 0\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.0\n"
    )
    run = launch(tmp_path, "refused", base, f"custom_reward_function.path={tmp_path / 'bad.py'}")
    assert run.wait() == 2, run.text()
    assert "ZeroDivisionError" in run.text() and not (tmp_path / "refused" / "logs").exists()
    run.assert_nothing_left()


def test_a_run_directory_belongs_to_one_run(tmp_path, base):
    first = launch(tmp_path, "shared", base, "trainer.total_training_steps=500")
    first.until_step(0)
    second = Launch(tmp_path / "shared", base, tmp_path / "second.log")
    assert second.wait() == 2
    assert f"in use by process {first.process.pid}" in second.text()
    first.process.send_signal(signal.SIGINT)
    assert first.wait() == 130
    first.assert_nothing_left()
