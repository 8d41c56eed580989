import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from verlite.controller import leftovers


def sleeper(mark):
    name, _, value = mark.partition("=")
    return subprocess.Popen(["sleep", "300"], env={**os.environ, name: value})


def note(run_dir, mark, folder, driver_lives=False):
    """Write the note of a run whose driver has ended."""
    leftovers.note(run_dir, mark, folder)
    path = run_dir / leftovers.NOTE
    noted = json.loads(path.read_text())
    assert noted["driver"][0] == os.getpid()
    if not driver_lives:
        noted["driver"][1] -= 1  # the number of another process that had this id before
        path.write_text(json.dumps(noted))


@pytest.mark.parametrize("driver_lives", [True, False])
def test_a_copy_of_a_run_directory_ends_nothing(tmp_path, driver_lives):
    original, copy = tmp_path / "original", tmp_path / "copy"
    (original / "logs").mkdir(parents=True)
    mark = f"VERLITE_RUN={os.getpid()}-0123456789abcdef"
    worker = sleeper(mark)
    folder = Path(tempfile.mkdtemp(prefix="verlite-", dir="/tmp"))
    try:
        note(original, mark, str(folder), driver_lives)
        shutil.copytree(original, copy)
        assert not leftovers.clean(copy)
        assert worker.poll() is None
        assert folder.exists()
        assert leftovers.clean(original) is not driver_lives
        assert folder.exists() is driver_lives
    finally:
        worker.kill()
        worker.wait()
        shutil.rmtree(folder, ignore_errors=True)


def test_the_next_run_ends_what_the_last_one_left(tmp_path):
    (tmp_path / "logs").mkdir()
    mark = f"VERLITE_RUN={os.getpid()}-0123456789abcdef"
    own, worker, other = sleeper(mark), sleeper(f"{mark}/ray"), sleeper(f"{mark}0")
    folder = tempfile.mkdtemp(prefix="verlite-", dir="/tmp")
    try:
        note(tmp_path, mark, folder)
        assert leftovers.clean(tmp_path)
        assert own.wait(10) == worker.wait(10) == -9
        assert other.poll() is None
        assert not Path(folder).exists()
        assert not leftovers.clean(tmp_path), "the note is gone"
    finally:
        for process in (own, worker, other):
            process.kill()
            process.wait()


def test_a_note_can_remove_only_a_private_folder_of_a_run(tmp_path):
    (tmp_path / "logs").mkdir()
    link = Path(tempfile.mkdtemp(prefix="verlite-", dir="/tmp"))
    link.rmdir()
    victim = tmp_path / "victim"
    victim.mkdir()
    link.symlink_to(victim)
    try:
        for folder in (str(victim), str(link), f"{link}/../{victim.name}"):
            note(tmp_path, "PATH=/usr/bin", folder)
            assert not leftovers.clean(tmp_path)
            assert victim.exists()
            assert not (tmp_path / leftovers.NOTE).exists(), "it was read"
    finally:
        link.unlink()
