"""`verlite supervise`: what is started again, how often, and the exit code in the end."""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import termios
import time

import pytest

from tests.controller.conftest import within
from verlite import threads
from verlite.control import exit_codes
from verlite.control.restarts import Attempt, Restarts
from verlite.controller import supervisor_file
from verlite.controller.head import NoCluster
from verlite.controller.placement import ResourcesMissing
from verlite.launch import supervise
from verlite.launch.supervise import private_folder, read_attempt
from verlite.trainer.errors import ServiceMissing, exit_code

LOST = exit_codes.LOST


@pytest.mark.parametrize("error", [NoCluster, ResourcesMissing, ServiceMissing])
def test_what_a_run_waits_for_is_missing(error):
    assert exit_code(error("away")) == exit_codes.REFUSED
    assert Attempt(2, "run", "away", error_type=error.__name__).misses_cluster


def test_an_attempt_is_read_from_the_run_directory(tmp_path):
    lines = ({"step": step, "time": 100.0 + step} for step in (1, 2))
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "global_step_2").mkdir()
    (tmp_path / "global_step_2" / "manifest.json").write_text("{}")
    error = {"time": 100.0, "type": "RayLost", "message": "the raylet has ended\nand more"}
    (tmp_path / supervisor_file.ERROR_FILE).write_text(json.dumps(error))
    report = supervisor_file.Report(str(tmp_path))
    assert read_attempt(LOST, report, started=99.0, since=time.time() + 9).saved is None
    now = read_attempt(LOST, report, started=99.0, since=1.0)
    assert (now.step, now.saved, now.error) == (2, 2, "the raylet has ended")
    assert now.error_type == "RayLost"
    assert now.ending == "ended with exit code 76 (the raylet has ended)"
    assert read_attempt(LOST, report, started=101.0).error == "", "an older run's error"
    error["exit_code"] = LOST
    (tmp_path / supervisor_file.ERROR_FILE).write_text(json.dumps(error))
    assert read_attempt(1, report, started=99.0).code == LOST, "native code ended the process"
    killed = read_attempt(-9, report, started=99.0)
    assert (killed.code, killed.signal) == (137, "SIGKILL")
    other = read_attempt(-40, report, started=99.0)
    assert (other.code, other.signal) == (168, "signal 40")
    (tmp_path / supervisor_file.ERROR_FILE).write_text("[1")
    assert read_attempt(-9, report, started=99.0).ending == "was ended by SIGKILL"


def test_steps_of_an_earlier_run_are_no_progress_of_an_attempt(tmp_path):
    """The attempt ended before it renamed or truncated the file of the run before."""
    lines = [{"step": 0}, *({"step": step, "time": 100.0 + step} for step in (1, 2, 50))]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    report = supervisor_file.Report(str(tmp_path))
    early = read_attempt(LOST, report, started=200.0, since=time.time() + 9)
    assert early.step is None
    assert read_attempt(LOST, report, started=101.5, since=time.time() + 9).step == 50
    restarts = Restarts(max_restarts=9, same_step=3)
    why = [restarts.ended(early).why for _ in range(3)][-1]
    assert why.endswith("3 attempts in a row failed before the first step")
    (tmp_path / "global_step_2").mkdir()
    (tmp_path / "global_step_2" / "manifest.json").write_text("{}")
    resumed = read_attempt(LOST, report, started=200.0, since=1.0)
    assert (resumed.step, resumed.saved) == (2, 2), "it resumed from step 2 and finished no step"


def test_folders_of_killed_supervisors_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = ("verlite-supervise-a", "verlite-supervise-b", "another")
    stale, new, other = (tmp_path / name for name in names)
    for folder in (stale, other):
        folder.mkdir()
        os.utime(folder, (0, 0))
    new.mkdir()
    with private_folder() as first:
        os.utime(first, (0, 0))
        with private_folder() as second:
            assert set(tmp_path.iterdir()) == {new, other, first, second}
    assert set(tmp_path.iterdir()) == {new, other}


RUN = """
import json, os, signal, sys, time
folder, plan = sys.argv[1], sys.argv[2].split(",")
count = len([name for name in os.listdir(folder) if name.isdecimal()])
open(f"{folder}/{count}", "w").write(str(os.getpid()))
with open(f"{folder}/started", "a") as file:
    print(os.environ["VERLITE_SUPERVISE_STARTED"], file=file)
assert os.environ["VERLITE_SUPERVISE_RESTARTS"] == str(count)
def stop(number, frame):
    print("child got", signal.Signals(number).name, flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
step = plan[min(count, len(plan) - 1)]
print("attempt", count, flush=True)
if step == "wait":
    time.sleep(60)
elif step == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif step == "final":
    from verlite.controller.supervisor_file import Report, write
    write(Report(no_restart="trainer.max_runtime=1h is over"))
    sys.exit(75)
elif step == "saved":
    from verlite.controller.supervisor_file import Report, write
    os.makedirs(f"{folder}/global_step_{count + 1}")
    open(f"{folder}/global_step_{count + 1}/manifest.json", "w").close()
    write(Report(folder))
    sys.exit(76)
elif step == "missing":
    from verlite.controller.supervisor_file import Report, write
    error = {"time": time.time(), "type": "ResourcesMissing", "message": "only 1 of 2 devices"}
    with open(f"{folder}/error.json", "w") as file:
        json.dump(error, file)
    write(Report(folder))
    sys.exit(2)
else:
    sys.exit(int(step))
"""
"""A command whose n-th start does the n-th entry of its plan, and notes its process id."""

