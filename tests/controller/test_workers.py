"""Calls to worker processes: arguments, results and failures."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tests.controller.conftest import alive, pids, processes_of, within
from tests.controller.workers import Echo, Light
from verlite.controller.columns import Ref, fetch
from verlite.controller.failures import RankDied, StuckError, WorkerError
from verlite.controller.placement import ResourcesMissing, reserve
from verlite.controller.supervise import Supervisor
from verlite.controller.worker_group import group, ready, spawn
from verlite.controller.worker_handle import process_infos
from verlite.controller.worker_start import prestart
from verlite.protocol.data import DataProto, object_array
from verlite.threads import cores

pytestmark = pytest.mark.process
PRELOAD = ["tests.controller.workers", "verlite.controller.columns"]


@pytest.fixture(scope="module")
def echo(cluster):
    """Two ranks for the whole file. The last test kills one of them."""
    placement = reserve(cluster, {"echo": [0, 1]}, devices_per_node=2, kind="cpu")
    return spawn(Echo, placement, "echo")


@pytest.fixture
def light(fresh):
    """Two ranks for one test."""
    worker = spawn(Light, reserve(fresh, {"light": [0, 1]}, devices_per_node=2), "light")
    ready(worker)
    return worker


def batch(rows: int = 5, width: int = 2) -> DataProto:
    x = torch.arange(rows * width).reshape(rows, width)
    return DataProto.from_dict({"x": x}, {"uid": [f"u{i}" for i in range(rows)]}, {"step": 7})


def numbers(*values: int) -> DataProto:
    """A request for `Echo.produce`."""
    uids = [f"u{i}" for i in range(len(values))]
    return DataProto.from_dict({"x": torch.tensor([[x, 0] for x in values])}, {"uid": uids})


def test_workers_start_with_the_python_that_the_run_names(fresh, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nVERLITE_TEST_PYTHON=own exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(fresh, "py_executable", str(python))
    worker = spawn(Light, reserve(fresh, {"light": [0]}, devices_per_node=1), "light")
    assert worker.environment("VERLITE_TEST_PYTHON") == [["own"]]


def test_split_distributes_rows_and_restores_their_order(echo):
    out = echo.double(batch(), plus=1)
    assert out.batch["y"].tolist() == (batch().batch["x"] * 2 + 1).tolist()
    assert out.batch["rank"].tolist() == [0, 0, 0, 1, 1]
    assert out.non_tensor_batch["uid"].tolist() == [f"u{i}" for i in range(5)]
    assert out.meta_info == {"step": 7}


def test_split_follows_the_assignment(echo):
    out = echo.samples(batch().with_meta(assignment=[[4, 0], [3, 1, 2]]), 2)
    assert out.batch["x"][:, 0].tolist() == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]
    assert out.batch["sample"].tolist() == [0, 1] * 5
    all_on_rank_1 = batch().with_meta(assignment=[[], [4, 3, 2, 1, 0]])
    assert echo.double(all_on_rank_1).batch["rank"].tolist() == [1] * 5
    assert echo.rows(batch(1), 9) == [(1, 9, {"step": 7}), (0, 9, {"step": 7})]


def test_columns_of_every_ranks_own_rows_stay_remote(echo):
    """Also if a rank returns no rows."""
    none, one = echo.produce_own()
    assert len(none) == 0 and isinstance(one.non_tensor_batch["tokens"][0], Ref)
    joined = DataProto.concat([none, one])
    assert joined.non_tensor_batch["producer"].tolist() == [1]
    assert fetch(joined).non_tensor_batch["tokens"].tolist() == [[1]]


def test_lost_rows_are_an_error(echo):
    with pytest.raises(ValueError, match=r"given \[3, 2\] rows and returned \[2, 1\]"):
        echo.lose_a_row(batch())


@pytest.fixture
def passed(monkeypatch):
    """The bytes of the batches that this process has pickled and unpickled."""
    found = {"sent": 0, "received": 0}
    pickled, unpickled = DataProto.__getstate__, DataProto.__setstate__

    def send(data):
        found["sent"] += data.nbytes
        return pickled(data)

    def receive(data, state):
        unpickled(data, state)
        found["received"] += data.nbytes

    monkeypatch.setattr(DataProto, "__getstate__", send)
    monkeypatch.setattr(DataProto, "__setstate__", receive)
    return found


def test_large_batches_are_sent_once(echo, passed):
    data = batch(64, 4096)
    assert echo.total(data) == [float(data.batch["x"].sum())] * 2
    assert passed["sent"] == data.nbytes
    out = echo.double(data)
    assert torch.equal(out.batch["y"], data.batch["x"] * 2)
    assert passed == {"sent": 2 * data.nbytes, "received": 2 * data.nbytes + 64 * 8}


def test_remote_columns_follow_their_rows(echo, passed):
    """The driver handles references only. Rows that it drops, repeats, reorders and sends to other
    ranks keep their values."""
    requests = numbers(3, 70_000, 1, 80_000, 5, 400_000, 7)  # some rows are larger than a chunk
    produced = requests.union(echo.produce(requests))
    assert passed["received"] == 0, "the driver received an array"
    columns = produced.non_tensor_batch
    assert all(isinstance(ref, Ref) for name in ("tokens", "text") for ref in columns[name])
    assert columns["producer"].tolist() == [0] * 4 + [1] * 3
    rows = produced.select_idxs([5, 0, 3, 0, 6]).select(meta_info_keys=[])
    rows = rows.with_meta(assignment=[[1, 4, 2], [3, 0]])
    consumed = echo.consume(rows)
    values = [400_000, 3, 80_000, 3, 7]
    assert consumed.batch["sum"].tolist() == [x * x for x in values]
    assert consumed.non_tensor_batch["text_read"].tolist() == [f"{x}!" for x in values]
    assert consumed.non_tensor_batch["consumer"].tolist() == [1, 0, 0, 1, 0]
    assert passed["sent"] < 10_000
    with_text = fetch(rows, ["text"]).non_tensor_batch
    assert with_text["text"].tolist() == [f"{x}!" for x in values]
    assert isinstance(with_text["tokens"][0], Ref)
    assert [len(tokens) for tokens in fetch(rows).non_tensor_batch["tokens"]] == values
    # Rows of 280 and 320 kB share a chunk of 1 MiB; the row of 1.6 MB has its own.
    assert len({ref.chunk for ref in columns["tokens"]}) == 4
    assert len(echo.produce(requests[:0])) == 0


def test_columns_mix_references_and_values(echo):
    produced = echo.produce(numbers(3, 70_000, 5))
    tokens = list(produced.non_tensor_batch["tokens"])
    tokens[1] = np.array([8, 8])
    mixed = produced.with_non_tensor(tokens=object_array(tokens))
    fetched = fetch(mixed, ["tokens"]).non_tensor_batch
    assert [len(row) for row in fetched["tokens"]] == [3, 2, 5]
    assert isinstance(fetched["text"][0], Ref)
    assert echo.consume(mixed).batch["sum"].tolist() == [9, 16, 25]


def test_method_registered_without_fetch_chooses_its_columns(echo):
    consumed = echo.consume_text(echo.produce(numbers(3, 4))).non_tensor_batch
    assert consumed["text_read"].tolist() == ["3!", "4!"]
    assert consumed["is_ref"].tolist() == [True, True]


def test_fetch_without_references_returns_the_batch():
    batch = DataProto.from_dict({}, {"tokens": [[1, 2], [3]]})
    assert fetch(batch) is batch
    assert fetch(batch, ["tokens"]) is batch


def test_ranks_of_a_role_form_a_process_group_on_loopback(echo, cluster):
    assert echo.all_reduce() == [3.0, 3.0]
    assert echo.all_reduce() == [3.0, 3.0]  # init_distributed may be called again
    sockets = [
        connection
        for process in processes_of(cluster.run_id)
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(sockets) > 5
    assert {c.laddr.ip for c in sockets} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def test_cores_are_shared_by_the_devices(echo):
    assert echo.threads() == [max(1, cores() // 2)] * 2


def test_wrong_calls_are_refused(echo):
    with pytest.raises(TypeError, match=r"echo.double.*must be a DataProto"):
        echo.double({"x": 1})
    with pytest.raises(AttributeError, match="Echo.doubel cannot be called"):
        echo.doubel(batch())
    with pytest.raises(AttributeError, match="rank cannot be set"):
        echo.rank = 3
    with pytest.raises(TypeError, match="is not the result of spawn"):
        group(len)


def test_roles_share_devices(fresh):
    """Roles with one device, roles with several, and a worker with two devices; eight processes on
    any number of cores."""
    roles = {"a": [0, 1, 2], "b": [0, 1], "c": [2, 1], "d": [[0, 2]]}
    placement = reserve(fresh, roles, devices_per_node=6)
    assert [placement.share(device) for device in range(4)] == [0.3333, 0.3333, 0.3333, 1.0]
    workers = [spawn(Light, placement, role) for role in "abcd"]
    ready(*workers)
    a, b, c, d = workers
    assert [spec[:3] for spec in a.spec()] == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]
    assert [spec[:3] for spec in d.spec()] == [(0, 1, 0)]
    assert [worker.node_id for worker in group(a).workers] == [spec[3] for spec in a.spec()]
    assert len(group(b)) == 2
    assert all(psutil.pid_exists(pid) for worker in workers for pid in pids(worker))
    assert repr(c) == "<c: 2 x Light>"
    assert repr(c.spec) == "<c.spec of 2 ranks>"
    names = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert a.environment(*names) == [["-1", "lo", "=lo"]] * 3
    assert a.add(1, b=2) == 3
    logs = Path(fresh.run_dir) / "logs"
    names = sorted(path.name for path in logs.glob("[bcd]_*.log"))
    assert names == ["b_0.log", "b_1.log", "c_0.log", "c_1.log", "d_0.log"]
    assert "b 1 is running" in (logs / "b_1.log").read_text()


def test_prestarted_processes_become_the_workers(fresh):
    """A module that cannot be imported does not harm them. Calls of several roles run in parallel,
    those of one role in order."""
    placement = reserve(fresh, {"a": [0, 1], "b": [1]}, devices_per_node=2)
    prestart(placement, "a", "tests.no_such_module", "wave")
    waiting = placement.prestarted["a"]
    a = spawn(Light, placement, "a")
    b = spawn(Light, placement, "b")
    ready(a, b)
    assert pids(a) == [info.process.pid for info in process_infos(waiting)]
    assert not placement.prestarted
    assert a.imported("wave") == [True, True]
    assert b.imported("wave") == [False]
    assert len(fresh.supervisor.workers) == 3

    start = time.monotonic()
    first = group(a).submit("sleep", 1.0)
    second = group(b).submit("sleep", 1.0)
    third = group(a).submit("add", 2, b=2)
    assert first.pending
    assert [future.result() for future in (first, second, third)] == [[0, 1], [0], 4]
    assert 1.0 <= time.monotonic() - start < 1.9
    assert first.result() == [0, 1]


def test_missing_devices_are_refused(fresh):
    for roles, message in [
        ({"a": [0, 2]}, r"a rank 1 is placed on devices \[2\], but the run has only 0 to 1"),
        ({"a": []}, "role a has no device"),
        ({"a": [[]]}, "a rank 0 is placed on devices"),
    ]:
        with pytest.raises(ValueError, match=message):
            reserve(fresh, roles, devices_per_node=2)
    with pytest.raises(ValueError, match="different nodes"):
        reserve(fresh, {"a": [[1, 2]]}, nodes=2, devices_per_node=2)
    table = r"(?s)needs 1 node\(s\) with 99 CPU each.*127.0.0.1 +99 +8 "
    with pytest.raises(ResourcesMissing, match=table):
        reserve(fresh, {"a": [0]}, devices_per_node=99)
    with pytest.raises(ResourcesMissing, match="GPU needed"):
        reserve(fresh, {"a": [0]}, devices_per_node=1, kind="cuda", wait_s=0.5)


@pytest.mark.parametrize(
    "how, kind, exception, message",
    [
        ("exception", "exception", "ValueError", "ValueError: bad batch"),
        ("terminate", "killed by SIGTERM", "Sigterm", "SIGTERM"),
        ("kill", "killed by SIGKILL or os._exit", None, "the process ended without a message"),
        ("segfault", "killed by SIGSEGV", None, 'workers.py", line [0-9]+ in fail'),
    ],
)
def test_failed_rank_is_reported_and_all_ranks_are_stopped(light, how, kind, exception, message):
    processes = pids(light)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=rf"light rank 1 failed in fail \({kind}\)") as caught:
        light.fail(1, how)
    error = caught.value
    assert (error.role, error.rank, error.method) == ("light", 1, "fail")
    assert (error.kind, error.exception_type) == (kind, exception)
    caught.match(message)
    caught.match("light_1.log")
    assert time.monotonic() - start < 10
    assert within(60, lambda: not any(alive(pid) for pid in processes))
    if how == "exception":
        assert isinstance(error.__cause__, ValueError)
        caught.match(r'raise ValueError\("bad batch"\)')
    with pytest.raises(RuntimeError, match="stopped after an earlier failure") as later:
        light.add(1)
    assert later.value.__cause__ is error


def test_sigterm_between_two_calls_is_named(light):
    process = pids(light)[1]
    os.kill(process, signal.SIGTERM)
    assert within(60, lambda: not alive(process))
    why = r"light rank 1 failed in sleep \(killed by SIGTERM\): something outside the run"
    with pytest.raises(WorkerError, match=why) as caught:
        light.sleep(5.0)
    assert caught.value.may_pass


def test_a_dead_rank_of_a_restartable_role_is_replaced_and_repeats_its_part(light, tmp_path):
    """Then both ranks are replaced: one is only stuck, and one has answered already."""
    workers, supervisor, before = group(light), group(light).supervisor, pids(light)
    supervisor.restartable = {"light"}
    children = light.child(own_session=False)
    (tmp_path / "die").touch()
    with pytest.raises(
        RankDied, match="light rank 1 failed in die_once .killed by SIGKILL"
    ) as died:
        light.die_once(str(tmp_path / "die"))
    assert alive(before[0])
    dead = supervisor.settle(died.value.workers)
    assert [worker.rank for worker in dead] == [1]
    assert within(60, lambda: not alive(children[1])) and alive(children[0])
    workers.restart(dead)
    died.value.call.send_missing()
    after = pids(light)
    assert died.value.call.result() == [(before[0], 1), (after[1], 1)] and after[1] != before[1]
    assert supervisor.workers == workers.workers and light.spec()[1][:2] == (1, 2)

    os.kill(before[0], signal.SIGSTOP)
    call = workers.submit("die_once", "")
    assert within(60, lambda: supervisor.poll(0.1) or 1 in call.values)
    both = list(workers.workers)
    assert supervisor.settle(both) == both
    assert within(60, lambda: not alive(before[0]))
    workers.restart(both)
    call.send_missing()
    assert call.result() == [(pid, 1) for pid in pids(light)], "also what had been answered"


def test_consequence_waits_for_its_cause(light):
    message = "light rank 1 failed in lose .killed by SIGKILL"
    with pytest.raises(WorkerError, match=message) as caught:
        light.lose(1)
    caught.match("then light rank 0 in lose: RuntimeError: .*closed by peer")


def test_dead_producer_is_named_where_its_columns_are_missing(fresh):
    """A worker or the driver only sees that the owner of the values has died."""
    placement = reserve(fresh, {"producer": [0], "reader": [1]}, devices_per_node=2)
    producer = spawn(Echo, placement, "producer")
    reader = spawn(Echo, placement, "reader")
    produced = producer.produce(numbers(200_000))
    ready(reader)
    os.kill(pids(producer)[0], signal.SIGKILL)
    dead = Supervisor(120)
    dead.workers = list(group(producer).workers)
    assert within(60, dead._dead_workers), "Ray has not noticed the death"
    time.sleep(2)  # until then the object store may still have the values
    message = "producer rank 0 failed in no call .killed by SIGKILL"
    with pytest.raises(WorkerError, match=message) as caught:
        reader.consume(produced)
    caught.match("then reader rank 0 in consume: OwnerDiedError")

    fresh.supervisor = dead
    with pytest.raises(WorkerError, match=message):
        fetch(produced)


def test_failed_construction_is_raised_by_the_next_call(fresh):
    placement = reserve(fresh, {"light": [0, 1]}, devices_per_node=2)
    worker = spawn(Light, placement, "light", fail_on_rank=1)
    message = "light rank 1 failed in construction.*FileNotFoundError: no such model"
    with pytest.raises(WorkerError, match=message) as caught:
        worker.spec()
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_failure_in_another_call_is_noticed(fresh):
    placement = reserve(fresh, {"a": [0], "b": [0]}, devices_per_node=1)
    a = spawn(Light, placement, "a")
    b = spawn(Light, placement, "b")
    ready(a, b)
    group(b).submit("sleep", 1000)
    group(b).submit("sleep", 1000)
    threading.Timer(0.5, os.kill, (pids(b)[0], signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(WorkerError, match="b rank 0 failed in sleep"):
        a.sleep(1000)
    assert time.monotonic() - start < 10


def test_stopped_rank_is_named_and_killed(light):
    processes = pids(light)
    os.kill(processes[1], signal.SIGSTOP)
    message = r"(?s)light.sleep made no progress for 2 s.*rank 1: process \d+ is stopped"
    with pytest.raises(StuckError, match=message) as caught:
        group(light).submit("sleep", 0.0).result(timeout_s=2)
    assert (caught.value.finished, caught.value.unfinished) == ([0], [1])
    assert within(60, lambda: not any(alive(pid) for pid in processes))


def test_ctrl_c_interrupts_a_wait_and_a_stuck_rank_shows_its_stack(light, fresh):
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        light.sleep(1000)
    assert time.monotonic() - start < 4
    message = (
        "(?s)light.spec made no progress.*not finished: 0, 1.*rank 0: process [0-9]+ is sleeping"
        '.*workers.py", line [0-9]+ in sleep'
    )
    with pytest.raises(StuckError, match=message):
        group(light).submit("spec").result(timeout_s=1)
    log = (fresh.run_dir / "logs" / "light_1.log").read_text()
    assert "most recent call first" in log


def test_dead_peer_is_the_cause_of_a_broken_collective(echo):
    assert echo.all_reduce() == [3.0, 3.0]
    message = "echo rank 1 failed in all_reduce .killed by SIGKILL"
    with pytest.raises(WorkerError, match=message):
        echo.all_reduce(die_on=1)
