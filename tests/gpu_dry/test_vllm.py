"""vLLM's own engine for GPUs: what it answers, and what it frees."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.models import tiny_model

MIB = 1 << 20
PROGRAM = """
import json, sys, torch
from tests.gpu_dry import gpu
from tests.rollout.oracle import ask, float64_model, largest_gap, load, moved
from verlite.rollout.batched import build_engine
from verlite.rollout.types import Sampling
from verlite.spec.roles import GenerationSpec, ModelSpec

path, device = sys.argv[1], torch.device("cuda", 0)
rollout = GenerationSpec(
    dtype="float32", max_num_seqs=4, gpu_memory_utilization=0.02, free_cache_engine=True,
    engine_kwargs={"vllm": {"kv_cache_memory_bytes": 64 << 20}},
)
prompts, sampling = [[5, 6, 7], [9], [4, 5, 6, 7, 8, 9, 10]], Sampling(max_tokens=6, seed=1)
old = float64_model(path)
new = moved(float64_model(path), 0.1)
found = {}

def gap(model):
    answers = ask(engine, prompts, sampling)
    return largest_gap(model, prompts, answers, sampling), [x.ids for x in answers]

engine = build_engine("vllm", ModelSpec(path), rollout, 64, device, 1, pretrained=True)
found["gap"], ids = gap(old)
awake = gpu.used()
engine.sleep()
found["asleep"] = gpu.used(), awake - gpu.used()
engine.wake("weights")
load(engine, new, 1)
engine.wake("kv_cache")
found["new gap"], new_ids = gap(new)
found["differ"] = ids != new_ids
engine.close()
print(json.dumps(found))
"""


@pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM in this environment")
def test_answers_sleeps_wakes_and_has_new_weights(tmp_path: Path) -> None:
    """Log-probs in float32 equal those of float64, before and after."""
    path = tiny_model(tmp_path / "model", "qwen2", hidden_size=64, num_attention_heads=2)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, path],
        env=os.environ | {"DRY_STRICT": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["gap"] < 2e-5 and found["new gap"] < 2e-5 and found["differ"]
    held, freed = found["asleep"]
    assert held <= 2 * MIB and freed >= 64 * MIB
