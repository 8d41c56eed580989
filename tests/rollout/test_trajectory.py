"""The trajectory loop with a real engine and small environments."""

import asyncio
import dataclasses
import random
import time

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tests.envs.retriever import Retriever
from tests.models import tiny_model, tiny_tokenizer
from tests.rollout.oracle import float64_model, naive_log_probs
from verlite.envs.chat import encode_chat
from verlite.envs.factory import CalculatorEnvFactory, SearchEnvFactory
from verlite.envs.search import INVALID
from verlite.envs.step import Step, ToolError, encode_text
from verlite.rewards import environment
from verlite.rollout.batched import build_engine
from verlite.rollout.trajectory import Request, run_all, run_trajectory
from verlite.rollout.types import Completion, EngineError, Sampling, Status, Trajectory, with_seed
from verlite.spec.roles import GenerationSpec, ModelSpec, RetrieverSpec

PIECES = ["h", "e", "l", "o", "!", " "]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("l", "o"), ("e", "l")]


def ambiguous_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer in which several id sequences decode to the same text.

    Examples: "he"+"llo", "hell"+"o", "h"+"e"+"l"+"l"+"o". Encoding returns only one of them.
    """
    vocab = {"<pad>": 0, "<eos>": 1}
    for piece in [*PIECES, *("".join(merge) for merge in MERGES), "llo"]:
        vocab.setdefault("\u0120" if piece == " " else piece, len(vocab))
    tokenizer = Tokenizer(BPE(vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


class Recorder:
    """An engine that records its calls."""

    def __init__(self, engine):
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.calls = []

    async def generate(self, prompt_ids, sampling, so_far=None, name=None):
        completion = await self.engine.generate(prompt_ids, sampling)
        self.calls.append((list(prompt_ids), sampling, completion))
        return completion


class Counter:
    """Answer with the number of letters of a turn. Done if a turn has more than `enough`."""

    def __init__(self, stop=("o",), enough=10**6, fault=None):
        self.stop = stop
        self.enough = enough
        self.fault = fault
        self.seen = []

    async def step(self, text: str, last: bool) -> Step:
        await asyncio.sleep(0)
        self.seen.append((text, last))
        if self.fault:
            raise self.fault
        return Step(
            " " + "he" * len(text),
            "!",
            "!",
            done=len(text) > self.enough,
            valid="h" in text,
            info={"letters": len(text)},
        )


@pytest.fixture(scope="module")
def ambiguous(tmp_path_factory):
    """Engine and float64 model whose vocabulary is exactly the ambiguous pieces."""
    tokenizer = ambiguous_tokenizer()
    path = tiny_model(
        tmp_path_factory.mktemp("ambiguous"),
        "qwen2",
        vocab_size=len(tokenizer),
        initializer_range=0.05,
    )
    tokenizer.save_pretrained(path)
    engine = build_engine(
        "hf",
        ModelSpec(path=path, tokenizer_path=str(save_generic(tokenizer, tmp_path_factory))),
        GenerationSpec(),
        400,
        torch.device("cpu"),
        0,
        pretrained=True,
    )
    yield engine, float64_model(path)
    engine.close()


def save_generic(tokenizer, tmp_path_factory):
    """Without a model config, AutoTokenizer reads tokenizer.json unchanged."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


def run(engine, request) -> Trajectory:
    return asyncio.run(run_trajectory(engine, request))


def test_sampled_ids_are_the_trained_ids(ambiguous):
    """Sampled ids are never decoded and re-encoded, which would change ids in almost every turn."""
    engine, _ = ambiguous
    changed = 0
    for seed in range(12):
        recorder = Recorder(engine)
        rng = random.Random(seed)
        prompt = [
            rng.randrange(2, engine._call(lambda core: core.vocab_size))
            for _ in range(rng.randrange(1, 20))
        ]
        env = Counter(stop=("o", "! "))
        trajectory = run(
            recorder,
            Request(
                prompt,
                Sampling(1.2, max_tokens=40, seed=seed),
                env,
                max_turns=3,
                max_response_tokens=300,
            ),
        )
        context = list(prompt)
        rest = list(
            zip(
                trajectory.response_ids, trajectory.response_mask, trajectory.log_probs, strict=True
            )
        )
        for sent, _, completion in recorder.calls:
            observation = len(sent) - len(context)
            assert sent[: len(context)] == context
            assert [(i, 0, 0.0) for i in sent[len(context) :]] == rest[:observation]
            rest = rest[observation:]
            assert (
                list(
                    zip(
                        completion.ids, [1] * len(completion.ids), completion.log_probs, strict=True
                    )
                )
                == rest[: len(completion.ids)]
            )
            rest = rest[len(completion.ids) :]
            context = sent + completion.ids
            text = engine.tokenizer.decode(completion.ids, skip_special_tokens=True)
            changed += engine.tokenizer.encode(text, add_special_tokens=False) != [
                i for i in completion.ids if i != 1
            ]
        assert not rest and len(recorder.calls) == trajectory.turns
        assert trajectory.weight_versions == [(0, sum(trajectory.response_mask))]
    assert changed > 12, "the test has no power unless encoding the text again gives other ids"


