"""Environments of the package verifiers in their own process: samples, failures, rows of data.

`stand_in/verifiers` takes the place of the package, and `test_the_real_package` runs where the
variable VERIFIERS_PYTHON names an interpreter that has it.
"""

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.envs.test_chat import QWEN, tokenizer_of
from tests.gateway.speaker import Speaker
from tests.test_own_process import child_of
from verlite.contracts import verifiers as contract
from verlite.gateway import agents as agents_module
from verlite.gateway import verifiers
from verlite.gateway.agents import Agents, Task
from verlite.gateway.program import ProgramError
from verlite.rewards.result import RewardResult
from verlite.rollout.types import Sampling, Status
from verlite.spec.roles import AgentSpec

pytestmark = pytest.mark.process

STAND_IN = str(Path(__file__).with_name("stand_in"))
ASK = ("ask", {"reward": 0.5})


def spec_of(name="heights", **settings):
    given = {"python": sys.executable, "timeout_s": 60.0, "memory_gb": 2.0, **settings}
    return AgentSpec(None, name, **given)


def task_of(*acts):
    extra_info = {"index": 0, "task": json.dumps({"acts": acts})}
    return Task({"extra_info": extra_info}, [1, 2], Sampling(max_tokens=100))


async def sampled(agents, *tasks):
    return await asyncio.gather(*(agents.sample(task) for task in tasks))


def run(main, *turns, **settings):
    """Return (engine, what `main(agents)` returns)."""
    engine = Speaker(tokenizer_of(QWEN), *turns)

    async def inside():
        async with Agents(spec_of(**settings), engine, 1000, {}, STAND_IN) as agents:
            return await main(agents)

    return engine, asyncio.run(asyncio.wait_for(inside(), 300))


def sample(*acts, turns=("330",), **settings):
    engine, (one,) = run(lambda agents: sampled(agents, task_of(*acts)), *turns, **settings)
    return engine, one


def test_an_episode_becomes_a_scored_trajectory():
    engine, one = sample(ASK)
    assert (one.status, one.error) == (Status.DONE, None)
    assert one.score == RewardResult(0.5, {"right": 0.5, "letters": 3.0})
    assert engine.tokenizer.decode(one.response_ids) == "330<|im_end|>"
    assert one.response_mask == [1] * len(one.response_ids)
    assert one.prompt_ids == engine.calls[0][0]


def test_the_training_client_sends_tokens():
    engine, one = sample(ASK, renderer={"name": "bytes"})
    assert one.prompt_ids == list(b"high?") == engine.calls[0][0]
    assert one.score is not None and one.score.parts["letters"] == len(str(one.response_ids))


def test_one_process_serves_all_samples_at_few_addresses(monkeypatch):
    """verifiers keeps a client per address, so a finished sample's is used again."""
    monkeypatch.setattr(agents_module, "REST_S", 0.0)

    async def main(agents):
        many = [await sampled(agents, *[task_of(ASK)] * 2) for _ in range(4)]
        failed = await sampled(agents, task_of(("raise", "no")))
        after = await sampled(agents, task_of(ASK), task_of(ASK))
        environment = agents.environment
        return [*many, after], failed, environment.starts, agents._addresses

    engine, (good, (failed,), starts, addresses) = run(main, *["330"] * 10)
    assert all(one.status is Status.DONE for group in good for one in group)
    assert failed.status is Status.ERROR and starts == 1
    assert len({place for _, place in addresses}) == len(addresses) == 2


