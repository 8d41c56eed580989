"""Restore a run from a checkpoint, lock its directory, stop it. Whole runs: test_runs.py."""

import gc
import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.trainer.test_finish import fake_run
from tests.trainer.test_stages import Screen
from verlite.algorithms.kl import KLController
from verlite.config.critical import critical_settings
from verlite.config.plan import engine_settings
from verlite.config.schema import Config, DataConfig
from verlite.control.machine import Machine
from verlite.controller import supervisor_file
from verlite.trainer import build, checkpoints, checks, command, launch, opening, ppo
from verlite.trainer.build import restore
from verlite.trainer.checkpoints import MANIFEST, Checkpoint, CheckpointError
from verlite.trainer.common_checks import refuse_changes, steps_left
from verlite.trainer.errors import AlreadyComplete, RunRefused, ServiceMissing
from verlite.trainer.opening import (
    absolutize_paths,
    checkpoint_text,
    lock_run_dir,
    newest_saved,
    rl_preflight,
)
from verlite.trainer.run import Run
from verlite.trainer.saving import STEP_FILE
from verlite.trainer.tracking import read_lines

STATE = {"step": 6, "version": 9, "kl_controller": {"value": 0.25}}


def a_config() -> Config:
    return Config(data=DataConfig(train_files="x"))


@pytest.mark.parametrize(("kind", "weight"), [("fixed", 0.1), ("adaptive", 0.25)])
@pytest.mark.parametrize("moved", [False, True])
def test_restore_sets_step_version_and_kl_weight(tmp_path, kind, weight, moved, monkeypatch):
    """A fixed KL coefficient comes from the configuration.

    A checkpoint of another run is not a save.
    """
    kl = KLController(0.1) if kind == "fixed" else KLController(0.1, 6.0, 100)
    run_dir = tmp_path / "new" if moved else tmp_path
    run = fake_run(run_dir, kl=kl, total_steps=10)
    run.config.algorithm.kl_ctrl.type = kind
    monkeypatch.setattr(opening, "make_plan", lambda config: None)
    found = rl_preflight(run.config)
    found.run_dir, found.state = run_dir, STATE
    found.checkpoint = Checkpoint(tmp_path / "global_step_6", 6)
    restore(run, STATE)
    run.begin(newest_saved(found))
    assert (run.step, run.stop.machine.resumed_step, run.kl.value) == (6, 6, weight)
    assert run.version + 1 == 9, "the first sync sends the saved weights under their old version"
    assert run.stop.machine.saved_step == (0 if moved else 6)


def test_changed_settings_are_refused_in_one_message():
    config = a_config()
    saved = critical_settings(config) | {"data.seed": 7, "data.shuffle": False}
    message = (
        r"data.seed: 7 in the checkpoint, 42 now\n"
        r"  data.shuffle: False in the checkpoint, True now"
    )
    with pytest.raises(RunRefused, match=message):
        refuse_changes(critical_settings(config), saved)
    assert refuse_changes(critical_settings(config), critical_settings(config)) == []


AWAY = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    "service", ["reward_function", "tools", "generation_servers", "reference_service"]
)
def test_a_service_that_is_away_is_told_from_other_refusals(service, monkeypatch):
    """After a loss `verlite supervise` waits for it."""
    config = a_config()
    config.reward.remote.url = f"{AWAY}/get_reward"
    config.retriever.url = f"{AWAY}/retrieve"
    config.env.name = "search"
    config.actor_rollout_ref.ref.url = AWAY
    config.actor_rollout_ref.rollout.servers = [AWAY]
    config.actor_rollout_ref.rollout.server_wait_s = 0.0
    plan = SimpleNamespace(max_turns=2, servers=True, max_model_len=8, rollout_dtype="float32")
    plan.reference_urls = [AWAY]
    monkeypatch.setattr(opening, "make_plan", lambda config: plan)
    with pytest.raises(ServiceMissing, match=AWAY):
        getattr(checks, service)(rl_preflight(config))


