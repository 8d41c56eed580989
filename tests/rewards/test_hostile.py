"""Reward functions that do harm: it ends in their own processes, and only their sample fails."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from verlite.keeper import OUTPUT_BYTES
from verlite.rewards import pool as pools
from verlite.rewards.pool import MAX_CHILDREN, Pool
from verlite.rewards.result import MAX_CHARACTERS, RewardItem, RewardResult
from verlite.rewards.scorer import Scorer
from verlite.spec.roles import ScorerSpec

pytestmark = pytest.mark.process

SOURCE = """
import os, signal, subprocess, sys, time

children = []

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "kill the parent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if solution_str == "kill the group":
        os.killpg(0, signal.SIGKILL)
        time.sleep(60)
    if solution_str == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if solution_str == "exit":
        os._exit(7)
    if solution_str == "allocate":
        blocks = []
        while True:
            blocks.append(bytearray(16 << 20))
    if solution_str == "print":
        sys.stdout.write("\\x1b[2J\\x9b1m\\u202e é")
        sys.stdout.flush()
        for _ in range(100):
            sys.stdout.write("x" * (1 << 20))
            os.write(2, b"y" * (1 << 10))
    if solution_str == "fork" and os.fork() == 0:
        raise ValueError("in the child")
    if solution_str == "close":
        os.closerange(3, 64)
    if solution_str in ("text", "another answer", "no score", "no end"):
        line = {
            "text": b"text\\n",
            "another answer": b'{"done": 999, "score": 1, "parts": {}, "error": null, '
            b'"traceback": null}\\n',
            "no score": b'{"done": 0, "score": "1", "parts": {}, "error": null, '
            b'"traceback": null}\\n',
            "no end": b"x" * (8 << 20),
        }[solution_str]
        for descriptor in range(3, 32):
            try:
                left = line
                while left:
                    left = left[os.write(descriptor, left):]
            except OSError:
                pass
    if solution_str == "much":
        return {"score": 1, "pred": "\\U0001f600" * 100_001}
    if solution_str == "all that is allowed":
        return {"score": 1, "pred": "\\U0001f600" * 99_996}
    if solution_str == "daemon":
        children.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
    if solution_str == "environment":
        wanted = ("CANARY_API_KEY", "JUDGE_API_KEY", "HOME")
        return {"score": 1, "seen": ",".join(os.environ.get(name, "-") for name in wanted)}
    if solution_str == "need a secret":
        return os.environ["CANARY_API_KEY"]
    if solution_str == "stop soon":
        import threading
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()
    return 0.5
