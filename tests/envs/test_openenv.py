"""Episodes of an OpenEnv server: actions, observations, rewards, and what goes wrong."""

import asyncio
import importlib.util
import random
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.envs.openenv_server import SCHEMA, Server
from tests.models import tiny_tokenizer
from tests.test_own_process import child_of
from verlite import own_process
from verlite.config.compile import env_spec
from verlite.config.load import compose
from verlite.config.plan import make_plan
from verlite.contracts.envs import check_env
from verlite.envs import openenv
from verlite.envs.openenv import EnvironmentLost, OpenEnv, _value, action_of, reset_of, text_of
from verlite.rollout.loop import run_loop
from verlite.rollout.types import Completion, Sampling, Status, Task, Trajectory

CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}:{{ m.content }}<eos>{% else %}"
    "{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)
ROW = {
    "prompt": [{"role": "user", "content": "Add. "}],
    "data_source": "sums",
    "ground_truth": None,
    "extra_info": {"reset": {"seed": 3}},  # random.Random(3): 1+4
}


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which folders of loaded files are added


class Engine:
    """Writes the given texts, one a turn."""

    def __init__(self, texts: Sequence[str], finish: str = "stop") -> None:
        self.tokenizer = tiny_tokenizer()
        self.tokenizer.chat_template = CHAT
        self.contexts: list[str] = []
        self._texts = list(texts)
        self._finish = finish

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        self.contexts.append(self.tokenizer.decode(prompt_ids))
        ids = self.tokenizer.encode(self._texts.pop(0), add_special_tokens=False)
        return Completion(ids, [-1.0] * len(ids), self._finish, [(0, len(ids))])


async def sample(factory: OpenEnv, engine: Any, row: Any = ROW, longest: int = 400) -> Trajectory:
    task = Task(row, [1], Sampling(max_tokens=20))
    return await run_loop(engine, factory, longest, task)


def play(
    server: Server, engine: Any, samples: int = 1, longest: int = 400, **settings: Any
) -> list[Trajectory]:
    async def run() -> list[Trajectory]:
        runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        try:
            async with OpenEnv(f"http://127.0.0.1:{port}/", **{"max_turns": 4, **settings}) as env:
                games = [sample(env, engine, longest=longest) for _ in range(samples)]
                return list(await asyncio.gather(*games))
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_an_episode() -> None:
    server, engine = Server(), Engine(["5", "I say 4<eos>"])
    (found,) = play(server, engine)
    assert found.error is None and found.status == Status.DONE
    assert server.resets == [{"seed": 3}] and server.actions == [{"answer": 5}, {"answer": 4}]
    assert engine.contexts == ["Add. 1+4=:", "Add. 1+4=:5<eos>again::"]
    assert found.score is not None and found.score.score == 0.5
    assert found.turn_scores == [0.5, 0.0]
    assert _text(engine, found, 1) == "5I say 4<eos>"
    assert _text(engine, found, 0) == "<eos>again::"


def _text(engine: Engine, found: Trajectory, mask: int) -> str:
    tokens = zip(found.response_ids, found.response_mask, strict=True)
    return str(engine.tokenizer.decode([token for token, own in tokens if own == mask]))


def test_a_reward_of_reset_belongs_to_the_first_turn() -> None:
    (found,) = play(Server("reward at once"), Engine(["5", "4"]))
    assert found.turn_scores == [0.75, 0.0]


def test_a_reward_function_may_score_in_place_of_the_rewards() -> None:
    (found,) = play(Server(), Engine(["5", "4"]), scores=False)
    assert found.error is None and found.score is None and found.turn_scores == [0.5, 0.0]


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["no idea", "5", "5"], "Error: write one JSON object with 'answer'"),
        (['{"answer": "x", "why": 1}', "5", "5"], "Error: write one JSON object"),
    ],
)
def test_a_mistake_of_the_model_is_told_and_costs_a_turn(texts: list[str], told: str) -> None:
    server, engine = Server(), Engine(texts)
    (found,) = play(server, engine)
    assert found.error is None and told in engine.contexts[1]
    assert found.turn_scores == [0.0, 0.5, 0.5] and len(server.actions) == 2