def test_relative_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy").mkdir()
    given = a_config()
    given.actor_rollout_ref.model.path = "policy"
    given.critic.model.path = "Qwen/Qwen2.5-0.5B"
    given.trainer.default_local_dir = "run"
    config = absolutize_paths(given)
    assert config.actor_rollout_ref.model.path == str(tmp_path / "policy")
    assert config.critic.model.path == "Qwen/Qwen2.5-0.5B", "a name on the hub is not a folder"
    assert config.trainer.default_local_dir == str(tmp_path / "run")
    assert given.actor_rollout_ref.model.path == "policy"


def test_a_run_directory_is_locked_until_its_owner_ends(tmp_path):
    lock = lock_run_dir(tmp_path / "run")
    with pytest.raises(RunRefused, match=f"in use by process {os.getpid()}"):
        lock_run_dir(tmp_path / "run")
    lock.close()
    lock_run_dir(tmp_path / "run").close()
    (tmp_path / "file").touch()
    with pytest.raises(RunRefused, match="cannot be written"):
        lock_run_dir(tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("mode", "saved", "text"),
    [
        ("auto", True, "global_step_4. To resume, run the same command."),
        ("disable", True, "run the same command with trainer.resume_mode=auto."),
        ("auto", False, "No checkpoint was saved"),
        ("disable", False, "No checkpoint was saved"),
    ],
)
def test_the_line_about_a_stop_names_the_last_checkpoint(tmp_path, mode, saved, text):
    config = a_config()
    config.trainer.default_local_dir = str(tmp_path)
    config.trainer.resume_mode = mode
    if saved:
        (tmp_path / "global_step_4").mkdir()
        (tmp_path / "global_step_4" / MANIFEST).touch()
    assert text in checkpoint_text(config, 9.0) and "Files" not in checkpoint_text(config, 9.0)
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "logs").mkdir()
    assert checkpoint_text(config, 9.0).endswith(f". Files: metrics.jsonl, logs in {tmp_path}.")


@pytest.mark.parametrize("mode", ["disable", "resume_path"])
def test_the_line_about_a_stop_names_no_checkpoint_of_an_earlier_run(tmp_path, monkeypatch, mode):
    """A run that starts over in a used directory, without and under `verlite supervise`."""
    config = a_config()
    config.trainer.default_local_dir = str(tmp_path)
    config.trainer.resume_mode = mode
    for step, saved_at in ((4, 200.0), (50, 50.0)):
        manifest = tmp_path / f"global_step_{step}" / MANIFEST
        manifest.parent.mkdir()
        manifest.touch()
        os.utime(manifest, (saved_at, saved_at))
    path = tmp_path / "global_step_4"
    assert checkpoint_text(config, 300.0).startswith("No checkpoint was saved")
    text = checkpoint_text(config, 100.0)
    assert text.startswith(f"Last checkpoint: {path}. ")
    assert f"trainer.resume_mode=resume_path trainer.resume_from_path={path}." in text
    monkeypatch.setenv(supervisor_file.STARTED, "100.0")
    assert checkpoint_text(config, 300.0) == text, "an earlier attempt of this command saved it"
    config.trainer.resume_mode = "auto"
    assert "global_step_50. To resume, run the same command." in checkpoint_text(config, 300.0)


@pytest.mark.parametrize(
    ("step", "exported", "export_hf", "val_only", "complete"),
    [
        (5, "5", True, False, True),
        (5, "4", True, False, False),  # an export of the run when it had fewer steps
        (5, None, True, False, False),
        (5, None, False, False, True),
        (5, "5", True, True, False),
        (4, "4", True, False, False),
    ],
)
def test_a_run_is_complete_once_its_last_step_is_exported(
    tmp_path, monkeypatch, step, exported, export_hf, val_only, complete
):
    config = a_config()
    config.trainer.default_local_dir = str(tmp_path)
    config.trainer.export_hf, config.trainer.val_only = export_hf, val_only
    config.trainer.total_training_steps = 5
    if exported:
        (tmp_path / "huggingface").mkdir()
        (tmp_path / "huggingface" / STEP_FILE).write_text(exported)
    monkeypatch.setattr(opening, "make_plan", lambda config: None)
    found = rl_preflight(config)
    found.sampler = SimpleNamespace(size=1)
    found.state = {"step": step, "metrics": {"loss": 1.0}}
    if not complete:
        steps_left(found)
        assert found.total_steps == 5
        return
    with pytest.raises(AlreadyComplete, match="step 5 of 5"):
        steps_left(found)
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert line["step"] == 5 and line["loss"] == 1.0


