"""Signals in the driver, the first cause, and the exit code. A signal may end the process, so each
case is a small program."""

import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from verlite.control import limits
from verlite.control.exit_codes import DONE, FAILED, INTERRUPTED, STOPPED
from verlite.control.machine import Machine
from verlite.control.policy import Policy
from verlite.controller.failures import NodeLost, RayLost, StuckError, WorkerError
from verlite.trainer import stop as stop_module
from verlite.trainer.errors import RunRefused, exit_code
from verlite.trainer.stop import Stop

PROGRAM = """
import ctypes, os, signal, sys, time
from verlite.control import limits
from verlite.control.machine import Machine
from verlite.control.policy import Policy
from verlite.trainer import stop as module
limits.END_S, limits.LEAVE_S, limits.REPEAT_S = 1.0, 3.0, 0.3
stop = module.Stop()
stop.tell(Machine.begins, Policy(total_steps=9, stop_grace_s=1.0), step=5, saved=5)

class Screen:
    info = staticmethod(lambda text: print(text, flush=True))

class unsaved:
    @staticmethod
    def append(step):
        stop.tell(Machine.step_wanted)
        stop.tell(Machine.step_finished)

    @staticmethod
    def clear():
        stop.tell(Machine.saved)

stop.screen = Screen
stop.where = lambda: "in step 7"
stop.checkpoint = lambda: "Last checkpoint: step 6."

def send(number):
    os.kill(os.getpid(), number)

def hang_in_c():
    "Lock a mutex twice. The second call does not return, and signals do not interrupt it."
    mutex = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    if os.fork() == 0:
        time.sleep(0.5)
        os.kill(os.getppid(), signal.SIGTERM)
        os._exit(0)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)

try:
    with stop:
        try:
            {body}
        finally:
            {cleanup}
except KeyboardInterrupt:
    print(stop.message())
    sys.exit(stop.machine.exit_code)
"""

STOP_LINE = "stopped by SIGTERM in step 7. Last checkpoint: step 6."
INTERRUPT_LINE = "interrupted in step 7. Last checkpoint: step 6."
SAVE = "unsaved.append(6); send(signal.SIGTERM); "

DEFERRED = ": step 6 is not saved yet; the run stops once it is\n"
NOT_SAVED = (
    "\nSIGTERM: not saved within trainer.stop_grace_s=1, in step 7. The run still saves and then "
    "ends; another signal gives it 1 s more. Last checkpoint: step 6.\n"
)

CASES = {
    "SIGTERM": ("send(signal.SIGTERM)", "pass", STOPPED, f"{STOP_LINE}\n"),
    "a closed terminal with nothing to save": (
        "send(signal.SIGHUP)",
        "time.sleep(0.5); send(signal.SIGHUP); time.sleep(0.1); print('cleaned')",
        STOPPED,
        "cleaned\nstopped by SIGHUP in step 7. Last checkpoint: step 6.\n",
    ),
    "Ctrl-C": ("send(signal.SIGINT)", "pass", INTERRUPTED, f"{INTERRUPT_LINE}\n"),
    "SIGTERM with an unsaved step": (
        SAVE + "time.sleep(2.5); unsaved.clear(); print('saved', stop.machine.requested)",
        "pass",
        0,
        f"SIGTERM{DEFERRED}{NOT_SAVED}saved SIGTERM\n",
    ),
    "a second signal while saving": (
        SAVE + "time.sleep(0.8); send(signal.SIGINT); time.sleep(30)",
        "pass",
        STOPPED,
        f"SIGTERM{DEFERRED}\na second signal: the save has 1 s\n"
        f"\n{STOP_LINE}\n  (not saved within 1 s of the second signal)\n",
    ),
    "a signal after the decision": (
        "stop.decide(1); send(signal.SIGTERM); time.sleep(0.2); sys.exit(stop.decide(75))",
        "pass",
        FAILED,
        "",
    ),
    "a slow cleanup": (
        "send(signal.SIGTERM)",
        "time.sleep(30)",
        STOPPED,
        f"\n{STOP_LINE}\n  (it did not end within 1 s",
    ),
    "C code that does not return": ("hang_in_c()", "pass", STOPPED, f"\n{STOP_LINE}\n"),
    "SIGTERM to a forked child": (
        "reader, writer = os.pipe()\n"
        "            child = os.fork()\n"
        "            if not child: os.write(writer, b'1'); time.sleep(30)\n"
        "            os.read(reader, 1); os.kill(child, signal.SIGTERM)\n"
        "            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "            time.sleep(1.5); print(stop.machine.requested)",
        "pass",
        0,
        "-15\nNone\n",
    ),
}
"""{case: (code inside `with stop`, code of the cleanup, exit code, start of the output)}. What each
signal does at each time is decided without processes: tests/control."""


