"""Agent programs in processes of their own: what they get, how they end, and their samples."""

import asyncio
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import verlite
from tests.engine.graphs import session_of, trajectory_of
from tests.envs.test_chat import QWEN, tokenizer_of
from tests.gateway.speaker import Speaker
from tests.other_user import as_nobody
from verlite.gateway import forks, program
from verlite.gateway.agents import Agents, Task
from verlite.gateway.program import MAX_VARIABLE, ProgramError, score_of
from verlite.rewards.result import BadReturn, RewardResult
from verlite.rollout.types import EngineDied, Sampling, Status
from verlite.spec.roles import AgentSpec

pytestmark = pytest.mark.process

ASK = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
key = "Bearer " + os.environ["OPENAI_API_KEY"]
def ask(messages, **body):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages, **body}).encode(),
        {"Content-Type": "application/json", "Authorization": key},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]
"""
"""Beginning of programs: `task`, and `ask(messages) -> message`."""
ROW = {
    "prompt": [{"role": "user", "content": "How high?"}],
    "data_source": "heights",
    "ground_truth": "330",
    "extra_info": {"index": 3},
}


def sample(tmp_path, code, *turns, count=1, row=ROW, sampling=None, begin=ASK, name=None, **spec):
    """Run a program for `count` samples, or its function `name`; return (engine, trajectories)."""
    file = tmp_path / "agent.py"
    file.write_text(begin + textwrap.dedent(code))
    engine = Speaker(tokenizer_of(QWEN), *turns)
    command = f"{file}{name}" if name else f"{sys.executable} {file}"
    settings = AgentSpec(command, **{"timeout_s": 60.0, "memory_gb": 2.0, **spec})
    task = Task(row, [1, 2], sampling or Sampling(max_tokens=100))

    async def run():
        async with Agents(settings, engine, 1000, {}, str(tmp_path)) as agents:
            return await asyncio.gather(*(agents.sample(task) for _ in range(count)))

    return engine, asyncio.run(asyncio.wait_for(run(), 120))


@pytest.fixture(params=[(), ("urllib.request",)], ids=["started", "forked"])
def preload(request):
    return request.param


def sampled_of(trajectory):
    pairs = zip(trajectory.response_ids, trajectory.response_mask, strict=True)
    return [token for token, mask in pairs if mask]


def test_a_conversation_becomes_a_scored_trajectory(tmp_path):
    code = """
        history = list(task["prompt"])
        history.append(ask(history))
        history.append({"role": "user", "content": "sure?"})
        history.append(ask(history))
        print("log")
        right = history[-1]["content"] == task["ground_truth"]
        print(json.dumps({"score": float(right), "turns": 2, "why": "exact"}))
    """
    engine, (trajectory,) = sample(tmp_path, code, "300?", "330")
    assert trajectory.status is Status.DONE and trajectory.error is None
    assert trajectory.score == RewardResult(1.0, {"turns": 2.0, "why": "exact"})
    tokens = engine.tokenizer
    first, second = (context for context, _ in engine.calls)
    assert trajectory.prompt_ids == first
    whole = trajectory.prompt_ids + trajectory.response_ids
    assert whole[: len(second)] == second
    sampled = sampled_of(trajectory)
    assert tokens.decode(sampled) == "300?<|im_end|>330<|im_end|>"
    assert [author for author, _ in trajectory.segments] == ["model", "tool", "model"]
    assert trajectory.weight_versions == [(4, len(sampled))]
    assert trajectory.session["requests"] == 2 and trajectory.session["branches"] == 1
    assert trajectory.gen_seconds > 0 and trajectory.tool_seconds > 0


def test_all_branches_are_trained(tmp_path):
    code = """
        ask([{"role": "user", "content": "sub-agent"}])
        history = [*task["prompt"], ask(task["prompt"])]
        ask([*history, {"role": "user", "content": "sure?"}])
        print(0.5)
    """
    engine, (trajectory,) = sample(tmp_path, code, "short", "a longer one", "yes")
    sampled = sampled_of(trajectory)
    text = "short<|im_end|>a longer one<|im_end|>yes<|im_end|>"
    assert engine.tokenizer.decode(sampled) == text
    assert (trajectory.session["branches"], trajectory.session["new_roots"]) == (2, 1)
    assert trajectory.prompt_ids == engine.calls[0][0]
    (_, first), (prompt, _) = trajectory.branches
    assert trajectory.response_ids[first : first + prompt] == engine.calls[1][0]


def credits_of(trajectory):
    return [request["credit"] for request in trajectory.requests]


def test_branches_of_a_graph_worked_out_by_hand():
    """A turn (tokens 3, 4 | 5, 6), its continuation, the same again with another answer, and a
    sub-agent. Version i samples request i."""
    session = session_of(((None, 2, 2), (0, 1, 1), (0, 1, 2), (None, 1, 1)))
    one = trajectory_of(session, "branch")
    assert one.prompt_ids == [3, 4]
    assert one.response_ids == [5, 6, 7, 8, *(3, 4, 5, 6, 9), 10, 11, 12, 13]
    assert one.response_mask == [1, 1, 0, 1, *(0, 0, 0, 0, 0), 1, 1, 0, 1]
    pairs = zip(one.response_ids, one.response_mask, strict=True)
    expected = [-token / 10 if mask else 0.0 for token, mask in pairs]
    assert one.log_probs == expected
    assert one.branches == [(2, 4), (5, 2), (1, 1)]
    assert one.segments == [
        *(("model", 2), ("tool", 1), ("model", 1)),
        *(("tool", 5), ("model", 2), ("tool", 1), ("model", 1)),
    ]
    assert one.weight_versions == [(0, 2), (1, 1), (2, 2), (3, 1)]
    # 6 tokens in 3 branches: 2 for the tokens of each, together.
    assert credits_of(one) == [2 / 3, 2 / 3, 1, 2]
    assert credits_of(trajectory_of(session, "0.5")) == [0.125, 0.25, 0.5, 1]
    assert credits_of(trajectory_of(session)) == [1, 1, 1, 1]
    names = ("request", "parent", "root", "branch", "context", "given", "sampled")
    assert [tuple(request[name] for name in names) for request in one.requests] == [
        (0, None, "first", 0, 2, 2, 2),
        (1, 0, None, 0, 5, 1, 1),
        (2, 0, None, 1, 5, 1, 2),
        (3, None, "new", 2, 1, 1, 1),
    ]
    assert one.session["tokens"] == 15 and one.session["repeated_tokens"] == 4


def test_an_answer_without_tokens_has_no_share():
    session = session_of(((None, 1, 0), (None, 1, 4)))
    assert credits_of(trajectory_of(session, "branch")) == [4, 1]


def test_a_sample_is_cut_if_its_last_answer_is():
    session = session_of(((None, 1, 1), (None, 1, 1)))
    session.nodes[0].finish_reason = "length"
    assert trajectory_of(session).status is Status.DONE
    session.nodes[1].finish_reason = "length"
    assert trajectory_of(session).status is Status.LENGTH


def test_a_function_may_score(tmp_path):
    _, (trajectory,) = sample(tmp_path, "ask(task['prompt'])", "a", reward="function")
    assert (trajectory.status, trajectory.score) == (Status.DONE, None)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_is_called_in_a_process_of_its_own(tmp_path, kind, preload):
    code = f"""
        {kind} agent(task, base_url, key):
            assert (base_url, key) == (os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
            said = ask(task["prompt"])["content"]
            print("a log without end of line", end="")
            return {{"score": 1, "said": said, "pid": os.getpid(), "at": os.getcwd()}}
    """
    begin = ASK.replace("task = json.load(sys.stdin)\n", "")
    _, (trajectory,) = sample(tmp_path, code, "330", begin=begin, name=":agent", preload=preload)
    parts = trajectory.score.parts
    assert (trajectory.error, trajectory.score.score, parts["said"]) == (None, 1.0, "330")
    assert parts["pid"] != os.getpid() and parts["at"] == os.path.realpath(tmp_path)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        (":agent", "ended with exit code 1: ZeroDivisionError: division by zero"),
        (":other", "has no function or class 'other'"),
    ],
)
def test_a_function_that_fails_is_an_unscored_sample(tmp_path, name, error, preload):
    code = "def agent(task, base_url, key):\n    ask(task['prompt'])\n    return 1 / 0"
    begin = ASK.replace("task = json.load(sys.stdin)\n", "")
    _, (trajectory,) = sample(tmp_path, code, "a", begin=begin, name=name, preload=preload)
    assert trajectory.status is Status.ERROR and trajectory.score is None
    assert error in trajectory.error


def test_what_a_function_prints_is_no_score(tmp_path):
    code = "def agent(task, base_url, key):\n    ask(task['prompt'])\n    print(7)"
    begin = ASK.replace("task = json.load(sys.stdin)\n", "")
    _, (trajectory,) = sample(tmp_path, code, "a", begin=begin, name=":agent")
    assert trajectory.score is None
    assert trajectory.error.startswith("BadReturn: the function returned None")


def test_a_turn_cut_at_its_limit_at_the_end_is_status_length(tmp_path):
    code = "ask(task['prompt']); print(1)"
    _, (trajectory,) = sample(tmp_path, code, "x" * 9, sampling=Sampling(max_tokens=4))
    assert (trajectory.status, trajectory.score) == (Status.LENGTH, RewardResult(1.0))


CALLED = (
    '<tool_call>{"name": "calculator", "arguments": {"expression": "11*30"}}</tool_call>',
    "=330",
)


@pytest.mark.parametrize(
    ("place", "turns"),
    [
        ("docs/agent_programs.md", ("300?", "330")),
        ("docs/tutorial_agent.md", CALLED),
        ("recipes/agent/agent.py", CALLED),
        ("recipes/agent/with_openai.py", CALLED),
        ("recipes/agent/with_anthropic.py", CALLED),
    ],
)
def test_programs_of_pages_and_recipes_run_as_they_stand(tmp_path, place, turns):
    file = Path(verlite.__file__).parents[1] / place
    if file.suffix == ".md":
        (code,) = re.findall(r"```python\n(# my_agent\.py\n.*?)```", file.read_text(), re.DOTALL)
        file = tmp_path / "my_agent.py"
        file.write_text(code)
    engine = Speaker(tokenizer_of(QWEN), *turns)
    spec = AgentSpec(f"{sys.executable} {file}", timeout_s=100.0)

    async def run():
        async with Agents(spec, engine, 1000, {}, str(tmp_path)) as agents:
            return await agents.sample(Task(ROW, [1], Sampling(max_tokens=200)))

    trajectory = asyncio.run(run())
    assert (trajectory.error, trajectory.score.score) == (None, 1.0)
    assert trajectory.turns == 2 and trajectory.session["branches"] == 1
    if turns is CALLED:  # the calculator's answer, from the program
        assert "330" in engine.tokenizer.decode(engine.calls[1][0])


FAILURES = {
    "exit code": (
        "ask(task['prompt']); raise OSError('broken')",
        "ended with exit code 1: OSError",
    ),
    "no call": (
        "print(1)",
        "ended without an answer of the model. The model never answered it: its",
    ),
    "another server": (
        "raise OSError('no route')",
        "code 1: OSError: no route. The model never answered",
    ),
    "no package": (
        "ask(task['prompt']); import no_such_package",
        "'no_such_package'. Name a Python that has it: agent.command='/path/to/venv/bin/python",
    ),
    "withheld": (
        "os.environ['MY_SEARCH_API_KEY']",
        "KeyError: 'MY_SEARCH_API_KEY'. The program gets this variable with "
        "agent.secret_env_vars=[MY_SEARCH_API_KEY]",
    ),
    "no score": ("ask(task['prompt']); print('done')", "BadReturn: the last line of its output is"),
    "no output": ("ask(task['prompt'])", "BadReturn: it printed nothing; expected a number"),
    "not finite": ("ask(task['prompt']); print('NaN')", "BadReturn: returned nan"),
    "signal": ("ask(task['prompt']); os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
    "memory": ("ask(task['prompt']); bytearray(4 << 30); print(1)", "MemoryError"),
    "log": (
        "ask(task['prompt'])\nsys.stderr.write('log\\n' * 50000); raise OSError('broken')",
        "ended with exit code 1: OSError: broken",
    ),
    "output": (
        "ask(task['prompt'])\nwhile True: print('x' * 100000)",
        "it printed more than 16 MiB",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_program_that_fails_is_an_unscored_sample(tmp_path, name, monkeypatch, preload):
    monkeypatch.setenv("MY_SEARCH_API_KEY", "hush")
    code, error = FAILURES[name]
    _, (trajectory,) = sample(tmp_path, code, "a", preload=preload)
    assert trajectory.status is Status.ERROR and trajectory.score is None
    assert error in trajectory.error
    assert ("The model never answered it" in trajectory.error) == (
        "ask(" not in code and name != "withheld"  # one remedy is enough
    )
    assert not any(trajectory.response_mask)
    last = error.rpartition(": ")[2]  # a failing program's own words are in its log
    assert last in trajectory.log or not error.startswith("ended with exit code")


def test_forks_share_the_modules_and_nothing_else(tmp_path):
    """The modules are imported once, before there is a session; the file runs for each sample."""
    (tmp_path / "slow.py").write_text(
        "import os\nimporter = os.getpid(), 'OPENAI_API_KEY' in os.environ"
    )
    code = """
        import random, slow
        slow.seen = getattr(slow, "seen", 0) + 1
        ask(task["prompt"])
        parts = {"seen": slow.seen, "importer": slow.importer[0], "at_once": slow.importer[1]}
        parts |= {"pid": os.getpid(), "random": random.random(), "arguments": str(sys.argv[1:])}
        parts |= {"first": sys.path[0], "name": __name__}
        print(json.dumps({"score": 1, **parts}))
    """
    _, trajectories = sample(tmp_path, code, *"abc", count=3, preload=("slow",))
    parts = [trajectory.score.parts for trajectory in trajectories]
    assert [(p["seen"], p["at_once"], p["name"]) for p in parts] == [(1, 0, "__main__")] * 3
    assert len({p["importer"] for p in parts}) == 1
    assert len({p["pid"] for p in parts} | {parts[0]["importer"]}) == 4
    assert len({p["random"] for p in parts}) == 3
    assert {p["first"] for p in parts} == {str(tmp_path)}


def test_if_the_process_of_the_forks_is_killed_it_starts_again(tmp_path):
    code = """
        ask(task["prompt"])
        if not os.path.exists("killed"):
            open("killed", "w").close()
            stat = open(f"/proc/{os.getppid()}/stat").read()  # of the keeper
            os.kill(int(stat.rpartition(")")[2].split()[1]), 9)
            while True: pass
        print(1)
    """
    file = tmp_path / "agent.py"
    file.write_text(ASK + textwrap.dedent(code))
    settings = AgentSpec(f"{sys.executable} {file}", timeout_s=60.0, preload=["json"])

    async def run():
        engine = Speaker(tokenizer_of(QWEN), "a", "b")
        async with Agents(settings, engine, 1000, {}, str(tmp_path)) as agents:
            return [await agents.sample(Task(ROW, [1], Sampling())) for _ in range(2)]

    killed, after = asyncio.run(asyncio.wait_for(run(), 120))
    assert "was killed by SIGKILL" in killed.error and killed.score is None
    assert (after.error, after.score) == (None, RewardResult(1.0))


WRITE = """
import json, os, sys, time
import odd
task = json.loads(os.environ["VERLITE_TASK"])
open(task["name"], "w").close()
for other in task.get("until", ()):
    while not os.path.exists(other): time.sleep(0.01)
if task.get("leaves"):
    if os.fork() == 0:
        os.setsid()
        for file in range(3): os.close(file)
        open("left_", "w").write(str(os.getpid()))
        os.rename("left_", "left")
        time.sleep(600)
    while not os.path.exists("left"): time.sleep(0.01)
    os.kill(os.getppid(), 9)
    time.sleep(600)
os.write(1, b"1\\n")  # before what is left in a buffer
"""
"""A program that writes a file of its task's name, and may wait for another, or leave a child."""
ODD = """
import os, subprocess
print("loading")
child = subprocess.Popen(["sleep", "600"])
open("module_child", "w").write(str(child.pid))
fork, left = os.fork, [0]
def fails_at_times():
    if os.path.exists("refuse") and os.getppid() != 1 and os.getpid() == importer:
        os.remove("refuse")
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
importer, os.fork = os.getpid(), fails_at_times
"""
"""A module that prints, starts a process, and makes `os.fork` fail where a file says so."""


def with_forks(tmp_path, main, run=asyncio.run):
    """Run `main(own, started)`, where `started(name, ...)` runs WRITE in one process of forks."""
    (tmp_path / "agent.py").write_text(WRITE)
    (tmp_path / "odd.py").write_text(ODD)
    spec = AgentSpec(f"{sys.executable} {tmp_path}/agent.py", preload=["odd"])

    async def inside():
        async with forks.Forks(spec, str(tmp_path)) as own:

            def started(name, timeout_s=60.0, **task):
                limited = replace(spec, timeout_s=timeout_s, memory_gb=2.0)
                return program.run(limited, {"name": name, **task}, "", "", forks=own)

            return await main(own, started)

    return run(asyncio.wait_for(inside(), 120))


def importer_of(own):
    (importer,) = psutil.Process(own._process._process.pid).children()
    return importer


def test_samples_of_a_process_that_is_stopped_or_killed_end(tmp_path, monkeypatch):
    sent, connect = asyncio.Event(), forks._connect

    async def connects(*args):
        await connect(*args)
        sent.set()

    monkeypatch.setattr(forks, "_connect", connects)

    async def main(own, started):
        assert await started("first") == "1"
        importer = importer_of(own)
        importer.suspend()
        with pytest.raises(ProgramError, match=r"did not end within agent.timeout_s=0.2"):
            await started("late", 0.2)
        importer.resume()
        assert await started("second") == "1"
        wait_until_gone({child.pid for child in importer.children()} - {module_child()})
        assert not (tmp_path / "late").exists()  # nobody waits for it
        importer.suspend()
        waiting = asyncio.ensure_future(started("third"))
        sent.clear()
        await sent.wait()
        importer.kill()
        assert await waiting == "1"
        assert importer_of(own) != importer

    def module_child():
        return int((tmp_path / "module_child").read_text())

    with_forks(tmp_path, main)


def test_what_modules_and_programs_do_ends_no_other_sample(tmp_path, monkeypatch):
    """A module prints and has a process that ends; a fork fails; a program kills its keeper."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)

    async def main(own, started):
        running = asyncio.ensure_future(started("running", until=["end"]))
        while not (tmp_path / "running").exists():
            await asyncio.sleep(0.01)
        (tmp_path / "refuse").touch()
        with pytest.raises(
            ProgramError, match="cannot be started: .Errno 11. Resource temporarily"
        ):
            await started("refused")
        with pytest.raises(ProgramError, match="was killed by SIGKILL"):
            await started("leaves", leaves=True)
        wait_until_gone([int((tmp_path / "left").read_text())])
        module_child = psutil.Process(int((tmp_path / "module_child").read_text()))
        assert module_child.status() == psutil.STATUS_SLEEPING
        module_child.kill()
        wait_until_gone([module_child.pid])
        ask = (
            "import socket, sys; connection = socket.socket(socket.AF_UNIX)\n"
            "connection.connect('\\0' + sys.argv[1]); print(connection.recv(9))"
        )
        asked = [sys.executable, "-c", ask, own._address[1:].decode()]
        assert subprocess.check_output(asked) == b"b''\n"  # only its own worker is answered
        (tmp_path / "end").touch()
        assert await running == "1" and own._process.starts == 1

    with_forks(tmp_path, main)


def test_another_user_who_has_taken_the_address_gets_nothing(tmp_path):
    other = as_nobody(
        "listener = socket.socket(socket.AF_UNIX); listener.bind(''); listener.listen()\n"
        "print(listener.getsockname()[1:].decode(), flush=True)\n"
        "connection = listener.accept()[0]\n"
        "try: connection.sendall(b'pid 1\\n'); print(connection.recv(1000))\n"
        "except ConnectionError: print(b'')  # closed at once"
    )

    async def main(own, started):
        assert await started("first") == "1"
        own._address = b"\0" + other.stdout.readline().strip().encode()
        with pytest.raises(ConnectionResetError):
            await own._fork({"SECRET": "hush"})

    with other:
        with_forks(tmp_path, main)
        assert other.stdout.read() == "b''\n"


def test_forked_samples_leave_no_file_open_in_uvloop(tmp_path):
    async def main(own, started):
        await started("first")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            assert set(await asyncio.gather(*(started("a") for _ in range(10)))) == {"1"}
        end = time.monotonic() + 60
        while len(os.listdir("/proc/self/fd")) > before:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)

    with_forks(tmp_path, main, pytest.importorskip("uvloop").run)


@pytest.mark.parametrize("command", [f"{sys.executable} link/agent.py -x", "folder/agent.py:agent"])
def test_a_fork_has_the_names_of_a_program_that_is_started(tmp_path, command):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "folder" / "agent.py").write_text(
        "import sys\ndef agent(*_): return str((__name__, __file__, sys.argv, sys.path[0]))\n"
        "if __name__ == '__main__': print(agent(), sys.modules['__main__'].agent is agent)"
    )

    async def names(own):
        spec = AgentSpec(command, timeout_s=60.0, memory_gb=2.0)
        return await program.run(spec, {}, "", "", str(tmp_path), forks=own)

    async def run():
        async with forks.Forks(AgentSpec(command, preload=["json"]), str(tmp_path)) as own:
            return await names(own), await names(None)

    forked, started = asyncio.run(asyncio.wait_for(run(), 120))
    assert forked == started and "agent.py" in started


@pytest.mark.parametrize(
    ("module", "error"),
    [
        ("no_such_package", "ModuleNotFoundError: No module named 'no_such_package'. Install it"),
        ("odd_error", "ValueError: one two. Leave it out"),
        ("ends", "SystemExit: 3. Leave it out"),
        ("asks", "EOFError: EOF when reading a line. Leave it out"),
        ("large", "MemoryError. Raise agent.memory_gb"),
        ("maps", "ImportError: a.so: failed to map segment. Raise agent.memory_gb"),
        ("threads", "importing them starts 1 threads, which a fork does not have"),
    ],
)
def test_modules_that_cannot_be_shared_are_named(tmp_path, module, error, monkeypatch):
    (tmp_path / "threads.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    )
    (tmp_path / "odd_error.py").write_text("raise ValueError('one\\ntwo\\n')")
    (tmp_path / "ends.py").write_text("import sys; sys.exit(3)")
    (tmp_path / "asks.py").write_text("input()")
    (tmp_path / "large.py").write_text("bytearray(1 << 40)")
    (tmp_path / "maps.py").write_text("raise ImportError('a.so: failed to map segment')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    _, (trajectory,) = sample(tmp_path, "", preload=(module,))
    assert trajectory.status is Status.ERROR and error in trajectory.error
    assert f"agent.preload=['{module}']: {sys.executable} ended" in trajectory.error


@pytest.mark.parametrize("limit_s", [0.0, 600.0])
def test_a_check_says_what_it_waits_for(limit_s, monkeypatch):
    said = []
    monkeypatch.setattr(forks, "SAY_S", limit_s)
    forks.check(AgentSpec(f"{sys.executable} agent.py", preload=["json"]), said.append)
    waits = f"agent.preload=['json']: {sys.executable} is still importing them"
    assert said == ([] if limit_s else [waits])


def test_the_limit_of_a_sample_does_not_count_the_imports(monkeypatch):
    """A program whose imports take longer than the limit still starts. If its process does not
    fork, the message names the key."""

    async def imports(own):
        await asyncio.sleep(0.2)

    async def refuses(own, variables):
        raise OSError("started")

    async def hangs(own, variables):
        await asyncio.Event().wait()

    monkeypatch.setattr(forks.Forks, "ready", imports)
    spec = AgentSpec("python agent.py", preload=["slow"])
    for start, error in (
        (refuses, "it cannot be started: started"),
        (hangs, r"end within agent.timeout_s=0.1: that of agent.preload=\['slow'\] did not fork"),
    ):
        monkeypatch.setattr(forks.Forks, "start", start)
        with pytest.raises(ProgramError, match=error):
            own = forks.Forks(spec, None)
            limited = replace(spec, timeout_s=0.1, memory_gb=1.0)
            asyncio.run(program.run(limited, {}, "", "", forks=own))


def test_a_command_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ProgramError, match="no-such-program: No such file or directory"):
        asyncio.run(program.run(AgentSpec("no-such-program -x", memory_gb=1), {}, "", ""))


def test_a_program_that_cannot_be_started_is_an_unscored_sample(tmp_path, monkeypatch):
    async def refuse(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    _, (trajectory,) = sample(tmp_path, "", "a")
    assert trajectory.status is Status.ERROR and trajectory.score is None
    assert "cannot be started: [Errno 11] Resource temporarily" in trajectory.error


def test_a_program_that_hangs_is_killed_with_all_that_it_started(tmp_path, preload):
    """Children in groups and sessions of their own, too."""
    code = f"""
        import subprocess, time
        child = "import os, time; open(str(os.getpid()), 'w'); time.sleep(600)"
        for options in ({{}}, {{"start_new_session": True}}):
            subprocess.Popen([sys.executable, "-c", child], **options)
        while sum(name.isdigit() for name in os.listdir()) < 2:
            time.sleep(0.01)
        ask(task["prompt"])
        open({str(tmp_path / "asked")!r}, "w")
        time.sleep(600)
    """
    _, (trajectory,) = sample(tmp_path, code, "a", timeout_s=10.0, preload=preload)
    assert trajectory.error == "ProgramError: it did not end within agent.timeout_s=10"
    assert (tmp_path / "asked").exists()
    children = [int(file.name) for file in tmp_path.iterdir() if file.name.isdigit()]
    assert len(children) == 2
    wait_until_gone(children)


def test_what_a_program_leaves_behind_is_killed_when_it_ends(tmp_path, preload):
    code = f"""
        import subprocess
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
        ask(task["prompt"])
        print(1)
    """
    _, (trajectory,) = sample(tmp_path, code, "a", preload=preload)
    assert trajectory.score == RewardResult(1.0)
    wait_until_gone([int((tmp_path / "child").read_text())])


def test_what_a_program_leaves_behind_is_killed_when_it_kills_its_keeper(tmp_path, preload):
    code = f"""
        import subprocess
        quiet = {{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}}
        child = subprocess.Popen(["sleep", "600"], start_new_session=True, **quiet)
        open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
        os.kill(os.getppid(), 9)
        ask(task["prompt"])
    """
    _, (trajectory,) = sample(tmp_path, code, "a", preload=preload)
    assert trajectory.status is Status.ERROR and "was killed by SIGKILL" in trajectory.error
    wait_until_gone([int((tmp_path / "child").read_text())])


def wait_until_gone(pids):
    end = time.monotonic() + 60
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < end, pids
        time.sleep(0.01)


def test_an_engine_that_dies_ends_the_program_and_is_raised(tmp_path):
    died = EngineDied("it died")
    code = f"""
        try:
            ask(task["prompt"])
        except OSError:
            open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
            import time
            time.sleep(600)
    """
    with pytest.raises(EngineDied, match="it died"):
        sample(tmp_path, code, died)


def test_a_cancelled_sample_ends_its_program(tmp_path, preload):
    file = tmp_path / "agent.py"
    file.write_text(
        "import os, time\nopen('pid', 'w').write(str(os.getpid()))\n"
        "os.rename('pid', 'ready')\ntime.sleep(600)"
    )
    settings = AgentSpec(f"{sys.executable} {file}", preload=preload)

    async def run():
        engine = Speaker(tokenizer_of(QWEN))
        async with Agents(settings, engine, 1000, {}, str(tmp_path)) as agents:
            task = asyncio.create_task(agents.sample(Task(ROW, [1], Sampling())))
            while not (tmp_path / "ready").exists():
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), 60))
    wait_until_gone([int((tmp_path / "ready").read_text())])


def test_what_a_program_gets(tmp_path, monkeypatch, preload):
    monkeypatch.setenv("MY_SECRET_TOKEN", "hush")
    monkeypatch.setenv("SEARCH_API_KEY", "named")
    monkeypatch.setenv("MY_SETTING", "seen")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("no_proxy", "example.org")
    code = """
        assert task == json.loads(os.environ["VERLITE_TASK"])
        ask(task["prompt"])
        names = ["MY_SECRET_TOKEN", "SEARCH_API_KEY", "MY_SETTING"]
        names += ["NO_PROXY", "no_proxy", "OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE"]
        seen = {name: str(os.environ.get(name)) for name in names}
        print(json.dumps({"score": 0, "task": json.dumps(task), "folder": os.getcwd(), **seen}))
    """
    _, (trajectory,) = sample(
        tmp_path, code, "a", secret_env_vars=["SEARCH_API_KEY"], preload=preload
    )
    parts = trajectory.score.parts
    assert json.loads(parts["task"]) == ROW and parts["folder"] == os.path.realpath(tmp_path)
    assert (parts["MY_SECRET_TOKEN"], parts["MY_SETTING"]) == ("None", "seen")
    assert parts["PYTHONDONTWRITEBYTECODE"] == "None"
    assert parts["SEARCH_API_KEY"] == "named"
    assert parts["no_proxy"] == "example.org,127.0.0.1" and "127.0.0.1" in parts["NO_PROXY"]
    assert parts["OMP_NUM_THREADS"] == "1"


def test_a_task_too_long_for_a_variable_is_on_the_input(tmp_path):
    row = ROW | {"extra_info": {"text": "é" * MAX_VARIABLE}}
    code = """
        assert "VERLITE_TASK" not in os.environ
        ask(task["prompt"])
        print(len(task["extra_info"]["text"]))
    """
    _, (trajectory,) = sample(tmp_path, code, "a", row=row)
    assert trajectory.score == RewardResult(float(MAX_VARIABLE))


def test_at_most_so_many_programs_run_at_once(tmp_path):
    """Each counts the files of those that run while it does."""
    code = f"""
        import time
        mark = {str(tmp_path)!r} + f"/{{os.getpid()}}.running"
        open(mark, "w").close()
        ask(task["prompt"])
        running = len([name for name in os.listdir({str(tmp_path)!r}) if name.endswith("running")])
        os.remove(mark)
        print(running)
    """
    _, trajectories = sample(tmp_path, code, *"abcdef", count=6, max_processes=2)
    assert {t.status for t in trajectories} == {Status.DONE}
    assert max(t.score.score for t in trajectories) <= 2


@pytest.mark.parametrize(
    ("line", "result"),
    [
        ("1", RewardResult(1.0)),
        ("-0.5", RewardResult(-0.5)),
        ('{"score": 1, "acc": 0}', RewardResult(1.0, {"acc": 0.0})),
    ],
)
def test_scores(line, result):
    assert score_of(line) == result


@pytest.mark.parametrize("line", ["", "right", "true", "[1]", '{"reward": 1}', "Infinity", '"1"'])
def test_lines_that_are_no_score(line):
    with pytest.raises(BadReturn):
        score_of(line)
