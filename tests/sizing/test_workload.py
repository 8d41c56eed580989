"""Lengths and latencies from quantiles, and costs by roofline, against hand-worked numbers."""

import math
from statistics import fmean, quantiles

import pytest

from verlite.sizing.assumed import (
    READ,
    STEP_S,
    SYNCED,
    TRAINED,
    Drawn,
    Quantiles,
    parse_quantiles,
    roofline_costs,
)
from verlite.sizing.devices import Devices, DevicesError
from verlite.sizing.tables import run_models
from verlite.terminal import GIB


def test_quantiles_of_each_form():
    assert parse_quantiles("1500", "--x") == Quantiles(((0.5, 1500.0),))
    assert parse_quantiles("1500", "--x").at(0.99) == 1500
    lognormal = parse_quantiles("p50=1500 p99=12000", "--x")
    assert lognormal.at(0.5) == pytest.approx(1500)
    assert lognormal.at(0.99) == pytest.approx(12000)
    assert lognormal.at(0.01) == pytest.approx(1500 / 8)  # as far below the median
    assert parse_quantiles("p10=1 p90=16", "--x").at(0.5) == pytest.approx(4)
    sigma = math.log(8) / 2.3263479
    assert fmean(lognormal.values()) == pytest.approx(1500 * math.exp(sigma**2 / 2), rel=0.01)
    assert parse_quantiles("p16=1,p84=1", "--x").at(0.3) == 1
    joined = parse_quantiles("p0=1 p50=4 p98=9 p100=900", "--x")
    assert [joined.at(share) for share in (0, 0.25, 0.5, 0.98, 0.99, 1)] == pytest.approx(
        [1, 2, 4, 9, 90, 900]
    )
    assert str(joined) == "p0=1 p50=4 p98=9 p100=900"


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-1", "p50=1", "p50=2 p99=1", "p99=1 p50=2", "p0=1 p50=2", "p50=1 p101=2 p102=3",
     "p50=1 90=2", "p50=0 p99=1", "inf"],
)  # fmt: skip
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match=r"--x .* must be a number above 0, as in .* quantiles"):
        parse_quantiles(text, "--x")


@pytest.mark.parametrize("text", ["p50=1 p50.0001=1e300", "p50=1e300 p99=1e308", "1e13"])
def test_numbers_that_cannot_be_drawn_are_refused(text):
    with pytest.raises(ValueError, match=r"--x .* spreads too far: .* and 1e\+12 is allowed"):
        parse_quantiles(text, "--x")
    assert parse_quantiles("p50=0.5 p99=600", "--x").at(1.0) > 1e8


def test_a_sampled_token_has_the_context_of_long_samples():
    """Half of the samples have 100 tokens, half 300. Of four sampled tokens three are of long ones:
    10 + (100 + 20) / 2 = 70 tokens before a short one's, 10 + (300 + 20) / 2 = 170."""
    halves = Quantiles(((0.0, 100.0), (0.5, 100.0), (0.5 + 1e-9, 300.0), (1.0, 300.0)))
    drawn = Drawn(4, 10, halves, 300, calls=2, observation=10)
    assert drawn.mean_context() == pytest.approx((70 + 3 * 170) / 4)
    assert drawn.mean_tokens() == pytest.approx(10 + 200 + 20)


def test_drawn_samples_follow_the_quantiles_and_share_their_tokens_over_turns():
    tool = parse_quantiles("p50=0.05 p99=2.5", "--tool-latency")
    drawn = Drawn(4, 30, parse_quantiles("p50=300 p99=4000", "--x"), 1000, 2, tool, 7)
    workload = drawn.workload()
    samples = [sample for number in range(3000) for sample in workload(number)]
    assert workload(5) == drawn.workload()(5) != workload(6)
    lengths = [sample.sampled for sample in samples]
    assert quantiles(lengths, n=2)[0] == pytest.approx(300, rel=0.05)
    assert max(lengths) == 1000
    assert sum(length == 1000 for length in lengths) / 12000 == pytest.approx(0.14, abs=0.02)
    latencies = [turn.tool_s for sample in samples for turn in sample.turns[:2]]
    assert quantiles(latencies, n=2)[0] == pytest.approx(0.05, rel=0.05)
    assert sum(latency > 2.5 for latency in latencies) / 24000 == pytest.approx(0.01, rel=0.2)
    for sample in samples[:50]:
        parts = [turn.tokens for turn in sample.turns]
        assert len(parts) == 3 and max(parts) - min(parts) <= 1
        assert [turn.observation for turn in sample.turns] == [7, 7, 0]
        assert sample.turns[2].tool_s == 0
    assert fmean(sample.tokens for sample in samples) == pytest.approx(
        drawn.mean_tokens(), rel=0.03
    )


def test_roofline_of_a_known_model(planned):
    """Qwen2.5-7B: 7.6156e9 parameters in bfloat16; 7.0706e9 of them are multiplied; keys and values
    of a token are 2 x 28 layers x 4 heads x 128 in 2 bytes. An H100 has 989 TFLOP/s, 3350 GB/s."""
    config, plan = planned(
        "qwen2.5-7b",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    )
    models = run_models(config, plan)
    chosen = Devices("H100-80GB", 8, int(79 * GIB), "cuda")
    drawn = Drawn(4, 300, Quantiles(((0.5, 700.0),)), 4000)
    costs = roofline_costs(config, plan, chosen, models, drawn)
    read = 2 * 3350e9 * READ
    assert costs.decode_step_s == pytest.approx(STEP_S + 2 * 7.6156e9 / read, rel=1e-4)
    forward = 2 * 7.0706e9 + 2 * 28 * 28 * 128 * 1001
    keys = 57344 * (300 + 700 / 2)
    prefill = forward / (2 * 989e12 * 0.5)
    assert costs.prefill_token_s == pytest.approx(prefill, rel=1e-4)
    assert costs.decode_sample_s == pytest.approx(keys / read + prefill, rel=1e-4)
    assert not plan.needs_old_log_probs and not plan.needs_reference
    assert costs.update_token_s == pytest.approx(3 * forward / (989e12 * TRAINED), rel=1e-4)
    assert costs.sync_s == pytest.approx(1 + 2 * 7.6156e9 / SYNCED, rel=1e-4)
    with pytest.raises(DevicesError, match="the costs of 24 GiB are not known. Name GPUs of"):
        roofline_costs(config, plan, Devices("24 GiB", 8, None, "cuda"), models, drawn)
