"""A checkpoint is either complete or ignored, even if its writing is interrupted."""

import errno
import json
import os

import pytest

from tests.trainer.runs import driver_state
from verlite.controller import supervisor_file
from verlite.trainer import checkpoints
from verlite.trainer.checkpoints import CheckpointError, defect, find, newest, prune, write


def save(run_dir, step, payload=b"weights"):
    def save_parts(folder):
        (folder / "actor").mkdir()
        (folder / "actor" / "shard.bin").write_bytes(payload)

    return write(run_dir, step, driver_state(step), save_parts)


def disk_full(folder):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_written_checkpoint_is_complete_and_found(tmp_path):
    save(tmp_path, 3)
    found = newest(tmp_path, pytest.fail)
    assert found.step == 3
    assert found.state()["step"] == 3
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert defect(found.path) is None


def test_a_kill_during_a_save_leaves_the_older_checkpoint(tmp_path):
    save(tmp_path, 3)

    def killed(folder):
        (folder / "half").write_bytes(b"x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 6, {}, killed)
    assert newest(tmp_path, pytest.fail).step == 3
    assert not list(tmp_path.glob(".tmp*"))


@pytest.mark.parametrize("leftover", [".tmp_global_step_6", "global_step_6"])
def test_folders_without_a_manifest_are_ignored_with_a_warning(tmp_path, leftover):
    save(tmp_path, 3)
    (tmp_path / leftover).mkdir()
    (tmp_path / leftover / "half").write_bytes(b"x")
    warnings = []
    assert newest(tmp_path, warnings.append).step == 3
    assert any("global_step_6" in line for line in warnings)


@pytest.mark.parametrize("pointer", ["", "garbage", "99", None])
def test_a_wrong_pointer_file_is_repaired(tmp_path, pointer):
    save(tmp_path, 3)
    path = tmp_path / "latest_checkpointed_iteration.txt"
    if pointer is None:
        path.unlink()
    else:
        path.write_text(pointer)
    warnings = []
    assert newest(tmp_path, warnings.append).step == 3
    assert path.read_text() == "3"
    assert len(warnings) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b"weightX"),
        lambda file: file.write_bytes(b"weigh"),
        lambda file: file.unlink(),
    ],
    ids=["changed", "truncated", "deleted"],
)
def test_a_damaged_shard_is_named_and_the_older_checkpoint_is_used(tmp_path, damage):
    save(tmp_path, 3)
    damage(save(tmp_path, 6).path / "actor" / "shard.bin")
    warnings = []
    assert find(tmp_path, "auto", None, warnings.append).step == 3
    assert "shard.bin" in " ".join(warnings)
    with pytest.raises(CheckpointError, match="shard.bin"):
        find(tmp_path, "resume_path", str(tmp_path / "global_step_6"), warnings.append)


def test_auto_refuses_to_start_over_if_all_checkpoints_are_damaged(tmp_path):
    (save(tmp_path, 3).path / "actor" / "shard.bin").unlink()
    with pytest.raises(CheckpointError, match="resume_mode=disable"):
        find(tmp_path, "auto", None, lambda text: None)
    assert find(tmp_path, "disable", None, pytest.fail) is None


def test_a_full_disk_leaves_older_checkpoints(tmp_path):
    save(tmp_path, 3)
    message = "(?s)No space left.*needs about .* bytes;.* free.*Older checkpoints are unchanged"
    with pytest.raises(CheckpointError, match=message):
        write(tmp_path, 6, {}, disk_full)
    assert newest(tmp_path, pytest.fail).step == 3


def test_a_failed_first_save_mentions_no_older_checkpoints(tmp_path):
    with pytest.raises(CheckpointError) as failure:
        write(tmp_path, 6, {}, disk_full)
    assert "Older" not in str(failure.value)
    assert newest(tmp_path, pytest.fail) is None


def test_too_little_space_is_refused_before_writing(tmp_path, monkeypatch):
    save(tmp_path, 3)
    usage = checkpoints.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: usage._replace(free=3))
    with pytest.raises(CheckpointError, match="It needs about 4.. bytes; .* has 3 bytes free"):
        save(tmp_path, 6)


def test_pruning_keeps_at_least_the_newest(tmp_path):
    for step in (9, 10, 11):
        save(tmp_path, step)
    prune(tmp_path, 11, 0, pytest.fail)
    assert [p.name for p in tmp_path.glob("global_step_*")] == ["global_step_11"]


def test_pruning_leaves_later_folders_and_counts_only_older_ones(tmp_path):
    """A run that resumed from step 3 passed over damaged folders of later steps."""
    for step in (1, 2, 3, 8, 9):
        save(tmp_path, step)
    save(tmp_path, 4)
    prune(tmp_path, 4, 2, pytest.fail)
    left = [checkpoints.step_of(path) for path in tmp_path.glob("global_step_*")]
    assert sorted(left) == [3, 4, 8, 9]


def test_a_half_deleted_checkpoint_is_incomplete(tmp_path, monkeypatch):
    for step in (3, 6):
        save(tmp_path, step)

    def busy(folder):
        raise OSError("busy")

    warnings = []
    monkeypatch.setattr(checkpoints.shutil, "rmtree", busy)
    prune(tmp_path, 6, 1, warnings.append)
    assert "global_step_3 could not be deleted: busy" in warnings[0]
    assert defect(tmp_path / "global_step_3")
    assert not defect(tmp_path / "global_step_6")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("weights", "global_step_N"),
        ("global_step_1", "does not exist"),
        ("global_step_2", "is not a directory"),
    ],
)
def test_resume_path_must_be_a_checkpoint_folder(tmp_path, name, message):
    (tmp_path / "weights").mkdir()
    (tmp_path / "global_step_2").touch()
    with pytest.raises(CheckpointError, match=message):
        find(tmp_path, "resume_path", str(tmp_path / name), pytest.fail)


def test_the_manifest_lists_every_file_but_itself(tmp_path):
    folder = save(tmp_path, 1).path
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(manifest) == ["actor/shard.bin", "state.json"]


def test_disable_resumes_after_a_restart_by_the_supervisor_from_its_own_checkpoints(
    tmp_path, monkeypatch
):
    """Those of an earlier run in the directory, here of a later step, are not its own."""
    save(tmp_path, 30)
    os.utime(tmp_path / "global_step_30" / "manifest.json", (1000, 1000))
    monkeypatch.setenv(supervisor_file.STARTED, "2000")
    monkeypatch.setenv(supervisor_file.RESTARTS, "1")
    assert find(tmp_path, "disable", None, pytest.fail) is None
    save(tmp_path, 3)
    assert find(tmp_path, "auto", None, lambda text: None).step == 30
    warnings = []
    assert find(tmp_path, "disable", None, warnings.append).step == 3
    assert "counts for the first start" in warnings[-1]
    monkeypatch.setenv(supervisor_file.RESTARTS, "0")
    assert find(tmp_path, "disable", None, pytest.fail) is None
