"""The guardian, and facts about a machine, without a Ray cluster."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.controller.conftest import alive, within
from verlite.controller import cluster, guardian, node
from verlite.controller.failures import RayLost

OWNER = """
import os, subprocess, sys
from verlite.controller import guardian
os.environ["MARK"] = "{mark}"
watch = guardian.start("MARK={mark}", "{folder}")
os.environ["MARK"] = "{mark}/actor/1"
worker = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL)
os.environ["MARK"] = "{mark}"
child = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL)
os.environ["MARK"] = "{mark}0"
other = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL)
print(worker.pid, child.pid, other.pid, flush=True)
sys.stdin.read()
guardian.dismiss(watch)
"""


@pytest.mark.process
@pytest.mark.parametrize("normal_exit", [True, False])
def test_guardian_spares_the_owners_children_after_a_normal_exit(normal_exit, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    code = OWNER.format(mark=f"test-{os.getpid()}-{normal_exit}", folder=folder)
    command = [sys.executable, "-c", code]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    worker, child, other = map(int, owner.stdout.readline().split())
    os.kill(worker, signal.SIGSTOP)
    assert alive(worker) and alive(child) and folder.exists()
    if normal_exit:
        owner.communicate(timeout=60)
    else:
        owner.kill()
        owner.communicate()
    try:
        assert within(60, lambda: not alive(worker) and not folder.exists())
        assert alive(child) == normal_exit
        assert alive(other), "a run whose id begins with this one's"
    finally:
        for pid in (child, other):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


CUT_OFF = """
import subprocess, sys
code = (
    "from verlite.controller import guardian; import os; "
    "guardian.main(os.getppid(), 'MARK=cut-off', '--head={head},0.1,5,4')"
)
watch = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
print("started", flush=True)
sys.stdin.read()
"""


@pytest.mark.process
def test_guardian_ends_a_worker_that_has_lost_the_head():
    """A few connections that fail do not end it, as when the head is slow."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-c", CUT_OFF.format(head=address)]
        owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert owner.stdout.readline() == "started\n"
        for _ in range(6):  # more than fail
            server.accept()[0].close()
        assert owner.poll() is None
    assert owner.wait(20) == -signal.SIGKILL
    owner.communicate()
    assert guardian.answers(address, 5.0) is False


@pytest.mark.process
@pytest.mark.parametrize("failed_start", [False, True])
def test_ray_agents_without_a_mark_are_found_by_their_files(failed_start, tmp_path, monkeypatch):
    """Ray's agents overwrite the start of their environment with their title."""
    folder = tmp_path / "temporary"
    other_folder = tmp_path / "temporary-2"
    folder.mkdir()
    other_folder.mkdir()
    places = {"ray::Agent": folder, "ray::Another": other_folder, "tracker": folder}
    started = {}
    for title, place in places.items():
        command = ["bash", "-c", f"exec -a {title} sleep 1000 > {place}/log"]
        started[title] = subprocess.Popen(command, env={"PATH": os.environ["PATH"]})

    def all_have_titles():
        command_lines = [Path(f"/proc/{one.pid}/cmdline") for one in started.values()]
        return all(b"exec" not in path.read_bytes() for path in command_lines)

    try:
        assert within(60, lambda: all((place / "log").exists() for place in places.values()))
        assert within(60, all_have_titles)
        agent = started["ray::Agent"]
        for who in ("getpid", "getppid"):  # the process that looks, and the guardian's owner
            with monkeypatch.context() as as_agent:
                as_agent.setattr(os, who, lambda: agent.pid)
                assert guardian.ray_processes_using(str(folder)) == []
        if failed_start:
            cluster._kill_ray("MARK=nobody", str(folder))
        else:
            guardian.dismiss(guardian.start("MARK=nobody", str(folder)))
        assert agent.wait(10) == -signal.SIGKILL
        assert started["ray::Another"].poll() is None
        assert started["tracker"].poll() is None
    finally:
        for one in started.values():
            one.kill()
            one.wait()


def test_free_listeners_have_different_ports():
    listeners = [node.free_listener("127.0.0.1") for _ in range(16)]
    assert len({listener.getsockname()[1] for listener in listeners}) == 16
    assert {listener.getsockname()[0] for listener in listeners} == {"127.0.0.1"}
    for listener in listeners:
        listener.close()


