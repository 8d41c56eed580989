"""Simulated steps against schedules worked out by hand, closed forms and invariances."""

import math
import random
from dataclasses import replace

import pytest

from verlite.sizing.simulation import Costs, Sample, Settings, Simulated, Turn, Workload, simulate

SYNC = Settings("sync", prompts=4, engines=1, trainer_devices=2, devices=3)
ASYNC = replace(SYNC, mode="async")
SECOND = Costs(decode_step_s=1.0)
"""An engine gives every sample that runs a token per second."""


def lengths(*tokens: int, then: int = 10, prompt: int = 0) -> Workload:
    """Return prompts with a sample each, of these tokens, and of `then` after them."""

    def group(number: int) -> list[Sample]:
        return [Sample(prompt, (Turn(tokens[number] if number < len(tokens) else then),))]

    return group


def constant(tokens: int, samples: int = 2, prompt: int = 0) -> Workload:
    return lambda number: [Sample(prompt, (Turn(tokens),))] * samples


def drawn(number: int) -> list[Sample]:
    """Three samples with a tool of very different latencies."""
    draw = random.Random(number)

    def turn() -> Turn:
        return Turn(1 + int(draw.paretovariate(1.2)) % 500, draw.lognormvariate(0.0, 1.5), 7)

    return [Sample(20, (turn(), turn(), Turn(5))) for _ in range(3)]


MIXED = Costs(0.02, 0.003, 0.0005, 0.004, 1.0, 0.7, 0.3, 0.2)


def step_s(found: Simulated) -> list[float]:
    return [round(step.step_s, 9) for step in found.steps]


def test_a_synchronous_step_is_the_sum_of_its_parts():
    """8 samples: 100 tokens at 0.1 + 8 x 0.05 s, prefill 8 x 30 x 0.01 s, 8 x 130 tokens trained at
    0.02 s on two devices, 3 s of other updates, a sync of 5 s, rewards 0.5 s."""
    costs = Costs(0.1, 0.05, 0.01, 0.02, 3.0, 5.0, 0.5, 2.0)
    found = simulate(constant(100, prompt=30), costs, SYNC, 4)
    gen, update = 100 * (0.1 + 8 * 0.05) + 8 * 30 * 0.01 + 0.5, 8 * 130 * 0.02 / 2 + 3.0
    for step in found.steps:
        assert step.gen_s == pytest.approx(gen)
        assert step.update_s == pytest.approx(update)
        assert step.step_s == pytest.approx(gen + update + 5.0)
        assert step.period_s == pytest.approx(gen + update + 7.0)
        assert (step.tokens, step.age_mean, step.age_max) == (8 * 130, 0.0, 0.0)
        assert step.busy_s == pytest.approx(gen - 0.5)
        assert step.running * step.period_s == pytest.approx(8 * (gen - 0.5))
    metrics = found.metrics()
    assert metrics["perf/throughput"] == pytest.approx(8 * 130 / (gen + update + 5.0) / 3)
    assert metrics["utilization/trainer"] == pytest.approx(update / (gen + update + 7.0))


@pytest.mark.parametrize("update", [2.0, 60.0])
def test_with_depth_1_a_step_takes_the_longer_of_sampling_and_update(update):
    """The engine makes 1 / 0.05 tokens per second however many samples run. A sync pauses it. The
    first two steps' samples begin together and end together, so it is the mean of two steps."""
    costs = Costs(0.0, 0.05, update_s=update, sync_s=5.0)
    sampling = 8 * 100 * 0.05
    found = simulate(constant(100), costs, ASYNC, 12)
    pairs = [(a + b) / 2 for a, b in zip(step_s(found)[2::2], step_s(found)[3::2], strict=True)]
    assert pairs == pytest.approx([max(sampling, update) + 5.0] * 5)
    busy = found.metrics()["utilization/engines"]
    assert busy == pytest.approx(sampling / (max(sampling, update) + 5.0))


def test_samples_wait_for_a_place_and_for_each_others_prefill():
    """Two places; 1, 2 and 3 tokens. The first two prompts take 2 s. The first sample ends at 3,
    the third's prompt keeps the second until 5, and the third ends at 3 + 1 + 3."""
    costs = Costs(1.0, 0.0, prefill_token_s=0.5)
    three = replace(SYNC, prompts=3, max_num_seqs=2)
    found = simulate(lengths(1, 2, 3, prompt=2), costs, three, 1)
    assert step_s(found) == [7.0]
    work = [(work.steps, work.tokens, work.prefill) for _, work in found.work]
    assert work == [(1.0, 2.0, 4.0), (2.0, 4.0, 6.0), (4.0, 6.0, 6.0)]


