"""Calls that work: what reaches the ranks, and what comes back."""

import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tests.controller.conftest import processes_of
from tests.controller.workers import Echo, Light
from verlite.controller import node
from verlite.controller.columns import Ref, fetch
from verlite.controller.hosts import prestart
from verlite.controller.placement import ResourcesMissing, reserve
from verlite.controller.supervise import presences
from verlite.controller.worker_group import group, ready, spawn, submit
from verlite.protocol.data import DataProto, object_array


@pytest.fixture(scope="module")
def echo(cluster):
    placement = reserve(cluster, {"echo": [0, 1]}, devices_per_node=2, kind="cpu")
    return spawn(Echo, placement, "echo")


def batch(rows: int = 5, width: int = 2) -> DataProto:
    x = torch.arange(rows * width).reshape(rows, width)
    return DataProto.from_dict({"x": x}, {"uid": [f"u{i}" for i in range(rows)]}, {"step": 7})


def test_split_divides_rows_and_puts_them_back(echo):
    out = echo.double(batch(), plus=1)
    assert out.batch["y"].tolist() == (batch().batch["x"] * 2 + 1).tolist() and out.batch[
        "rank"
    ].tolist() == [0, 0, 0, 1, 1]
    assert out.non_tensor_batch["uid"].tolist() == [
        f"u{i}" for i in range(5)
    ] and out.meta_info == {"step": 7}


def test_split_follows_the_assignment_also_without_rows_for_a_rank(echo):
    out = echo.samples(batch().with_meta(assignment=[[4, 0], [3, 1, 2]]), 2)
    assert (
        out.batch["x"][:, 0].tolist() == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]
        and out.batch["sample"].tolist() == [0, 1] * 5
    )
    assert (
        echo.double(batch().with_meta(assignment=[[], [4, 3, 2, 1, 0]])).batch["rank"].tolist()
        == [1] * 5
    )
    assert echo.rows(batch(1), 9) == [(1, 9, {"step": 7}), (0, 9, {"step": 7})]


def test_rows_that_a_worker_loses_are_an_error(echo):
    with pytest.raises(ValueError, match=r"given \[3, 2\] rows and returned \[2, 1\]"):
        echo.lose_a_row(batch())


def test_large_batches_travel_once_and_are_counted(echo, cluster):
    data = batch(64, 4096)
    before = cluster.sent_bytes, cluster.received_bytes
    assert echo.total(data) == [float(data.batch["x"].sum())] * 2
    assert cluster.sent_bytes - before[0] == data.nbytes
    out = echo.double(data)
    assert torch.equal(out.batch["y"], data.batch["x"] * 2)
    assert (
        cluster.sent_bytes - before[0] == 2 * data.nbytes
        and cluster.received_bytes - before[1] == 2 * data.nbytes + 64 * 8
    )


def test_kept_columns_stay_with_their_maker_and_follow_their_rows(echo, cluster):
    """The driver moves references: rows that it drops, repeats, mixes and deals out to other ranks have their own values there."""
    x = torch.tensor(
        [[n, 0] for n in (3, 70_000, 1, 80_000, 5, 400_000, 7)]
    )  # some are larger than a chunk
    asked = DataProto.from_dict({"x": x}, {"uid": [f"u{i}" for i in range(7)]})
    before = cluster.sent_bytes, cluster.received_bytes
    spoken = asked.union(echo.speak(asked))
    assert cluster.received_bytes == before[1], "no array came to the driver"
    columns = spoken.non_tensor_batch
    assert (
        all(isinstance(ref, Ref) for name in ("tokens", "text") for ref in columns[name])
        and columns["who"].tolist() == [0] * 4 + [1] * 3
    )
    chosen = (
        spoken.select_idxs([5, 0, 3, 0, 6])
        .select(meta_info_keys=[])
        .with_meta(assignment=[[1, 4, 2], [3, 0]])
    )
    heard = echo.listen_to(chosen)
    numbers = [400_000, 3, 80_000, 3, 7]
    assert heard.batch["sum"].tolist() == [n * n for n in numbers] and heard.non_tensor_batch[
        "heard"
    ].tolist() == [f"{n}!" for n in numbers]
    assert heard.non_tensor_batch["listener"].tolist() == [1, 0, 0, 1, 0]
    assert cluster.sent_bytes - before[0] < 10_000
    here = fetch(chosen, ["text"])
    assert here.non_tensor_batch["text"].tolist() == [f"{n}!" for n in numbers] and isinstance(
        here.non_tensor_batch["tokens"][0], Ref
    )
    assert [len(tokens) for tokens in fetch(chosen).non_tensor_batch["tokens"]] == numbers
    assert len({ref.chunk for ref in columns["tokens"]}) == 4, (
        "rows of 280 and 320 kB share a chunk of 1 MiB, one of 1.6 MB has its own"
    )
    none = echo.speak(asked[:0])
    assert len(none) == 0


def test_columns_mix_references_and_values(echo):
    spoken = echo.speak(DataProto.from_dict({"x": torch.tensor([[3, 0], [70_000, 0], [5, 0]])}))
    tokens = list(spoken.non_tensor_batch["tokens"])
    tokens[1] = np.array([8, 8])
    mixed = spoken.with_non_tensor(tokens=object_array(tokens))
    fetched = fetch(mixed, ["tokens"]).non_tensor_batch
    assert [len(row) for row in fetched["tokens"]] == [3, 2, 5]
    assert isinstance(fetched["text"][0], Ref)
    assert echo.listen_to(mixed).batch["sum"].tolist() == [9, 16, 25]