def test_facts_about_a_machine(tmp_path):
    assert node.oom_kills() >= 0
    assert node.interface_of("127.0.0.1") == "lo"
    assert node.interface_of("203.0.113.9") is None
    log = tmp_path / "log"
    log.write_text("".join(f"line {i}\n" for i in range(1000)))
    assert node.tail(str(log), 2) == "line 998\nline 999"
    assert node.tail(str(tmp_path / "none"), 2) == ""


def test_diagnosis_leaves_out_the_log_of_earlier_processes(tmp_path):
    log = tmp_path / "log"
    me = node.this_process()
    log.write_text(f"--- pid 1 on host\nold\n--- pid {me.pid} on host\nnew\nExtension modules: x\n")
    assert node.diagnose([(str(log), me)])[0].log == "new"
    assert "old" in node.diagnose([(str(log), None)])[0].log


def test_what_a_killed_process_has_started_is_killed_too():
    """Also by a process that has ended before, but not what has a session of its own."""
    script = "sleep 300 & echo $!; setsid sleep 300 & echo $!; exec sleep 300"
    leader = subprocess.Popen(
        ["sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    child, apart = (node.process(int(leader.stdout.readline())) for _ in range(2))
    other = subprocess.Popen(["sleep", "300"])
    try:
        known = node.process(leader.pid)
        assert within(60, lambda: os.getsid(apart.pid) == apart.pid)
        for process in (child, apart):  # each has become `sleep`
            assert within(60, lambda one=process: node.process_state(one) == "sleeping")
        leader.kill()
        leader.wait()
        node.kill([node.Process(known.pid, known.started + 10**6), node.Process(leader.pid, 0)])
        assert node.process_state(child) == "sleeping"
        node.kill([known])
        assert node.process_state(child) in ("gone", "dead")
        assert node.process_state(apart) == "sleeping" and other.poll() is None
    finally:
        node.send_signal([child, apart], signal.SIGKILL)
        other.kill()
        other.wait()


def test_process_with_a_reused_id_is_not_signaled():
    other = subprocess.Popen(["sleep", "100"])
    started = int(Path(f"/proc/{other.pid}/stat").read_text().split()[21])
    process = node.Process(other.pid, started)
    earlier = node.Process(other.pid, started - 1)
    assert node.process_state(node.this_process()) != "gone"
    assert node.process_state(process) != "gone"
    os.kill(other.pid, signal.SIGSTOP)
    assert within(60, lambda: node.process_state(process) == "stopped by a signal")
    node.send_signal([earlier, node.Process(2**22 + 1, 1)], signal.SIGKILL)
    assert other.poll() is None
    assert node.process_state(earlier) == "gone"
    node.send_signal([process], signal.SIGKILL)
    assert other.wait() == -signal.SIGKILL
    assert node.process_state(process) == "gone"


@pytest.mark.parametrize(
    "error, tries, raised",
    [
        (Exception("The current node timed out during startup."), 3, RayLost),
        (RuntimeError("the port is taken"), 1, RayLost),
        (TypeError("a bug"), 1, TypeError),
    ],
)
def test_a_local_ray_that_does_not_start_is_lost(monkeypatch, error, tries, raised):
    """Ray reports a start that took longer than its limit, as on a busy machine, as Exception."""
    calls = []
    monkeypatch.setattr("ray.init", lambda **options: calls.append("init") or throw(error))
    monkeypatch.setattr("ray.shutdown", lambda: None)
    with pytest.raises(raised, match=str(error)):
        cluster._start_local(1, None, [], lambda: calls.append("clean"))
    assert calls == ["init", "clean"] * tries


def throw(error):
    raise error


def test_a_signal_while_ray_starts_waits_for_the_handler_of_this_process(monkeypatch):
    """Ray's would print a stack. Ray is ended, so that the program may start it again."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    def init(**options):
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(signal.SIG_IGN))  # as Ray's, in C
        signal.raise_signal(signal.SIGTERM)

    ended = []
    ray_node = SimpleNamespace(kill_all_processes=lambda **options: ended.append(options))
    monkeypatch.setattr("ray._private.worker._global_node", ray_node)
    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.shutdown", lambda: ray_node.kill_all_processes(allow_graceful=True))
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            cluster._start_local(1, None, [], lambda: None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == [{"allow_graceful": False}]
