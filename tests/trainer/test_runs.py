"""Whole runs through Ray, FSDP2 and the embedded engine.

They give the same numbers after a kill and on two devices, stop and resume cleanly, and report the
first cause of a failure. Starting a run costs far more than its steps, so one run serves several
checks where it can.
"""

import json
import os
import re
import signal
import socket
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.runs import RAY_STARTED, Launch, digits, launch, one_thread, quiet, write_reward
from verlite.report.export import Base, export_checkpoint, find_checkpoint
from verlite.trainer.saving import exported_step

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

NO_VALIDATION = ["trainer.val_before_train=false", "trainer.test_freq=-1"]


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_qwen2):
    options = digits(tmp_path_factory.mktemp("sums"), tiny_qwen2)
    return [*options, "trainer.n_gpus_per_node=1", "trainer.test_freq=2"]


def when_logging(step, action):
    """Code for the driver: run `action` instead of `log(self, step, metrics)` at this step."""
    return f"""
import os, signal
from verlite.trainer.tracking import Tracking
log = Tracking.log
def faulty(self, step, metrics):
    if step == {step}:
        {action}
    else:
        log(self, step, metrics)
Tracking.log = faulty
"""


def steps_of(run):
    return [line["step"] for line in run.metrics()]


def pointer_of(run):
    return (run.run_dir / "latest_checkpointed_iteration.txt").read_text()


def test_a_killed_run_resumes_to_the_same_numbers(tmp_path, base, monkeypatch):
    """Two updates per step, and a KL loss whose reference stays the model of step 0.

    The whole run has all roles on one device. The killed one has devices for rollout, for
    `inference` with the reference, and for the actor. Neither that nor the log-prob probe of weight
    syncs, in the whole run only, changes a number. One thread per worker: with more, the order of
    additions would depend on the number of workers.
    """
    one_thread(monkeypatch)
    options = [
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        "trainer.max_actor_ckpt_to_keep=1",
    ]
    probe = "actor_rollout_ref.rollout.weight_probe"
    whole = launch(tmp_path, "whole", base, *options, f"{probe}=always")
    assert whole.wait() == 0, whole.text()
    assert steps_of(whole) == [0, 1, 2, 3, 4]
    driver_log = (whole.run_dir / "logs" / "driver.log").read_text()
    assert "starting Ray" in driver_log and "step 4/4  score" in driver_log
    assert all(0 <= line["perf/weight_probe_gap"] < 1e-5 for line in whole.metrics()[1:])

    options.append(f"{probe}=never")
    options += [
        "trainer.n_gpus_per_node=3",
        "cluster.component_placement={rollout: 0, inference: 1, actor: 2}",
    ]
    kill = when_logging(3, "log(self, step, metrics); os.kill(os.getpid(), signal.SIGKILL)")
    killed = launch(tmp_path, "killed", base, *options, before=kill)
    assert killed.wait() == -signal.SIGKILL
    killed.assert_nothing_left()
    resumed = launch(tmp_path, "killed", base, *options)
    assert resumed.wait() == 0, resumed.text()
    assert "resumed from" in resumed.text()
    assert "step 2 of 4" in resumed.text()
    logs = {log.name for log in (resumed.run_dir / "logs").glob("*_0.log")}
    assert logs >= {f"{role}_0.log" for role in ("actor", "rollout", "inference", "ref")}

    assert [quiet(line) for line in resumed.metrics()] == [quiet(line) for line in whole.metrics()]
    for line in whole.metrics()[1:]:
        assert "actor/entropy" in line
        assert "training/log_prob_gap_max" in line
    for step in (3, 4):
        expected = (whole.run_dir / "rollouts" / f"step_{step}.jsonl").read_text()
        assert (resumed.run_dir / "rollouts" / f"step_{step}.jsonl").read_text() == expected
    expected_weights = (whole.run_dir / "huggingface" / "model.safetensors").read_bytes()
    weights = (resumed.run_dir / "huggingface" / "model.safetensors").read_bytes()
    assert weights == expected_weights
    assert sorted(p.name for p in resumed.run_dir.glob("global_step_*")) == ["global_step_4"]
    resumed.assert_nothing_left()

    no_ray = (
        "import ray\n"
        "def init(*args, **kwargs): raise AssertionError('Ray is not needed')\n"
        "ray.init = init"
    )
    again = launch(tmp_path, "killed", base, *options, before=no_ray)
    assert again.wait() == 0
    assert "already complete" in again.text()

    more_steps = [*options, "trainer.total_training_steps=6"]
    changed = launch(tmp_path, "killed", base, *more_steps, "data.seed=7")
    assert changed.wait() == 2
    assert "data.seed: 42 in the checkpoint, 7 now" in changed.text()


