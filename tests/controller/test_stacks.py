"""`verlite stacks`: what all processes of a run are doing, asked for through a file."""

import os
import signal
import threading
import time

import pytest
from typer.testing import CliRunner

from tests.controller.conftest import pids, within
from tests.controller.workers import Echo, Light
from verlite.cli import app
from verlite.controller.cluster import current
from verlite.controller.placement import reserve
from verlite.controller.stacks import REQUESTS, answer_requests, ranks_text, render, threads
from verlite.controller.worker_group import ready, spawn, submit
from verlite.report.stacks import StacksError, ask
from verlite.trainer.opening import lock_run_dir

DUMP = """Thread 0x00007f01 (most recent call first):
  File "/a/pool.py", line 3 in wait

Current thread 0x00007f02 (most recent call first):
  File "/a/dist.py", line 7 in all_reduce
  File "/a/actor.py", line 9 in update"""


def answer(*workers: tuple[str, int, str | None, str, str]) -> dict:
    return {
        "driver": {"host": "head", "pid": 4, "stacks": DUMP},
        "calls": [{"role": "actor", "method": "update", "seconds": 61.2, "unfinished": [0, 1, 3]}],
        "workers": [
            {
                "role": role,
                "rank": rank,
                "host": host,
                "pid": 10 + rank,
                "state": state,
                "stacks": s,
            }
            for role, rank, host, state, s in workers
        ],
    }


def test_equal_stacks_are_shown_once():
    other = DUMP.replace("7 in all_reduce", "8 in all_gather")
    addresses = DUMP.replace("0x00007f", "0x00009a")
    text = render(
        answer(
            ("actor", 0, "gpu-0", "sleeping", DUMP),
            ("actor", 1, "gpu-1", "sleeping", other),
            ("actor", 2, "gpu-1", "sleeping", addresses),
            ("actor", 3, "gpu-0", "sleeping", DUMP),
            ("rollout", 0, "gpu-0", "sleeping", DUMP),
            ("rollout", 1, None, "on a node that does not answer", ""),
        )
    )
    assert text.splitlines()[0] == "driver: process 4 on head"
    assert "actor.update has run for 61 s; not finished: ranks 0-1, 3" in text
    assert "actor ranks 0, 2-3: processes 10, 13 on gpu-0; process 12 on gpu-1\n" in text
    assert "actor rank 1: process 11 on gpu-1\n" in text
    assert text.count("8 in all_gather") == 1
    assert "rollout rank 0: process 10 on gpu-0" in text
    assert text.endswith(
        "rollout rank 1: process 11 on an unknown node\n"
        "    no answer: the process is on a node that does not answer"
    )


def test_the_main_thread_comes_first():
    first, second = threads(DUMP)
    assert first.splitlines()[0].startswith("  main thread")
    assert first.index("all_reduce") < first.index("actor.py")
    assert "pool.py" in second and "all_reduce" not in second
    assert threads("") == []


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([1, 0], "ranks 0-1"), ([0, 2, 4, 5, 6], "ranks 0, 2, 4-6")],
)
def test_ranks(ranks, text):
    assert ranks_text(ranks) == text


def test_a_folder_without_a_running_job_is_refused_at_once(tmp_path):
    for prepare in (lambda: None, lambda: (tmp_path / "logs").mkdir()):
        prepare()
        with pytest.raises(StacksError, match="no job is running in"):
            ask(tmp_path, 60)
    with lock_run_dir(tmp_path), answer_requests(tmp_path, current):
        pass
    (tmp_path / REQUESTS).touch()  # a killed driver leaves it
    result = CliRunner().invoke(app, ["stacks", str(tmp_path)])
    assert (result.exit_code, "no job is running in" in result.output) == (2, True)


@pytest.mark.slow
def test_a_driver_that_does_not_answer_is_named(tmp_path):
    with lock_run_dir(tmp_path):
        (tmp_path / REQUESTS).parent.mkdir()
        (tmp_path / REQUESTS).touch()
        with pytest.raises(
            StacksError, match=rf"process {os.getpid()}\) did not answer within 1 s"
        ):
            ask(tmp_path, 1)
    assert not list(tmp_path.glob("logs/*.json"))


def test_a_job_that_ends_before_it_answers_is_reported_at_once(tmp_path):
    requests = tmp_path / REQUESTS
    requests.parent.mkdir()
    with lock_run_dir(tmp_path):
        requests.touch()
        ending = threading.Timer(0.5, requests.unlink)  # as the driver does at its end
        ending.start()
        start = time.monotonic()
        with pytest.raises(StacksError, match="has ended before it answered"):
            ask(tmp_path, 30)
    assert time.monotonic() - start < 10
    assert not list(tmp_path.glob("logs/*"))


@pytest.mark.slow
def test_a_driver_without_workers_answers_to_two_commands_at_once(tmp_path):
    found = []
    with lock_run_dir(tmp_path), answer_requests(tmp_path, current):
        asking = [
            threading.Thread(target=lambda: found.append(render(ask(tmp_path, 30))))
            for _ in range(2)
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    assert len(found) == 2
    for text in found:
        assert "in test_a_driver_without_workers_answers" in text  # this thread's stack
        assert "no worker has started" in text
    assert not list(tmp_path.glob("logs/*"))


@pytest.mark.process
def test_workers_in_a_collective_in_native_code_and_stopped(cluster):
    """Two ranks wait for a third, which never comes; another worker is stopped by a signal."""
    placement = reserve(
        cluster, {"echo": [0, 1, 2], "light": [3, 4]}, devices_per_node=5, kind="cpu"
    )
    echo, light = spawn(Echo, placement, "echo"), spawn(Light, placement, "light")
    ready(echo, light)
    waiting = submit(echo.all_reduce_without, 2)
    sleeping = submit(light.sleep, 1000)
    os.kill(pids(light)[1], signal.SIGSTOP)
    try:
        assert within(60, lambda: cluster.supervisor.poll(0.1) or len(waiting.pending) == 2)
        time.sleep(1)
        with lock_run_dir(cluster.run_dir), answer_requests(cluster.run_dir, current):
            result = CliRunner().invoke(app, ["stacks", str(cluster.run_dir)])
    finally:
        os.kill(pids(light)[1], signal.SIGCONT)
    assert result.exit_code == 1
    text = result.output
    assert "echo.all_reduce_without has run for" in text
    assert "not finished: ranks 0-1" in text
    waiters = text[text.index("\necho ranks 0-1: processes ") :]
    assert "in all_reduce_without" in waiters[: waiters.index("\necho rank 2")]
    assert "\nlight rank 0: process " in text and "in sleep" in text
    assert "no answer: the process is stopped by a signal" in text
    assert text.index("light rank 1") < text.index("no answer")
    assert len(sleeping.pending) == 2
