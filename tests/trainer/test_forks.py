"""A forked command is what the same command is as a new process, as far as tests look at it."""

import os
import signal

import psutil
import pytest

from tests.trainer.forks import Forked
from tests.trainer.runs import Launch, processes_of

pytestmark = pytest.mark.process
PROGRAM = """
import os, sys
print(sys.argv[1:], os.environ["PLACE"], os.getcwd(), sorted(map(int, os.listdir("/proc/self/fd"))))
print("not numbered", "LEFT_OUT" in os.environ, "ray" in sys.modules, file=sys.stderr)
sys.exit(7)
"""


def start(tmp_path, code, **environment):
    with (tmp_path / "out").open("w") as out:
        return Forked(["-c", code, "a", "b"], out, environment)


def test_arguments_environment_folder_output_and_exit_code(tmp_path, monkeypatch):
    monkeypatch.setenv("LEFT_OUT", "1")
    monkeypatch.chdir(tmp_path)
    process = start(tmp_path, PROGRAM, PLACE="here", PYTHONUNBUFFERED="1")
    assert process.wait(60) == 7
    text = (tmp_path / "out").read_text()
    # 3 is the folder that is listed.
    expected = f"['a', 'b'] here {tmp_path} [0, 1, 2, 3]\nnot numbered False False\n"
    assert text == expected
    assert start(tmp_path, "1 / 0").wait(60) == 1
    assert "ZeroDivisionError" in (tmp_path / "out").read_text()


def test_a_fork_is_found_by_its_environment_and_ends_by_signals(tmp_path):
    run = Launch(tmp_path, [], tmp_path / "log", "import time; time.sleep(60)", forked=True)
    environment = psutil.Process(run.process.pid).environ()
    while "VERLITE_TEST_RUN" not in environment:  # the fork writes it
        environment = psutil.Process(run.process.pid).environ()
    assert environment == {**os.environ, "VERLITE_TEST_RUN": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    assert [process.pid for process in processes_of(tmp_path)] == [run.process.pid]
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == -signal.SIGTERM
    run.process.kill()  # it has ended: no other process with its number gets the signal
    run.assert_nothing_left()