def test_lora_learns_and_a_stopped_run_resumes_to_the_same_numbers(tmp_path, base, tiny_qwen2):
    """One update per step, and a KL loss against the policy without its adapters.

    No worker has a reference model, and the engine samples with the merged weights. The stop
    request arrives after step 2 has decided not to save, so the run's end writes the checkpoint.
    """
    options = [
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=4",
        *NO_VALIDATION,
    ]
    whole = launch(tmp_path, "whole", base, *options, "trainer.save_freq=4")
    assert whole.wait() == 0, whole.text()
    lines = whole.metrics()
    assert lines[0]["actor/kl_loss"] == 0, "LoRA's B starts at 0"
    assert all(line["actor/kl_loss"] > 1e-4 for line in lines[1:])
    for line in lines:
        assert line["actor/grad_norm"] > 0
        assert line["training/log_prob_gap"] < 1e-5
    assert lines[-1]["critic/score/mean"] > lines[0]["critic/score/mean"]
    assert not [log for log in (whole.run_dir / "logs").iterdir() if log.name.startswith("ref")]

    stop = when_logging(2, "log(self, step, metrics); os.kill(os.getpid(), signal.SIGTERM)")
    stopped = launch(tmp_path, "stopped", base, *options, "trainer.save_freq=-1", before=stop)
    assert stopped.wait() == 75, stopped.text()
    assert pointer_of(stopped) == "2"
    resumed = launch(tmp_path, "stopped", base, *options, "trainer.save_freq=-1")
    assert resumed.wait() == 0, resumed.text()
    assert "step 2 of 4" in resumed.text()
    assert [quiet(line) for line in resumed.metrics()] == [quiet(line) for line in lines]

    weights = load_file(whole.run_dir / "huggingface" / "model.safetensors")
    resumed_weights = load_file(resumed.run_dir / "huggingface" / "model.safetensors")
    assert weights.keys() == resumed_weights.keys()
    for name, tensor in resumed_weights.items():
        assert torch.equal(weights[name], tensor), name
    start = load_file(f"{tiny_qwen2}/model.safetensors")
    changed_layers = {
        name.split(".")[-2] for name in start if not torch.equal(start[name], weights[name])
    }
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert changed_layers == attention | {"gate_proj", "up_proj", "down_proj"}
    assert (whole.run_dir / "huggingface" / "lora_adapter" / "adapter_config.json").is_file()
    checkpoint = find_checkpoint(whole.run_dir, pytest.fail)
    assert checkpoint.step == 4
    assert export_checkpoint(checkpoint, tmp_path / "exported", Base(tiny_qwen2)) < 1e-5

    changed = launch(
        tmp_path,
        "stopped",
        base,
        *options,
        "trainer.total_training_steps=6",
        "actor_rollout_ref.model.lora_alpha=8",
    )
    assert changed.wait() == 2
    assert "model.lora_alpha: 16 in the checkpoint, 8 now" in changed.text()


def test_a_failed_save_warns_and_a_late_kill_loses_no_step(tmp_path, base):
    """In step 1, workers find a file where their folder should be.

    In step 2, the kill comes after the checkpoint and before the line in metrics.jsonl.
    """
    full = """
from verlite.trainer import checkpoints
write = checkpoints.write
def faulty_write(run_dir, step, state, save_parts):
    blocker = run_dir / f".tmp_global_step_{step}" / "actor"
    def blocked(folder):
        if step == 1:
            blocker.write_text("a file where a folder should be")
        save_parts(folder)
    return write(run_dir, step, state, blocked)
checkpoints.write = faulty_write
"""
    options = [
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        *NO_VALIDATION,
    ]
    kill = when_logging(2, "os.kill(os.getpid(), signal.SIGKILL)")
    killed = launch(tmp_path, "late", base, *options, before=full + kill)
    killed.wait()
    assert "warning: checkpoint of step 1 was not written" in killed.text()
    assert steps_of(killed) == [1], killed.text()
    assert sorted(p.name for p in killed.run_dir.glob("global_step_*")) == ["global_step_2"]
    assert exported_step(killed.run_dir) is None
    saved = load_file(killed.run_dir / "global_step_2/actor/huggingface/model.safetensors")

    again = launch(tmp_path, "late", base, *options)
    assert again.wait() == 0, again.text()
    assert steps_of(again) == [1, 2]
    assert "critic/score/mean" in again.metrics()[1]
    exported = load_file(again.run_dir / "huggingface" / "model.safetensors")
    assert exported_step(again.run_dir) == 2
    assert saved.keys() == exported.keys()
    assert all(torch.equal(saved[name], exported[name]) for name in exported)
    assert not list(again.run_dir.glob(".*_huggingface"))
    again.assert_nothing_left()


