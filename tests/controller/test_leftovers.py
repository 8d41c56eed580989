import json
import os
import subprocess
import tempfile
from pathlib import Path

from verlite.controller import leftovers


def sleeper(mark):
    name, _, value = mark.partition("=")
    return subprocess.Popen(["sleep", "300"], env={**os.environ, name: value})


def test_the_next_run_ends_what_the_last_one_left(tmp_path):
    (tmp_path / "logs").mkdir()
    mark = f"VERLITE_RUN={os.getpid()}-0123456789abcdef"
    own, worker, other = sleeper(mark), sleeper(f"{mark}/ray"), sleeper(f"{mark}0")
    folder = tempfile.mkdtemp(prefix="verlite-", dir="/tmp")
    try:
        leftovers.note(tmp_path, mark, folder)
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
            note = {"mark": "PATH=/usr/bin", "folder": folder}
            (tmp_path / leftovers.NOTE).write_text(json.dumps(note))
            assert not leftovers.clean(tmp_path)
            assert victim.exists()
    finally:
        link.unlink()