def test_a_tool_frees_the_engine_and_its_answer_is_computed():
    """Turn 1: 3 tokens, until 3 + 0.4 for the prompts. The tool ends at 13.4; its 6 tokens take 0.6
    s, and 2 more tokens 2 s. The sample beside it takes 20 + 0.4, and waits for these 0.6."""

    def group(number: int) -> list[Sample]:
        return [Sample(2, (Turn(3, 10.0, 6), Turn(2))), Sample(2, (Turn(20),))]

    found = simulate(group, Costs(1.0, 0.0, 0.1), replace(SYNC, prompts=1), 1)
    assert [round(work.prefill) for _, work in found.work] == [10, 10]
    assert step_s(found) == [21.0]
    assert found.steps[0].tokens == 2 + 11 + 2 + 20
    assert found.steps[0].running * 21.0 == pytest.approx(21.0 + 3.4 + 2.6)


def test_a_straggler_is_waited_for_in_the_last_step_that_may_train_it():
    """Two prompts a step, four engines. Prompt 1 takes 100 s, the others 10. It was started with
    version 1, so with max_age=4 step 5 must train it. Steps 1 to 4 train 0 2, 3 4, 5 6, 7 8."""
    settings = replace(ASYNC, prompts=2, engines=4, max_age=4)
    found = simulate(lengths(10, 100), replace(SECOND, update_s=5.0), settings, 5)
    assert step_s(found) == [15.0, 15.0, 15.0, 15.0, 45.0]
    assert [step.age_max for step in found.steps] == [0.0, 1.0, 1.0, 1.0, 4.0]
    assert [step.age_mean for step in found.steps[:3]] == [0.0, 0.5, 0.5]
    assert found.steps[4].gen_s == 40.0
    waits = simulate(
        lengths(10, 100), replace(SECOND, update_s=5.0), replace(settings, max_age=1), 3
    )
    assert step_s(waits)[:2] == [15.0, 90.0]


def test_a_running_sample_goes_on_with_new_weights():
    """Prompt 0 is trained from 10 to 20. Prompt 1 has 20 tokens of version 1 then, and needs 10
    more. With kv_cache=fresh its 20 tokens and its prompt of 5 are computed again."""
    one = replace(ASYNC, prompts=1, kv_cache="mixed")
    costs = replace(SECOND, update_s=10.0)
    mixed = simulate(lengths(10, 30), costs, one, 2)
    assert step_s(mixed) == [20.0, 20.0]
    assert mixed.steps[1].age_mean == pytest.approx(2 / 3)
    assert mixed.steps[1].age_max == 1.0
    slow = replace(costs, prefill_token_s=0.1)
    for kv_cache, seconds in (("mixed", 0.5), ("fresh", 0.5 + 2.5)):  # prompt 2 has 5 tokens, too
        found = simulate(lengths(10, 30, prompt=5), slow, replace(one, kv_cache=kv_cache), 2)
        assert found.steps[1].gen_s == pytest.approx(10.0 + seconds)
    off = simulate(lengths(10, 30), costs, replace(one, partial_rollout=False), 2)
    assert step_s(off) == [30.0, 10.0]  # the sync waits for prompt 1
    assert [step.gen_s for step in off.steps] == [20.0, 0.0]
    assert off.steps[1].age_mean == 1.0


def test_the_whole_context_of_a_later_turn_is_computed_again():
    """Prompt 1 has 5 tokens, an answer of 4 at 7, and 13.5 tokens more at 20.9, when prompt 0 has
    been trained: 22 whole ones are computed again in 2.2 s, and 16.5 are left."""

    def group(number: int) -> list[Sample]:
        return [Sample(0, (Turn(5, 2.0, 4), Turn(30)) if number == 1 else (Turn(10),))]

    costs = Costs(1.0, prefill_token_s=0.1, update_s=10.5)
    found = simulate(group, costs, replace(ASYNC, prompts=1), 2)
    assert found.steps[0].step_s == pytest.approx(20.9)
    assert found.steps[1].gen_s == pytest.approx(2.2 + 16.5)


