"""Which cluster is joined, what is said when none can be, and a guardian on its own."""

import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.controller.conftest import alive, within
from verlite.controller import cluster, guardian, node, supervise
from verlite.controller.supervise import StopRequest, Terminated


@pytest.mark.parametrize("address", ["ray://head:10001", "http://127.0.0.1:8265"])
def test_addresses_of_other_services_name_the_right_command(address, tmp_path):
    with pytest.raises(
        ConnectionError, match=f"address={address}.*ray job submit --address={address}"
    ):
        cluster.connect(tmp_path, address=address)


def test_a_stale_address_is_told_at_once(tmp_path, monkeypatch):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # bound and not listening: refuses
        stale = f"127.0.0.1:{holder.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", stale)
        start = time.monotonic()
        with pytest.raises(ConnectionError, match=f"RAY_ADDRESS={stale} does not answer"):
            cluster.connect(tmp_path)
        assert time.monotonic() - start < 10
        monkeypatch.setattr("ray._private.utils.read_ray_address", lambda: stale)
        monkeypatch.setenv("RAY_ADDRESS", "")
        assert cluster.find(None) is None  # what a crashed `ray start` left behind does not count
        with pytest.raises(ConnectionError, match="RAY_ADDRESS=auto, but no cluster runs"):
            monkeypatch.setenv("RAY_ADDRESS", "auto")
            cluster.find(None)


@pytest.mark.parametrize(
    "reply, joined",
    [(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), True), (b"HTTP/1.1 400 Bad Request", False)],
)
def test_a_cluster_that_runs_on_this_machine_is_joined_and_other_servers_are_not(
    reply, joined, monkeypatch
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].sendall(reply), daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr("ray._private.utils.read_ray_address", lambda: address)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        assert cluster.find("local") is None
        assert cluster.find(None) == (address if joined else None)


OWNER = """
import os, subprocess, sys, time
from verlite.controller import guardian
os.environ["MARK_ALL"] = os.environ["MARK_WORKERS"] = "{mark}"
watch = guardian.start("MARK_ALL={mark}", "MARK_WORKERS={mark}", "{folder}")
worker = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL)
del os.environ["MARK_WORKERS"]
child = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL)
print(worker.pid, child.pid, flush=True)
sys.stdin.read()
guardian.dismiss(watch)
"""


@pytest.mark.parametrize("orderly", [True, False])
def test_a_guardian_spares_the_owners_children_only_when_the_owner_leaves_in_order(
    orderly, tmp_path
):
    folder = tmp_path / "temporary"
    folder.mkdir()
    code = OWNER.format(mark=f"test-{os.getpid()}-{orderly}", folder=folder)
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    worker, child = map(int, owner.stdout.readline().split())
    os.kill(worker, signal.SIGSTOP)
    assert alive(worker) and alive(child) and folder.exists()
    if orderly:
        owner.communicate(timeout=60)
    else:
        owner.kill()
        owner.communicate()
    try:
        assert within(10, lambda: not alive(worker) and not folder.exists())
        assert alive(child) == orderly
    finally:
        if alive(child):
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("failed_start", [False, True])
def test_rays_agents_are_known_by_their_files_when_their_title_lies_over_their_mark(
    failed_start, tmp_path, monkeypatch
):
    folder, another = tmp_path / "temporary", tmp_path / "temporary-2"
    folder.mkdir(), another.mkdir()
    places = {"ray::Agent": folder, "ray::Another": another, "tracker": folder}
    started = {
        title: subprocess.Popen(
            ["bash", "-c", f"exec -a {title} sleep 1000 > {place}/log"],
            env={"PATH": os.environ["PATH"]},
        )
        for title, place in places.items()
    }
    try:
        assert within(10, lambda: all((place / "log").exists() for place in places.values()))
        assert within(
            10,
            lambda: all(
                b"sleep" not in Path(f"/proc/{one.pid}/cmdline").read_bytes()
                for one in started.values()
            ),
        )
        agent = started["ray::Agent"]
        for who in ("getpid", "getppid"):  # the process that looks, and the guardian's owner
            with monkeypatch.context() as as_agent:
                as_agent.setattr(os, who, lambda: agent.pid)
                assert guardian.writing(str(folder)) == []
        if failed_start:
            cluster._kill_ray("nobody", 0, str(folder))
        else:
            guardian.dismiss(guardian.start("MARK_ALL=nobody", "MARK_WORKERS=nobody", str(folder)))
        assert agent.wait(10) == -signal.SIGKILL
        assert started["ray::Another"].poll() is started["tracker"].poll() is None
    finally:
        for one in started.values():
            one.kill()
            one.wait()


def test_stop_request_keeps_the_first_signal_and_raises_on_the_second_sigterm():
    told = []
    with StopRequest(told.append) as stop:
        assert stop.requested is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested == "SIGUSR1" and told == ["SIGUSR1"]
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL and stop.requested == "SIGUSR1"


def test_a_sigterm_that_comes_out_of_ray_as_ctrl_c_is_a_sigterm_again(monkeypatch):
    import ray

    def wait(*_, terminated, **__):
        try:
            supervise.terminate("SIGTERM") if terminated else None
        except Terminated:
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(supervise, "_terminated", [])
    for terminated, kind in ((True, Terminated), (False, KeyboardInterrupt)):
        monkeypatch.setattr(ray, "wait", functools.partial(wait, terminated=terminated))
        with pytest.raises(KeyboardInterrupt) as caught:
            supervise._wait([], 1, 1.0)
        assert caught.type is kind


FORKS = """
import os, signal, time
from verlite.controller.supervise import StopRequest
with StopRequest() as stop:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b"here")
        time.sleep(60)
    os.read(reader, 4)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert stop.requested is None
"""


def test_a_forked_child_does_not_inherit_the_request():
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=60)


def test_sixteen_meeting_points_at_once_have_sixteen_ports():
    listeners = [node.free_listener("127.0.0.1") for _ in range(16)]
    assert len({listener.getsockname()[1] for listener in listeners}) == 16
    assert {listener.getsockname()[0] for listener in listeners} == {"127.0.0.1"}
    for listener in listeners:
        listener.close()


def test_what_a_machine_says_of_itself(tmp_path):
    assert 1 <= node.cores() <= os.cpu_count() and node.oom_kills() >= 0
    assert node.interface_of("127.0.0.1") == "lo" and node.interface_of("203.0.113.9") is None
    log = tmp_path / "log"
    log.write_text("".join(f"line {i}\n" for i in range(1000)))
    assert (
        node.tail(str(log), 2) == "line 998\nline 999"
        and node.tail(str(tmp_path / "none"), 2) == ""
    )


def test_a_process_number_that_another_process_has_now_is_left_alone():
    me, other = node.this_process(), subprocess.Popen(["sleep", "100"])
    process = node.Process(other.pid, int(Path(f"/proc/{other.pid}/stat").read_text().split()[21]))
    assert "gone" not in (node.process_state(me), node.process_state(process))
    os.kill(other.pid, signal.SIGSTOP)
    assert within(5, lambda: node.process_state(process) == "stopped by a signal")
    node.send_signal(
        [node.Process(other.pid, process.started - 1), node.Process(2**22 + 1, 1)], signal.SIGKILL
    )
    assert (
        other.poll() is None
        and node.process_state(node.Process(other.pid, process.started - 1)) == "gone"
    )
    node.send_signal([process], signal.SIGKILL)
    assert other.wait() == -signal.SIGKILL and node.process_state(process) == "gone"
