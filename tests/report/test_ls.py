"""`verlite ls`: one row per run, whatever its files look like."""

import fcntl
import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verlite.cli import app
from verlite.cli.runs import age
from verlite.control.exit_codes import DONE, FAILED, INTERRUPTED, STOPPED
from verlite.report import runs
from verlite.report.runs import find_runs, read_run
from verlite.trainer import run_record
from verlite.trainer.errors import RunRefused
from verlite.trainer.stop import Stop

HELD_OUT = "val-core/sums/reward/mean@1"


def make_run(run_dir: Path, lines=(), code: int | None = None, planned: int | None = 9) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    run_record.begin(run_dir)
    if planned is not None:
        run_record.plan(run_dir, planned)
    if lines:
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if code is not None:
        run_record.end(run_dir, code)
    return run_dir


@pytest.mark.parametrize(
    ("code", "state"),
    [(DONE, "done"), (STOPPED, "stopped"), (INTERRUPTED, "stopped"), (1, "failed")],
)
def test_the_state_is_the_recorded_end(tmp_path, code, state):
    assert read_run(make_run(tmp_path, [{"step": 9}], code)).state == state


def test_a_validated_run_with_steps_left_is_not_done(tmp_path):
    assert read_run(make_run(tmp_path, [{"step": 8}], DONE)).state == "validated"


def test_a_locked_run_is_running_and_one_without_an_end_was_killed(tmp_path):
    make_run(tmp_path, code=DONE)
    run_record.begin(tmp_path)
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(tmp_path).state == "running"
    row = read_run(tmp_path)
    assert row.state == "killed" and row.total_steps == 9
    assert f"process {os.getpid()} on " in row.note
    values = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**values, "host": "elsewhere"}))
    row = read_run(tmp_path)
    assert row.state == "unknown" and "on elsewhere recorded no end" in row.note


def test_a_lock_of_another_user_tells_nothing(tmp_path, monkeypatch):
    make_run(tmp_path, code=DONE)
    (tmp_path / ".lock").touch()
    monkeypatch.setattr(runs, "is_locked", lambda path: True)
    assert read_run(tmp_path).state == "running"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert read_run(tmp_path).state == "unknown"


def test_the_driver_records_its_plan_and_its_end(tmp_path):
    stop = Stop(embedded=True)
    stop.begin(tmp_path)
    assert run_record.read(tmp_path).exit_code is None
    run_record.plan(tmp_path, 40)
    stop.report(RunRefused("the folder\nis wrong"))
    stop.decide(DONE)  # too late
    row = read_run(tmp_path)
    assert (row.state, row.total_steps, row.note) == ("failed", 40, "the folder is wrong")
    Stop(embedded=True).begin(tmp_path)
    file = run_record.read(tmp_path)
    assert (file.exit_code, file.ended, file.total_steps) == (None, None, 40)


def test_the_score_is_the_last_validation_else_the_last_step(tmp_path):
    trained = [{"step": step, "critic/score/mean": step / 10} for step in range(1, 5)]
    row = read_run(make_run(tmp_path, trained, DONE))
    assert (row.step, row.score, row.score_name) == (4, 0.4, "critic/score/mean")
    trained[1][HELD_OUT] = 0.75
    trained[2][HELD_OUT] = None
    row = read_run(make_run(tmp_path, trained, DONE))
    assert (row.step, row.score, row.score_name) == (4, 0.75, HELD_OUT)
    trained[1]["val-core/more/reward/mean@1"] = 0.25
    row = read_run(make_run(tmp_path, trained, DONE))
    assert (row.score, row.score_name) == (0.5, "val-core")
    tuned = [{"step": 1, "train/loss": 2.0, "val/loss": 3.0}, {"step": 2, "train/loss": 1.0}]
    row = read_run(make_run(tmp_path, tuned, DONE))
    assert (row.step, row.score, row.score_name) == (2, 3.0, "val/loss")
    row = read_run(make_run(tmp_path, tuned[1:], DONE))
    assert (row.score, row.score_name) == (1.0, "train/loss")


def test_only_the_end_of_long_files_is_read(tmp_path, monkeypatch):
    lines = [{"step": step, "critic/score/mean": step / 1000} for step in range(1, 1000)]
    make_run(tmp_path, lines, DONE)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"val": unreadable\n' + path.read_text())
    assert "cannot be read: 1" in read_run(tmp_path).note
    monkeypatch.setattr(runs, "TAIL_BYTES", 100)
    row = read_run(tmp_path)
    assert (row.step, row.score, row.note) == (999, 0.999, "")


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        ("run.json", "{", "run.json cannot be read"),
        ("run.json", "[1]", "run.json is not a JSON object"),
        ("run.json", '{"total_steps": "many"}', "run.json has entries of another type"),
        ("run.json", None, "it has no run.json"),
        ("metrics.jsonl", "{broken\n[1]\n", "lines of metrics.jsonl that cannot be read: 2"),
        ("metrics.jsonl", "\xff" * 100, "lines of metrics.jsonl that cannot be read: 1"),
    ],
)
def test_damaged_files_are_in_the_note(tmp_path, name, content, note):
    make_run(tmp_path, [{"step": 9}], DONE)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content, encoding="latin-1")
    row = read_run(tmp_path)
    assert note in row.note
    if name == "run.json":
        assert (row.state, row.step, row.total_steps) == ("unknown", 9, None)
    else:
        assert (row.state, row.step, row.total_steps) == ("done", None, 9)