def test_an_address_rests_before_it_is_used_again(monkeypatch):
    """A late request of the sample that had it must not reach another sample's session."""
    seen = []

    class Environment:
        """Notes addresses."""

        async def __aenter__(self):
            pass

        async def __aexit__(self, *error):
            pass

        async def run(self, row, session, log):
            seen.append(session.base_url)
            await asyncio.sleep(0)
            return {"score": 1.0}

    async def inside():
        agents = Agents(spec_of(), Speaker(tokenizer_of(QWEN)), 1000, {}, STAND_IN)
        agents.environment = Environment()
        async with agents:
            for limit, count in ((1e9, 2), (0.0, 2), (0.0, 1), (0.0, 1), (1e9, 1), (1e9, 1)):
                monkeypatch.setattr(agents_module, "REST_S", limit)
                await sampled(agents, *[task_of()] * count)

    asyncio.run(inside())
    a, b, *again, c, d = seen
    assert again == [a, b, a, b]  # the one that has rested longest
    assert len({a, b, c, d}) == 4


FAILURES = {
    "an error of the episode": (
        [ASK, ("error", ["EnvError", "finalize(): no"])],
        r"EpisodeFailed: EnvError: finalize\(\): no",
    ),
    "an error of an agent": (
        [("ask", {"ok": False, "errors": [["SandboxError", "gone"]]})],
        "EpisodeFailed: SandboxError: gone",
    ),
    "a deadline of the environment": ([ASK, ("late", None)], "EpisodeFailed: TimeoutError: "),
    "a deadline of an agent": (
        [("ask", {"ok": False, "is_timeout": True, "stop_condition": "agent_timeout"})],
        "EpisodeFailed: TimeoutError: it is not ok: agent_timeout",
    ),
    "an exception": ([("raise", "a\nb")], "EpisodeFailed: ValueError: a b"),
    "no question": ([("wait", 0)], "EpisodeFailed: NoScore: "),
    "a retry": ([ASK, ("retry", None)], "EpisodeFailed: Retried: "),
    "a judge that is trained": (
        [ASK, ("ask", {"trainable": False})],
        "EpisodeFailed: Untrainable: solver must not ask the model",
    ),
    "several scores": ([ASK, ("ask", {"reward": 1.0})], "EpisodeFailed: SeveralScores: "),
    "a score that is no number": ([("ask", {"reward": float("nan")})], "BadReturn: "),
    "a dead process": ([("exit", 3)], "ProgramError: .* ended with exit code 3"),
}


def test_failed_episodes_have_a_class_and_no_score():
    """One process for all but the last, which ends it."""
    tasks = [task_of(*acts) for acts, _ in FAILURES.values()]

    async def main(agents):
        return [one for task in tasks for one in await sampled(agents, task)]

    _, failed = run(main, *["330"] * 20)
    for (name, (_, error)), one in zip(FAILURES.items(), failed, strict=True):
        assert re.match(error, one.error), (name, one.error)
        assert one.status is Status.ERROR and one.score is None, name
        assert not any(one.response_mask), name


def test_agents_with_one_score_are_one_sample():
    _, one = sample(ASK, ASK, turns=("330", "331"))
    assert one.score is not None and one.score.score == 0.5
    assert len(one.branches) == 2 and sum(one.response_mask) == 2 * len("330") + 2


def test_a_row_without_a_task_says_how_to_write_one():
    task = Task({"extra_info": {}}, [1, 2], Sampling(max_tokens=100))
    _, (one,) = run(lambda agents: sampled(agents, task))
    assert "verlite tasks" in one.error


def test_a_task_that_is_not_json_costs_its_sample_only():
    bad = Task({"extra_info": {"task": "not json"}}, [1, 2], Sampling(max_tokens=100))
    _, (failed, good) = run(lambda agents: sampled(agents, bad, task_of(ASK)), "330")
    assert "extra_info.task='not json' is not JSON" in failed.error
    assert good.status == Status.DONE


def test_a_sample_that_takes_too_long_leaves_the_process_alone():
    async def main(agents):
        late = await sampled(agents, task_of(("wait", 600)))
        good = await sampled(agents, task_of(ASK))
        return late, good, agents.environment.starts, agents.environment._results

    _, ((late,), (good,), starts, open_results) = run(main, "330", timeout_s=1.0)
    assert late.error == "ProgramError: it did not end within agent.timeout_s=1"
    assert (good.status, starts, open_results) == (Status.DONE, 1, {})


