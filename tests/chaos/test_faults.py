"""A few faults in real runs, which `python -m tests.chaos` injects at random and for longer."""

import signal
import subprocess
import sys
import time
from random import Random

import pytest

from tests.chaos.disturb import disturb, note_resumed, wait_for_phase
from tests.chaos.faults import EXPORTING, STARTING, STEPPING, pause
from tests.chaos.run import Run, differences
from tests.chaos.workloads import Workload, sums
from tests.controller.conftest import within
from tests.trainer.runs import one_thread, processes_of

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

STEPS = 12
PAUSES = {"actor": "update_actor", "gcs": "gen", "raylet": "update_critic", "driver": "testing"}
"""Processes that stop for a moment, and the phase in which they do."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a finished run without faults. Sums must not depend on the number of threads."""
    folder = tmp_path_factory.mktemp("chaos")
    with pytest.MonkeyPatch.context() as patch:
        one_thread(patch)
        run = Run(sums(folder / "sums", STEPS), folder / "undisturbed")
        run.start()
        assert run.finish() == 0, run.text()
        yield run


def test_the_undisturbed_run_enters_every_phase_that_faults_aim_at(undisturbed):
    entered = {phase for _, _, phase in undisturbed.phases()}
    assert entered >= {*STARTING, *STEPPING, *EXPORTING}
    assert undisturbed.wait_until_clean() == []


def test_faults_cost_no_finished_step_and_change_no_number(undisturbed, tmp_path):
    """A Ray daemon is killed. Then the driver is, and the newest checkpoint is damaged before the
    third attempt, in which processes stop for a moment."""
    run = Run(undisturbed.workload, tmp_path)
    random = Random(0)
    try:
        run.start()
        for name, phase in (
            ("raylet SIGKILL", "update_actor"),
            ("shard truncated", "update_critic"),
        ):
            run.launch.until_step(2)
            assert wait_for_phase(run, phase, 240), run.text()
            outcome = disturb(run, name, phase, random)
            assert outcome is not None and not outcome.problem, (outcome, run.text())
            assert run.wait_until_clean() == []
            run.start()
            note_resumed(run, outcome)
            assert not outcome.problem, run.text()
        for role, phase in PAUSES.items():
            assert wait_for_phase(run, phase, 240), run.text()
            step = run.finished_steps()
            resume = pause(role)(run, random)
            # A second, or one step: a run goes on without its gcs, and has few steps.
            ended = time.monotonic() + 1
            while time.monotonic() < ended and run.finished_steps() == step:
                time.sleep(0.02)
            resume()
        assert run.finish() == 0, run.text()
        assert run.starts == 3
        assert differences(run, undisturbed) == []
        assert run.wait_until_clean() == []
    finally:
        run.stop()


def test_sigterm_ends_a_soak_and_its_runs(tmp_path):
    run = Run(Workload("sums", STEPS, 0, []), tmp_path / "undisturbed")
    options = [f"--folder={tmp_path}", f"--json={tmp_path}/soak.json", "--steps=500"]
    soak = subprocess.Popen([sys.executable, "-m", "tests.chaos.stops", *options])
    try:
        assert within(400, lambda: "starting workers" in {phase for _, _, phase in run.phases()})
        assert run.temporary_folders() and processes_of(run.run_dir)
        soak.send_signal(signal.SIGTERM)
        assert soak.wait(120) == 128 + signal.SIGTERM
        assert not processes_of(run.run_dir)
        assert not run.temporary_folders() and not run.agents()
    finally:
        for process in [soak, *processes_of(run.run_dir)]:
            process.kill()
        soak.wait()