def test_log_probs_of_every_turn_use_the_whole_context(ambiguous):
    engine, model = ambiguous
    sampling = Sampling(1.2, max_tokens=30, seed=3)
    trajectory = run(
        engine, Request([2, 3, 4], sampling, Counter(), max_turns=4, max_response_tokens=300)
    )
    assert trajectory.turns >= 3
    expected = naive_log_probs(model, trajectory.prompt_ids, trajectory.response_ids, sampling)
    for mask, got, want in zip(
        trajectory.response_mask, trajectory.log_probs, expected, strict=True
    ):
        assert abs(got - want * mask) < 1e-5


def test_turns_draw_different_random_numbers(ambiguous):
    engine, _ = ambiguous
    recorder = Recorder(engine)
    run(
        recorder,
        Request(
            [2],
            Sampling(1.2, max_tokens=30, seed=3),
            Counter(),
            max_turns=4,
            max_response_tokens=300,
        ),
    )
    seeds = [sampling.seed for _, sampling, _ in recorder.calls]
    assert len(set(seeds)) == len(seeds) >= 3 and seeds[0] == 3
    assert with_seed(Sampling(seed=None), 2).seed is None


def test_environment_sees_text_up_to_its_stop_string(ambiguous):
    """A token may extend beyond the stop string. It is kept and trained, but the environment does
    not see the rest."""
    engine, _ = ambiguous
    env = Counter(stop=("l",))
    trajectory = run(
        engine,
        Request(
            [3], Sampling(1.5, max_tokens=60, seed=1), env, max_turns=5, max_response_tokens=300
        ),
    )
    text = engine.tokenizer.decode(
        [i for i, m in zip(trajectory.response_ids, trajectory.response_mask, strict=True) if m]
    )
    assert all("l" not in seen[:-1] for seen, _ in env.seen)
    assert text.count("l") > sum("l" in seen for seen, _ in env.seen) > 1, "some token overshot"


def test_last_turn_and_status(ambiguous):
    engine, _ = ambiguous
    long = Sampling(1.2, max_tokens=60, seed=5)
    env = Counter()
    trajectory = run(engine, Request([3], long, env, max_turns=2, max_response_tokens=300))
    assert trajectory.status == Status.MAX_TURNS and [last for _, last in env.seen] == [
        False,
        False,
        True,
    ]
    assert trajectory.response_mask[-1] == 1, "no observation after the last turn"
    assert [info["letters"] for info in trajectory.infos] == [len(text) for text, _ in env.seen]
    assert trajectory.invalid_turns == sum("h" not in text for text, _ in env.seen)

    trajectory = run(
        engine, Request([3], long, Counter(enough=0), max_turns=2, max_response_tokens=300)
    )
    assert (
        trajectory.status == Status.DONE
        and trajectory.turns == 1
        and set(trajectory.response_mask) == {1}
    )
    trajectory = run(engine, Request([3], long, Counter(enough=0), max_turns=0))
    assert trajectory.status == Status.DONE, "the last turn may be the answer"

    trajectory = run(
        engine,
        Request(
            [3], dataclasses.replace(long, max_tokens=2), Counter(stop=("never",)), max_turns=2
        ),
    )
    assert trajectory.status == Status.LENGTH and len(trajectory.response_ids) == 2


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None])
def test_rewards_of_turns(ambiguous, reward):
    class Paid(Counter):
        async def step(self, text, last):
            return dataclasses.replace(await super().step(text, last), reward=len(self.seen) / 2)

    engine, _ = ambiguous
    request = Request([3], Sampling(1.2, max_tokens=60, seed=5), Paid(), 2, 300)
    trajectory = run(engine, request)
    assert trajectory.turn_scores == [0.5, 1.0, 1.5]
    assert [info["reward"] for info in trajectory.infos] == [0.5, 1.0, 1.5]
    item = {"trajectory": {"turn_scores": trajectory.turn_scores}}
    assert environment.compute_score("game", "", None, item) == 3.0
    with pytest.raises(ValueError, match="max_turns=0"):
        environment.compute_score("game", "", None, {})

    class Wrong(Counter):
        async def step(self, text, last):
            return Step("x", reward=reward)

    trajectory = run(engine, dataclasses.replace(request, env=Wrong()))
    assert trajectory.status == Status.ERROR and trajectory.turn_scores == []


