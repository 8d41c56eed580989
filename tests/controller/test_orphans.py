"""A driver that ends in any way leaves nothing: no Ray, no worker, no worker's child, no folder."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.controller.conftest import processes_of, within

pytestmark = pytest.mark.process

ENDS = {
    "stop": (signal.SIGTERM, 0, ""),
    "ctrl_c": (signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt"),
    "kill": (signal.SIGKILL, -signal.SIGKILL, ""),
}
"""{way to end: (signal to send, exit code, end of standard error)}.

stop: the driver returns normally after a signal, which all processes of the run get. kill: a worker
is stopped at that time.
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Return a function that starts the driver for a way to end, and the next one in advance."""
    started = {}

    def start_driver(name):
        started[name] = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.controller.driver",
                str(tmp_path_factory.mktemp(name)),
                name,
            ],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(end):
        order = list(ENDS)
        index = order.index(end)
        for name in order[index : index + 2]:
            if name not in started:
                start_driver(name)
        return started[end]

    yield run
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("end", ENDS)
def test_no_process_is_left_after(end, start):
    number, code, message = ENDS[end]
    process = start(end)
    line = process.stdout.readline().split()
    assert line, process.stderr.read()
    run_id = line[0]
    if number == signal.SIGINT or end == "stop":
        os.killpg(process.pid, number)  # as a terminal and `timeout` do; Ray's agents are in it
        for one in processes_of(run_id) if end == "stop" else []:
            one.send_signal(number)
    elif number is not None:
        process.send_signal(number)
    process.wait(timeout=60)
    assert within(60, lambda: not processes_of(run_id)), processes_of(run_id)
    assert process.returncode == code
    assert process.stderr.read().rstrip().endswith(message)
    if end == "stop":
        assert "saved after SIGTERM" in process.stdout.read()