def test_method_registered_without_fetch_chooses_its_columns(echo):
    spoken = echo.speak(DataProto.from_dict({"x": torch.tensor([[3, 0], [4, 0]])}))
    heard = echo.listen_to_text(spoken).non_tensor_batch
    assert heard["heard"].tolist() == ["3!", "4!"]
    assert heard["is_ref"].tolist() == [True, True]


def test_what_is_no_reference_stays_as_it_is():
    batch = DataProto.from_dict({}, {"tokens": [[1, 2], [3]]})
    assert fetch(batch) is batch and fetch(batch, ["tokens"]) is batch


def test_ranks_meet_in_torch_distributed_on_loopback(echo, cluster):
    assert echo.all_reduce() == [3.0, 3.0]
    assert echo.all_reduce() == [3.0, 3.0]  # joining twice is joining once
    sockets = [
        c
        for process in processes_of(cluster.run_id)
        for c in process.net_connections()
        if c.status == psutil.CONN_LISTEN
    ]
    assert len(sockets) > 5 and {c.laddr.ip for c in sockets} <= {
        "127.0.0.1",
        "::ffff:127.0.0.1",
        "::1",
    }


def test_threads_are_shared_out_over_the_devices(echo, monkeypatch):
    assert echo.threads() == [max(1, node.cores() // 2)] * 2


def test_wrong_calls_say_what_is_wrong(echo):
    with pytest.raises(TypeError, match="echo.double.*must be a DataProto"):
        echo.double({"x": 1})
    with pytest.raises(AttributeError, match="Echo.doubel cannot be called"):
        echo.doubel(batch())
    with pytest.raises(AttributeError, match="cannot be set"):
        echo.rank = 3
    with pytest.raises(TypeError, match="submit needs a method"):
        submit(len, [1])


def test_four_roles_share_devices_and_more_devices_than_cores(fresh):
    """Roles on one slot, roles on some slots, a worker with two slots; eight processes."""
    placement = reserve(
        fresh, {"a": [0, 1, 2], "b": [0, 1], "c": [2, 1], "d": [[0, 2]]}, devices_per_node=6
    )
    assert [placement.share(slot) for slot in range(4)] == [0.3333, 0.3333, 0.3333, 1.0]
    workers = [spawn(Light, placement, role) for role in "abcd"]
    ready(*workers)
    a, b, c, d = workers
    assert [seat[:3] for seat in a.seat()] == [(0, 3, 0), (1, 3, 1), (2, 3, 2)] and [
        seat[:3] for seat in d.seat()
    ] == [(0, 1, 0)]
    assert group(a).node_ids == [seat[3] for seat in a.seat()] and len(group(b)) == 2
    assert all(psutil.pid_exists(pid) for worker in workers for pid in group(worker).pids)
    assert repr(c) == "<c: 2 x Light>" and repr(c.seat) == "<c.seat of 2 ranks>"
    assert a.environment("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME") == [["", "lo"]] * 3
    assert a.add(1, b=2) == 3
    logs = Path(fresh.run_dir) / "logs"
    assert sorted(path.name for path in logs.glob("[bcd]_*.log")) == [
        "b_0.log",
        "b_1.log",
        "c_0.log",
        "c_1.log",
        "d_0.log",
    ]
    assert "b 1 is here" in (logs / "b_1.log").read_text()


def test_processes_that_were_started_early_become_the_workers(fresh):
    """A module that is missing is none of their business."""
    placement = reserve(fresh, {"a": [0, 1], "b": [1]}, devices_per_node=2)
    prestart(placement, "a", "tests.no_such_module", "wave")
    waiting = placement.hosts["a"]
    a, b = spawn(Light, placement, "a"), spawn(Light, placement, "b")
    ready(a, b)
    assert (
        group(a).pids == [known.process.pid for known in presences(waiting)] and not placement.hosts
    )
    assert a.imported("wave") == [True, True] and b.imported("wave") == [False]
    assert len(fresh.supervisor.members) == 3


def test_submitted_calls_overlap_between_roles_and_queue_within_one(fresh):
    placement = reserve(fresh, {"a": [0, 1], "b": [0, 1]}, devices_per_node=2)
    a, b = spawn(Light, placement, "a"), spawn(Light, placement, "b")
    ready(a, b)
    start = time.monotonic()
    futures = [submit(a.sleep, 1.0), submit(b.sleep, 1.0), submit(a.add, 2, b=2)]
    assert not futures[0].done()
    assert [future.result() for future in futures] == [[0, 1], [0, 1], 4]
    assert 1.0 <= time.monotonic() - start < 1.9 and all(future.done() for future in futures)
    assert futures[0].result() == [0, 1]


def test_devices_that_do_not_exist(fresh):
    for roles, message in [
        ({"a": [0, 2]}, r"a rank 1 is placed on devices \[2\], but the run has only 0 to 1"),
        ({"a": []}, "role a has no device"),
        ({"a": [[]]}, "a rank 0 is placed on devices"),
    ]:
        with pytest.raises(ValueError, match=message):
            reserve(fresh, roles, devices_per_node=2)
    with pytest.raises(ValueError, match="different nodes"):
        reserve(fresh, {"a": [[1, 2]]}, nodes=2, devices_per_node=2)
    with pytest.raises(
        ResourcesMissing, match=r"(?s)needs 1 node\(s\) with 99 CPU each.*127.0.0.1 +99 +8 "
    ):
        reserve(fresh, {"a": [0]}, devices_per_node=99)
    with pytest.raises(ResourcesMissing, match="GPU needed"):
        reserve(fresh, {"a": [0]}, devices_per_node=1, kind="cuda", wait_s=0.5)