def test_single_turn_without_environment(ambiguous):
    engine, _ = ambiguous
    recorder = Recorder(engine)
    trajectory = run(recorder, Request([3], Sampling(max_tokens=200, seed=1)))
    assert (
        trajectory.status == Status.DONE
        and trajectory.response_ids[-1] == 1
        and trajectory.turns == 1
    )
    assert (
        set(trajectory.response_mask) == {1}
        and trajectory.weight_versions == [(0, len(trajectory.response_ids))]
        and trajectory.gen_seconds > 0
    )
    trajectory = run(recorder, Request([3], Sampling(max_tokens=2, seed=1, ignore_eos=True)))
    assert trajectory.status == Status.LENGTH
    assert all(call[1].stop == () for call in recorder.calls)


@pytest.mark.parametrize("budget", range(8, 60, 3))
def test_token_limits_are_kept_and_no_observation_comes_last(ambiguous, budget):
    engine, _ = ambiguous
    env = Counter()
    request = Request(
        [3], Sampling(1.2, max_tokens=9, seed=7), env, max_turns=9, max_response_tokens=budget
    )
    recorder = Recorder(engine)
    trajectory = run(recorder, request)
    assert len(trajectory.response_ids) <= budget
    assert trajectory.response_mask[-1] == 1
    assert all(1 <= sampling.max_tokens <= 9 for _, sampling, _ in recorder.calls)
    if trajectory.status == Status.LENGTH and recorder.calls[-1][2].finish_reason == "stop":
        observation = engine.tokenizer.encode("! " + "he" * len(env.seen[-1][0]) + "!")
        assert len(trajectory.response_ids) + len(observation) >= budget


def test_long_observation_is_truncated_inside_its_tags(ambiguous):
    engine, _ = ambiguous
    tokenizer = engine.tokenizer
    step = Step("he" * 40, "! ", " !")
    encode = encode_text(tokenizer)
    ids, cut = encode(step, [], 12)
    assert cut and len(ids) == 12 and tokenizer.decode(ids) == "! " + "he" * 8 + " !"
    ids, cut = encode(step, [], 44)
    assert not cut and tokenizer.decode(ids) == "! " + "he" * 40 + " !"
    with pytest.raises(ValueError, match="data.max_obs_length=4 is too small"):
        encode(step, [], 4)
    ids, _ = encode(Step("he<eos>he"), [], 44)
    assert tokenizer.eos_token_id not in ids, (
        "what a passage holds is text, also where it looks like the end of a turn"
    )
    request = Request(
        [3], Sampling(1.2, max_tokens=30, seed=5), Counter(), max_turns=2, max_response_tokens=300
    )
    trajectory = run(engine, dataclasses.replace(request, max_observation_tokens=4))
    assert trajectory.truncated_observations == 2 and trajectory.response_mask.count(0) == 8
    sides = [who for (who, count) in trajectory.segments for _ in range(count)]
    assert [who == "model" for who in sides] == [bool(mask) for mask in trajectory.response_mask]


def test_custom_observation_encoder(ambiguous):
    engine, _ = ambiguous
    request = Request(
        [3],
        Sampling(1.2, max_tokens=30, seed=5),
        Counter(),
        1,
        300,
        encode_observation=lambda step, context, limit: ([7, 7, 7], False),
    )
    trajectory = run(engine, request)
    assert [
        i for i, m in zip(trajectory.response_ids, trajectory.response_mask, strict=True) if not m
    ] == [7, 7, 7]


