"""Workers stop at breakpoint() and at failures, and a debugger lets them continue.

The tests speak the debugger's protocol, as an editor does.
"""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.controller.conftest import alive, pids, within
from tests.controller.debugged import Debugged
from tests.dap import Client
from verlite.controller.cluster import TOKEN_FILE, _write_token
from verlite.controller.debugger import STOP_MARK, new_stops, show_stops
from verlite.controller.failures import WorkerError
from verlite.controller.placement import reserve
from verlite.controller.worker_group import group, ready, spawn, submit
from verlite.controller.worker_handle import WorkerHandle

pytest.importorskip("debugpy")

pytestmark = pytest.mark.process


def start(cluster, role: str) -> Debugged:
    """Two ranks in a run with a debugger, in which failures stop, too."""
    placement = reserve(cluster, {role: [0, 1]}, devices_per_node=2, kind="cpu")
    worker = spawn(Debugged, placement, role)
    ready(worker)
    return worker


@pytest.fixture(scope="module")
def debugged_cluster(cluster):
    cluster.debugger, cluster.stops_at_failures = "debugpy", True
    return cluster


@pytest.fixture(scope="module")
def debugged(debugged_cluster):
    """Two ranks for the tests in which nothing fails."""
    return start(debugged_cluster, "debugged")


class Shown(list):
    """Texts about stops, as the driver shows them."""

    def after(self, method, *args, **kwargs):
        """Call a method of the workers, and wait for the next text. Return the call and it."""
        count = len(self)
        call = submit(method, *args, **kwargs)
        assert within(60, lambda: call.supervisor.poll(0.1) or len(self) > count)
        return call, self[-1]


@pytest.fixture(scope="module")
def shown(debugged_cluster):
    texts = Shown()
    with show_stops(debugged_cluster, texts.append):
        yield texts


def address_in(text: str) -> str:
    return re.search(r"attach a debugger to (\S+:\d+)", text)[1]


def test_an_update_continues_with_the_same_numbers(debugged, shown):
    """Rank 1 stops before a collective in which rank 0 waits for it, longer than the collective's
    usual limit. A second stop of the attached debugger shows that it has the process."""
    without = debugged.update(stop_on=None)
    call, text = shown.after(debugged.update, stop_on=1)
    assert re.search(
        rf"debugged rank 1 \(process {pids(debugged)[1]} on \S+\) waits at a breakpoint: "
        r"\S+/debugged.py:\d+ in update; attach a debugger to 127\.0\.0\.1:\d+",
        text,
    )
    time.sleep(2.5)
    assert list(call.pending.values()) == group(debugged).workers  # both wait
    with Client(address_in(text)) as client:
        thread, frame = client.stopped()
        assert frame["name"] == "update"
        assert client.evaluate("gradient.shape", frame) == "torch.Size([2, 3])"
        client.go_on(thread)
        assert call.result() == without
        again, text = shown.after(debugged.update, stop_on=1)
        assert "the debugger at 127.0.0.1" in text
        thread, frame = client.stopped()
        client.go_on(thread)
        assert again.result() == without
    assert len(shown) == 2


def test_a_stop_in_a_thread(debugged, shown):
    call, text = shown.after(debugged.in_thread)
    with Client(address_in(text)) as client:
        thread, frame = client.stopped()
        assert (frame["name"], client.evaluate("secret + 1", frame)) == ("score", "42")
        client.go_on(thread)
        assert call.result() == [41, 0]


def test_a_failure_is_shown_before_the_debugger_attaches(fresh, shown):
    call, text = shown.after(start(fresh, "failing").fail)
    assert text.startswith("error: failing rank 1 failed in fail: KeyError: \"not in ['answer']\"")
    assert "debugged.py" in text and "raise KeyError" in text
    with Client(address_in(text)) as client:
        thread, frame = client.stopped()
        assert client.evaluate("wrong", frame) == "{'answer': 42}"
        client.go_on(thread)
    with pytest.raises(WorkerError, match="failing rank 1 failed in fail") as caught:
        call.result()
    assert isinstance(caught.value.__cause__, KeyError)


def test_ctrl_c_at_a_failure_reports_the_failure(fresh, shown):
    worker = start(fresh, "interrupted")
    processes = pids(worker)
    call, _ = shown.after(worker.fail)
    threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(WorkerError, match=r"rank 1 failed in fail.*(?s:.*)raise KeyError"):
        call.result()
    assert within(60, lambda: not any(map(alive, processes)))


def test_breakpoint_without_a_debugger_is_an_error(fresh, monkeypatch):
    monkeypatch.setattr(fresh, "debugger", "")
    monkeypatch.setattr(fresh, "stops_at_failures", False)
    placement = reserve(fresh, {"plain": [0]}, devices_per_node=1, kind="cpu")
    worker = spawn(Debugged, placement, "plain")
    expected = "breakpoint() at <string>:2 in child, but the run has no debugger"
    assert expected in worker.refused()[0]
    with pytest.raises(
        WorkerError, match=r"NoDebugger: .*debugged.py:\d+ in update.*trainer.debug"
    ):
        worker.update(stop_on=0)


def test_ray_debug_connects_by_the_printed_command(fresh, shown, monkeypatch):
    """The legacy debugger in a terminal: choose the stop, look at a value, continue."""
    monkeypatch.setattr(fresh, "debugger", "legacy")
    monkeypatch.setattr(fresh, "stops_at_failures", False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    token = fresh.run_dir / "logs" / TOKEN_FILE
    _write_token(token)
    placement = reserve(fresh, {"legacy": [0]}, devices_per_node=1, kind="cpu")
    call, text = shown.after(spawn(Debugged, placement, "legacy").update, stop_on=0)
    assert "debugged.py" in text and "in update; connect with: " in text
    terminal, end = pty.openpty()
    command = text.partition("connect with: ")[2]
    debug = subprocess.Popen(command, shell=True, stdin=end, stdout=end, stderr=end)
    try:
        for prompt, answer in (
            ("Enter breakpoint index", "0"),
            ("(Pdb) ", "p gradient.shape"),
            ("torch.Size([2, 3])", "c"),
        ):
            read_until(terminal, prompt)
            os.write(terminal, f"{answer}\n".encode())
        call.result()
    finally:
        debug.kill()
        debug.wait()
        token.unlink()
        os.close(terminal)
        os.close(end)


def read_until(terminal: int, text: str) -> None:
    """Read a terminal's output up to this text."""
    seen = ""
    while text not in seen:
        assert select.select([terminal], [], [], 60)[0], seen
        seen += os.read(terminal, 4096).decode(errors="replace")


def test_stops_of_a_log_are_read_once_and_only_when_complete(tmp_path):
    path = tmp_path / "actor_0.log"
    worker = WorkerHandle(None, "actor", 0, "", "", str(path), None)
    offsets: dict[str, int] = {}
    assert new_stops(worker, offsets) == []
    stop = STOP_MARK + (
        '{"run": "r", "host": "h", "pid": 1, "file": "f", "line": 2, "function": "g", '
        '"address": ""}'
    )
    path.write_text(f"text\n{STOP_MARK}of the user\n{stop}\n{stop[:20]}")
    assert [found.line for found in new_stops(worker, offsets)] == [2]
    assert new_stops(worker, offsets) == []
    with path.open("a") as file:
        file.write(stop[20:] + "\n")
    assert [found.function for found in new_stops(worker, offsets)] == ["g"]
