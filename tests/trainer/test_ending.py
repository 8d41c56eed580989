"""The first cause is reported before anything is shut down, and decides the exit code."""

import json
import subprocess
import sys
from contextlib import ExitStack

import pytest

from verlite.control.events import Asked
from verlite.controller.failures import NodeLost, RayLost, StuckError, WorkerError
from verlite.controller.stop import Stop
from verlite.trainer import ending
from verlite.trainer.ending import begin, report, reported_first
from verlite.trainer.errors import RunRefused, exit_code


@pytest.mark.parametrize(
    "error, code",
    [
        (RunRefused("no"), 2),
        (ValueError("a bug"), 1),
        (WorkerError("text", "actor", 0, "update", "exception", "ValueError"), 1),
        (WorkerError("text", "actor", 0, "update", "killed", may_pass=True), 76),
        (StuckError("text", "actor", "update", [], [0]), 76),
        (NodeLost("text"), 76),
        (RayLost("text"), 76),
    ],
)
def test_exit_codes(error, code):
    assert exit_code(error) == code


@pytest.fixture
def stop(tmp_path):
    stop = Stop()
    begin(stop, tmp_path)
    stop.where = lambda: "in step 7"
    stop.checkpoint = lambda: "Last checkpoint: step 6."
    return stop


def interrupt(stop):
    with pytest.raises(KeyboardInterrupt):
        stop.tell(Asked("SIGTERM"))


def read(run_dir):
    return json.loads((run_dir / "error.json").read_text())


def test_the_cause_is_written_before_the_cleanup_which_changes_nothing(stop, tmp_path, capsys):
    at_cleanup = []

    def fail():
        at_cleanup.append((read(tmp_path)["message"], capsys.readouterr().err, stop.code))
        raise ValueError("the cleanup fails, too")

    with pytest.raises(ValueError) as caught, ExitStack() as stack:
        stack.callback(fail)
        with reported_first(stop, tmp_path), reported_first(stop, tmp_path):
            raise RayLost("the raylet has ended")
    printed = "error: the raylet has ended\nLast checkpoint: step 6.\n"
    assert at_cleanup == [("the raylet has ended", printed, 76)]
    assert report(stop, None, caught.value) == 76
    error = read(tmp_path)
    assert error["message"] == "the raylet has ended"
    assert (error["exit_code"], error["type"], error["where"]) == (76, "RayLost", "in step 7")
    log = (tmp_path / "logs" / "driver.log").read_text()
    assert log.index("error: the raylet has ended") < log.index("while ending: ValueError: the cle")
    assert log.count("the raylet has ended") == 1
    assert "the cleanup" not in capsys.readouterr().err


@pytest.mark.parametrize("error", [RayLost("the raylet has ended"), KeyboardInterrupt()])
def test_the_cause_is_printed_before_the_disk_is_written(
    error, stop, tmp_path, capsys, monkeypatch
):
    """A full or hung disk may block the writes."""
    at_writes = []

    def write(*arguments):
        at_writes.append(capsys.readouterr().err)

    if isinstance(error, KeyboardInterrupt):
        interrupt(stop)
    stop.on_end = stop.log = write
    monkeypatch.setattr(ending, "replace_file", write)
    with pytest.raises(type(error)), reported_first(stop, tmp_path):
        raise error
    assert "Last checkpoint: step 6." in at_writes[0] and not any(at_writes[1:])


@pytest.mark.parametrize("problem", [BrokenPipeError, SystemExit])
def test_a_terminal_that_is_gone_does_not_keep_the_report_from_the_disk(
    problem, stop, tmp_path, monkeypatch, capfd
):
    def fail(error, out):
        raise problem

    monkeypatch.setattr(ending, "print_error", fail)
    assert report(stop, tmp_path, RayLost("the raylet has ended")) == 76
    assert read(tmp_path)["message"] == "the raylet has ended"
    assert "error: the raylet has ended" in capfd.readouterr().err


def test_a_finished_run_stays_finished(stop, tmp_path):
    assert stop.decide(0) == 0
    assert report(stop, tmp_path, RayLost("the GCS has ended")) == 0
    assert not (tmp_path / "error.json").exists()


def test_a_new_run_removes_the_error_of_the_last(stop, tmp_path):
    report(stop, tmp_path, ValueError("a bug"))
    assert "ValueError: a bug" in read(tmp_path)["traceback"]
    begin(Stop(), tmp_path)
    assert not (tmp_path / "error.json").exists()


def test_a_stop_is_said_before_the_cleanup(stop, tmp_path, capsys):
    interrupt(stop)
    with pytest.raises(KeyboardInterrupt), reported_first(stop, tmp_path):
        raise KeyboardInterrupt
    line = "stopped by SIGTERM in step 7. Last checkpoint: step 6."
    assert capsys.readouterr().err == f"{line}\n"
    assert line in (tmp_path / "logs" / "driver.log").read_text()
    assert stop.code == 75


HANGS = """
import atexit, sys, threading, time
from verlite.trainer import ending
ending.ATEXIT_S = 0.3
atexit.register(lambda: time.sleep(600))
threading.Thread(target=time.sleep, args=(600,)).start()
print("last line")
ending.leave(7)
"""


def test_leaving_waits_neither_for_threads_nor_for_atexit():
    done = subprocess.run([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, timeout=240)
    assert (done.returncode, done.stdout) == (7, b"last line\n")


ADDRESS = "https://me:hunter2@host/score?api_key=s3cret&x=1"  # not near a line that raises


@pytest.mark.parametrize("kind", [OSError, RayLost])
def test_secrets_in_addresses_are_masked_everywhere(kind, stop, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    error = kind(f"no answer from {ADDRESS}")
    with pytest.raises(kind, match="no answer"), reported_first(stop, tmp_path):
        raise error
    report(stop, tmp_path, kind(f"while ending: {error}"))
    texts = [(tmp_path / name).read_text() for name in ("error.json", "logs/driver.log")]
    assert texts[1].count("https://me:***@host/score?api_key=***&x=1") > 1
    texts.append(capsys.readouterr().err)
    another = Stop()
    begin(another, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(ending.os, "_exit", lambda code: None)
        patched.setattr(ending, "write_error", texts.append)
        ending.end_at_once(another, tmp_path, error)
    assert len(texts) == 4
    for text in texts:
        assert "https://me:***@host/score?api_key=***&x=1" in text
        assert "hunter2" not in text and "s3cret" not in text
