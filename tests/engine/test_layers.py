"""Checkpointing, activation offload and torch.compile do not change results."""

import math
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.engine import programs
from tests.engine.batches import engine, ragged_batch
from verlite.engine import fsdp, sharding
from verlite.engine.micro import MicroBatching

pytestmark = pytest.mark.process

CASE = {"mode": "token-mean", "rows": list(range(8)), "size": 3}


def test_activation_offload_gives_the_same_gradient(
    tiny_qwen2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the layers' inputs are offloaded. The test forces the copies on a CPU."""
    packed: list[torch.Size] = []

    class Watched(sharding.save_on_cpu):
        def __init__(self, **options: Any):
            super().__init__(**options)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: packed.append(tensor.shape) or pack(tensor)

    (plain,) = programs.gradients(tiny_qwen2, [CASE], enable_gradient_checkpointing=True)
    monkeypatch.setattr(sharding, "save_on_cpu", Watched)
    monkeypatch.setattr(
        fsdp,
        "checkpoint_layers",
        lambda model, offload: sharding.checkpoint_layers(model, offload=True),
    )
    (offloaded,) = programs.gradients(tiny_qwen2, [CASE], enable_gradient_checkpointing=True)
    assert offloaded[0] == plain[0]
    assert all(torch.equal(offloaded[1][name], gradient) for name, gradient in plain[1].items())
    real = (
        ragged_batch().batch["attention_mask"].sum(1)[[row for row in range(8) if row != 4]]
    )  # row 4 has no trainable token and is not run
    passes = [int(part.sum()) for part in real.split(3)]
    assert packed == [torch.Size((1, tokens, 32)) for tokens in passes for _ in range(2)]


@pytest.mark.parametrize(
    ("device", "asked", "expected"),
    [("cpu", True, False), ("cuda", True, True), ("cuda", False, False)],
)
def test_activations_are_offloaded_only_on_a_gpu(
    tiny_qwen2: str, monkeypatch: pytest.MonkeyPatch, device: str, asked: bool, expected: bool
) -> None:
    class Seen(Exception):
        pass

    def look(model: Any, offload: bool) -> None:
        assert offload == expected
        raise Seen

    monkeypatch.setattr(fsdp, "checkpoint_layers", look)
    with pytest.raises(Seen):
        fsdp.TrainEngine(
            fsdp.ModelSpec(path=tiny_qwen2, enable_activation_offload=asked),
            fsdp.FSDPSpec(),
            fsdp.OptimSpec(),
            device=device,
        )


def compiled_updates(path: str, compiled: bool) -> tuple[list[Any], list[int]]:
    """Return log-probs, metrics and gradients for several batches, and the number of graphs after
    each."""
    subject = engine(
        path, train=True, lr=0.0, grad_clip=math.inf, use_torch_compile=compiled, **programs.LORA
    )
    caught = programs.catch_gradients(subject)
    results = []
    graphs = []
    for rows, size in ([0, 1, 2, 3, 4, 5, 6, 7], 3), ([5, 6], 2), ([3, 2, 1], 1), ([7, 0, 1, 5], 4):
        log_probs = subject.forward(ragged_batch()[rows], MicroBatching(size=size))["log_probs"]
        with subject.without_adapters():
            reference = subject.forward(ragged_batch()[rows], MicroBatching(size=size))["log_probs"]
        metrics = subject.update(
            ragged_batch()[rows],
            MicroBatching(size=size),
            0.8,
            programs.weighted_loss("token-mean"),
        )
        results.append((log_probs, reference, metrics["loss"], dict(caught)))
        graphs.append(counters["stats"]["unique_graphs"])
    return results, graphs


def assert_compiled_is_eager(path: str) -> list[int]:
    """Return the number of graphs after each batch.

    Graphs are run as Dynamo traced them. Generating code for them, or tracing their backward passes
    ahead of time, would test torch instead of the engine.
    """
    compile_ = torch.compile
    try:
        torch.compile = lambda model, **options: compile_(model, backend="eager", **options)
        torch._dynamo.reset()
        counters.clear()
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            results, graphs = compiled_updates(path, True)
        eager, none = compiled_updates(path, False)
        assert none == graphs[-1:] * 4
    finally:
        torch.compile = compile_
    for one, other in zip(results, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    return graphs


@pytest.mark.timeout(600)
def test_compiled_layers_equal_eager_and_compile_once(tiny_qwen2: str) -> None:
    """The first batch compiles all graphs: with and without gradients, with and without adapters.

    Later batches have other lengths and numbers of rows.
    """
    graphs = assert_compiled_is_eager(tiny_qwen2)
    assert 0 < graphs[0] == graphs[-1]