def test_tool_failure_gives_status_error(ambiguous):
    engine, _ = ambiguous
    sampling = Sampling(1.2, max_tokens=30, seed=5)
    requests = [
        Request([3], sampling, Counter(), 2, 300),
        Request([3], sampling, Counter(fault=ConnectionError("retriever down")), 2, 300),
        Request([], sampling),
        Request([3], sampling),
        Request([3], sampling, Counter(fault=SystemExit(3)), 2, 300),
    ]
    whole, broken, empty, single, exited = asyncio.run(run_all(engine, requests))
    assert exited.status == Status.ERROR and exited.error == "SystemExit: 3"
    assert broken.status == Status.ERROR and broken.error == "ConnectionError: retriever down"
    assert broken.response_ids and not any(broken.response_mask)
    assert broken.segments == [("model", len(broken.response_ids))], (
        "what happened can still be read"
    )
    assert len(broken.response_ids) == len(broken.response_mask) == len(broken.log_probs)
    assert empty.status == Status.ERROR and empty.error.startswith(
        "ValueError: the prompt is empty"
    )
    assert (
        whole.error is None
        and single.error is None
        and Status.ERROR not in (whole.status, single.status)
    )


def test_hundreds_of_trajectories_keep_their_order(ambiguous):
    engine, _ = ambiguous
    requests = [
        Request([2 + i % 9], Sampling(1.2, max_tokens=12, seed=i), Counter(), 2, 60)
        for i in range(300)
    ]
    trajectories = asyncio.run(run_all(engine, requests))
    assert [t.prompt_ids for t in trajectories] == [r.prompt_ids for r in requests]
    assert (
        trajectories[17].response_ids
        == run(engine, dataclasses.replace(requests[17], env=Counter())).response_ids
    )
    assert all(t.status != Status.ERROR for t in trajectories)


class Broken:
    """A faulty engine: inconsistent answers, an aborted request, a failure in the middle."""

    def __init__(self, tokenizer, *answers):
        self.tokenizer = tokenizer
        self.answers = list(answers)

    async def generate(self, prompt_ids, sampling, so_far=None, name=None):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_engine_faults(ambiguous):
    tokenizer = ambiguous[0].tokenizer
    aborted = run(
        Broken(tokenizer, Completion([3, 4], [-1.0, -1.0], "abort", [(1, 2)])),
        Request([2], Sampling()),
    )
    assert aborted.status == Status.ERROR and aborted.response_mask == [0, 0]
    for log_probs, spans in (([-1.0], [(1, 2)]), ([-1.0] * 2, [(1, 1)]), ([-1.0] * 2, [(1, 3)])):
        broken = Broken(tokenizer, Completion([3, 4], log_probs, "stop", spans))
        counts = f"2 tokens but {len(log_probs)} log-probs and the weight versions of {spans[0][1]}"
        with pytest.raises(EngineError, match=counts):
            run(broken, Request([2], Sampling()))
    fine = Completion([3], [-1.0], "stop", [(1, 1)])
    with pytest.raises(EngineError, match="died"):
        asyncio.run(
            run_all(
                Broken(tokenizer, fine, EngineError("died"), fine), [Request([2], Sampling())] * 3
            )
        )


class Slow(Counter):
    """A tool whose first turn takes `seconds`, or waits until `release` is set."""

    def __init__(self, seconds, release=None, **kwargs):
        super().__init__(**kwargs)
        self.seconds = seconds
        self.release = release
        self.spans = []

    async def step(self, text: str, last: bool) -> Step:
        began = time.monotonic()
        if not self.seen:
            await asyncio.sleep(self.seconds)
            if self.release is not None:
                await asyncio.wait_for(self.release.wait(), 60)
        self.spans.append((began, time.monotonic()))
        return await super().step(text, last)


@pytest.mark.slow
def test_slow_tools_run_concurrently(ambiguous):
    """256 samples with tool calls of 0.5 s, one of 2 s. Sequentially they would take 129 s."""
    engine, _ = ambiguous
    others_ended = asyncio.Event()
    ended = set()

    def finished(number, trajectory):
        ended.add(number)
        if len(ended - {100}) == 255:
            others_ended.set()

    envs = [Slow(2.0, others_ended) if i == 100 else Slow(0.5) for i in range(256)]
    recorder = Recorder(engine)
    sampling = Sampling(1.2, max_tokens=12)
    requests = [
        Request([2 + i % 9], dataclasses.replace(sampling, seed=i), env, 3, 80)
        for i, env in enumerate(envs)
    ]
    began = time.monotonic()
    trajectories = asyncio.run(run_all(recorder, requests, finished))
    assert all(t.status != Status.ERROR for t in trajectories)
    seconds = time.monotonic() - began
    slow_began, slow_ended = envs[100].spans[0]
    assert slow_ended - slow_began >= 2.0 and seconds < 60.0, (
        "close to the longest tool call, plus this machine's own time"
    )
    others = [env for i, env in enumerate(envs) if i != 100 and env.spans]
    later = [env for env in others if len(env.spans) > 1]
    assert len(later) > 100 and all(env.spans[1][0] < slow_ended for env in later), (
        "second turns do not wait for the slowest first"
    )
    assert all(env.spans[-1][1] < slow_ended for env in others), (
        "the others end while one still waits"
    )
    assert sum(t.tool_seconds for t in trajectories) > 20 * seconds
    assert (
        trajectories[100].tool_seconds
        >= 2.0
        > max(t.tool_seconds for i, t in enumerate(trajectories) if i != 100)
    )


