"""What FSDP gathers and reduces at a time."""

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torch.library import _scoped_library
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2ForCausalLM

from tests.engine import programs
from tests.engine.batches import engine, ragged_batch
from tests.gpu_dry import cpu_kernels
from tests.models import tiny_model
from verlite.engine import attention, fsdp, sharding
from verlite.engine.micro import MicroBatching


def groups(path: str, head: str) -> list[set[str]]:
    """Return the names of the parameters that FSDP gathers together, of each group."""
    model = engine(path, head=head).model
    owners: dict[str, set[str]] = {}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        parents = [".".join(parts[:i]) for i in range(len(parts))]
        owner = [p for p in parents if isinstance(model.get_submodule(p), FSDPModule)][-1]
        owners.setdefault(owner, set()).add(name.removeprefix("model."))
    return list(owners.values())


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_output_head_are_reduced_on_their_own(tied: bool, tmp_path: Path) -> None:
    """Together they are several GiB of gradients in float32 for a vocabulary of 150,000."""
    path = tiny_model(tmp_path, "qwen2", tie_word_embeddings=tied)
    alone = [{"model.embed_tokens.weight"}, {"lm_head.weight"}]
    assert [group in groups(path, "lm") for group in alone] == [not tied, not tied]
    assert alone[0] in groups(path, "value")


# Checkpointing, activation offload and torch.compile do not change results


CASE = {"mode": "token-mean", "rows": list(range(8)), "size": 3}


class Counted(TorchDispatchMode):
    """Counts the products and attention passes of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"products": 0, "attention": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::mm", "aten::addmm"):
            self.counts["products"] += 1
        elif func.name() == "aten::_scaled_dot_product_flash_attention_for_cpu":
            self.counts["attention"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [True, False])
def test_kept_outputs_change_no_bit_and_are_not_computed_again(
    tiny_qwen2: str, packed: bool
) -> None:
    """Without checkpointing an operator runs once forward. The last product of a layer, whose
    output nothing of the layer needs, is never computed again."""
    found = {}
    for kept in (False, True, "attention", "products"):
        options = {"enable_gradient_checkpointing": kept, "use_remove_padding": packed}
        subject = engine(tiny_qwen2, train=True, grad_clip=math.inf, **options)
        caught = programs.catch_gradients(subject)
        loss = programs.weighted_loss("token-mean")
        with Counted() as counted:
            subject.update(ragged_batch(), MicroBatching(size=3), 0.8, loss)
        found[kept] = dict(caught), counted.counts
    expected, once = found[False][0], found[False][1]
    for kept, (gradients, _) in found.items():
        assert gradients.keys() == expected.keys(), kept
        assert all(torch.equal(gradients[name], g) for name, g in expected.items()), kept
    layers, passes, products, calls = 2, 3, 6, 7 if packed else 3
    again = {name: found[True][1][name] - once[name] for name in once}
    assert again == {"products": layers * passes * products, "attention": layers * calls}
    assert found["attention"][1] == once | {"products": found[True][1]["products"]}
    assert found["products"][1] == once


class OldFormat(Qwen2ForCausalLM):
    """A model of the Hub from before transformers 4.35, which chooses its checkpoints itself."""

    def _set_gradient_checkpointing(self, module: Any, value: bool = False) -> None:
        if value and isinstance(module, Qwen2DecoderLayer):
            plain = module.forward
            module.forward = lambda x, **options: checkpoint(  # type: ignore[method-assign]
                lambda x: plain(x, **options), x, use_reentrant=True
            )


@pytest.mark.parametrize("kind", [OldFormat, Qwen2ForCausalLM])
def test_the_first_layer_is_trained_where_the_embeddings_are_not(
    kind: type[Qwen2ForCausalLM], tiny_qwen2: str
) -> None:
    model = kind.from_pretrained(tiny_qwen2).requires_grad_(False).train()
    trained = model.get_parameter("model.layers.0.mlp.down_proj.weight").requires_grad_()
    sharding.checkpoint_layers(model, True, offload=False)
    model(torch.tensor([[3, 4, 5]])).logits.square().sum().backward()
    assert trained.grad is not None and trained.grad.any()
    assert bool(model._require_grads_hooks) == (kind is OldFormat)


@pytest.mark.process
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

    settings = {"enable_gradient_checkpointing": True, "share_prefixes": False}
    (plain,) = programs.gradients(tiny_qwen2, [CASE], **settings)
    monkeypatch.setattr(sharding, "save_on_cpu", Watched)
    monkeypatch.setattr(
        fsdp,
        "checkpoint_layers",
        lambda model, kept, offload: sharding.checkpoint_layers(model, kept, offload=True),
    )
    (offloaded,) = programs.gradients(tiny_qwen2, [CASE], **settings)
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
@pytest.mark.process
def test_activations_are_offloaded_only_on_a_gpu(
    tiny_qwen2: str, monkeypatch: pytest.MonkeyPatch, device: str, asked: bool, expected: bool
) -> None:
    class Seen(Exception):
        pass

    def look(model: Any, kept: bool, offload: bool) -> None:
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


def passes(subject: Any, rows: list[int], size: int, adapters: bool) -> list[Any]:
    """Return log-probs, those of the base model if there are adapters, and an update's loss."""
    micro = MicroBatching(size=size)
    found = [subject.forward(ragged_batch()[rows], micro)["log_probs"]]
    if adapters:
        with subject.without_adapters():
            found.append(subject.forward(ragged_batch()[rows], micro)["log_probs"])
    loss = programs.weighted_loss("token-mean")
    return [*found, subject.update(ragged_batch()[rows], micro, 0.8, loss)["loss"]]