def test_pipelined_passes_begin_when_a_prompt_is_finished():
    """1, 2 and 3 tokens are ready after as many seconds. 2 s a token: passes end at 3, 7 and 13."""
    costs = replace(SECOND, update_token_s=4.0, update_s=1.0, sync_s=0.5)
    settings = replace(SYNC, mode="pipelined", prompts=3)
    found = simulate(lengths(1, 2, 3, then=1), costs, settings, 2)
    assert step_s(found) == [14.5, 1.0 + 3 * 2.0 + 1.5]
    assert found.steps[0].age_max == 0.0
    # With two updates half of the passes end at 2, 4 and 7, and the others take 6 s after them.
    two = simulate(lengths(1, 2, 3, then=1), costs, replace(settings, updates=2), 1)
    assert step_s(two) == [7.0 + 6.0 + 1.5]
    summed = simulate(lengths(1, 2, 3, then=1), costs, replace(settings, mode="sync"), 2)
    assert step_s(summed) == [3.0 + 12.0 + 1.5, 8.5]


@pytest.mark.parametrize("mode", ["sync", "pipelined", "async"])
def test_all_times_scale_with_the_costs(mode):
    def slower(number: int) -> list[Sample]:
        return [
            Sample(s.prompt, tuple(t._replace(tool_s=3 * t.tool_s) for t in s.turns))
            for s in drawn(number)
        ]

    settings = replace(ASYNC, mode=mode, engines=2, max_age=3, depth=2, max_num_seqs=4)
    tripled = Costs(**{name: 3 * value for name, value in vars(MIXED).items()})
    one = simulate(drawn, MIXED, settings, 8)
    three = simulate(slower, tripled, settings, 8)
    assert step_s(three) == pytest.approx([3 * step for step in step_s(one)])
    assert [s.age_mean for s in three.steps] == pytest.approx([s.age_mean for s in one.steps])
    assert len(set(step_s(one))) > 2


@pytest.mark.parametrize("settings", [SYNC, ASYNC, replace(ASYNC, max_age=4, depth=2)])
def test_more_engines_are_never_slower_with_equal_lengths(settings):
    times = []
    for engines in (1, 2, 3, 4, 8):
        found = simulate(constant(50, prompt=9), MIXED, replace(settings, engines=engines), 10)
        times.append(found.metrics()["timing_s/step"])
    assert all(more <= fewer + 1e-9 for fewer, more in zip(times, times[1:], strict=False))
    assert times[-1] < times[0]


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_max_age_0_equals_sync(engines):
    sync = simulate(drawn, MIXED, replace(SYNC, engines=engines), 6)
    never_old = replace(ASYNC, engines=engines, max_age=0, depth=0)
    assert simulate(drawn, MIXED, never_old, 6).steps == sync.steps


@pytest.mark.parametrize("kv_cache", ["fresh", "mixed"])
@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize(("max_age", "depth"), [(1, 1), (2, 1), (4, 2)])
def test_ages_stay_within_the_bound_and_every_prompt_is_trained_once(
    max_age, depth, partial, kv_cache
):
    settings = replace(
        ASYNC,
        engines=2,
        max_age=max_age,
        depth=depth,
        partial_rollout=partial,
        kv_cache=kv_cache,
        max_num_seqs=3,
    )
    found = simulate(drawn, MIXED, settings, 9, is_whole=True)
    ages = [step.age_max for step in found.steps]
    assert max(ages) == (max_age if partial else depth)
    assert all(0 <= step.age_mean <= step.age_max for step in found.steps)
    whole = [sample for number in range(9 * 4) for sample in drawn(number)]
    assert sum(step.tokens for step in found.steps) == sum(sample.tokens for sample in whole)
    assert sorted(sample for sample, _ in found.work) == sorted(whole)
    total = sum(step.busy_s for step in found.steps) * 2
    each = sum(MIXED.decode_step_s * work.steps for _, work in found.work)
    assert total < each  # several samples share a step


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(ValueError, match="trainer.mode=tune is not one of sync, pipelined, async"):
        replace(SYNC, mode="tune")
    with pytest.raises(ValueError, match="engines is 0, and must be at least 1"):
        replace(SYNC, engines=0)
    with pytest.raises(ValueError, match="sync_s is -1, and must be from 0 to 1e"):
        replace(SECOND, sync_s=-1)
    with pytest.raises(ValueError, match="sync_s is inf, and must be from 0 to 1e"):
        replace(SECOND, sync_s=math.inf)
    with pytest.raises(ValueError, match="decode_step_s or decode_sample_s must be above 0"):
        Costs(0.0)
