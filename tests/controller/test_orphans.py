"""However a driver ends, nothing of its run is alive soon after: no Ray, no worker, no worker's child, no temporary folder."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.controller.conftest import processes_of, within

ENDS = {
    "success": (None, 0, ""),
    "exception": (None, 1, "ValueError: a bug in the driver"),
    "ctrl-c": (signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt"),
    "terminate": (signal.SIGTERM, 1, "Terminated: SIGTERM"),
    "request": (signal.SIGTERM, 0, ""),
    "frozen": (signal.SIGKILL, -signal.SIGKILL, ""),
}
"""name: (signal sent, exit code, end of its standard error). frozen: kill -9 of the driver while a worker is stopped."""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A driver that ends in a given way; the next one is started too, since starting is mostly waiting."""
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "start_new_session": True,
    }
    started = {}

    def run(end):
        order = list(ENDS)
        for name in order[order.index(end) : order.index(end) + 2]:
            if name not in started:
                command = [
                    sys.executable,
                    "-m",
                    "tests.controller.driver",
                    str(tmp_path_factory.mktemp(name)),
                    name,
                ]
                started[name] = subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes)
        return started[end]

    yield run
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_after(end, start):
    number, code, says = ENDS[end]
    process = start(end)
    line = process.stdout.readline().split()
    assert line, process.stderr.read()
    run_id = line[0]
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: everyone in the foreground gets it
    elif number is not None:
        process.send_signal(number)
    process.wait(timeout=60)
    assert within(15, lambda: not processes_of(run_id)), processes_of(run_id)
    assert process.returncode == code
    assert process.stderr.read().rstrip().endswith(says)
    if end == "request":
        assert "saved after SIGTERM" in process.stdout.read()
