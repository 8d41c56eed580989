"""The training engine on a GPU: the CPU's values, and when it waits."""

from typing import Any

import pytest
import torch

from tests.engine.batches import ragged_batch
from tests.engine.programs import weighted_loss
from tests.gpu_dry import gpu
from verlite.engine import attention
from verlite.engine.fsdp import TrainEngine
from verlite.engine.micro import MicroBatching
from verlite.engine.offload import HostMemory
from verlite.spec.roles import FSDPSpec, ModelSpec, OptimSpec

pytestmark = pytest.mark.usefixtures("one_rank")
LOSS = weighted_loss("token-mean")
SAVED = {"enable_gradient_checkpointing": True, "enable_activation_offload": True}


def engine(path: str, device: str | None, dtype: str = "float32", **model: Any) -> TrainEngine:
    optim = OptimSpec(lr=1e-2)
    fsdp = FSDPSpec(dtype=dtype, param_offload=True, optimizer_offload=True)
    return TrainEngine(ModelSpec(path, **model), fsdp, optim, device=device)


def results(engine: TrainEngine, micro: MicroBatching) -> tuple[Any, ...]:
    """Return the values of a log-prob pass, an update, a checkpoint's parts and a fingerprint."""
    engine.onload(optimizer=True)
    log_probs = engine.forward(ragged_batch(), micro, with_entropy=True)
    metrics = engine.update(ragged_batch(), micro, 0.8, LOSS)
    weights = [p.to_local().cpu().clone() for p in engine.parameters]
    return log_probs, metrics, weights, engine.fingerprint(torch.float32)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("saved", [{}, SAVED, {"enable_gradient_checkpointing": "products"}])
def test_equals_the_cpu(tiny_qwen2: str, dtype: str, saved: dict[str, Any], packed: bool) -> None:
    """Bit for bit, as the CPU computes both: a copy that was read too early would show."""
    micro = MicroBatching(size=3)
    options = {**saved, "use_remove_padding": packed}
    expected = results(engine(tiny_qwen2, "cpu", dtype, **options), micro)
    with gpu.calls() as seen:
        actual = results(engine(tiny_qwen2, "cuda", dtype, **options), micro)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert bool(seen.count("op _varlen_attn")) == (packed and dtype == "bfloat16")


def test_on_amd_attention_runs_sequence_by_sequence(tiny_qwen2: str, monkeypatch: Any) -> None:
    """With a torch for ROCm, which calls its GPUs cuda: the CPU's values without that kernel,
    to the rounding of bfloat16, which torch's own attention does at other places."""
    micro = MicroBatching(size=3)
    expected = results(engine(tiny_qwen2, "cpu", "bfloat16"), micro)
    monkeypatch.setattr(torch.version, "hip", "7.1.25424")
    attention._has_varlen_kernel.cache_clear()
    with gpu.calls() as seen:
        actual = results(engine(tiny_qwen2, "cuda", "bfloat16"), micro)
    attention._has_varlen_kernel.cache_clear()
    torch.testing.assert_close(actual[:2], expected[:2], rtol=0.02, atol=0.02)
    assert not seen.count("op _varlen_attn")


def test_saved_activations_leave_through_pinned_memory(tiny_qwen2: str) -> None:
    trained = engine(tiny_qwen2, "cuda", **SAVED)
    trained.onload(optimizer=True)
    with gpu.calls() as seen:
        trained.update(ragged_batch(), MicroBatching(size=3), 0.8, LOSS)
    layers, micro_batches = 2, 3
    assert seen.count("copy from pinned") == layers * micro_batches + micro_batches
    assert seen.count("copy to pageable") <= 1


def test_each_micro_batch_is_sent_in_one_copy_without_waiting(tiny_qwen2: str) -> None:
    """What remains is one wait of transformers' own, which looks for packed sequences."""
    trained = engine(tiny_qwen2, None)
    trained.onload(optimizer=True)
    waits, pinned, pageable = [], [], []
    for size in (3, 1):
        with gpu.calls() as seen:
            trained.update(ragged_batch(), MicroBatching(size=size), 0.8, LOSS)
        waits.append(len(seen.waits))
        pinned.append(seen.count("copy from pinned"))
        pageable.append(seen.count("copy from pageable"))
    assert pinned == [3, 7] and pageable[0] == pageable[1] and waits[1] - waits[0] == 7 - 3


def test_offload_frees_the_gpu_and_locks_pages_once(tiny_qwen2: str) -> None:
    trained = engine(tiny_qwen2, "cuda")
    shard = sum(p.to_local().nbytes for p in trained.parameters)
    trained.update(ragged_batch(), MicroBatching(size=3), 0.8, LOSS)
    allocated, before = torch.cuda.memory_allocated(), gpu.pinned()
    trained.offload()
    assert torch.cuda.memory_allocated() <= allocated - 3 * shard
    locked = gpu.pinned() - before
    assert 3 * shard <= locked <= 3 * shard + 64 * 4 * len(trained.parameters)
    held = gpu.used()
    trained.onload(optimizer=True)
    assert gpu.used() >= held and torch.cuda.memory_allocated() >= 3 * shard
    with gpu.calls() as seen:
        trained.offload()
    assert gpu.used() == held and seen.count("cudaHostRegister") == 0
    assert seen.bytes("copy to pinned") >= 3 * shard and seen.count("copy to pageable") == 0


def test_offloaded_tensors_have_arrived() -> None:
    """Also if nothing is freed, which would wait for them."""
    x, memory = torch.full((1 << 16,), 3.0, device="cuda"), HostMemory(torch.device("cuda"))
    memory.offload({"x": x})
    torch.cuda.synchronize()
    x.fill_(7)
    assert memory.offload({"x": x})["x"].sum() == 7 << 16
