"""trainer.max_runtime: when the run must have ended. tests/control has when it stops."""

import json
import time

import pytest

from verlite.controller.supervisor_file import STARTED
from verlite.trainer import time_limit
from verlite.trainer.time_limit import end_of_wall_time, longest


def test_the_time_counts_from_the_allocation():
    assert end_of_wall_time("1h", 1000.0, {}) == 4600.0
    assert end_of_wall_time("1h", 1000.0, {"SLURM_JOB_START_TIME": "400"}) == 4000.0
    ends = {"SLURM_JOB_START_TIME": "400", "SLURM_JOB_END_TIME": "2200"}
    assert end_of_wall_time("1h", 1000.0, ends) == 2200.0
    assert end_of_wall_time("10m", 1000.0, ends) == 1000.0
    assert end_of_wall_time(None, 1000.0, ends) is None
    assert end_of_wall_time("1h", 1000.0, {"SLURM_JOB_START_TIME": "Unknown"}) == 4600.0


def test_under_verlite_supervise_the_time_counts_from_its_start():
    supervised = {STARTED: "700.250"}
    assert end_of_wall_time("1h", 1000.0, supervised) == 4300.25
    slurm = {**supervised, "SLURM_JOB_START_TIME": "400"}
    assert end_of_wall_time("1h", 1000.0, slurm) == 4000.0
    assert end_of_wall_time("1h", 1000.0, {STARTED: "nan"}) == 4600.0


def test_the_control_gets_the_end_on_its_own_clock(monkeypatch):
    monkeypatch.setattr(time_limit, "end_of_wall_time", lambda *_: time.time() + 100.0)
    assert time_limit.deadline("1h") == pytest.approx(time.monotonic() + 100.0, abs=5.0)
    monkeypatch.setattr(time_limit, "end_of_wall_time", lambda *_: None)
    assert time_limit.deadline(None) is None


def test_the_longest_of_the_last_steps_of_earlier_runs_count(tmp_path):
    assert longest("1h", tmp_path) == (0.0, 0.0)
    seconds = [(9000.0, 9000.0), (40.0, None), (50.0, 7.0), *[(30.0, 0.0)] * 18]
    lines = [
        {"step": step, "timing_s/step": step_s, "timing_s/save_checkpoint": save_s}
        for step, (step_s, save_s) in enumerate(seconds)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert longest("1h", tmp_path) == (50.0, 7.0)
    assert longest(None, tmp_path) == (0.0, 0.0)