def test_a_cancel_right_behind_its_run_is_answered():
    async def main(agents):
        environment = agents.environment
        ended = await environment.start()
        result = environment._results[99] = asyncio.get_running_loop().create_future()
        run = {"run": 99, "task": {"acts": []}, "base_url": "http://h/s/v1", "key": "k"}
        lines = [json.dumps(one).encode() for one in (run, {"cancel": 99})]
        await environment._process.send(b"\n".join(lines))
        await asyncio.wait((result, ended), timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert result.done(), "it was not answered"
        return result.result()

    assert run(main)[1] == {"error": "Cancelled"}


def test_a_hung_process_does_not_hold_up_a_sample_with_a_big_task(monkeypatch):
    """It does not read: the pipe is full before the task is sent."""
    monkeypatch.setattr(verifiers, "CANCEL_S", 0.2)
    big = {"prompt": "a" * (8 << 20), "acts": []}
    task = Task({"extra_info": {"task": json.dumps(big)}}, [1, 2], Sampling(max_tokens=100))

    async def main(agents):
        await agents.environment.start()
        child_of(agents.environment._process).suspend()
        return await asyncio.wait_for(sampled(agents, task), 60)

    _, (failed,) = run(main, timeout_s=0.5)
    assert failed.error == "ProgramError: it did not end within agent.timeout_s=0.5"


def test_a_process_that_hangs_is_replaced(monkeypatch):
    """It answers neither the sample nor that it is cancelled: all its samples fail, the next one
    gets a new process."""
    monkeypatch.setattr(verifiers, "CANCEL_S", 1.0)

    async def main(agents):
        hung = task_of(("wait", 0.2), ("hang", 600))
        failed = await sampled(agents, hung, task_of(("wait", 600)))
        await agents.environment.settled()
        good = await sampled(agents, task_of(ASK))
        return failed, good, agents.environment.starts

    _, (failed, (good,), starts) = run(main, "330", timeout_s=2.0)
    assert all("agent.timeout_s=2" in one.error for one in failed)
    assert (good.status, starts) == (Status.DONE, 2)


def test_samples_of_a_killed_process_say_so():
    async def main(agents):
        waiting = asyncio.ensure_future(sampled(agents, *[task_of(("wait", 600))] * 3))
        await agents.environment.start()
        while not agents.environment._results:  # the samples wait for the start, too
            await asyncio.sleep(0.01)
        child_of(agents.environment._process).kill()
        failed = await waiting
        return failed, await sampled(agents, task_of(ASK))

    _, (failed, (good,)) = run(main, "330")
    assert all("was killed by SIGKILL" in one.error for one in failed)
    assert good.status is Status.DONE


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"name": "broken"}, "broken cannot be loaded: ValueError: its file is not there"),
        ({"renderer": {"name": "qwen9"}}, "cannot be loaded: ValueError: no renderer"),
        ({"python": "/no/such/python"}, "/no/such/python: No such file or directory"),
    ],
)
def test_the_check_before_a_run_says_why(monkeypatch, settings, cause):
    monkeypatch.chdir(STAND_IN)
    with pytest.raises(ProgramError, match=cause):
        verifiers.check(spec_of(**settings), "")


def test_a_missing_package_names_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProgramError, match=r"cannot be imported by .*uv pip install"):
        verifiers.check(spec_of(), "")


def test_another_version_is_refused(monkeypatch, tmp_path):
    (tmp_path / "verifiers").symlink_to(Path(STAND_IN, "verifiers"))
    monkeypatch.chdir(tmp_path)
    assert verifiers.check(spec_of(), "") == "0.4.0"
    (tmp_path / "verifiers").unlink()
    (tmp_path / "verifiers/v1/utils").mkdir(parents=True)
    for file in Path(STAND_IN).rglob("*.py"):
        text = file.read_text().replace("0.4.0", "0.5.1")
        (tmp_path / file.relative_to(STAND_IN)).write_text(text)
    with pytest.raises(ProgramError, match=r"verifiers 0\.5\.1 is installed; verlite needs 0\.4"):
        verifiers.check(spec_of(), "")