def test_folders_and_pipes_in_place_of_files(tmp_path):
    make_run(tmp_path, code=FAILED)
    (tmp_path / "error.json").write_text("[]")
    os.mkfifo(tmp_path / "metrics.jsonl")
    (tmp_path / "global_step_3").write_text("not a folder")
    row = read_run(tmp_path)
    assert "error.json cannot be read" in row.note and "not a regular file" in row.note
    assert (row.state, row.step, row.checkpoint) == ("failed", None, None)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    assert read_run(tmp_path).step is None


def test_runs_are_found_to_a_depth_and_newest_first(tmp_path):
    for number, name in enumerate(["old", "a/b/new", "a/deep/er/run", ".hidden"]):
        run_dir = make_run(tmp_path / name, code=DONE)
        os.utime(run_dir / "run.json", (1e9 + number, 1e9 + number))
    make_run(tmp_path / "old" / "inside", code=DONE)
    (tmp_path / "a" / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "a" / "unreadable").symlink_to("nowhere")
    checkpoint = tmp_path / "old" / "global_step_8"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text("{}")

    def names(depth):
        found = find_runs(tmp_path, depth)
        return [os.path.relpath(row.path, tmp_path) for row in found.rows], found.skipped

    assert names(4) == (["a/deep/er/run", "a/b/new", "old"], [])
    assert names(1) == (["old"], ["folders deeper than --depth=1, not looked into: 3"])
    assert [row.checkpoint for row in find_runs(tmp_path, 1).rows] == [8]
    assert [row.path for row in find_runs(tmp_path / "old", 0).rows] == [str(tmp_path / "old")]


def test_large_trees_are_not_read_to_their_end(tmp_path, monkeypatch):
    for number in range(5):
        (tmp_path / f"folder{number}").mkdir()
    make_run(tmp_path / "folder0", code=DONE)
    monkeypatch.setattr(runs, "MAX_ENTRIES", 3)
    assert find_runs(tmp_path, 2).skipped == [f"{tmp_path}: only 3 of its entries were looked at"]
    monkeypatch.setattr(runs, "LIMIT_S", -1.0)
    found = find_runs(tmp_path, 2)
    assert not found.rows and "some folders were not looked into" in found.skipped[0]


def test_the_command(tmp_path):
    lines = [{"step": 3, "critic/score/mean": 0.25, HELD_OUT: 0.5}]
    make_run(tmp_path / "project" / "first", lines, STOPPED)
    sixty = time.time() - 7200
    for file in (tmp_path / "project" / "first").iterdir():
        os.utime(file, (sixty, sixty))
    make_run(tmp_path / "project" / "[red]second", code=FAILED, planned=None)
    (tmp_path / "project" / "[red]second" / "error.json").write_text('{"message": "no\\n[bold]"}')
    result = CliRunner().invoke(app, ["ls", str(tmp_path)])
    assert result.exit_code == 0
    _, second, first = (line.split() for line in result.output.splitlines())
    assert first == ["project/first", "stopped", "3/9", "0.5", "held", "out", "-", "2", "h"]
    assert second[:5] == ["project/[red]second", "failed", "-", "-", "-"]
    assert second[7:] == ["no", "[bold]"]
    as_json = CliRunner().invoke(app, ["ls", str(tmp_path), "--json"])
    (newest, oldest) = json.loads(as_json.stdout)
    assert newest["state"] == "failed"
    assert (oldest["step"], oldest["total_steps"], oldest["score"]) == (3, 9, 0.5)
    assert oldest["score_name"] == HELD_OUT and abs(oldest["written"] - sixty) < 1


def test_folders_without_runs(tmp_path):
    result = CliRunner().invoke(app, ["ls", str(tmp_path)])
    assert result.exit_code == 0 and "has no run directories" in result.output
    assert CliRunner().invoke(app, ["ls", str(tmp_path), "--json"]).stdout == "[]\n"
    result = CliRunner().invoke(app, ["ls", str(tmp_path / "none")])
    assert result.exit_code == 2 and "does not exist" in result.output


def test_ages_have_one_unit():
    assert [age(s) for s in (-3, 59, 90, 7200, 3 * 86400)] == ["0 s", "59 s", "2 min", "2 h", "3 d"]