@pytest.mark.parametrize("resumed_step", [0, 2])
def test_the_export_of_another_run_is_renamed(tmp_path, resumed_step):
    """A run that resumed replaces its own export."""

    def export_hf(folder):
        Path(folder).mkdir()
        (Path(folder) / "config.json").write_text("new")
        return [None]

    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "config.json").write_text("old")
    shown = []
    run = SimpleNamespace(
        run_dir=tmp_path,
        actor=SimpleNamespace(export_hf=export_hf),
        stop=SimpleNamespace(machine=SimpleNamespace(resumed_step=resumed_step)),
        step=3,
        display=SimpleNamespace(info=shown.append),
    )
    build.export(run)
    found = {path.parent: path.read_text() for path in tmp_path.glob("*/config.json")}
    assert found.pop(tmp_path / "huggingface") == "new"
    assert list(found.values()) == ([] if resumed_step else ["old"])
    assert all(str(path) in shown[0] for path in found) and len(shown) == len(found)


@pytest.mark.parametrize(("saved", "saves"), [(2, 0), (0, 1)])
def test_a_stopped_run_saves_unsaved_steps(tmp_path, monkeypatch, saved, saves):
    run = fake_run(tmp_path, resumed_step=2, saved_step=saved)
    saved_steps = []

    def save(run):
        saved_steps.append(run.step)
        return run.tell(Machine.saved)

    monkeypatch.setattr(build, "save", save)
    assert build.finalize(run) == 75
    assert saved_steps == [2] * saves


def test_a_stopped_run_fails_if_its_steps_cannot_be_saved(tmp_path, monkeypatch):
    def fail(*arguments):
        raise CheckpointError("full")

    run = fake_run(tmp_path, resumed_step=2)
    monkeypatch.setattr(checkpoints, "write", fail)
    monkeypatch.setattr(Run, "state", lambda run: {})
    with pytest.raises(CheckpointError, match="after step 2"):
        build.finalize(run)


@pytest.mark.parametrize(
    ("kind", "offload", "expected"),
    [
        ("cuda", True, "actor . critic . .. rollout ..."),
        ("cuda", False, "actor critic .. rollout ..."),
        ("cpu", True, "actor critic rollout ..."),
    ],
)
def test_a_role_that_offloads_is_built_before_the_next_one_starts(
    monkeypatch, kind, offload, expected
):
    """Together their models may not fit on a GPU."""
    config = a_config()
    config.actor_rollout_ref.actor.fsdp_config.optimizer_offload = offload
    config.critic.model.fsdp_config.param_offload = offload
    events = []
    monkeypatch.setattr(build, "spawn", lambda cls, placement, role, *args: events.append(role))
    monkeypatch.setattr(build, "ready", lambda *groups: events.append("." * len(groups)))

    def spec_of(role, config, plan, total_steps):
        fsdp = engine_settings(config, role, kind) if role != "rollout" else None
        return SimpleNamespace(engine=SimpleNamespace(fsdp=fsdp))

    monkeypatch.setattr(build, "role_spec", spec_of)
    plan = SimpleNamespace(roles=("actor", "critic", "rollout"))
    build.start_workers(SimpleNamespace(kind=kind), config, plan, 1, None, Screen())
    assert " ".join(events) == expected


def test_a_training_command_collects_garbage_rarely(monkeypatch):
    seen = []

    @contextmanager
    def opened(given):
        yield given

    monkeypatch.setattr(launch, "launched", lambda loaded, stop: opened(loaded))
    monkeypatch.setattr(build, "open_run", opened)
    monkeypatch.setattr(build, "finalize", lambda run: 0)
    monkeypatch.setattr(ppo, "train", lambda run: seen.append(gc.get_threshold()))
    before = gc.get_threshold()
    assert before[0] < 100_000
    assert command.train_rl("run", SimpleNamespace(decide=lambda code: code)) == 0
    assert seen == [(100_000, *before[1:])] and gc.get_threshold() == before