class Playback:
    """An engine that returns given texts and stops at stop strings. Each character is one id."""

    def __init__(self, *turns):
        self.tokenizer = tiny_tokenizer()
        self.turns = list(turns)
        self.contexts = []
        self.stops = []

    async def generate(self, prompt_ids, sampling, so_far=None, name=None):
        text = self.turns.pop(0)
        ended = True
        self.contexts.append(self.tokenizer.decode(prompt_ids))
        self.stops.append(sampling.stop)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if not any(stop in text for stop in sampling.stop):
            ids.append(self.tokenizer.eos_token_id)
        if len(ids) > sampling.max_tokens:
            ids = ids[: sampling.max_tokens]
            ended = False
        return Completion(ids, [-0.25] * len(ids), "stop" if ended else "length", [(4, len(ids))])


def play(*turns, max_turns=3, total=2000, per_turn=60, most=100, **retriever):
    """Run a search trajectory with these model turns and a real retriever."""
    engine = Playback(*turns)
    with Retriever() as server:
        factory = SearchEnvFactory(RetrieverSpec(url=(server.url,), **{"topk": 2, **retriever}))
        prompt = engine.tokenizer.encode("Question: how high?\n", add_special_tokens=False)
        request = Request(
            prompt,
            Sampling(1.0, max_tokens=per_turn, seed=1),
            factory.env({}),
            max_turns,
            total,
            most,
        )

        async def one():
            async with factory:
                return await run_trajectory(engine, request)

        trajectory = asyncio.run(one())
    ids = [i for i in trajectory.response_ids if i != engine.tokenizer.eos_token_id]
    return engine, server, trajectory, engine.tokenizer.decode(ids)


WHOLE = """<think>hm</think> I do not know
My previous action is invalid. If I want to search, I should put the query \
between <search> and </search>. If I want to give the final answer, I should put the answer \
between <answer> and </answer>. Let me try again.
<search> capital </search>

<information>Doc 1(Title: "Paris") Paris is the capital of France.</information>

<search>metres high</search>

<information>Doc 1(Title: "Eiffel Tower") The Eiffel Tower stands in Paris and is 330 metres high.
Doc 2(Title: "Mount Everest") Mount Everest is 8849 metres high.</information>

"""


def test_search_transcript():
    turns = [
        "<think>hm</think> I do not know",
        "<search> capital </search>",
        "<search>metres high</search>",
        "<answer>8849</answer>",
    ]
    engine, server, trajectory, text = play(*turns, most=300)
    assert text == WHOLE + turns[3] and trajectory.status == Status.DONE
    second_search = WHOLE.index("<search>metres")
    assert engine.contexts == [
        "Question: how high?\n",
        f"Question: how high?\n{turns[0]}<eos>{INVALID}",
        f"Question: how high?\n{turns[0]}<eos>{WHOLE[len(turns[0]) : second_search]}",
        f"Question: how high?\n{turns[0]}<eos>{WHOLE[len(turns[0]) :]}",
    ]
    assert [body["queries"] for body in server.requests] == [["capital"], ["metres high"]]
    assert set(engine.stops) == {("</search>", "</answer>")}
    assert (trajectory.turns, trajectory.invalid_turns, trajectory.truncated_observations) == (
        4,
        1,
        0,
    )
    assert [info["action"] for info in trajectory.infos] == [
        "invalid",
        "search",
        "search",
        "answer",
    ]
    assert [who for who, _ in trajectory.segments] == ["model", "tool"] * 3 + ["model"]
    rows = iter(
        zip(trajectory.response_ids, trajectory.response_mask, trajectory.log_probs, strict=True)
    )
    for who, count in trajectory.segments:
        ids, masks, log_probs = zip(*(next(rows) for _ in range(count)), strict=True)
        assert set(masks) == {int(who == "model")} and set(log_probs) == {
            -0.25 if who == "model" else 0.0
        }
    assert sum(trajectory.response_mask) == sum(map(len, turns)) + 1, "and one end token"


