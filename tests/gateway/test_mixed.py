"""A few mixed sessions through the gateway of a real engine; `python -m tests.gateway.mixed` plays
a thousand through vLLM."""

import asyncio

import pytest
import torch

from tests.gateway import mixed
from tests.rollout.oracle import float64_model
from verlite.rollout.batched import build_engine
from verlite.spec.roles import GenerationSpec, ModelSpec


@pytest.mark.slow
def test_mixed_sessions_are_exact_accounted_for_and_have_the_models_log_probs(tmp_path):
    path = mixed.model_in(tmp_path)
    cpu = torch.device("cpu")
    spec = GenerationSpec()
    engine = build_engine("hf", ModelSpec(path=path), spec, mixed.LONGEST, cpu, 0, pretrained=True)
    logged = mixed.Logged(engine)
    try:
        played = asyncio.run(asyncio.wait_for(mixed.play(logged, 4), 300))
    finally:
        engine.close()
    found = mixed.account(played, logged, float64_model(path))
    assert found["broken"] == [] and found["largest_gap"] < 1e-4
    assert found["ledger"]["branches"] > 8 and found["sampled_tokens"] > 300
    assert found["rules"]["rows: kept"] == 4