def test_rows_are_the_tasks_and_the_prompts_of_the_taskset(monkeypatch):
    monkeypatch.chdir(STAND_IN)
    rows = verifiers.tasks(spec_of())
    assert [row["prompt"] for row in rows] == [
        [{"role": "user", "content": "How high?"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "c"}],
        [{"role": "user", "content": "silent"}],
    ]
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2, 3]
    assert json.loads(rows[2]["extra_info"]["task"]) == {
        "prompt": "c", "system_prompt": "Be brief."
    }  # fmt: skip
    assert verifiers.tasks(spec_of("endless"), 2) == [
        {**row, "data_source": "endless"} for row in rows[:2]
    ]
    with pytest.raises(ProgramError, match="Taskset has no end"):
        verifiers.tasks(spec_of("endless"))


def test_the_contract_runs_episodes_and_cancels_one(monkeypatch):
    """The stand-in's own tasks do nothing, so they are replaced."""
    monkeypatch.chdir(STAND_IN)
    rows = [task_of(ASK).row, task_of(("wait", 0.01), ASK, ("ask", {"reward": 0.5})).row]
    monkeypatch.setattr(contract, "tasks", lambda spec, count: rows)
    seen, broken = contract.check_verifiers("heights", sys.executable, {}, ["330"])
    assert broken == []
    assert [line.partition(" rewritten")[0] for line in seen] == [
        "task 0: score 0.5, 1 turns, 1 branches (0",
        "task 1: score 0.5, 2 turns, 2 branches (0",
    ]
    rows[1:] = [task_of(("raise", "no")).row]
    assert contract.check_verifiers("heights", sys.executable, {})[1] == [
        "task 1: EpisodeFailed: ValueError: no"
    ]


def test_the_contract_finds_a_process_that_does_not_cancel(monkeypatch):
    monkeypatch.chdir(STAND_IN)
    monkeypatch.setattr(verifiers, "CANCEL_S", 1.0)
    rows = [task_of(("stubborn", None), ASK).row]
    monkeypatch.setattr(contract, "tasks", lambda spec, count: rows)
    _, broken = contract.check_verifiers("heights", sys.executable, {})
    assert broken == ["a cancelled sample is not answered: the process hangs, and is started again"]


REAL = os.environ.get("VERIFIERS_PYTHON")


@pytest.mark.skipif(REAL is None, reason="VERIFIERS_PYTHON names no interpreter with verifiers")
@pytest.mark.parametrize("harness", ["null", "bash"])
def test_the_real_package(harness, monkeypatch):
    """The recipe's taskset, with the names and fields that the stand-in has."""
    recipe = str(Path(__file__).parents[2] / "recipes" / "verifiers")
    monkeypatch.chdir(recipe)
    settings = {"agent": {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}}
    spec = spec_of("column_sums", python=REAL, kwargs=settings, timeout_s=240.0)
    rows = verifiers.tasks(spec, 2)
    assert rows[0]["prompt"] == [{"role": "user", "content": "10+10="}]
    engine = Speaker(tokenizer_of(QWEN), "0020", "0030")

    async def main():
        async with Agents(spec, engine, 1000, {}, recipe) as agents:
            tasks = [Task(row, [1, 2], Sampling(max_tokens=100)) for row in rows]
            return [(await sampled(agents, task))[0] for task in tasks]

    right, wrong = asyncio.run(asyncio.wait_for(main(), 600))
    assert (right.error, wrong.error) == (None, None)
    assert right.score == RewardResult(1.0, {"right": 1.0})
    assert wrong.score == RewardResult(0.0, {"right": 0.0})
    assert engine.tokenizer.decode(right.response_ids) == "0020<|im_end|>"
