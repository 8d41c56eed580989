"""Engines, ranks and processes on GPUs of their own."""

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.rollout.oracle import ask, float64_model, load, moved
from verlite.engine.scoring import ScoringSettings, TokenScorer, default_device
from verlite.engine.sharding import compute_dtype
from verlite.rollout.batched import build_engine, engine_dtype
from verlite.rollout.engines import hf
from verlite.rollout.types import Sampling
from verlite.sizing.devices import Devices, choose_devices
from verlite.spec.roles import FSDPSpec, GenerationSpec, ModelSpec
from verlite.weights import ipc
from verlite.weights.fingerprint import fingerprint, settle, sum_of_hashes

GPU = torch.device("cuda", 0)
LONG = Sampling(max_tokens=12, ignore_eos=True, seed=1)
PROMPTS = [[5, 6, 7], [9], [4, 5, 6, 7, 8, 9, 10]]


def test_hf_engine_sleeps_reloads_and_equals_the_cpu(tiny_qwen2: str) -> None:
    rollout = GenerationSpec(max_num_seqs=4, dtype="float32")
    policy = moved(float64_model(tiny_qwen2), 0.1)
    answers: list[Any] = []
    for device in (torch.device("cpu"), GPU):
        engine = build_engine("hf", ModelSpec(tiny_qwen2), rollout, 64, device, 1, pretrained=True)
        answers.append([(x.ids, x.log_probs) for x in ask(engine, PROMPTS, LONG)])
        allocated = torch.cuda.memory_allocated()
        engine.sleep()
        if device.type == "cuda":
            weights = sum(p.numel() * 4 for p in policy.parameters())
            assert torch.cuda.memory_allocated() <= allocated - weights
        engine.wake("weights")
        load(engine, policy, 1)
        engine.wake("kv_cache")
        answers[-1] += [(x.ids, x.log_probs) for x in ask(engine, PROMPTS, LONG)]
        engine.close()
    assert answers[1] == answers[0] and answers[0][:3] != answers[0][3:]


def test_the_cache_may_take_a_share_of_what_is_free() -> None:
    held = torch.empty(1 << 30, dtype=torch.uint8, device=GPU)
    free = torch.cuda.mem_get_info(GPU)[0]
    del held  # the allocator keeps it
    assert hf._cache_limit(GPU, 0.5) >= (free + (1 << 30)) // 2


def test_what_is_automatic_is_a_gpus(tiny_qwen2: str) -> None:
    assert default_device() == "cuda"
    assert compute_dtype(FSDPSpec(), GPU, True) == torch.bfloat16
    assert engine_dtype("auto", GPU) == torch.bfloat16
    assert ScoringSettings(tiny_qwen2, device="cuda").resolved().dtype == "bfloat16"
    plan: Any = SimpleNamespace(devices_per_node=2, device="cuda")
    assert choose_devices(None, plan) == Devices("NVIDIA H100 80GB HBM3", 2, 80 << 30, "cuda")


def test_settings_of_the_allocator_are_read_in_older_versions_of_torch(monkeypatch: Any) -> None:
    newer = ipc._allocator_settings()
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    assert ipc._allocator_settings() == newer


def test_fingerprints_equal_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        named = [("a", torch.randn(1000, 7, generator=generator).to(dtype))]
        assert fingerprint([(n, t.to(GPU)) for n, t in named]) == fingerprint(named)
        found = [settle({n: sum_of_hashes(t.to(d)) for n, t in named}) for d in ("cpu", GPU)]
        assert found[0] == found[1]


def test_ranks_of_a_scorer_have_a_gpu_each(tiny_qwen2: str, monkeypatch: Any) -> None:
    """Two processes shard the model over two GPUs; their collectives meet, in order."""
    monkeypatch.setenv("DRY_STRICT", "1")
    rng = np.random.default_rng(0)
    rows = [rng.integers(4, 128, n) for n in (9, 4, 12, 7)]
    found = []
    for device in ("cpu", "cuda"):
        settings = ScoringSettings(tiny_qwen2, ranks=2, device=device, dtype="float32")
        scorer = TokenScorer(dataclasses.replace(settings))
        found.append((scorer.log_probs(rows, [3, 2, 5, 6], 0.7), scorer.facts["fingerprints"]))
        scorer.close()
    assert found[0][1] == found[1][1]
    for a, b in zip(found[0][0], found[1][0], strict=True):
        np.testing.assert_array_equal(a, b)


def child(code: str, **variables: str) -> Any:
    """Return what a process prints as JSON."""
    env = os.environ | {"DRY_STRICT": "1"} | variables
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("nvml", "mapped"), [("1", True), ("0", False)])
def test_segments_of_training_roles_are_expandable_where_nvml_is(nvml: str, mapped: bool) -> None:
    code = """
import json, torch
from tests.gpu_dry import gpu
from verlite.workers.training import use_expandable_segments
use_expandable_segments()
with gpu.calls() as seen:
    torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
print(json.dumps([seen.count("cuMemMap") > 0, seen.count("cudaMalloc") > 0]))
"""
    assert child(code, DRY_NVML=nvml) == [mapped, not mapped]


def test_a_worker_uses_the_gpu_that_ray_has_given_it() -> None:
    """Its own number 0, whatever the machine's: memory, and the id that ipc compares."""
    code = """
import json, torch
from types import SimpleNamespace
from tests.gpu_dry import gpu
from verlite.controller.worker import Worker
from verlite.weights.ipc import gpu_uuid
worker = SimpleNamespace(_spec=SimpleNamespace(device_kind="cuda"))
device = Worker.device.fget(worker)
torch.empty(1 << 20, device=device)
print(json.dumps([gpu.used(0), gpu.used(1) > 0, gpu_uuid(device)]))
"""
    used, has_own, uuid = child(code, CUDA_VISIBLE_DEVICES="1")
    assert used == 0 and has_own
    assert bytes.fromhex(uuid.replace("-", "")) == b"dry-gpu-00000001"