@pytest.fixture(scope="module")
def programs():
    """All cases, running at the same time. Under nohup they would inherit an ignored SIGHUP."""
    started = {}
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for case, (body, cleanup, _, _) in CASES.items():
        code = PROGRAM.format(body=body, cleanup=cleanup)
        started[case] = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    signal.signal(signal.SIGHUP, before)
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("case", CASES)
def test_signal(case, programs):
    _, _, code, output = CASES[case]
    start = time.monotonic()
    text = programs[case].communicate(timeout=60)[0]
    assert programs[case].returncode == code, text
    assert text.startswith(output), text
    assert time.monotonic() - start < 25, "the program's own sleep ended it"


def test_an_ignored_hangup_stays_ignored():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop(embedded=True) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.machine.requested is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


class Exit(Exception):
    """The process would have ended with this code."""


@pytest.fixture
def exits(monkeypatch):
    def leave(code):
        raise Exit(code)

    monkeypatch.setattr(stop_module.os, "_exit", leave)
    monkeypatch.setattr(limits, "LAST_WORDS_S", 0.2)
    monkeypatch.setattr(stop_module, "write_error", lambda text: None)


def end_at_second_signal(stop):
    """Tell a run that has nothing to save of two signals. Return the exit code."""
    stop.tell(Machine.signal, "SIGTERM")
    stop.machine.patience._last -= 2.0
    with pytest.raises(Exit) as caught:
        stop.tell(Machine.signal, "SIGTERM")
    return caught.value.args[0]


def test_a_handler_prints_nothing_itself():
    """The main thread may be inside a write to the same stream, which refuses a second one."""
    stop, said = Stop(), []
    done = threading.Event()

    def say(text):
        said.append((text, threading.get_ident() == threading.main_thread().ident))
        done.set()

    stop.screen = SimpleNamespace(info=say)
    stop.tell(Machine.begins, Policy(total_steps=9))
    stop.tell(Machine.step_wanted)
    stop.tell(Machine.step_finished)
    stop._handle(signal.SIGTERM, None)
    text = "SIGTERM: step 1 is not saved yet; the run stops once it is"
    assert done.wait(30) and said == [(text, False)]


def test_the_decision_is_said_once_and_before_the_disk_is_written():
    stop, done = Stop(embedded=True), []
    stop.record_end = lambda code: done.append(code)

    def say():
        assert stop._turn.acquire(blocking=False), "said while a lock is held"
        stop._turn.release()
        done.append("said")

    assert [stop.decide(code, say=say) for code in (FAILED, STOPPED)] == [FAILED, FAILED]
    assert done == ["said", FAILED]


def test_a_terminal_that_hangs_does_not_keep_the_decision_from_the_disk(monkeypatch):
    monkeypatch.setattr(limits, "LAST_WORDS_S", 0.1)
    stop, done, release = Stop(embedded=True), [], threading.Event()
    stop.record_end = done.append
    assert stop.decide(FAILED, say=lambda: release.wait(60)) == FAILED and done == [FAILED]
    release.set()


@pytest.mark.parametrize("fault", ["hangs", "fails"])
def test_the_end_is_explained_without_the_disk(exits, monkeypatch, fault):
    said = []
    monkeypatch.setattr(limits, "CHECKPOINT_S", 0.1)
    monkeypatch.setattr(limits, "LAST_WORDS_S", 30)
    monkeypatch.setattr(stop_module, "write_error", said.append)
    stop, release = Stop(), threading.Event()

    def checkpoint():
        if fault == "fails":
            raise OSError(5, "Input/output error")
        release.wait(60)

    stop.checkpoint = checkpoint
    end_at_second_signal(stop)
    release.set()
    (text,) = said
    assert "stopped by SIGTERM" in text and "The last checkpoint is not known: " in text
    assert "(a second signal" in text and ("Input/output error" in text) == (fault == "fails")


@pytest.mark.parametrize("end", ["a signal", "a slow cleanup"])
def test_a_disk_that_hangs_does_not_keep_the_process(exits, monkeypatch, end):
    stop, release = Stop(), threading.Event()
    stop.log = lambda text: release.wait(60)
    start = time.monotonic()
    if end == "a signal":
        assert end_at_second_signal(stop) == STOPPED
    else:
        monkeypatch.setattr(limits, "LEAVE_S", 1e-9)
        stop.tell(Machine.ended, DONE)
        with pytest.raises(Exit) as caught:
            stop.tell(Machine.watched)
        assert caught.value.args == (DONE,)
    assert time.monotonic() - start < 20
    release.set()


def test_time_is_watched_also_where_no_thread_can_be_started(exits, monkeypatch):
    """The thread that watches it says what follows in another one, and goes on without."""
    stop = Stop()
    policy = Policy(total_steps=9, stop_grace_s=1.0)
    stop.tell(Machine.begins, policy, step=5, saved=5)
    stop.tell(Machine.step_wanted)
    stop.tell(Machine.step_finished)

    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stop.tell(Machine.signal, "SIGTERM")
    now[0] += limits.REPEAT_S + 0.1
    stop.tell(Machine.signal, "SIGTERM")
    assert stop.machine.patience.signals == 2
    now[0] += 1.1
    with pytest.raises(Exit) as caught:
        stop.tell(Machine.watched)
    assert caught.value.args == (STOPPED,)