def test_an_action_that_the_server_rejects_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "openenv_mapping.py").write_text(
        "def act(text, schema):\n    return {'wrong': text}\n"
    )
    engine = Engine(["5", "5"])
    (found,) = play(Server(), engine, action=f"{tmp_path}/openenv_mapping.py:act", max_turns=2)
    assert found.error is None and "the action is not valid: answer: Field" in engine.contexts[1]
    assert found.score is not None and found.score.score == 0.0


def test_functions_of_the_user(tmp_path: Path) -> None:
    code = "def act(text, schema):\n    return {'answer': len(text)}\n"
    code += "def tell(observation):\n    return 'told ' + observation['question']\n"
    (tmp_path / "openenv_mapping.py").write_text(code)
    mine = f"{tmp_path}/openenv_mapping.py"
    engine = Engine(["abcde", "a"])
    (found,) = play(Server(), engine, action=f"{mine}:act", observation=f"{mine}:tell")
    assert engine.contexts[0] == "Add. told 1+4=:" and found.turn_scores == [0.5, 0.0]


def test_a_long_observation_is_cut_and_an_episode_ends_at_max_turns() -> None:
    engine = Engine(["5"])
    (found,) = play(Server(), engine, max_turns=1, max_obs_length=2)
    assert engine.contexts == ["Add. 1+:"] and found.turn_scores == [0.5]


def test_an_answer_that_was_cut_is_no_action() -> None:
    server = Server()
    (found,) = play(server, Engine(["5"], finish="length"))
    assert found.status == Status.LENGTH and server.actions == []
    assert found.score is not None and found.score.score == 0.0


def test_an_episode_that_ends_early_is_scored() -> None:
    """Long episodes are not left out, which would favor short ones."""
    engine = Engine(["1", "1"], finish="length")
    (cut,) = play(Server("reward at once"), engine)
    assert cut.score is not None and cut.score.score == 0.25  # that of reset
    room = len(Engine([]).tokenizer.encode("Add. 1+4=:5<eos>again::", add_special_tokens=False))
    (full,) = play(Server(), Engine(["5"]), longest=room)
    assert full.score is not None and full.score.score == 0.5 and full.turn_scores == [0.5]
    (short,) = play(Server("no reward"), Engine(["5"]), max_turns=1)
    assert short.error is None and short.score is not None and short.score.score == 0.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"timeout_s": "1m"}, "env.kwargs.timeout_s='1m' must be a number of at least 0"),
        ({"session_s": -1}, "env.kwargs.session_s=-1 must be"),
        ({"memory_gb": float("nan")}, "env.kwargs.memory_gb=nan must be"),
        ({"server": "'a {port}"}, "env.openenv='a {port}: No closing quotation"),
    ],
)
def test_wrong_settings_name_key_and_value(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        OpenEnv(**{"server": "http://127.0.0.1:9", "max_turns": 1, **settings})
    with pytest.raises(ValueError, match=r"extra_info.reset='abc' must be a mapping"):
        reset_of([], {"reset": "abc"})


def test_a_server_that_is_gone_fails_its_second_check_too() -> None:
    async def run() -> None:
        runner = web.AppRunner(Server().app(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        env = OpenEnv(f"http://127.0.0.1:{port}", 1)
        assert await env.check() is None
        await runner.cleanup()
        with pytest.raises(EnvironmentLost):
            await env.check()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("hang reset", "EnvironmentTimeout"),
        ("hang step", "EnvironmentTimeout"),
        ("close reset", "EnvironmentLost"),
        ("close step", "EnvironmentLost"),
        ("raise reset", "EnvironmentFailed"),
        ("raise step", "EnvironmentFailed"),
        ("nonsense step", "EnvironmentFailed"),
        ("no reward", "EnvironmentFailed"),
    ],
)
def test_what_the_server_does_wrong_is_never_a_score(fault: str, error: str) -> None:
    (found,) = play(Server(fault), Engine(["5", "5"]), timeout_s=0.3 if "hang" in fault else 30)
    assert found.status == Status.ERROR and str(found.error).startswith(f"ToolError: {error}: ")
    assert found.score is None and not any(found.response_mask)


def test_a_server_with_one_session_plays_all_samples() -> None:
    server = Server(places=1)
    found = play(server, Engine(["5"] * 6), samples=3)
    assert [one.score and one.score.score for one in found] == [1.0] * 3 and server.most == 1
    (full,) = play(Server(places=0), Engine([]), session_s=0.0)
    assert str(full.error).startswith("ToolError: EnvironmentRefused: ") and "CAPACITY" in str(
        full.error
    )


def test_a_server_that_is_not_there() -> None:
    async def run() -> Trajectory:
        async with OpenEnv("http://127.0.0.1:9", 4) as env:
            return await sample(env, Engine([]))

    found = asyncio.run(run())
    assert str(found.error).startswith("ToolError: EnvironmentLost: http://127.0.0.1:9/schema")


@pytest.mark.process
def test_a_server_of_ones_own() -> None:
    command = f"{sys.executable} -m tests.envs.openenv_server {{port}}"

    async def run() -> list[Trajectory]:
        async with OpenEnv(command, 4) as env:
            first = await sample(env, Engine(["5", "5"]))
            assert env._program is not None and env._program._process is not None
            ended = await env._program.running()
            env._program._process.kill()
            await asyncio.wait([ended])
            return [first, await sample(env, Engine(["5", "5"]))]

    found = asyncio.run(run())
    assert [one.score and one.score.score for one in found] == [1.0, 1.0]
    ended = f"{sys.executable} -c raise(SystemExit(3)) {{port}}"

    async def fail() -> Trajectory:
        async with OpenEnv(ended, 4) as env:
            return await sample(env, Engine([]))

    assert "EnvironmentLost: env.openenv: " in str(asyncio.run(fail()).error)


@pytest.mark.process
def test_a_server_of_ones_own_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "HEALTH_S", 0.3)
    command = f"{sys.executable} -m tests.envs.openenv_server {{port}}"

    class Stops(Engine):
        """Stops the server, which is late at once."""

        async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
            env._timeout_s = 0.3
            child_of(env._program).suspend()
            return await super().generate(prompt_ids, sampling)

    async def run() -> tuple[Trajectory, Trajectory, int]:
        async with env:
            hung = await sample(env, Stops(["5"]))
            env._timeout_s = 60.0
            assert env._program is not None
            return hung, await sample(env, Engine(["5", "5"])), env._program.starts

    env = OpenEnv(command, 4)
    hung, good, starts = asyncio.run(asyncio.wait_for(run(), 120))
    assert str(hung.error).startswith("ToolError: EnvironmentTimeout: ") and hung.score is None
    assert (good.error, starts) == (None, 2)


