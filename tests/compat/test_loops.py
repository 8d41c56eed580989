"""Agent loops written for verl, with their YAML file."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny_tokenizer
from verlite.envs.factory import build_env_factory
from verlite.rollout.loop import run_loop
from verlite.rollout.types import Completion, EngineDied, Sampling, Status, Task, Trajectory
from verlite.spec.roles import EnvSpec

LOOP = """
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.replica import TokenOutput


@register("twice")
class Twice(AgentLoopBase):
    def __init__(self, *args, word="again", **kwargs):
        super().__init__(*args, **kwargs)
        self.word = word
        self.response_length = self.rollout_config.response_length

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        metrics = {}
        prompt = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        ids, mask = list(prompt), []
        for turn in range(2):
            if turn:
                told = self.tokenizer.encode(self.word, add_special_tokens=False)
                ids, mask = ids + told, mask + [0] * len(told)
            with simple_timer("generate_sequences", metrics):
                output: TokenOutput = await self.server_manager.generate(
                    request_id=uuid4().hex, prompt_ids=ids, sampling_params=sampling_params
                )
            ids, mask = ids + output.token_ids, mask + [1] * len(output.token_ids)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=ids[len(prompt):][: self.response_length],
            response_mask=mask[: self.response_length],
            reward_score=float(kwargs["reward_model"]["ground_truth"]),
            num_turns=4,
            metrics=metrics,
            extra_fields={"reward_extra_info": {"word": self.word}},
        )
"""
YAML = """
- name: twice
  _target_: loop_of_mine.Twice
  word: more
"""
VERL = "verl.experimental.agent_loop"
NAME = "verlite.compat.loops:VerlLoops"
CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}:{{ m.content }}<eos>{% else %}"
    "{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)
CONFIG = {
    "actor_rollout_ref": {"rollout": {"response_length": 100, "prompt_length": 20}},
    "data": {"apply_chat_template_kwargs": {}},
}


class Engine:
    """Answers 10, 11, 12, ...: log-prob -token, and the version of the number of the answer."""

    def __init__(self, error: Exception | None = None) -> None:
        self.tokenizer = tiny_tokenizer()
        self.tokenizer.chat_template = CHAT
        self.asked: list[tuple[list[int], Sampling]] = []
        self._error = error

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        if self._error:
            raise self._error
        self.asked.append((list(prompt_ids), sampling))
        number = len(self.asked)
        ids = [10 + number, 20 + number, 30 + number][: sampling.max_tokens]
        spans = [(number, 1), (number + 1, len(ids) - 1)]
        return Completion(ids, [-float(token) for token in ids], "stop", spans)


@pytest.fixture
def loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compat: None) -> Path:
    (tmp_path / "loop_of_mine.py").write_text(LOOP)
    (tmp_path / "loops.yaml").write_text(YAML)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "loop_of_mine", raising=False)
    return tmp_path / "loops.yaml"


def play(path: Path, engine: Any, longest: int = 200, **kwargs: Any) -> Trajectory:
    given = {"agent_loop_config_path": str(path), "config": CONFIG, **kwargs}
    factory = build_env_factory(EnvSpec(NAME, given))
    row = {
        "prompt": [{"role": "user", "content": "1+1="}],
        "data_source": "sums",
        "ground_truth": "2",
        "extra_info": {"index": 3},
    }
    task = Task(row, [1, 2], Sampling(max_tokens=5, seed=7))
    return asyncio.run(run_loop(engine, factory, longest, task))


def test_a_loop_trains_what_the_engine_sampled(loops: Path) -> None:
    engine = Engine()
    found = play(loops, engine)
    encode = engine.tokenizer.encode
    prompt, more = encode("1+1=:"), encode("more")
    assert found.error is None and found.status == Status.DONE
    assert found.prompt_ids == prompt
    assert found.response_ids == [11, 21, 31, *more, 12, 22, 32]
    assert found.response_mask == [1] * 3 + [0] * len(more) + [1] * 3
    assert found.log_probs == [-11, -21, -31, *[0] * len(more), -12, -22, -32]
    assert found.weight_versions == [(1, 1), (2, 3), (3, 2)]
    assert found.segments == [("model", 3), ("tool", len(more)), ("model", 3)]
    assert found.score is not None and (found.score.score, found.score.parts) == (
        2.0,
        {"word": "more"},
    )
    first, second = engine.asked
    assert second[0] == [*prompt, 11, 21, 31, *more]
    assert (first[1].max_tokens, first[1].seed) == (5, 7) and second[1].seed != 7


def test_a_response_that_the_loop_cuts_is_cut(loops: Path) -> None:
    code = LOOP.replace("self.rollout_config.response_length", "4")
    loops.with_name("loop_of_mine.py").write_text(code)
    found = play(loops, Engine())
    assert (found.response_ids[:3], len(found.response_ids)) == ([11, 21, 31], 4)
    assert found.weight_versions == [(1, 1), (2, 2)]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        # encoded again: other tokens than those sampled
        ("ids + output.token_ids", "ids + [t + 1 for t in output.token_ids]", "did not sample"),
        # the tool's words are marked as the model's
        ("mask + [0]", "mask + [1]", "did not sample after the tokens before them, first at 3 of"),
        ("response_mask=mask[", "response_mask=mask[1:][", "response_mask has"),
        ("[1] * len(output", "[0] * len(output", "no token of the model"),
        ("sampling_params=sampling_params", "sampling_params={'n': 2}", "may set max_tokens"),
        ("sampling_params=sampling_params", "sampling_params={'max_tokens': 0}", "at least 1"),
        ("metrics = {}", "return None", "run returned None, expected one AgentLoopOutput"),
        ("metrics = {}", "self.config.trainer", "Key 'trainer' is not in struct"),
        ('float(kwargs["reward_model"]["ground_truth"])', "float('nan')", "nan"),
        ("metrics = {}", "import asyncio; await asyncio.sleep(600)", "within env.kwargs.timeout_s"),
    ],
)
def test_a_loop_that_fails_is_not_scored(loops: Path, old: str, new: str, words: str) -> None:
    assert old in LOOP
    loops.with_name("loop_of_mine.py").write_text(LOOP.replace(old, new))
    found = play(loops, Engine(), timeout_s=0.2 if "sleep" in new else 60)
    assert found.status == Status.ERROR and words in str(found.error)
    assert found.score is None and not any(found.response_mask)


def test_the_smaller_limit_of_an_answer_counts(loops: Path) -> None:
    given = "{'max_tokens': 3, 'max_new_tokens': 2, 'repetition_penalty': None}"
    code = LOOP.replace("sampling_params=sampling_params", f"sampling_params={given}")
    loops.with_name("loop_of_mine.py").write_text(code)
    engine = Engine()
    assert play(loops, engine).error is None
    assert [sampling.max_tokens for _, sampling in engine.asked] == [2, 2]


def test_an_engine_that_died_ends_all_even_if_the_loop_catches_it(loops: Path) -> None:
    code = LOOP.replace("output: TokenOutput = await", "output = await self.asked(").replace(
        "sampling_params=sampling_params\n                )",
        "sampling_params=sampling_params\n                ))",
    )
    code += """
    async def asked(self, answer):
        try:
            return await answer
        except Exception:
            return TokenOutput(token_ids=[1])
