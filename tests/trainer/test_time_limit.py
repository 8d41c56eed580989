"""trainer.max_runtime: when the run stops by itself."""

from verlite.controller.stop import LEAVE_S
from verlite.controller.supervisor_file import STARTED
from verlite.trainer.time_limit import SPARE_S, UNKNOWN_SAVE_S, TimeLimit, deadline


def test_the_time_counts_from_the_allocation():
    assert deadline("1h", 1000.0, {}) == 4600.0
    assert deadline("1h", 1000.0, {"SLURM_JOB_START_TIME": "400"}) == 4000.0
    ends = {"SLURM_JOB_START_TIME": "400", "SLURM_JOB_END_TIME": "2200"}
    assert deadline("1h", 1000.0, ends) == 2200.0
    assert deadline("10m", 1000.0, ends) == 1000.0
    assert deadline(None, 1000.0, ends) is None
    assert deadline("1h", 1000.0, {"SLURM_JOB_START_TIME": "Unknown"}) == 4600.0


def test_under_verlite_supervise_the_time_counts_from_its_start():
    supervised = {STARTED: "700.250"}
    assert deadline("1h", 1000.0, supervised) == 4300.25
    assert deadline("1h", 1000.0, {**supervised, "SLURM_JOB_START_TIME": "400"}) == 4000.0
    assert deadline("1h", 1000.0, {STARTED: "nan"}) == 4600.0


def test_a_run_stops_while_there_is_time_to_save():
    limit = TimeLimit(deadline=1000.0)
    spare = LEAVE_S + SPARE_S
    unknown = 1000.0 - spare - 1.5 * UNKNOWN_SAVE_S
    assert not limit.is_over(unknown - 0.1) and limit.is_over(unknown + 0.1)
    limit.observe({"timing_s/step": 100.0, "timing_s/save_checkpoint": 200.0})
    limit.observe({"timing_s/step": 40.0, "timing_s/save_checkpoint": None})
    over = 1000.0 - spare - 300.0
    assert not limit.is_over(over - 0.1) and limit.is_over(over + 0.1)
    assert limit.fits_step(over - 150.1) and not limit.fits_step(over - 149.9)


def test_without_a_limit_there_is_always_time():
    limit = TimeLimit(None, step_s=1e9)
    assert limit.fits_step() and not limit.is_over()