def test_search_transcript_with_truncated_results_and_turn_limit():
    engine, server, trajectory, text = play(
        "<search>metres high</search>", "<search>more</search>", max_turns=1, most=70
    )
    information = text.removeprefix("<search>metres high</search>").removesuffix(
        "<search>more</search>"
    )
    assert (
        information == '\n\n<information>Doc 1(Title: "Eiffel Tower") The Eiffel</information>\n\n'
    )
    assert len(information) == 70 and trajectory.truncated_observations == 1
    assert trajectory.status == Status.MAX_TURNS and trajectory.turns == 2
    assert [body["queries"] for body in server.requests] == [["metres high"]], (
        "the last turn's search is not executed"
    )
    assert [info["action"] for info in trajectory.infos] == ["search", "search not executed"]
    assert trajectory.response_mask[-1] == 1


def test_search_transcript_at_the_token_limit():
    search = "<search>metres high</search>"
    engine, _, trajectory, text = play(search, "x" * 100, per_turn=40)
    assert (
        trajectory.status == Status.LENGTH
        and text.endswith("</information>\n\n" + "x" * 40)
        and len(trajectory.infos) == 1
    )
    engine, server, trajectory, text = play(search, total=len(search) + 100, most=100)
    assert trajectory.status == Status.LENGTH and text == search, (
        "an observation that leaves no token to answer with is not added"
    )
    engine, server, trajectory, text = play(search, "yes, it is", total=len(search) + 104, most=100)
    assert trajectory.status == Status.LENGTH and text.endswith("</information>\n\nyes,")
    assert len(trajectory.response_ids) == len(search) + 104


def test_unreachable_retriever_gives_status_error():
    engine = Playback("<search>Everest</search>")
    factory = SearchEnvFactory(RetrieverSpec(url=("http://127.0.0.1:9/retrieve",), deadline_s=0.3))

    async def one():
        async with factory:
            return await run_trajectory(
                engine, Request([5, 6], Sampling(max_tokens=60), factory.env({}), 2, 500)
            )

    trajectory = asyncio.run(one())
    assert trajectory.status == Status.ERROR and trajectory.error.startswith(
        "ToolError: no answer within retriever.deadline_s=0.3"
    )
    assert not any(trajectory.response_mask) and len(trajectory.response_mask) == len(
        "<search>Everest</search>"
    )


class LineDown(ToolError):
    """A subclass of ToolError defined by an environment."""


def test_subclass_of_tool_error_gives_status_error(ambiguous):
    trajectory = run(
        ambiguous[0],
        Request([3], Sampling(1.2, max_tokens=30, seed=5), Counter(fault=LineDown("cut")), 2, 300),
    )
    assert trajectory.error == "ToolError: cut" and trajectory.status == Status.ERROR


CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_chat_with_tools_equals_the_rendered_template():
    """Check every id of a calculator sample, and which ids are trained."""
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
    spoken = [call, "<tool_call>?</tool_call>", "It is 42."]
    engine = Playback(*spoken)
    engine.tokenizer.chat_template = CHAT
    factory = CalculatorEnvFactory()
    messages = [{"role": "user", "content": "6*7?"}]
    tokenizer = engine.tokenizer

    def rendered(messages, more=True):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=more, tokenize=False)
        return tokenizer.encode(text, add_special_tokens=False)

    request = Request(
        rendered(messages),
        Sampling(max_tokens=100),
        factory.env({}),
        4,
        600,
        200,
        encode_chat(tokenizer, factory.tools),
    )
    trajectory = run(engine, request)
    for text, answer in zip(
        spoken,
        [
            "42",
            "error: the call is not valid JSON: Expecting value: line 1 column 1 (char 0)",
            None,
        ],
        strict=True,
    ):
        messages += [
            {"role": "assistant", "content": text},
            *([{"role": "tool", "content": answer}] if answer else []),
        ]
    assert trajectory.prompt_ids + trajectory.response_ids == rendered(messages, more=False)[:-1], (
        "except for the final newline"
    )
    assert trajectory.status == Status.DONE and trajectory.invalid_turns == 1
    trained = [
        i for i, mask in zip(trajectory.response_ids, trajectory.response_mask, strict=True) if mask
    ]
    assert tokenizer.decode(trained) == "".join(f"{text}<eos>" for text in spoken)