def test_a_weight_sync_without_effect_stops_the_run(tmp_path, base):
    """The engine gets the weights from before the last update, under the next version."""
    stale = """
import dataclasses
from verlite.trainer import ppo
from verlite.trainer.stages import weights
inner, first = weights.sync_weights, []
class Stale:
    def __init__(self, actor): self.actor = actor
    def __getattr__(self, name): return getattr(self.actor, name)
    def offer_weights(self, version, probe_limit, routes):
        fresh = self.actor.offer_weights(version, probe_limit, routes)
        first.append(fresh[0].fingerprint)
        wrong = len(first) == 2
        return [dataclasses.replace(e, fingerprint=e.fingerprint + wrong) for e in fresh]
def faulty(run):
    if not isinstance(run.actor, Stale):
        run.workers["actor"] = Stale(run.actor)
    inner(run)
ppo.sync_weights = faulty
"""
    shm = set(os.listdir("/dev/shm"))
    options = ["trainer.total_training_steps=5", *NO_VALIDATION]
    run = launch(tmp_path, "stale", base, *options, before=stale)
    assert run.wait() == 1, run.text()
    assert "error: rollout rank 0 failed in fetch_weights" in run.text()
    assert "fingerprint" in run.text()
    assert "release_weights" not in run.text()
    run.assert_nothing_left()
    new = set(os.listdir("/dev/shm")) - shm
    assert not {name for name in new if name.startswith("verlite")}