SUPERVISE = """
import sys
from verlite.control import limits
from verlite.launch import supervise
limits.FIRST_PAUSE_S = limits.AFTER_STOP_S = 0.1
limits.FROZEN_S, limits.FROZEN_END_S = 0.4, 1.0
code = supervise.supervise(sys.argv[2:], 5, int(sys.argv[1]), lambda text: print("say", text))
sys.exit(code)
"""


class Supervised:
    def __init__(self, folder, plan, same_step=3):
        self.folder = folder
        command = [sys.executable, "-c", SUPERVISE, str(same_step)]
        command += [sys.executable, "-c", RUN, str(folder), plan]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )

    def end(self):
        text = self.process.communicate(timeout=120)[0]
        return self.process.returncode, text

    def child(self, number):
        path = self.folder / str(number)
        assert within(60, lambda: path.exists() and path.read_text())
        return int(path.read_text())


@pytest.fixture
def start(tmp_path):
    started = []

    def run(plan, **options):
        folder = tmp_path / str(len(started))
        (folder / "global_step_50").mkdir(parents=True)
        (folder / "global_step_50" / "manifest.json").touch()  # of an earlier run
        os.utime(folder / "global_step_50" / "manifest.json", (1.0, 1.0))
        started.append(Supervised(folder, plan, **options))
        return started[-1]

    yield run
    for one in started:
        one.process.kill()
        one.process.wait()


@pytest.mark.process
def test_restarts_of_real_commands(start):
    cases = {
        "76,kill,75,0": (0, 4, "restart 3 of 5"),
        "76,76,saved,0": (0, 4, "restart 1 of 5 since checkpoint 3, in"),
        "76,missing,missing,0": (0, 4, "ended with exit code 2 (only 1 of 2 devices)"),
        "final": (75, 1, "no restart: trainer.max_runtime=1h is over"),
    }
    running = {plan: start(plan) for plan in cases}
    for plan, (code, attempts, text) in cases.items():
        got, output = running[plan].end()
        assert got == code, f"{plan}: {output}"
        assert len(re.findall(r"^attempt \d$", output, re.MULTILINE)) == attempts, output
        assert text in output
        starts = set((running[plan].folder / "started").read_text().split())
        assert len(starts) == 1 and abs(float(starts.pop()) - time.time()) < 300


@pytest.mark.process
@pytest.mark.parametrize(("ours", "given"), [("3", None), ("", "3")], ids=["verlite", "user"])
def test_the_command_gets_the_users_number_of_threads_only(ours, given, monkeypatch, tmp_path):
    """A launcher such as torchrun divides the cores itself, which verlite's own number is not."""
    monkeypatch.setenv(threads.COUNT, "3")
    monkeypatch.setenv(threads.OURS, ours)
    found = tmp_path / "environment.json"
    code = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    command = [sys.executable, "-c", code, str(found)]
    assert supervise.supervise(command, 0, 0, print) == 0
    environment = json.loads(found.read_text())
    assert (environment.get(threads.COUNT), threads.OURS in environment) == (given, False)


@pytest.mark.process
def test_signals_reach_the_command_and_end_the_restarts(start):
    run = start("wait")
    run.child(0)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGTERM)
    code, output = run.end()
    assert code == 75
    assert output.count("child got SIGTERM") == 1
    assert "restart" not in output


@pytest.mark.process
def test_a_frozen_command_is_killed_and_one_without_supervisor_stops(start):
    frozen = start("wait,0")
    os.kill(frozen.child(0), signal.SIGSTOP)
    code, output = frozen.end()
    assert code == 0
    assert "has been stopped by SIGSTOP for 0.4 s" in output
    assert "was ended by SIGKILL" in output

    orphaned = start("wait")
    orphaned.child(0)
    time.sleep(0.5)
    orphaned.process.kill()
    assert orphaned.process.wait() == -signal.SIGKILL
    assert "child got SIGTERM" in orphaned.process.stdout.read()


def in_terminal():
    """Make standard input the controlling terminal. Under nohup SIGHUP would be ignored."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.process
def test_a_closed_terminal_stops_the_command_and_output_is_lost_without_harm(tmp_path):
    """The shell's process group gets SIGHUP, and each further print fails."""
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "verlite", "supervise", "--"]
    command += [sys.executable, "-c", CLOSED, str(tmp_path / "noted")]
    process = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=in_terminal,
    )
    os.close(terminal)
    try:
        assert b"ready" in os.read(master, 100)
        os.close(master)
        assert process.wait(60) == 75
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "noted").read_text() == "SIGTERM, saved"


CLOSED = """
import pathlib, signal, sys, time
from verlite.control.machine import Machine
from verlite.control.policy import Policy
from verlite.trainer.stop import Stop
from verlite.files import tolerate_full_disk
tolerate_full_disk()
stop = Stop()
stop.tell(Machine.begins, Policy(total_steps=2))
stop.tell(Machine.step_wanted)
stop.tell(Machine.step_finished)
with stop:
    print("ready", flush=True)
    while not stop.machine.requested:
        time.sleep(0.05)
    time.sleep(0.5)
    print("saving", flush=True)
    pathlib.Path(sys.argv[1]).write_text(f"{stop.machine.requested}, saved")
sys.exit(75)
"""
