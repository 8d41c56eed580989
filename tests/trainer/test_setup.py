"""What a run takes over from a checkpoint and what it refuses; whole runs are in test_runs.py."""

import os

import pytest

from tests.trainer.test_stages import a_run
from verlite.algorithms.kl import AdaptiveKLController, FixedKLController
from verlite.config.critical import critical_settings
from verlite.trainer.begin import from_anywhere, hold, refuse_changed_settings
from verlite.trainer.checkpoints import Checkpoint
from verlite.trainer.errors import RunRefused
from verlite.trainer.setup import restore

STATE = {"step": 6, "version": 9, "kl_controller": {"value": 0.25}}


@pytest.mark.parametrize(("kind", "weight"), [("fixed", 0.1), ("adaptive", 0.25)])
@pytest.mark.parametrize("moved", [False, True])
def test_a_resumed_run_goes_on_where_the_checkpoint_was(tmp_path, kind, weight, moved):
    """A fixed KL weight is the configuration's. What lies in another run's directory is not saved in this one's yet."""
    kl = FixedKLController(0.1) if kind == "fixed" else AdaptiveKLController(0.1, 6.0, 100)
    run = a_run(kl=kl, run_dir=tmp_path / "new" if moved else tmp_path, total_steps=10)
    run.config.algorithm.kl_ctrl.type = kind
    restore(run, Checkpoint(tmp_path / "global_step_6", 6), STATE)
    assert (run.step, run.resumed_step, run.kl.value) == (6, 6, weight)
    assert run.version + 1 == 9, (
        "the first sync gives the engines the saved weights under the version that they had"
    )
    assert run.saved_step == (0 if moved else 6)


def test_settings_that_give_other_numbers_are_refused_all_at_once():
    config = a_run().config
    saved = critical_settings(config) | {"data.seed": 7, "data.shuffle": False}
    with pytest.raises(
        RunRefused,
        match=r"data.seed: 7 in the checkpoint, 42 now\n  data.shuffle: False in the checkpoint, True now",
    ):
        refuse_changed_settings(config, saved)
    refuse_changed_settings(config, critical_settings(config))
    refuse_changed_settings(config, {})  # no checkpoint


def test_workers_find_the_drivers_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy").mkdir()
    given = a_run().config
    given.actor_rollout_ref.model.path, given.critic.model.path, given.trainer.default_local_dir = (
        "policy",
        "Qwen/Qwen2.5-0.5B",
        "run",
    )
    config = from_anywhere(given)
    assert config.actor_rollout_ref.model.path == str(tmp_path / "policy")
    assert config.critic.model.path == "Qwen/Qwen2.5-0.5B", "a name on the hub is no folder"
    assert config.trainer.default_local_dir == str(tmp_path / "run")
    assert given.actor_rollout_ref.model.path == "policy"


def test_a_run_directory_is_held_until_its_holder_ends(tmp_path):
    lock = hold(tmp_path / "run")
    with pytest.raises(RunRefused, match=f"in use by process {os.getpid()}"):
        hold(tmp_path / "run")
    lock.close()
    hold(tmp_path / "run").close()
    (tmp_path / "file").touch()
    with pytest.raises(RunRefused, match="cannot be written"):
        hold(tmp_path / "file" / "run")