"""
    loops.with_name("loop_of_mine.py").write_text(code)
    with pytest.raises(EngineDied, match="gone"):
        play(loops, Engine(EngineDied("gone")))


def test_a_sample_ends_where_no_token_fits(loops: Path) -> None:
    prompt = len(tiny_tokenizer().encode("1+1=:"))
    found = play(loops, Engine(), longest=prompt + 2)
    assert found.status == Status.ERROR and "fit with the answer" in str(found.error)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("loop_of_mine.Twice", "loop_of_mine.Missing", "has no function or class 'Missing'"),
        (
            "loop_of_mine.Twice",
            "verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop",
            "AgentLoopBase",
        ),
        ("- name: twice", "- named: twice", "must be a list of entries"),
    ],
)
def test_wrong_files(loops: Path, old: str, new: str, words: str) -> None:
    loops.write_text(YAML.replace(old, new))
    with pytest.raises(ValueError, match=words):
        play(loops, Engine())


def test_a_file_of_several_loops_needs_a_name(loops: Path) -> None:
    loops.write_text(YAML + YAML.replace("twice", "other"))
    with pytest.raises(ValueError, match="has the loops twice, other; set default_agent_loop"):
        play(loops, Engine())
    assert play(loops, Engine(), default_agent_loop="other").error is None


def test_what_loops_for_other_versions_of_verl_call(loops: Path) -> None:
    """verl 0.9 merges tokens with methods of the base, 0.5 and 0.6 prepare the class."""
    code = LOOP.replace(
        "ids, mask = ids + told, mask + [0] * len(told)",
        "said = [*kwargs['raw_prompt'], {'role': 'assistant', 'content': 'x'}]\n"
        "                merged, mask, _ = await self.ct_merge_non_assistant_msg(\n"
        "                    said, [*said, {'role': 'user', 'content': self.word}], ids, mask)\n"
        "                ids = merged.token_ids",
    ).replace("await self.apply_chat_template", "await self.ct_build_initial_tokens")
    code = code.replace(
        "ids, mask = ids + output.token_ids, mask + [1] * len(output.token_ids)",
        "merged, mask, _ = await self.ct_merge_assistant_token(ids, output.token_ids, mask)\n"
        "            ids = merged.token_ids",
    )
    code += """
    @classmethod
    def init_class(cls, config, tokenizer, processor, **kwargs):
        cls.length = config.actor_rollout_ref.rollout.response_length
"""
    loops.with_name("loop_of_mine.py").write_text(
        code.replace("self.response_length]", "self.length]")
    )
    engine = Engine()
    found = play(loops, engine)
    told = engine.tokenizer.encode("<eos>more:", add_special_tokens=False)
    assert found.error is None
    assert found.response_ids == [11, 21, 31, *told, 12, 22, 32]