def test_the_end_by_a_signal_decides_the_code_once(exits):
    stop = Stop()
    decided = []
    stop.record_end = decided.append
    stop.log = lambda text: decided.append(stop.decide(FAILED))  # the main thread, meanwhile
    assert end_at_second_signal(stop) == STOPPED
    assert decided == [STOPPED, STOPPED]


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
    stop.begin(tmp_path)
    stop.where = lambda: "in step 7"
    stop.checkpoint = lambda: "Last checkpoint: step 6."
    return stop


def interrupt(stop):
    with pytest.raises(KeyboardInterrupt):
        stop.tell(Machine.asked, "SIGTERM")


def read(run_dir):
    return json.loads((run_dir / "error.json").read_text())


def test_the_cause_is_written_before_the_cleanup_which_changes_nothing(stop, tmp_path, capsys):
    at_cleanup = []

    def fail():
        at_cleanup.append((read(tmp_path)["message"], capsys.readouterr().err, stop.machine.code))
        raise ValueError("the cleanup fails, too")

    with pytest.raises(ValueError) as caught, ExitStack() as stack:
        stack.callback(fail)
        with stop.reported_first(), stop.reported_first():
            raise RayLost("the raylet has ended")
    printed = "error: the raylet has ended\nLast checkpoint: step 6.\n"
    assert at_cleanup == [("the raylet has ended", printed, 76)]
    assert stop.report(caught.value) == 76
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
    stop.record_end = stop.log = write
    monkeypatch.setattr(stop_module, "replace_file", write)
    with pytest.raises(type(error)), stop.reported_first():
        raise error
    assert "Last checkpoint: step 6." in at_writes[0] and not any(at_writes[1:])


@pytest.mark.parametrize("problem", [BrokenPipeError, SystemExit])
def test_a_terminal_that_is_gone_does_not_keep_the_report_from_the_disk(
    problem, stop, tmp_path, monkeypatch, capfd
):
    def fail(error, out):
        raise problem

    monkeypatch.setattr(stop_module, "print_error", fail)
    assert stop.report(RayLost("the raylet has ended")) == 76
    assert read(tmp_path)["message"] == "the raylet has ended"
    assert "error: the raylet has ended" in capfd.readouterr().err


NO_FILES = """
import os, pathlib, resource, sys
from verlite.trainer.stop import Stop
stop = Stop()
stop.begin(pathlib.Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    with stop.reported_first():
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    os._exit(stop.machine.code + 10)
"""


def test_a_run_without_files_left_to_open_is_reported(tmp_path):
    command = [sys.executable, "-c", NO_FILES, str(tmp_path)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=240)
    assert "error: [Errno 24] Too many open files" in done.stderr
    assert done.returncode == FAILED + 10


def test_a_finished_run_stays_finished(stop, tmp_path):
    assert stop.decide(0) == 0
    assert stop.report(RayLost("the GCS has ended")) == 0
    assert not (tmp_path / "error.json").exists()


def test_a_new_run_removes_the_error_of_the_last(stop, tmp_path):
    stop.report(ValueError("a bug"))
    assert "ValueError: a bug" in read(tmp_path)["traceback"]
    Stop().begin(tmp_path)
    assert not (tmp_path / "error.json").exists()


def test_a_stop_is_said_before_the_cleanup(stop, tmp_path, capsys):
    interrupt(stop)
    with pytest.raises(KeyboardInterrupt), stop.reported_first():
        raise KeyboardInterrupt
    line = "stopped by SIGTERM in step 7. Last checkpoint: step 6."
    assert capsys.readouterr().err == f"{line}\n"
    assert line in (tmp_path / "logs" / "driver.log").read_text()
    assert stop.machine.code == 75


HANGS = """
import atexit, sys, threading, time
from verlite.control import limits
from verlite.trainer.stop import leave
limits.ATEXIT_S = 0.3
atexit.register(lambda: time.sleep(600))
threading.Thread(target=time.sleep, args=(600,)).start()
print("last line")
leave(7)
"""


def test_leaving_waits_neither_for_threads_nor_for_atexit():
    done = subprocess.run([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, timeout=240)
    assert (done.returncode, done.stdout) == (7, b"last line\n")


ADDRESS = "https://me:hunter2@host/score?api_key=s3cret&x=1"  # not near a line that raises


@pytest.mark.parametrize("kind", [OSError, RayLost])
def test_secrets_in_addresses_are_masked_everywhere(kind, stop, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    error = kind(f"no answer from {ADDRESS}")
    with pytest.raises(kind, match="no answer"), stop.reported_first():
        raise error
    stop.report(kind(f"while ending: {error}"))
    texts = [(tmp_path / name).read_text() for name in ("error.json", "logs/driver.log")]
    assert texts[1].count("https://me:***@host/score?api_key=***&x=1") > 1
    texts.append(capsys.readouterr().err)
    another = Stop()
    another.begin(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(stop_module.os, "_exit", lambda code: None)
        patched.setattr(stop_module, "write_error", texts.append)
        another.end_at_once(error)
    assert len(texts) == 4
    for text in texts:
        assert "https://me:***@host/score?api_key=***&x=1" in text
        assert "hunter2" not in text and "s3cret" not in text