"""
KILLED_ONCE = """
import os, signal

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str[0] != "/":
        return float(solution_str)
    try:
        os.close(os.open(solution_str, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return 0.25
    os.kill(os.getpid(), signal.SIGKILL)
"""
SOUND = RewardResult(0.5)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scorer]:
    path = tmp_path_factory.mktemp("hostile") / "reward.py"
    path.write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANARY_API_KEY", "canary-1")
        patch.setenv("JUDGE_API_KEY", "canary-2")
        patch.setattr(pools, "cores", lambda: 2)
        spec = ScorerSpec(
            path=str(path),
            secret_env_vars=["JUDGE_API_KEY"],
            item_timeout_s=20.0,
            process_memory_gb=0.25,
        )
        made = Scorer(spec)
        yield made
        made.close()


def score(scorer: Scorer, *texts: str, limit_s: float = 60.0) -> list[RewardResult]:
    return scorer.score([RewardItem("mine", text, "1", {}) for text in texts], limit_s)


@pytest.mark.parametrize(
    ("what", "error", "reason"),
    [
        ("kill the parent", "Died", "was killed by SIGKILL"),
        ("kill the group", "Died", "was killed by SIGKILL"),
        ("exit", "Died", "ended with exit code 7"),
        ("allocate", "MemoryError", "The limit was 0.2 GiB (reward.process_memory_gb)"),
        ("close", "Died", "ended with exit code 1"),
        ("text", "Died", "it wrote b'text' to the pipe of its results"),
        ("another answer", "Died", "it answered call 999, which it was not given"),
        ("no score", "Died", "to the pipe of its results"),
        ("no end", "Died", "a line without end"),
        ("much", "BadReturn", f"expected at most {MAX_CHARACTERS:,}"),
    ],
)
def test_only_the_sample_of_a_harmful_call_fails(
    scorer: Scorer, what: str, error: str, reason: str
) -> None:
    before, harmful, *after = score(scorer, "a", what, "b", "c")
    assert [before, *after] == [SOUND] * 3
    assert (harmful.score, harmful.error) == (None, error)
    assert reason in (harmful.traceback or "")
    assert score(scorer, "a", "b") == [SOUND] * 2


def test_a_process_that_something_else_has_killed_costs_no_sample(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A call that kills its process only once stands for what comes from outside."""
    path = tmp_path / "reward.py"
    path.write_text(KILLED_ONCE)
    scorer = Scorer(ScorerSpec(path=str(path), item_timeout_s=20.0))
    try:
        results = score(scorer, "1", "2", f"{tmp_path}/first", "3", f"{tmp_path}/second")
    finally:
        scorer.close()
    assert [result.score for result in results] == [1.0, 2.0, 0.25, 3.0, 0.25]
    warnings = [line for line in capfd.readouterr().err.splitlines() if "SIGKILL" in line]
    assert len(warnings) == 2
    assert all("1 unfinished calls are repeated" in line for line in warnings)


def test_a_stopped_process_costs_its_call_only(scorer: Scorer) -> None:
    first, second = score(scorer, "stop", "a", limit_s=3.0)
    assert (first.error, second) == ("Timeout", SOUND)
    assert score(scorer, "a", "b") == [SOUND] * 2


def test_the_child_of_a_fork_does_not_answer(scorer: Scorer) -> None:
    assert score(scorer, *["fork"] * 10) == [SOUND] * 10
    assert score(scorer, "a", "b") == [SOUND] * 2


def test_as_much_text_as_is_allowed_arrives(scorer: Scorer) -> None:
    [result] = score(scorer, "all that is allowed")
    assert result.score == 1.0 and result.parts == {"pred": "\U0001f600" * 99_996}


def test_secrets_of_the_environment_are_hidden_unless_named(scorer: Scorer) -> None:
    result, failed = score(scorer, "environment", "need a secret")
    assert result.parts["seen"] == f"-,canary-2,{os.environ.get('HOME', '-')}"
    assert failed.error == "KeyError" and failed.traceback is not None
    assert "CANARY_API_KEY is hidden" in failed.traceback
    assert "custom_reward_function.secret_env_vars" in failed.traceback


INTERRUPTS = """
import os, subprocess
from verlite import keeper
keeper.split(os.getppid(), 1 << 40)
ends = [subprocess.run(["sh", "-c", f"kill -{name} $$"]).returncode for name in ("INT", "HUP")]
print(ends, flush=True)
"""


def test_user_code_may_interrupt_what_it_starts() -> None:
    """Ray's workers ignore or block these signals, and so would their processes."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        found = subprocess.run([sys.executable, "-c", INTERRUPTS], stdout=-1, timeout=60).stdout
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert found == b"[-2, -1]\n"


def test_output_and_processes_left_behind_are_limited(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verlite.rewards.pool.LOOK_S", 0.0)

    def left() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.name() == "sleep" and process.cwd() == str(tmp_path):
                    found.append(process)
            except psutil.Error:
                continue
        return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]

    def wait_until_none_is_left() -> None:
        deadline = time.monotonic() + 20.0
        while left():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def calls(*texts: str) -> list[dict[str, object]]:
        return [RewardItem("mine", text, "1", {}).arguments() for text in texts]

    path = tmp_path / "reward.py"
    path.write_text(SOURCE)
    names = list(RewardItem("", "", None).arguments())
    pool = Pool(f"{path}:compute_score", names, 20.0, folder=str(tmp_path), processes=1)
    try:
        assert pool.run(calls("print", "a"), 30.0) == [SOUND] * 2
        written, deadline = "", time.monotonic() + 20.0
        while "the rest is dropped" not in written:  # what the last call printed may come later
            assert time.monotonic() < deadline
            time.sleep(0.05)
            written += capfd.readouterr().err
        assert OUTPUT_BYTES <= len(written) < 2 * OUTPUT_BYTES
        assert "\\x1b[2J\\x9b1m\\u202e é" in written and "\x1b" not in written
        assert pool.run(calls("daemon"), 30.0) == [SOUND]
        assert len(left()) == 1
        assert pool.run(calls("exit"), 30.0)[0].error == "Died"
        wait_until_none_is_left()
        assert pool.run(calls(*["daemon"] * (MAX_CHILDREN + 1)), 60.0)[-1] == SOUND
        wait_until_none_is_left()
        assert f"left {MAX_CHILDREN + 1} processes running" in capfd.readouterr().err
        assert pool.run(calls("stop soon"), 30.0) == [SOUND]
        time.sleep(0.6)  # until it has stopped, and reads no more calls
        unread = "x" * (1 << 20)  # more than a pipe holds
        assert pool.run(calls(unread), 2.0)[0].error == "Timeout"
        assert pool.run(calls("daemon"), 30.0) == [SOUND]
    finally:
        pool.close()
    wait_until_none_is_left()
