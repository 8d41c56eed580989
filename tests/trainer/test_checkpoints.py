"""A checkpoint is complete or absent (S1-S6 at the file level)."""

import errno
import json

import pytest

from verlite.trainer import checkpoints
from verlite.trainer.checkpoints import CheckpointError, defect, find, newest, prune, write


def save(run_dir, step, payload=b"weights"):
    def parts(folder):
        (folder / "actor").mkdir()
        (folder / "actor" / "shard.bin").write_bytes(payload)

    return write(run_dir, step, {"step": step}, parts)


def test_a_written_checkpoint_is_found_complete(tmp_path):
    save(tmp_path, 3)
    found = newest(tmp_path, pytest.fail)
    assert (found.step, found.state()["step"]) == (3, 3)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert defect(found.path) is None


def test_a_kill_while_saving_leaves_the_older_checkpoint_in_charge(tmp_path):
    save(tmp_path, 3)

    def killed(folder):
        (folder / "half").write_bytes(b"x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 6, {}, killed)
    assert newest(tmp_path, pytest.fail).step == 3
    assert not list(tmp_path.glob(".tmp*"))


@pytest.mark.parametrize("leftover", [".tmp_global_step_6", "global_step_6"])
def test_folders_without_a_manifest_are_told_and_ignored(tmp_path, leftover):
    save(tmp_path, 3)
    (tmp_path / leftover).mkdir()
    (tmp_path / leftover / "half").write_bytes(b"x")
    told = []
    assert newest(tmp_path, told.append).step == 3
    assert any("global_step_6" in line for line in told)


@pytest.mark.parametrize("pointer", ["", "garbage", "99", None])
def test_a_wrong_pointer_is_repaired_by_looking(tmp_path, pointer):
    save(tmp_path, 3)
    path = tmp_path / "latest_checkpointed_iteration.txt"
    path.unlink() if pointer is None else path.write_text(pointer)
    told = []
    assert newest(tmp_path, told.append).step == 3
    assert path.read_text() == "3" and len(told) == 1


@pytest.mark.parametrize(
    "damage",
    [lambda f: f.write_bytes(b"weightX"), lambda f: f.write_bytes(b"weigh"), lambda f: f.unlink()],
)
def test_a_damaged_shard_is_named_and_the_one_before_is_used(tmp_path, damage):
    save(tmp_path, 3)
    damage(save(tmp_path, 6).path / "actor" / "shard.bin")
    told = []
    assert find(tmp_path, "auto", None, told.append).step == 3
    assert "shard.bin" in " ".join(told)
    with pytest.raises(CheckpointError, match="shard.bin"):
        find(tmp_path, "resume_path", str(tmp_path / "global_step_6"), told.append)


def test_never_from_scratch_while_only_damaged_checkpoints_exist(tmp_path):
    (save(tmp_path, 3).path / "actor" / "shard.bin").unlink()
    with pytest.raises(CheckpointError, match="resume_mode=disable"):
        find(tmp_path, "auto", None, lambda text: None)
    assert find(tmp_path, "disable", None, pytest.fail) is None


def test_a_full_disk_costs_nothing_but_the_new_checkpoint(tmp_path):
    save(tmp_path, 3)

    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left.*GiB free"):
        write(tmp_path, 6, {}, full)
    assert newest(tmp_path, pytest.fail).step == 3


def test_too_little_space_is_refused_before_writing(tmp_path, monkeypatch):
    save(tmp_path, 3)
    usage = checkpoints.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: usage._replace(free=3))
    with pytest.raises(CheckpointError, match="needs about"):
        save(tmp_path, 6)


def test_pruning_keeps_the_newest_and_never_none(tmp_path):
    for step in (9, 10, 11):
        save(tmp_path, step)
    prune(tmp_path, 0, pytest.fail)
    assert [p.name for p in tmp_path.glob("global_step_*")] == ["global_step_11"]


def test_a_checkpoint_that_is_half_deleted_is_none(tmp_path, monkeypatch):
    for step in (3, 6):
        save(tmp_path, step)

    def refused(folder):
        raise OSError("busy")

    told = []
    monkeypatch.setattr(checkpoints.shutil, "rmtree", refused)
    prune(tmp_path, 1, told.append)
    assert "global_step_3 could not be deleted: busy" in told[0]
    assert defect(tmp_path / "global_step_3") and not defect(tmp_path / "global_step_6")


def test_a_resume_path_must_name_a_step(tmp_path):
    (tmp_path / "weights").mkdir()
    with pytest.raises(CheckpointError, match="global_step_N"):
        find(tmp_path, "resume_path", str(tmp_path / "weights"), pytest.fail)
    with pytest.raises(CheckpointError, match="no such folder"):
        find(tmp_path, "resume_path", str(tmp_path / "global_step_1"), pytest.fail)


def test_the_manifest_lists_every_file_but_itself(tmp_path):
    folder = save(tmp_path, 1).path
    assert sorted(json.loads((folder / "manifest.json").read_text())) == [
        "actor/shard.bin",
        "state.json",
    ]
