"""Signals in the driver. Each case is a small program, because a signal may end the process."""

import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from verlite.control import limits
from verlite.control.events import Begins, Ended, Signal, StepFinished, StepWanted, Watched
from verlite.control.exit_codes import DONE, FAILED, INTERRUPTED, STOPPED
from verlite.control.policy import Policy
from verlite.controller import stop as stop_module

PROGRAM = """
import ctypes, os, signal, sys, time
from verlite.control import limits
from verlite.control.events import *
from verlite.control.policy import Policy
from verlite.controller import stop as module
limits.END_S, limits.LEAVE_S, limits.REPEAT_S = 1.0, 3.0, 0.3
stop = module.Stop()
stop.tell(Begins(Policy(total_steps=9, stop_grace_s=1.0), step=5, saved=5))

class Screen:
    info = staticmethod(lambda text: print(text, flush=True))

class unsaved:
    @staticmethod
    def append(step):
        for event in (StepWanted(), StepFinished()):
            stop.tell(event)

    @staticmethod
    def clear():
        stop.tell(Saved())

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
    sys.exit(stop.exit_code)
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
    "SIGUSR1": (
        "send(signal.SIGUSR1)",
        "pass",
        STOPPED,
        "stopped by SIGUSR1 in step 7. Last checkpoint: step 6.\n",
    ),
    "a closed terminal": (
        SAVE.replace("SIGTERM", "SIGHUP")
        + "time.sleep(0.5); send(signal.SIGHUP); time.sleep(0.3); unsaved.clear(); print('saved')",
        "pass",
        0,
        f"SIGHUP{DEFERRED}saved\n",
    ),
    "a closed terminal with nothing to save": (
        "send(signal.SIGHUP)",
        "time.sleep(0.5); send(signal.SIGHUP); time.sleep(0.1); print('cleaned')",
        STOPPED,
        "cleaned\nstopped by SIGHUP in step 7. Last checkpoint: step 6.\n",
    ),
    "Ctrl-C": ("send(signal.SIGINT)", "pass", INTERRUPTED, f"{INTERRUPT_LINE}\n"),
    "SIGTERM with an unsaved step": (
        SAVE + "time.sleep(2.5); unsaved.clear(); print('saved', stop.requested)",
        "pass",
        0,
        f"SIGTERM{DEFERRED}{NOT_SAVED}saved SIGTERM\n",
    ),
    "Ctrl-C with an unsaved step": (
        "unsaved.append(6); send(signal.SIGINT)",
        "pass",
        INTERRUPTED,
        f"{INTERRUPT_LINE}\n",
    ),
    "SIGTERM twice from one sender": (
        SAVE + "time.sleep(0.1); send(signal.SIGTERM); time.sleep(0.5); print('saved')",
        "pass",
        0,
        f"SIGTERM{DEFERRED}saved\n",
    ),
    "a second signal while saving": (
        SAVE + "time.sleep(0.8); send(signal.SIGINT); time.sleep(30)",
        "pass",
        STOPPED,
        f"SIGTERM{DEFERRED}\na second signal: the save has 1 s\n"
        f"\n{STOP_LINE}\n  (not saved within 1 s of the second signal)\n",
    ),
    "a third signal": (
        SAVE + "time.sleep(0.4); send(signal.SIGINT); time.sleep(0.5); send(signal.SIGTERM); "
        "time.sleep(30)",
        "pass",
        STOPPED,
        f"SIGTERM{DEFERRED}\na second signal: the save has 1 s\n"
        f"\n{STOP_LINE}\n  (a third signal, SIGTERM, ended the process at once)\n",
    ),
    "a second signal with nothing to save": (
        "send(signal.SIGTERM)",
        "time.sleep(0.5); send(signal.SIGTERM); time.sleep(30)",
        STOPPED,
        f"\n{STOP_LINE}\n  (a second signal, SIGTERM, ended the process at once)\n",
    ),
    "a request": (
        "stop.tell(Asked('trainer.max_runtime'))",
        "time.sleep(30)",
        STOPPED,
        f"\n{STOP_LINE.replace('SIGTERM', 'trainer.max_runtime')}\n  (it did not end within 1 s",
    ),
    "a signal after a request does not limit the save": (
        "unsaved.append(6); stop.tell(Asked('trainer.max_runtime')); time.sleep(0.5); "
        "send(signal.SIGTERM); time.sleep(2.0); print('saved')",
        "pass",
        0,
        f"trainer.max_runtime{DEFERRED}"
        "\ntrainer.max_runtime: not saved within trainer.stop_grace_s=1, in step 7. The run still "
        "saves and then ends; another signal gives it 1 s more. Last checkpoint: step 6.\nsaved\n",
    ),
    "a slow end after the decision": (
        "stop.decide(0); time.sleep(30)",
        "pass",
        DONE,
        "\n(cleaning up took longer than 3 s, so the process was ended)\n",
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
    "a slow end after the save": (
        SAVE + "time.sleep(0.5); unsaved.clear(); time.sleep(30)",
        "pass",
        STOPPED,
        f"SIGTERM{DEFERRED}\n{STOP_LINE}\n  (it did not end within 3 s",
    ),
    "trackers that take long after the save": (
        SAVE + "time.sleep(0.5); unsaved.clear(); time.sleep(1.8); print('sent')",
        "pass",
        0,
        f"SIGTERM{DEFERRED}sent\n",
    ),
    "C code that does not return": ("hang_in_c()", "pass", STOPPED, f"\n{STOP_LINE}\n"),
    "SIGTERM to a forked child": (
        "reader, writer = os.pipe()\n"
        "            child = os.fork()\n"
        "            if not child: os.write(writer, b'1'); time.sleep(30)\n"
        "            os.read(reader, 1); os.kill(child, signal.SIGTERM)\n"
        "            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "            time.sleep(1.5); print(stop.requested)",
        "pass",
        0,
        "-15\nNone\n",
    ),
    "no signal": ("pass", "pass", 0, ""),
}
"""{case: (code inside `with stop`, code of the cleanup, exit code, start of the output)}."""


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
        with stop_module.Stop(embedded=True) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.requested is None
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
    monkeypatch.setattr(stop_module, "LAST_WORDS_S", 0.2)
    monkeypatch.setattr(stop_module, "write_error", lambda text: None)


def end_at_second_signal(stop):
    """Tell a run that has nothing to save of two signals. Return the exit code."""
    stop.tell(Signal("SIGTERM"))
    stop.machine.patience._last -= 2.0
    with pytest.raises(Exit) as caught:
        stop.tell(Signal("SIGTERM"))
    return caught.value.args[0]


def test_a_handler_prints_nothing_itself():
    """The main thread may be inside a write to the same stream, which refuses a second one."""
    stop, said = stop_module.Stop(), []
    done = threading.Event()

    def say(text):
        said.append((text, threading.get_ident() == threading.main_thread().ident))
        done.set()

    stop.screen = SimpleNamespace(info=say)
    for event in (Begins(Policy(total_steps=9)), StepWanted(), StepFinished()):
        stop.tell(event)
    stop._handle(signal.SIGTERM, None)
    text = "SIGTERM: step 1 is not saved yet; the run stops once it is"
    assert done.wait(30) and said == [(text, False)]


def test_the_decision_is_said_once_and_before_the_disk_is_written():
    stop, done = stop_module.Stop(embedded=True), []
    stop.on_end = lambda code: done.append(code)

    def say():
        assert stop._turn.acquire(blocking=False), "said while a lock is held"
        stop._turn.release()
        done.append("said")

    assert [stop.decide(code, say=say) for code in (FAILED, STOPPED)] == [FAILED, FAILED]
    assert done == ["said", FAILED]


def test_a_terminal_that_hangs_does_not_keep_the_decision_from_the_disk(monkeypatch):
    monkeypatch.setattr(stop_module, "LAST_WORDS_S", 0.1)
    stop, done, release = stop_module.Stop(embedded=True), [], threading.Event()
    stop.on_end = done.append
    assert stop.decide(FAILED, say=lambda: release.wait(60)) == FAILED and done == [FAILED]
    release.set()


@pytest.mark.parametrize("fault", ["hangs", "fails"])
def test_the_end_is_explained_without_the_disk(exits, monkeypatch, fault):
    said = []
    monkeypatch.setattr(stop_module, "CHECKPOINT_S", 0.1)
    monkeypatch.setattr(stop_module, "LAST_WORDS_S", 30)
    monkeypatch.setattr(stop_module, "write_error", said.append)
    stop, release = stop_module.Stop(), threading.Event()

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
    stop, release = stop_module.Stop(), threading.Event()
    stop.log = lambda text: release.wait(60)
    start = time.monotonic()
    if end == "a signal":
        assert end_at_second_signal(stop) == STOPPED
    else:
        monkeypatch.setattr(limits, "LEAVE_S", 1e-9)
        stop.tell(Ended(DONE))
        with pytest.raises(Exit) as caught:
            stop.tell(Watched())
        assert caught.value.args == (DONE,)
    assert time.monotonic() - start < 20
    release.set()


def test_time_is_watched_also_where_no_thread_can_be_started(exits, monkeypatch):
    """The thread that watches it says what follows in another one, and goes on without."""
    stop = stop_module.Stop()
    policy = Policy(total_steps=9, stop_grace_s=1.0)
    for event in (Begins(policy, step=5, saved=5), StepWanted(), StepFinished()):
        stop.tell(event)

    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stop.tell(Signal("SIGTERM"))
    now[0] += limits.REPEAT_S + 0.1
    stop.tell(Signal("SIGTERM"))
    assert stop.machine.patience.signals == 2
    now[0] += 1.1
    with pytest.raises(Exit) as caught:
        stop.tell(Watched())
    assert caught.value.args == (STOPPED,)


def test_the_end_by_a_signal_decides_the_code_once(exits):
    stop = stop_module.Stop()
    decided = []
    stop.on_end = decided.append
    stop.log = lambda text: decided.append(stop.decide(FAILED))  # the main thread, meanwhile
    assert end_at_second_signal(stop) == STOPPED
    assert decided == [STOPPED, STOPPED]