@pytest.mark.process
def test_a_server_that_is_late_once_is_not_replaced() -> None:
    """It still answers /health, be it with an error."""
    command = f"{sys.executable} -m tests.envs.openenv_server {{port}}"

    async def run() -> bool:
        async with OpenEnv(command, 4) as env:
            await env._ready()
            for path in ("", "/without"):
                env._url += path
                await env.end_if_it_hangs(env._ended)
            assert env._ended is not None
            return env._ended.done()

    assert not asyncio.run(asyncio.wait_for(run(), 120))


@pytest.mark.process
def test_each_start_has_a_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port that was free may be taken by the time that the server listens."""
    monkeypatch.setattr(own_process, "AGAIN_S", 0.0)
    command = f"{sys.executable} -m tests.envs.openenv_server {{port}}"

    async def run() -> tuple[Trajectory, Trajectory]:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            taken = [other.getsockname()[1]]
            free = openenv._free_port
            monkeypatch.setattr(openenv, "_free_port", lambda: taken.pop() if taken else free())
            async with OpenEnv(command, 4) as env:
                engine = Engine(["5", "5"])
                return await sample(env, engine), await sample(env, engine)

    failed, good = asyncio.run(asyncio.wait_for(run(), 120))
    assert "EnvironmentLost" in str(failed.error) and "address already in use" in str(failed.error)
    assert good.error is None


def test_without_a_free_port_the_sample_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def free() -> int:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(openenv, "_free_port", free)

    async def run() -> Trajectory:
        async with OpenEnv("server {port}", 4) as env:
            return await sample(env, Engine(["5"]))

    failed = asyncio.run(asyncio.wait_for(run(), 60))
    assert failed.status is Status.ERROR and failed.score is None
    assert "server cannot be started: [Errno 98] Address already in use" in str(failed.error)


def test_one_key_is_a_run_of_episodes() -> None:
    def spec(*given: str) -> tuple[Any, Any]:
        base = ["actor_rollout_ref.model.path=model", "data.train_files=rows.parquet"]
        config = compose(None, [*base, "env.openenv=http://h:1", *given], check=False).config
        return env_spec(config), make_plan(config, "cpu", count_rows=False)

    env, plan = spec("data.max_response_length=77", "env.kwargs.timeout_s=5")
    assert (env.name, env.kwargs["server"], env.kwargs["scores"]) == ("openenv", "http://h:1", True)
    assert env.kwargs["max_turns"] == plan.max_turns == 32 and env.kwargs["timeout_s"] == 5
    assert plan.longest_response == plan.longest_sequence - 1
    assert "http://h:1, episodes of up to 32 actions: answers of up to 77 tokens" in plan.turns
    own, plan = spec("custom_reward_function.path=mine.py", "max_turns=3")
    assert not own.kwargs["scores"] and plan.max_turns == own.kwargs["max_turns"] == 3


def test_the_command_says_where_to_listen() -> None:
    with pytest.raises(ValueError, match="must be a URL, or a command with {port}"):
        OpenEnv("python serve.py", 4)


def test_the_contract_of_environments_holds() -> None:
    async def run() -> list[str]:
        runner = web.AppRunner(Server().app(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        kwargs = {"server": f"http://127.0.0.1:{port}", "max_turns": 4}
        report = await asyncio.to_thread(check_env, "openenv", kwargs, ["5", "4"], [{"index": 1}])
        await runner.cleanup()
        assert report.turns > 5
        return report.lines()

    assert asyncio.run(run()) == []


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("<think>7</think> 12 or 13", {"type": "integer"}, 13),
        ("it is -2.5.", {"type": "number"}, -2.5),
        (" go left ", {"type": "string"}, "go left"),
        ("left, no: right", {"enum": ["left", "right"]}, "right"),
        ("yes", {"type": "boolean"}, True),
        ('so:\n```json\n{"x": 4}\n```', {"type": "integer"}, 4),
        ('{"x": "y"}', {"type": "string"}, "y"),
    ],
)
def test_the_action_in_a_text(text: str, field: Any, value: Any) -> None:
    found = action_of(text, {"properties": {"x": field, "metadata": {}}, "required": ["x"]})
    assert found == {"x": value}


def test_the_last_object_in_a_fence_is_the_action() -> None:
    """As this pattern finds it, which takes a time that grows with the square of hostile texts."""
    pattern = re.compile(r"```(?:json)?\s*(\{.*?\})\s*```", re.DOTALL)
    rng = random.Random(0)
    for _ in range(5000):
        text = "".join(rng.choices(["```", "json", "{", "}", " ", "\n", "a"], k=14))
        assert openenv._fenced(text) == (pattern.findall(text) or [""])[-1], text
    for hostile in ("```{", "```json {}", "} ", "```\n" * 3):  # the pattern takes minutes
        assert openenv._fenced(hostile * 300_000) in ("", "{}")


MOVES = {
    "$defs": {
        "Direction": {"enum": ["up", "down"], "type": "string"},
        "Again": {"anyOf": [{"$ref": "#/$defs/Again"}, {"type": "null"}]},
        "Walk": {"properties": {"steps": {"type": "integer"}}, "required": ["steps"]},
        "Talk": {"properties": {"words": {"type": "string"}}, "required": ["words"]},
    }
}


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ({"$ref": "#/$defs/Direction", "default": "up"}, "I go down", "down"),
        ({"allOf": [{"$ref": "#/$defs/Direction"}]}, "up", "up"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "so 7", 7),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}, {"type": "string"}]}, "left", "left"),
        ({"anyOf": [{"$ref": "#/$defs/Direction"}, {"type": "integer"}]}, "12", 12),
        ({"const": "stop", "type": "string"}, "now stop", "stop"),
        ({"$ref": "#/$defs/Again"}, "x", None),
        ({"$ref": "#/$defs/Missing"}, "x", None),
    ],
)
def test_fields_with_references_and_choices_of_types(field: Any, text: str, value: Any) -> None:
    """As pydantic writes enumerations and optional fields."""
    schema = {**MOVES, "properties": {"x": field}}
    if value is None:
        with pytest.raises(ValueError, match="'x'"):
            action_of(text, schema)
    else:
        assert action_of(text, schema) == {"x": value}


def test_an_action_of_several_kinds() -> None:
    kinds = [{"$ref": "#/$defs/Walk"}, {"$ref": "#/$defs/Talk"}]
    for schema in ({**MOVES, "oneOf": kinds}, {**MOVES, "anyOf": kinds}):
        assert action_of('{"steps": 2}', schema) == {"steps": 2}
        assert action_of('{"words": "a"}', schema) == {"words": "a"}
        for text in ('{"steps": 2, "words": "a"}', "2"):
            with pytest.raises(ValueError, match="'steps', 'words'"):
                action_of(text, schema)
    assert action_of("two, 3", {**MOVES, "$ref": "#/$defs/Walk"}) == {"steps": 3}


def test_schemas_that_name_each_other_are_followed_in_linear_time() -> None:
    names = [f"T{i}" for i in range(300)]
    tangle = {"anyOf": [*({"$ref": f"#/$defs/{name}"} for name in names), {"type": "integer"}]}
    schema = {"$defs": dict.fromkeys(names, tangle), "properties": {"x": tangle}}
    assert action_of("7", schema) == {"x": 7}
    assert len(openenv._options(tangle, schema)) == 301


def test_a_choice_is_a_whole_word() -> None:
    field = {"enum": ["up", "upright", "down", "left", "down-left"]}
    for text, choice in (
        ("upright", "upright"),
        ("go down-left", "down-left"),
        ("up, left", "left"),
    ):
        assert _value(text, field) == choice
    assert _value("I choose 12", {"enum": list(range(13))}) == 12
    assert _value("10", {"enum": [1, 10]}) == 10
    assert _value("leftover", field) is None
    assert _value("up", {"enum": []}) is None


@pytest.mark.parametrize("text", ["2.5", "none", '{"other": 1}', "<think>3</think>"])
def test_texts_without_an_action(text: str) -> None:
    with pytest.raises(ValueError, match="'answer'"):
        action_of(text, SCHEMA)


def test_observations_as_text() -> None:
    assert text_of({"metadata": {}, "question": "1+1="}) == "1+1="
    assert text_of({"board": [1], "left": 2}) == '{"board": [1], "left": 2}'


def test_all_samples_of_a_row_play_the_same_episode() -> None:
    first, second = {"index": 1}, {"index": 2}
    assert reset_of([], first) == reset_of([], dict(first)) != reset_of([], second)
    assert reset_of(["other"], first) != reset_of([], first)
    assert 0 <= reset_of([], first)["seed"] < 2**31
    assert reset_of([], {"reset": {"seed": 3}}) == {"seed": 3}


REAL = """
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class SumAction(Action):
    answer: int

class Question(Observation):
    question: str = ""

class Sums(Environment):
    def reset(self, seed=None, episode_id=None, **kwargs):
        return Question(question=f"{seed}+1=")
    def step(self, action, timeout_s=None, **kwargs):
        return Question(question="end", reward=float(action.answer), done=True)
    @property
    def state(self):
        return State()

app = create_app(Sums, SumAction, Question, env_name="sums")
"""


@pytest.mark.process
@pytest.mark.skipif(
    importlib.util.find_spec("openenv") is None,
    reason="openenv is not installed: its dependencies are not those of training",
)
def test_a_server_of_the_real_package(tmp_path: Path) -> None:
    (tmp_path / "sums_app.py").write_text(REAL)
    uvicorn = "-m uvicorn sums_app:app --port {port} --log-level warning"
    command = f"{sys.executable} {uvicorn} --app-dir {tmp_path}"

    async def run() -> list[Trajectory]:
        engine = Engine(["7", "7"])
        async with OpenEnv(command, 4) as env:  # one session, as servers have by default
            return list(await asyncio.gather(*(sample(env, engine) for _ in range(2))))

    found = asyncio.run(run())
    assert [one.score and one.score.score for one in found] == [7.0, 7.0]