def test_two_devices_give_the_same_numbers_as_one(tmp_path, base):
    """Data parallel: half of the rows per device. Sequence parallel: half of every sequence.

    The runs with two devices get their weights in other ways too: broadcast to two nodes, which are
    both this machine, and by buckets of the rank on the same device. Without sequence parallelism
    old and reference log-probs come from two ranks of `inference` on the second node.
    """
    options = [
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.weight_probe=always",
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
    nodes = [
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=2",
        "cluster.component_placement={actor: 0-1, rollout: 1-2, inference: 2-3}",
        "actor_rollout_ref.rollout.weight_transport=collective",
    ]
    ulysses = [
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "critic.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.rollout.weight_transport=ipc",
    ]
    for name, parallel in (("data_parallel", nodes), ("sequence_parallel", ulysses)):
        two = launch(tmp_path, name, base, *options, *parallel)
        assert two.wait(400) == 0, two.text()
        assert ("1 group of 2 devices" in two.text()) == (parallel is ulysses)
        for a, b in zip(one.metrics()[1:], two.metrics()[1:], strict=True):
            # With `inference` on devices of its own there is one more role with a straggler.
            assert a.keys() ^ b.keys() <= {"perf/straggler/inference"}
            # float32 sums have another order, and three steps of Adam amplify the difference.
            expected = {key: b[key] for key in keys}
            assert {key: a[key] for key in keys} == pytest.approx(expected, rel=2e-3, abs=1e-5)
    # The policy starts as the reference. If the reference were updated too, this would stay 0.
    penalties = [line["actor/reward_kl_penalty"] for line in one.metrics()[1:]]
    assert abs(penalties[0]) < 1e-5
    assert abs(penalties[-1]) > 1e-3


def test_a_stop_is_obeyed_while_generating_and_while_starting(tmp_path, base):
    """In one directory: SIGTERM while a reward function does not return, with steps that are not
    saved; SIGTERM while Ray starts; Ctrl-C between steps. While the run goes on, another one is
    refused in the same directory."""
    stuck = tmp_path / "stuck"
    reward = write_reward(
        tmp_path / "reward.py",
        f"""import os, time
    while os.path.exists({str(stuck)!r}):
        time.sleep(0.1)
    return sum(c.isdigit() for c in solution_str) / 4""",
    )
    options = [
        "trainer.total_training_steps=500",
        "trainer.test_freq=-1",
        f"custom_reward_function.path={reward}",
    ]
    first = launch(tmp_path, "shared", base, *options)
    first.until_step(0)
    second = Launch(tmp_path / "shared", base, tmp_path / "second.log")
    assert second.wait() == 2
    assert f"in use by process {first.process.pid}" in second.text()
    first.until_step(2)
    stuck.touch()
    time.sleep(2)
    steps = steps_of(first)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait(30) == 75, first.text()
    stuck.unlink()
    last = steps_of(first)[-1]
    assert steps_of(first) == steps, "the step in progress was given up"
    assert f"SIGTERM: step {last} is not saved yet" in first.text()
    assert f"stopped by SIGTERM after step {last} of 500. Last checkpoint:" in first.text()
    assert pointer_of(first) == str(last)
    state = json.loads((first.run_dir / f"global_step_{last}" / "state.json").read_text())
    assert state["step"] == last
    first.assert_nothing_left()

    in_ray_init = """
import os, signal, threading
from verlite.controller import cluster
start = cluster._start_local
def interrupted(*args):
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
    start(*args)
cluster._start_local = interrupted
"""
    early = launch(tmp_path, "shared", base, *options, before=in_ray_init)
    assert early.wait(60) == 75, early.text()
    line = f"stopped by SIGTERM while starting Ray. Last checkpoint: {early.run_dir}/global_step_"
    assert f"{line}{last}. To resume, run the same command." in early.text()
    early.assert_nothing_left()

    resumed = launch(tmp_path, "shared", base, *options)
    resumed.until_step(last + 1)
    resumed.process.send_signal(signal.SIGINT)
    assert resumed.wait() == 130
    (step,) = re.findall(r"interrupted in step (\d+)", resumed.text())
    assert int(step) > last  # the step whose metrics are written may still be ending
    assert f"global_step_{last}. To resume, run the same command." in resumed.text()
    resumed.assert_nothing_left()


def test_a_stop_is_obeyed_while_waiting_for_a_head(tmp_path, base):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound but not listening
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        run = launch(tmp_path, "head", base, f"ray_kwargs.ray_init.address={address}")
        deadline = time.monotonic() + 60
        while "waiting for the Ray cluster" not in run.text():
            assert time.monotonic() < deadline and run.process.poll() is None, run.text()
            time.sleep(0.1)
        run.process.send_signal(signal.SIGUSR1)
        assert run.wait(15) == 75, run.text()
    assert f"address={address}: connection refused, giving up in 300 s" in run.text()
    assert "stopped by SIGUSR1 while starting workers. No checkpoint was saved" in run.text()


def test_a_killed_worker_ends_the_run_with_its_name(tmp_path, base):
    run = launch(tmp_path, "crash", base, "trainer.total_training_steps=500", *NO_VALIDATION)
    run.until_step(1)
    workers = [process for process in run.processes() if process.pid != run.process.pid]
    victims = [p for p in workers if any("actor_0.log" in file for file in open_files(p))]
    assert victims
    victims[0].kill()
    assert run.wait(60) == 76, run.text()
    assert "actor rank 0" in run.text()
    run.assert_nothing_left()


def open_files(process: psutil.Process) -> list[str]:
    folder = f"/proc/{process.pid}/fd"
    try:
        return [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]
    except OSError:
        return []


def test_too_many_failed_rewards_stop_the_run_with_the_first_traceback(tmp_path, base):
    reward = write_reward(tmp_path / "bad.py", "raise ZeroDivisionError('the scorer broke')")
    options = ["reward.check_ground_truth=false", *NO_VALIDATION]
    run = launch(tmp_path, "reward", base, f"custom_reward_function.path={reward}", *options)
    assert run.wait() == 1, run.text()
    for text in ("reward.max_error_rate", "ZeroDivisionError", "the scorer broke"):
        assert text in run.text()
    run.assert_nothing_left()


def test_a_run_refused_after_ray_started_leaves_no_processes(tmp_path, base):
    """Ray and the worker processes start before the driver has read its prompts."""
    run = launch(tmp_path, "refused", base, "data.max_prompt_length=1", before=RAY_STARTED)
    assert run.wait() == 2, run.text()
    assert "data.max_prompt_length" in run.text()
    assert "Ray has started" in run.text()
    run.assert_nothing_left()
