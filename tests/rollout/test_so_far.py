"""Requests that go on elsewhere: their tokens so far are kept, and the rest is as if uncut."""

import asyncio
from dataclasses import replace

import pytest
import torch

from tests.rollout.oracle import (
    ask,
    float64_model,
    load,
    moved,
    naive_log_probs,
    naive_swapped_log_probs,
    until,
)
from tests.rollout.test_swaps import PROMPTS, end, sampled, start
from verlite.rollout.types import Completion, Sampling, after_tokens

LENGTH = 20


@pytest.fixture(scope="module")
def models(request):
    """Three versions of a model."""
    first = float64_model(request.getfixturevalue("tiny_qwen2"))
    return [first, moved(first, 0.3, seed=1), moved(first, 0.3, seed=2)]


def look_after(engine, steps, number):
    """Let `steps` ask what runs after a step. Returns the dict that the answer goes to."""
    found = {}
    steps.before[number] = lambda: found.update(engine.running())
    return found


def generate(engine, so_far=None, prompts=PROMPTS, samplings=None):
    """Generate for all prompts, named by their places."""
    samplings = samplings or [sampled(LENGTH, seed=i) for i in range(len(prompts))]

    async def all_at_once():
        return await asyncio.gather(
            *(
                engine.generate(prompt, sampling, (so_far or {}).get(i), i)
                for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
            )
        )

    return asyncio.run(all_at_once())


def test_what_runs_is_told_and_changes_nothing(tiny_qwen2, models):
    plain, steps = start(tiny_qwen2)
    expected = generate(plain)
    end(plain, steps)
    engine, steps = start(tiny_qwen2, max_num_seqs=4)
    steps.before = {5: lambda: load(engine, models[0], 1)}
    found = look_after(engine, steps, 8)
    answers = generate(engine)
    assert end(engine, steps) == []
    assert [answer.ids for answer in answers] == [answer.ids for answer in expected]
    assert set(found) == set(range(6))
    for i, one in found.items():
        count = 8 if i < 4 else 0  # the others wait for a row
        assert one.ids == answers[i].ids[:count] and len(one.log_probs) == count
        assert one.log_probs == answers[i].log_probs[:count]
        assert one.weight_versions == ([(0, 5), (1, 3)] if count else []) and not one.finish_reason


@pytest.mark.parametrize("cuts", [(1,), (9,), (3, 12), (19,)])
def test_a_cut_request_has_the_tokens_of_an_uncut_one(cuts, tiny_qwen2):
    """Random numbers are a function of seed and position."""
    uncut, steps = start(tiny_qwen2)
    samplings = [sampled(LENGTH, seed=i) for i in range(5)]
    samplings.append(Sampling(0.0, max_tokens=LENGTH, ignore_eos=True))
    expected = generate(uncut, samplings=samplings)
    end(uncut, steps)
    so_far = {}
    for before, cut in zip((0, *cuts), cuts, strict=False):
        engine, steps = start(tiny_qwen2)
        found = look_after(engine, steps, cut - before)
        generate(engine, so_far, samplings=samplings)
        end(engine, steps)
        so_far = found
        assert {len(one.ids) for one in so_far.values()} == {cut}
    engine, steps = start(tiny_qwen2, max_num_seqs=4)
    answers = generate(engine, so_far, samplings=samplings)
    end(engine, steps)
    for cut_one, whole in zip(answers, expected, strict=True):
        assert cut_one.ids == whole.ids and cut_one.finish_reason == whole.finish_reason
        assert cut_one.log_probs == pytest.approx(whole.log_probs, abs=1e-5)


def test_the_rest_is_computed_by_the_new_weights_and_the_beginning_is_kept(tiny_qwen2, models):
    """Loads of weights before and after the cut, with all log-probs by naive float64 passes."""
    engine, steps = start(tiny_qwen2)
    steps.before = {4: lambda: load(engine, models[1], 1)}
    so_far = look_after(engine, steps, 8)
    generate(engine)
    assert end(engine, steps) == []
    engine, steps = start(tiny_qwen2, max_num_seqs=4)
    load(engine, models[1], 1)
    steps.before = {6: lambda: load(engine, models[2], 2)}
    answers = generate(engine, so_far)
    assert end(engine, steps) == []
    assert answers[0].weight_versions == [(0, 4), (1, 10), (2, 6)]
    assert answers[5].weight_versions == [(0, 4), (1, 4), (2, 12)], "it waited for a row meanwhile"
    for i, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        assert len(answer.ids) == LENGTH
        expected = naive_swapped_log_probs(
            models, prompt, answer, sampled(LENGTH, seed=i), keeps_cache=False
        )
        assert answer.log_probs == pytest.approx(expected, abs=1e-4)


def test_a_stop_string_may_begin_before_the_cut(tiny_qwen2):
    engine, steps = start(tiny_qwen2)
    (whole,) = generate(engine, prompts=[[5, 6]], samplings=[sampled(LENGTH)])
    end(engine, steps)
    tokenizer = engine.tokenizer
    text = tokenizer.decode(whole.ids[6:8])
    assert len(text) > 1 and text not in tokenizer.decode(whole.ids[:7])
    sampling = replace(sampled(LENGTH), stop=(text,))
    so_far = Completion(whole.ids[:7], whole.log_probs[:7], "", [(0, 7)])
    engine, steps = start(tiny_qwen2)
    (answer,) = generate(engine, {0: so_far}, [[5, 6]], [sampling])
    end(engine, steps)
    assert answer.ids == whole.ids[:8] and answer.finish_reason == "stop"


def test_requests_without_a_name_are_not_told(tiny_qwen2):
    engine, steps = start(tiny_qwen2)
    found = look_after(engine, steps, 3)
    ask(engine, [[5]], sampled(5))
    end(engine, steps)
    assert found == {} and not engine._names


def test_a_cancelled_request_is_forgotten(tiny_qwen2):
    engine, steps = start(tiny_qwen2)

    async def cancel():
        task = asyncio.create_task(engine.generate([5], sampled(50), None, "name"))
        await asyncio.to_thread(until, lambda: steps.count > 2)
        assert set(await asyncio.to_thread(engine.running)) == {"name"}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await asyncio.to_thread(engine.running)

    assert asyncio.run(cancel()) == {}
    assert end(engine, steps) == [] and not engine._names and not engine._spans


def test_an_engine_that_begins_its_random_numbers_anew_gets_another_seed():
    sampling = Sampling(max_tokens=10, seed=3)
    left = [after_tokens(sampling, count) for count in range(4)]
    assert [one.max_tokens for one in left] == [10, 9, 8, 7]
    assert left[0].seed == 3 and len({one.seed for one in left}) == 4
    assert all(0 <= one.seed < 2**63 for one in left)
    assert after_tokens(replace(sampling, seed=None), 2).seed is None


def test_the_naive_log_probs_see_a_shift_of_one_token(tiny_qwen2, models):
    """The oracle of this file is not blind to an offset."""
    engine, steps = start(tiny_qwen2)
    (answer,) = generate(engine, prompts=[[5, 6]], samplings=[sampled(LENGTH)])
    end(engine, steps)
    shifted = naive_log_probs(models[0], [5, 6, answer.ids[0]], answer.ids[1:], sampled(LENGTH))
    assert torch.tensor(shifted).sub(torch.tensor(answer.log_probs[:-1])).abs().max() > 1e-2
