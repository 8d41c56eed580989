"""A missing login of a tracker is noticed without a network."""

from pathlib import Path

import pytest

from verlite.trainer import trackers


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_no_login_is_named_with_its_command():
    assert "`wandb login`" in trackers.wandb_problem({})
    assert "`swanlab login`" in trackers.swanlab_problem({})


@pytest.mark.parametrize(
    "env", [{"WANDB_API_KEY": "k"}, {"WANDB_MODE": "offline"}, {"WANDB_MODE": "disabled"}]
)
def test_variables_decide_for_wandb(env):
    assert trackers.wandb_problem(env) is None


@pytest.mark.parametrize("env", [{"SWANLAB_API_KEY": "k"}, {"SWANLAB_MODE": "offline"}])
def test_variables_decide_for_swanlab(env):
    assert trackers.swanlab_problem(env) is None


def test_a_netrc_entry_counts_only_for_its_server(home):
    (home / ".netrc").write_text("machine api.wandb.ai login user password k\n")
    assert trackers.wandb_problem({}) is None
    assert "for w.example" in trackers.wandb_problem({"WANDB_BASE_URL": "https://w.example"})
    (home / "other").write_text("machine w.example login user password k\n")
    env = {"WANDB_BASE_URL": "https://w.example", "NETRC": str(home / "other")}
    assert trackers.wandb_problem(env) is None


def test_a_broken_netrc_is_no_login(home):
    (home / ".netrc").write_bytes(b"machine \xff\n)(")
    assert trackers.wandb_problem({}) is not None


def test_wandbs_settings_file_counts(home):
    folder = home / ".config" / "wandb"
    folder.mkdir(parents=True)
    (folder / "settings").write_text("[default]\nbase_url = https://w.example\n")
    assert "for w.example" in trackers.wandb_problem({})
    (folder / "settings").write_text("[default]\nmode = offline\n")
    assert trackers.wandb_problem({}) is None


def test_swanlabs_login_file_counts(home):
    (home / ".swanlab").mkdir()
    (home / ".swanlab" / ".netrc").write_text("machine x login y password z\n")
    assert trackers.swanlab_problem({}) is None


def test_notes_name_the_tracker_and_see_the_runs_variables():
    (note,) = trackers.login_notes(["console", "wandb", "tensorboard"], {})
    assert note.startswith("trainer.logger=wandb: no login") and "wandb sync" in note
    assert trackers.login_notes(["wandb"], {"WANDB_API_KEY": "k"}) == []