COMPILED = {
    "trees": programs.LORA,
    "flat, adapters": programs.LORA | {"share_prefixes": False},
    "flat": {"share_prefixes": False},
    "flat, all kept": {"share_prefixes": False, "enable_gradient_checkpointing": False},
}


@pytest.fixture
def varlen_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Flat rows take torch's operator for GPUs, computed on the CPU."""
    monkeypatch.setattr(attention, "_fits_varlen_kernel", lambda query, value: True)
    with _scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", lambda *args: cpu_kernels._varlen(*args), "CPU")
        library.impl(
            "_varlen_attn_backward", lambda *args: cpu_kernels._varlen_backward(*args), "CPU"
        )
        yield


@pytest.mark.timeout(600)
@pytest.mark.process
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_layers_equal_eager_and_compile_once(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The first two batches compile all graphs, which all layers share: three have as many as two.
    50 other batches, with other lengths and numbers of rows, compile none.

    Graphs are run as Dynamo traced them. Generating code for them, or tracing their backward passes
    ahead of time, would test torch instead of the engine.
    """
    options: dict[str, Any] = COMPILED[case]
    adapters = "lora_rank" in options
    if case != "trees":
        request.getfixturevalue("varlen_on_cpu")
    compile_, variables = torch.compile, []

    def as_traced(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        variables.append(sum(isinstance(x, int | torch.SymInt) for x in inputs))
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda layer: compile_(layer, backend=as_traced))
    graphs = []
    for layers in (3, 2):
        path = tiny_model(tmp_path / str(layers), "qwen2", num_hidden_layers=layers)
        torch._dynamo.reset()
        counters.clear()
        variables.clear()
        compiled, eager = (
            engine(path, train=True, lr=0.0, grad_clip=math.inf, use_torch_compile=on, **options)
            for on in (True, False)
        )
        caught = [programs.catch_gradients(subject) for subject in (compiled, eager)]
        for rows, size in ([0, 1, 2, 3, 4, 5, 6, 7], 3), ([5, 6], 2):
            one, other = (passes(subject, rows, size, adapters) for subject in (compiled, eager))
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(dict(caught[0]), dict(caught[1]), rtol=1e-5, atol=1e-5)
        graphs.append(len(variables))
    draw = torch.Generator().manual_seed(0)
    for _ in range(50):
        rows = torch.randperm(8, generator=draw)[: int(torch.randint(2, 9, (), generator=draw))]
        passes(compiled, rows.tolist(), int(torch.randint(1, 5, (), generator=draw)), adapters)
    assert graphs == [len(variables)] * 2
    assert bool(counters["graph_break"]) == (case == "trees")
    assert max(variables) == (2 if case == "trees" else 4)  # tokens, sequences, the longest


def test_the_check_of_the_gpu_is_a_constant_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def untraceable() -> bool:
        torch._dynamo.graph_break()
        return True

    cuda = SimpleNamespace(is_available=untraceable, get_device_capability=lambda device: (9, 0))
    fake = SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=None))
    monkeypatch.setattr(attention, "torch", fake)
    check = attention._has_varlen_kernel.__wrapped__
    monkeypatch.setattr(attention, "_has_varlen_kernel", functools.cache(check))

    def halved_if_there(x: torch.Tensor) -> torch.Tensor:
        return x / 2 if attention._has_varlen_kernel(x.device) else x

    compiled = torch.compile(halved_if_there, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [0.5, 0.5]
