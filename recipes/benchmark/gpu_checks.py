"""Checks of what verlite computes on a GPU, compared with float32 on the CPU. gpu.py runs them.

Every check is a row: its figure, the limit that the figure must not exceed, and whether it passed,
failed or was skipped and why. On a CPU the same checks run with a smaller model and skip what only
a GPU has: pinned memory, freed device memory, the varlen kernel.

Errors are relative: those of attention to the largest expected value, those of gradients to the
norm, mean gaps of log-probs and values to their standard deviation. Limits of half precisions are
about three times what the same dtype shows on a CPU; those of two updates, three times what an H200
shows, because Adam's first step turns the rounding of a tiny gradient into a whole step.
"""

import asyncio
import contextlib
import gc
import importlib.util
import logging
import multiprocessing
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from parts import Results
from torch import Tensor, nn
from training import loss
from workload import model_in

from verlite.engine.attention import Sequences, packed_attention
from verlite.engine.fsdp import TrainEngine
from verlite.engine.micro import MicroBatching
from verlite.protocol.data import DataProto
from verlite.rollout.batched import build_engine
from verlite.rollout.trajectory import Request, run_all
from verlite.rollout.types import Sampling, Trajectory, WeightSyncError
from verlite.spec.roles import FSDPSpec, GenerationSpec, ModelSpec, OptimSpec
from verlite.weights.fingerprint import fingerprint, tensor_fingerprint
from verlite.weights.ipc import (
    TRIAL_S,
    BucketStream,
    Publisher,
    error_line,
    publish_trial,
    read_trial,
)
from verlite.weights.transport import publish

SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 8192,
        "hidden_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "max_position_embeddings": 4096,
    },
    "tiny": {
        "vocab_size": 128,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 256,
        "max_position_embeddings": 512,
    },
}
# Sequences of a batch and the longest; tokens per micro-batch; sequences in one attention call.
BATCHES = {"small": (24, 512), "tiny": (6, 40)}
MICRO_TOKENS = {"small": 2048, "tiny": 96}
LENGTHS = {"small": (5, 1, 700, 129, 64), "tiny": (5, 1, 37, 18)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Skip(Exception):
    """The check cannot run here; the message says why."""


@dataclass(frozen=True)
class Checks:
    """Runs checks on a device and stores their rows.

    folder: for files of this group. shape: a name in SHAPES.
    """

    results: Results
    device: torch.device
    shape: str
    folder: Path

    def __call__(self, name: str, limit: float, measure: Callable[[], float]) -> bool:
        """Run one check: it passes if the figure that `measure` returns is at most `limit`. Return
        whether it passed."""
        began = time.time()
        row: dict[str, Any] = {"limit": limit}
        try:
            figure = float(measure())
            row |= {"status": "passed" if figure <= limit else "failed", "figure": figure}
        except Skip as reason:
            row |= {"status": "skipped", "reason": str(reason)}
        except Exception as error:  # a broken check must not stop the others
            row |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        self.results.write(name, row | {"seconds": time.time() - began})
        return bool(row["status"] == "passed")

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def need_cuda(self) -> None:
        """Skip a check of something that only a GPU has."""
        if not self.is_cuda:
            raise Skip("needs a GPU")

    def model(self) -> str:
        """Return a folder with a random model, also random where a new model has ones and zeros, so
        that no weight can be lost unnoticed."""
        folder = self.folder / "model"
        if folder.exists():
            return str(folder)
        from transformers import AutoModelForCausalLM

        model_in(folder, initializer_range=0.04, **SHAPES[self.shape])
        model = AutoModelForCausalLM.from_pretrained(folder)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        model.save_pretrained(folder)
        return str(folder)

    def engine(
        self,
        device: torch.device | str | None = None,
        dtype: str = "float32",
        trained: bool = True,
        head: str = "lm",
        fsdp: dict[str, Any] | None = None,
        **model: Any,
    ) -> TrainEngine:
        """Build a trainer of the model; the same seed, and so the same weights, each time."""
        options = {"path": self.model(), "enable_gradient_checkpointing": False} | model
        return TrainEngine(
            ModelSpec(**options),
            FSDPSpec(dtype=dtype, **(fsdp or {})),
            OptimSpec(lr=1e-3) if trained else None,
            head=head,
            total_training_steps=100,
            device=device or self.device,
        )

    def batch(self) -> DataProto:
        return rows(*BATCHES[self.shape])

    @property
    def micro(self) -> MicroBatching:
        return MicroBatching(max_tokens=MICRO_TOKENS[self.shape])

    def update(self, engine: TrainEngine) -> dict[str, float]:
        """Take one optimizer step."""
        return engine.update(self.batch(), self.micro, 1.0, loss_of(engine))

    def forward(self, engine: TrainEngine) -> dict[str, Tensor]:
        """Return log-probs and entropies, or values, of the batch."""
        return engine.forward(self.batch(), self.micro, 0.9, with_entropy=engine.model.kind == "lm")


def loss_of(engine: TrainEngine) -> Callable[..., Any]:
    """Return the loss of a policy, or of a value model."""
    if engine.model.kind == "lm":
        return loss

    def squared(micro: Any, outputs: dict, counts: Any) -> tuple[Tensor, dict]:
        error = (outputs["values"] - micro["advantages"]).square()
        return (error * micro["response_mask"]).sum() / counts.tokens, {}

    return squared


# Figures


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    actual, expected = actual.detach().float().cpu(), expected.detach().float().cpu()
    return float((actual - expected).abs().max() / expected.abs().max())


def mean_gap(actual: Tensor, expected: Tensor, mask: Tensor) -> float:
    """Return the mean absolute difference over the tokens of `mask`, in standard deviations of the
    expected values, so that it does not depend on the model's size."""
    is_counted = mask.bool()
    actual, expected = actual[is_counted], expected[is_counted]
    return float((actual - expected).abs().mean() / expected.std())


def gradients(engine: TrainEngine) -> dict[str, Tensor]:
    """Return the clipped gradients of a new engine's first update, which Adam's first moment holds
    up to a factor."""
    return {
        name: _whole(engine.optimizer.state[parameter]["exp_avg"]).float().cpu().clone()
        for name, parameter in engine.model.named_parameters()
        if engine.optimizer is not None and parameter in engine.optimizer.state
    }


def gradient_gap(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative error of a parameter's gradient. Gradients that are tiny compared
    with the others count relative to a tenth of the root mean square of all norms."""
    if actual.keys() != expected.keys():
        raise AssertionError(f"parameters differ: {min(actual.keys() ^ expected.keys())}")
    norms = torch.stack([gradient.norm() for gradient in expected.values()])
    floor = norms.square().mean().sqrt() / 10
    gaps = [
        (actual[name] - gradient).norm() / torch.maximum(gradient.norm(), floor)
        for name, gradient in expected.items()
    ]
    return float(torch.stack(gaps).max())


def state(engine: TrainEngine) -> dict[str, Tensor]:
    """Return copies of parameters and optimizer state on the CPU."""
    found = {}
    for name, parameter in engine.model.named_parameters():
        found[name] = _whole(parameter.detach()).cpu().clone()
        if engine.optimizer is not None:
            for key, value in engine.optimizer.state[parameter].items():
                found[f"{name}.{key}"] = _whole(value).cpu().clone()
    return found


def differing(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> int:
    """Return the number of elements that are not bit-equal."""
    if actual.keys() != expected.keys():
        raise AssertionError(f"names differ: {min(actual.keys() ^ expected.keys())}")
    return sum(int((tensor != expected[name]).sum()) for name, tensor in actual.items())


def _whole(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # one rank has all of it


def allocated_mib(device: torch.device) -> float:
    """Return the memory of live tensors on the GPU."""
    _settle(device)
    return torch.cuda.memory_allocated(device) / 2**20


def used_mib(device: torch.device) -> float:
    """Return the GPU's memory in use, by whatever allocator."""
    _settle(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**20


def _settle(device: torch.device) -> None:
    """Free what no tensor uses, and the workspaces that matrix products keep: 65 MiB on an H200."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()


def rows(sequences: int, longest: int) -> DataProto:
    """Return sequences of longest/4 to longest tokens, with prompts of an eighth of the longest."""
    prompt, generator = longest // 8, torch.Generator().manual_seed(0)
    lengths = torch.linspace(longest // 4, longest, sequences).long()
    attention = (torch.arange(longest)[None] < lengths[:, None]).long()
    response_mask = attention[:, prompt:]
    return DataProto.from_dict(
        {
            "input_ids": torch.randint(3, 128, attention.shape, generator=generator) * attention,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "advantages": torch.randn(sequences, 1, generator=generator) * response_mask,
        }
    )


# Groups of checks


def attention(check: Checks) -> None:
    """Packed attention and its gradients against a written-out softmax per sequence."""
    # float32: rounding of sums. Half precisions: a few units in the last place.
    limits = {"float32": 1e-4, "bfloat16": 0.02, "float16": 0.003}
    kinds = {"MHA": (4, 4, None), "GQA": (6, 2, None), "GQA, window 7": (6, 2, 7)}
    for dtype, limit in limits.items():
        for size in (64, 128):
            for kind, (heads, kv_heads, window) in kinds.items():
                check(
                    f"{dtype}, head size {size}, {kind}",
                    limit,
                    partial(attention_gap, check, DTYPES[dtype], size, heads, kv_heads, window),
                )
    check("calls past the varlen kernel in bfloat16", 0, lambda: calls_past_varlen(check))


def attention_gap(
    check: Checks, dtype: torch.dtype, size: int, heads: int, kv_heads: int, window: int | None
) -> float:
    """Return the largest relative error of the output and of the three gradients."""
    lengths = LENGTHS[check.shape]
    generator = torch.Generator().manual_seed(0)

    def random(count: int) -> Tensor:
        shape = (1, count, sum(lengths), size)
        return torch.randn(shape, generator=generator).to(dtype)  # both sides get rounded values

    inputs = [random(heads), random(kv_heads), random(kv_heads)]
    direction = random(heads).transpose(1, 2)
    boundaries = torch.tensor([0, *lengths]).cumsum(0).int().to(check.device)
    sequences = Sequences(lengths, boundaries)
    ours = [x.to(check.device).requires_grad_() for x in inputs]
    out, _ = packed_attention(nn.Module(), *ours, None, sliding_window=window, sequences=sequences)
    found = [out, *torch.autograd.grad((out * direction.to(check.device)).sum(), ours)]
    theirs = [x.float().requires_grad_() for x in inputs]
    right = written_out(*theirs, lengths, window)
    expected = [right, *torch.autograd.grad((right * direction.float()).sum(), theirs)]
    return max(relative(a, b) for a, b in zip(found, expected, strict=True))


def written_out(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], window: int | None
) -> Tensor:
    """Causal attention of each sequence [1, T, H, D], by its definition."""
    copies = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
    outputs = []
    parts = zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True)
    for q, k, v in parts:
        age = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        is_seen = (age >= 0) & (age < (window or q.shape[2]))
        scores = (q @ k.transpose(2, 3)) / q.shape[3] ** 0.5
        outputs.append(scores.masked_fill(~is_seen, -torch.inf).softmax(-1) @ v)
    return torch.cat(outputs, 2).transpose(1, 2)


def calls_past_varlen(check: Checks) -> float:
    """Return the calls, of one, that did not reach torch's varlen kernel."""
    check.need_cuda()
    if torch.cuda.get_device_capability(check.device) < (8, 0) or torch.version.hip:
        raise Skip("the kernel needs an NVIDIA GPU of compute capability 8.0 or newer")
    from torch.nn.attention import varlen

    with mock.patch.object(varlen, "varlen_attn", wraps=varlen.varlen_attn) as kernel:
        attention_gap(check, torch.bfloat16, 64, 6, 2, None)
    return 1 - kernel.call_count


def training(check: Checks) -> None:
    """Passes and updates of a one-rank FSDP2 trainer against the float32 trainer on the CPU."""
    for head in ("lm", "value"):
        reference = check.engine("cpu", head=head)
        if head == "value":
            set_value_head(reference)
        expected = check.forward(reference)
        steps = [check.update(reference)]
        right = gradients(reference)
        steps.append(check.update(reference))
        train_checks(check, head, expected, right, steps)
    sums = check.engine("cpu", trained=False)
    check("sum of squared probabilities, float32", 1e-4, lambda: sum_gap(check, sums))


def trees(check: Checks) -> None:
    """Prefixes that samples share, computed once: values and gradients against flat float32 rows on
    the CPU and against flat bfloat16 rows, and the seconds of both."""
    batch = check.batch()
    ids, mask = batch.batch["input_ids"], batch.batch["response_mask"]
    alike = ids.shape[1] // 4  # no row is shorter
    first = torch.arange(len(ids)) // 6 * 6
    ids[:, :alike] = ids[first, :alike]
    whole = MicroBatching(size=len(ids))

    def engine(shared: bool, dtype: str, device: str | None = None) -> TrainEngine:
        return check.engine(device, dtype, share_prefixes=shared)

    def found(shared: bool, dtype: str, device: str | None = None) -> tuple[Tensor, dict, float]:
        subject = engine(shared, dtype, device)
        log_probs = subject.forward(batch, whole, 0.9)["log_probs"]
        metrics = subject.update(batch, whole, 1.0, loss)
        return log_probs, gradients(subject), metrics["tokens_computed"]

    right, right_gradients, flat_tokens = found(False, "float32", "cpu")
    saved = alike * (len(ids) - len(set(first.tolist())))
    kept = {(shared, dtype): found(shared, dtype) for shared, dtype in _TREE_RUNS}
    for (shared, dtype), (log_probs, own, tokens) in kept.items():
        if not shared:
            continue
        limit, gradient_limit = (1e-4, 1e-3) if dtype == "float32" else (0.08, 0.15)
        check(f"log-probs, {dtype}", limit, lambda v=log_probs: mean_gap(v, right, mask))
        check(f"gradients, {dtype}", gradient_limit, lambda g=own: gradient_gap(g, right_gradients))
        check(f"tokens too many, {dtype}", 0, lambda t=tokens: abs(flat_tokens - saved - t))

    def beside_flat() -> float:
        tree, flat = (gradient_gap(kept[s, "bfloat16"][1], right_gradients) for s in (True, False))
        return tree / flat

    check("bfloat16, gradients' error over that of flat rows", 1.5, beside_flat)

    def seconds(shared: bool) -> float:
        check.need_cuda()
        subject, taken = engine(shared, "bfloat16"), []
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            subject.update(batch, whole, 1.0, loss)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        return min(taken)

    check("bfloat16, seconds over those of flat rows", 3.0, lambda: seconds(True) / seconds(False))


_TREE_RUNS = ((True, "float32"), (True, "bfloat16"), (False, "bfloat16"))
"""Shared or flat, and dtype."""


def compiled(check: Checks) -> None:
    """Compiled layers against layers that are not. Compiling takes a minute or more."""
    for dtype, limit in (("float32", 1e-3), ("bfloat16", 0.15)):  # the latter with attention inside
        check(f"compiled layers, gradients, {dtype}", limit, lambda d=dtype: compiled_gap(check, d))


def set_value_head(engine: TrainEngine) -> None:
    """A new value head is 0; give it values that show an error of the body."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in engine.model.model.named_parameters():
        if name.startswith(("score", "classifier")):
            local = _whole(parameter.detach())
            local.copy_(torch.randn(local.shape, generator=generator) * 0.1)


def train_checks(
    check: Checks,
    head: str,
    expected: dict[str, Tensor],
    right: dict[str, Tensor],
    steps: list[dict[str, float]],
) -> None:
    """Check one head's passes, gradients and two updates in all dtypes."""
    mask = check.batch().batch["response_mask"]
    pass_limits = {"float32": 1e-4, "bfloat16": 0.08, "float16": 0.01}
    for dtype, limit in pass_limits.items():
        for is_packed in (True, False):
            layout = "packed" if is_packed else "padded"

            def passes(dtype: str = dtype, is_packed: bool = is_packed) -> float:
                engine = check.engine(
                    dtype=dtype, trained=False, head=head, use_remove_padding=is_packed
                )
                if head == "value":
                    set_value_head(engine)
                found = check.forward(engine)
                return max(mean_gap(found[name], expected[name], mask) for name in expected)

            check(f"{head} passes, {dtype}, {layout}", limit, passes)
    limits = {"float32": (1e-3, 3e-4), "bfloat16": (0.15, 0.1)}
    for dtype, (gradient_limit, step_limit) in limits.items():

        def trained(dtype: str = dtype) -> TrainEngine:
            engine = check.engine(dtype=dtype, head=head)
            if head == "value":
                set_value_head(engine)
            return engine

        def gradient(trained: Callable[[], TrainEngine] = trained) -> float:
            engine = trained()
            check.update(engine)
            return gradient_gap(gradients(engine), right)

        def step(trained: Callable[[], TrainEngine] = trained) -> float:
            engine = trained()
            found = [check.update(engine) for _ in steps]
            return max(
                abs(one[key] - other[key]) / max(abs(other[key]), 0.1)
                for one, other in zip(found, steps, strict=True)
                for key in ("loss", "grad_norm")
            )

        check(f"{head} gradients, {dtype}", gradient_limit, gradient)
        check(f"{head} loss and gradient norm of two updates, {dtype}", step_limit, step)


def sum_gap(check: Checks, reference: TrainEngine) -> float:
    key, options = "sum_pi_squared", {"with_sum_pi_squared": True}
    found, expected = (
        engine.forward(check.batch(), check.micro, 0.9, **options)[key]
        for engine in (check.engine(trained=False), reference)
    )
    return relative(found, expected)


def compiled_gap(check: Checks, dtype: str) -> float:
    """Return the gradient gap of compiled layers to layers in float32 that are not."""
    if not check.is_cuda and os.environ.get("VERLITE_SMOKE_COMPILE") != "1":
        raise Skip("takes minutes on a CPU; set VERLITE_SMOKE_COMPILE=1")
    return update_gap(check, {"use_torch_compile": True}, dtype=dtype, share_prefixes=False)


def update_gap(check: Checks, fsdp: dict[str, Any] | None = None, **model: Any) -> float:
    """Return the gap of the first gradients to those of a plain trainer on the same device."""
    found = []
    for options in ({}, {"fsdp": fsdp, **model}):
        engine = check.engine(**options)
        check.update(engine)
        found.append(gradients(engine))
    return gradient_gap(found[1], found[0])


def memory(check: Checks) -> None:
    """Checkpointing, activation offload, and offload of parameters and optimizer."""
    # First, because it must come before the process uses the GPU.
    check("training roles' segments that do not grow", 0, lambda: fixed_segments(check))
    check(
        "gradient checkpointing, gradients",
        1e-4,
        lambda: update_gap(check, enable_gradient_checkpointing=True),
    )
    offloaded = {"enable_gradient_checkpointing": True, "enable_activation_offload": True}
    check("activation offload, gradients", 1e-4, lambda: update_gap(check, **offloaded))
    check(
        "activation offload, peak relative to without",
        0.999,
        lambda: peak_of(check, offloaded) / peak_of(check, {"enable_gradient_checkpointing": True}),
    )
    engine = check.engine(fsdp={"param_offload": True, "optimizer_offload": True})
    check.update(engine)
    before = state(engine)

    def back() -> float:
        engine.offload()
        engine.onload(optimizer=True)
        return differing(state(engine), before)

    check("offload and onload, differing elements", 0, back)
    check("offload, share of host memory that is not pinned", 0, lambda: not_pinned(check, engine))
    check("offload, MiB left on the device", 1, lambda: left_after_offload(check, engine))

    def forward_offloaded() -> float:
        expected = check.forward(engine)["log_probs"]
        engine.offload()
        engine.onload()
        return relative(check.forward(engine)["log_probs"], expected)

    check("log-probs after offload and onload", 1e-6, forward_offloaded)

    def update_offloaded() -> float:
        plain = check.engine()
        check.update(plain)
        engine.offload()
        engine.onload(optimizer=True)
        found, expected = check.update(engine), check.update(plain)
        return max(abs(found[key] / expected[key] - 1) for key in ("loss", "grad_norm"))

    check("update after offload and onload", 1e-4, update_offloaded)


def fixed_segments(check: Checks) -> float:
    """Return 1 if torch's allocator does not use the expandable segments that training roles ask
    for, unless the user has configured it."""
    check.need_cuda()
    from verlite.workers.training import use_expandable_segments

    if any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        raise Skip("the allocator is configured by the environment")
    use_expandable_segments()
    torch.zeros(1, device=check.device)
    return 1 - torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]


def peak_of(check: Checks, model: dict[str, Any]) -> float:
    """Return the peak memory of an update, above what the engine holds, in bytes."""
    check.need_cuda()
    engine = check.engine(dtype="bfloat16", **model)
    check.update(engine)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    check.update(engine)
    return torch.cuda.max_memory_allocated() - held


def not_pinned(check: Checks, engine: TrainEngine) -> float:
    """Return the share of offloaded bytes in pageable memory, whose copies are slow."""
    check.need_cuda()
    engine.offload()
    tensors = [_whole(p.detach()) for p in engine.parameters]
    for parameter in engine.parameters:
        moments = engine.optimizer.state[parameter] if engine.optimizer else {}
        tensors += [_whole(value) for value in moments.values() if value.numel() > 1]
    pageable = sum(tensor.nbytes for tensor in tensors if not tensor.is_pinned())
    engine.onload(optimizer=True)
    return pageable / sum(tensor.nbytes for tensor in tensors)


def left_after_offload(check: Checks, engine: TrainEngine) -> float:
    """Return the memory of the engine on the device after offload: buffers only."""
    check.need_cuda()
    held = allocated_mib(check.device)
    engine.offload()
    freed = held - allocated_mib(check.device)
    engine.onload(optimizer=True)
    total = sum(parameter.numel() for parameter in engine.parameters) * 12 / 2**20
    return total - freed  # float32 weights and two moments


def planned(check: Checks) -> None:
    """The peak memory of passes, against what `verlite plan` predicts."""
    from verlite.sizing.dry_engine import DryEngineSpec
    from verlite.sizing.measure import Passes, PassRows, measure

    batch = check.batch()
    lengths = tuple(batch.batch["attention_mask"].sum(1).tolist())
    rows = PassRows(lengths, batch.batch["response_mask"].shape[1])
    model = ModelSpec(path=check.model())
    spec = DryEngineSpec(model, FSDPSpec(), OptimSpec(), "lm", 1, 1, check.device.type, "bfloat16")
    predicted = measure(spec, Passes(rows, rows, forward_entropy=True))
    whole = MicroBatching(size=len(lengths))

    def excess(call: Callable[[TrainEngine], object], expected: int) -> float:
        check.need_cuda()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        engine = check.engine(dtype="bfloat16", enable_gradient_checkpointing=True)
        call(engine)
        torch.cuda.reset_peak_memory_stats()
        call(engine)
        return (torch.cuda.max_memory_allocated() - before) / expected - 1

    # The plan leaves out the workspaces of libraries.
    with one_rank(check.device.type):
        check(
            "update, share of the peak that the plan misses",
            0.15,
            lambda: excess(lambda engine: engine.update(batch, whole, 1.0, loss), predicted.update),
        )
        check(
            "log-probs, share of the peak that the plan misses",
            0.15,
            lambda: excess(
                lambda engine: engine.forward(batch, whole, 1.0, with_entropy=True),
                predicted.forward,
            ),
        )


def checkpoint(check: Checks) -> None:
    """Saving and loading, export, and fingerprints of the trainer."""
    engine = check.engine()
    check.update(engine)
    engine.step_schedule()
    folder = check.folder / "checkpoint"

    def loaded() -> float:
        engine.save(folder)
        other = check.engine()
        other.load(folder)
        return differing(state(other), state(engine)) + abs(
            other.schedule_step - engine.schedule_step
        )

    check("save and load, differing elements", 0, loaded)

    def continued() -> float:
        other = check.engine()
        other.load(folder)
        found, expected = check.update(other), check.update(engine)
        return max(abs(found[key] / expected[key] - 1) for key in ("loss", "grad_norm"))

    check("update after load", 1e-5, continued)
    for name, dtype in DTYPES.items():
        check(
            f"fingerprint of shards and of the export, {name}",
            0,
            lambda dtype=dtype: engine.fingerprint(dtype) != fingerprint(engine.export(dtype)),
        )

    def exported() -> float:
        engine.save_pretrained(check.folder / "exported")
        path = str(check.folder / "exported")
        again = check.engine(trained=False, path=path)
        found, expected = check.forward(again), check.forward(engine)
        return relative(found["log_probs"], expected["log_probs"])

    check("export to a Hugging Face folder, log-probs", 1e-5, exported)


def adapters(check: Checks) -> None:
    """LoRA: gradients, the base model as reference, and the merged export."""
    if not importlib.util.find_spec("peft"):
        raise Skip("peft is not installed")
    options = {"lora_rank": 8, "lora_alpha": 16}
    reference = check.engine("cpu", **options)
    expected = [check.update(reference)]
    right = gradients(reference)
    expected.append(check.update(reference))  # B starts at 0, so that A has a gradient only now
    trained: list[TrainEngine] = []

    def gradient(dtype: str) -> float:
        engine = check.engine(dtype=dtype, **options)
        check.update(engine)
        return gradient_gap(gradients(engine), right)

    check("LoRA gradients, float32", 1e-3, lambda: gradient("float32"))
    check("LoRA gradients, bfloat16", 0.15, lambda: gradient("bfloat16"))

    def step() -> float:
        trained.append(check.engine(**options))
        found = [check.update(trained[0]) for _ in expected]
        return max(
            abs(one["grad_norm"] / other["grad_norm"] - 1)
            for one, other in zip(found, expected, strict=True)
        )

    check("LoRA gradient norm of two updates, float32", 1e-3, step)

    def base() -> float:
        plain = check.forward(check.engine(trained=False))["log_probs"]
        with trained[0].without_adapters():
            return relative(check.forward(trained[0])["log_probs"], plain)

    check("LoRA, log-probs without adapters", 1e-5, base)

    def merged() -> float:
        trained[0].save_pretrained(check.folder / "merged")
        plain = check.engine(trained=False, path=str(check.folder / "merged"))
        found, expected = check.forward(plain), check.forward(trained[0])
        return relative(found["log_probs"], expected["log_probs"])

    check("LoRA, log-probs of the merged export", 1e-4, merged)


def engines(check: Checks, name: str) -> None:
    """A generation engine: sync, gap to the trainer, sleep and wake, memory."""
    if name == "vllm" and not importlib.util.find_spec("vllm"):
        raise Skip("vllm is not installed")
    dtypes = ("float32", "bfloat16") if name == "hf" else ("bfloat16",)
    if not check.is_cuda:
        dtypes = ("float32",) if name == "vllm" else dtypes
    for dtype in dtypes:
        engine_checks(check, name, dtype)


def engine_checks(check: Checks, name: str, dtype: str) -> None:
    """Check one engine in one dtype."""
    trainer = check.engine(dtype=dtype)
    device_before = used_mib(check.device) if check.is_cuda else 0.0
    tensors_before = allocated_mib(check.device) if check.is_cuda else 0.0
    settings = {"dtype": dtype, "enforce_eager": not check.is_cuda, "kv_cache_gb": 0.1}
    rollout = GenerationSpec(gpu_memory_utilization=0.4, max_num_seqs=64, **settings)
    with _warnings() as warnings:
        built = build_engine(name, ModelSpec(path=check.model()), rollout, 128, check.device, 0)
    version = iter(range(1000))

    def sync() -> None:
        expected = trainer.fingerprint(DTYPES[dtype])
        built.wake("weights")
        built.load_weights(trainer.export(DTYPES[dtype]), next(version), expected)
        built.wake("kv_cache")

    first: list[list[Trajectory]] = []
    gap_limit = {"float32": 1e-4, "bfloat16": 0.1}[dtype]

    def synced_gap() -> float:
        sync()
        first.append(samples(built, check))
        return rollout_gap(trainer, first[-1], check)

    def slept() -> float:
        built.sleep()
        sync()
        again = samples(built, check)
        pairs = zip(again, first[-1], strict=True)
        return sum(one.response_ids != other.response_ids for one, other in pairs)

    def slept_gap() -> float:
        built.sleep()
        sync()
        again = samples(built, check)
        return max(
            abs(a - b)
            for one, other in zip(again, first[-1], strict=True)
            for a, b in zip(one.log_probs, other.log_probs, strict=True)
        )

    def new_weights() -> float:
        for _ in range(3):
            check.update(trainer)
        sync()
        return rollout_gap(trainer, samples(built, check), check)

    def refused() -> float:
        """Return 1 if the engine accepts weights of which one matrix is wrong by 1%."""
        weights = list(trainer.export(DTYPES[dtype]))
        index = next(i for i, (key, _) in enumerate(weights) if "o_proj" in key)
        weights[index] = (weights[index][0], weights[index][1] * 1.01)
        before = built.version
        try:
            built.load_weights(weights, before + 1, trainer.fingerprint(DTYPES[dtype]))
        except WeightSyncError:
            return float(built.version != before)
        return 1.0

    def asleep_tensors() -> float:
        check.need_cuda()
        built.sleep()
        left = allocated_mib(check.device) - tensors_before
        sync()
        return left

    def asleep_device() -> float:
        check.need_cuda()
        built.sleep()
        asleep = used_mib(check.device) - device_before
        sync()
        return asleep

    def grown() -> float:
        check.need_cuda()
        sync()
        before = used_mib(check.device)
        for _ in range(3):
            built.sleep()
            sync()
            samples(built, check)
        return used_mib(check.device) - before

    def warned() -> float:
        if warnings:
            raise AssertionError(warnings[0])
        return 0

    try:
        check(f"{name} {dtype}, warnings at the start", 0, warned)
        check(f"{name} {dtype}, gap to the trainer after a sync", gap_limit, synced_gap)
        check(f"{name} {dtype}, samples that differ after sleep and sync", 0, slept)
        check(f"{name} {dtype}, log-prob gap after sleep and sync", 1e-4, slept_gap)
        check(f"{name} {dtype}, gap to the trainer after updates", gap_limit, new_weights)
        check(f"{name} {dtype}, wrong weights accepted", 0, refused)
        check(f"{name} {dtype}, gap after the repair", gap_limit, new_weights)
        check(f"{name} {dtype}, MiB of tensors while asleep", 1, asleep_tensors)
        # Kernels that the engine has loaded; of vLLM also CUDA graphs and its process's context.
        held = 3072 if name == "vllm" else 512
        check(f"{name} {dtype}, MiB of the device held while asleep", held, asleep_device)
        check(f"{name} {dtype}, MiB grown over three syncs", 64, grown)
    finally:
        built.close()


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect what verlite warns of, such as an engine that falls back to a slow path."""
    found: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, logger = Collect(logging.WARNING), logging.getLogger("verlite")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def samples(engine: Any, check: Checks) -> list[Trajectory]:
    """Sample with fixed seeds."""
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(3, 128, (6, 9), generator=generator).tolist()
    requests = [
        Request(prompt[: 4 + i], Sampling(max_tokens=24, seed=100 + i, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]
    return asyncio.run(run_all(engine, requests))


def rollout_gap(trainer: TrainEngine, found: list[Trajectory], check: Checks) -> float:
    """Return the `mean_gap` of the engine's log-probs to the trainer's."""
    width = max(len(one.prompt_ids) for one in found)
    length = max(len(one.response_ids) for one in found)
    shape = (len(found), width + length)
    ids, attention_mask = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    log_probs = torch.zeros(len(found), length)
    for row, one in enumerate(found):
        columns = slice(width - len(one.prompt_ids), width + len(one.response_ids))
        ids[row, columns] = torch.tensor([*one.prompt_ids, *one.response_ids])
        attention_mask[row, columns] = 1
        log_probs[row, : len(one.log_probs)] = torch.tensor(one.log_probs)
    batch = DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": attention_mask[:, width:],
        }
    )
    expected = trainer.forward(batch, check.micro)["log_probs"]
    return mean_gap(log_probs, expected, attention_mask[:, width:])


def fingerprints(check: Checks) -> None:
    """Fingerprints on the device and on the CPU, of every dtype and cast."""
    sources = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    others = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    small = (torch.float8_e4m3fn, torch.float8_e5m2)
    generator = torch.Generator().manual_seed(4)
    size = {"small": (1 << 24) + 12_345, "tiny": (1 << 16) + 123}[check.shape]  # several chunks
    # All magnitudes that float16 distinguishes, signed zeros and subnormal numbers among them.
    numbers = (
        torch.randn(size, generator=generator)
        * torch.randint(-30, 15, (size,), generator=generator).float().exp2()
    )
    numbers[:100] = 0.0
    numbers[100:200] = -0.0
    numbers[200:300] = 1e-41
    for source in sources:
        for target in sources[1:]:
            check(
                f"{_name(source)} as {_name(target)}",
                0,
                partial(fingerprint_differs, numbers.to(source), target, check.device),
            )
    for dtype in small:
        tensor = numbers.clamp(-400, 400).to(dtype)  # neither dtype overflows
        check(_name(dtype), 0, partial(fingerprint_differs, tensor, None, check.device))
    integers = torch.randint(-(2**40), 2**40, (size,), generator=generator)
    for dtype in others:
        check(_name(dtype), 0, partial(fingerprint_differs, integers.to(dtype), None, check.device))


def fingerprint_differs(tensor: Tensor, dtype: torch.dtype | None, device: torch.device) -> float:
    """Return 1 if the fingerprints differ, also of a transposed matrix."""
    matrix = tensor[: tensor.numel() // 64 * 64].view(-1, 64).t()
    return float(
        any(
            tensor_fingerprint(x.to(device), dtype) != tensor_fingerprint(x, dtype)
            for x in (tensor, matrix)
        )
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def ipc(check: Checks) -> None:
    """Tensors handed to another process on the same device, without a copy."""
    context = multiprocessing.get_context("spawn")
    import torch.multiprocessing  # noqa: F401  registers how tensors are sent

    # put of a SimpleQueue raises what sharing a tensor raises; a Queue's thread would print it.
    sent, answers = context.SimpleQueue(), context.Queue()
    process = context.Process(target=serve_ipc, args=(sent, answers), daemon=True)
    process.start()
    generator = torch.Generator().manual_seed(5)

    def answer() -> Any:
        """Return what the other process answers; raise what it could not do, or that it hangs,
        before this part is killed."""
        until = time.time() + check.results.left() / 2
        while True:
            try:
                found, reason = answers.get(timeout=1)
            except queue.Empty:
                if not process.is_alive():
                    reason = f"ended with exit code {process.exitcode}"
                elif time.time() > until:
                    reason = "does not answer"
                else:
                    continue
            if reason:
                raise RuntimeError(f"the process that reads on the same device: {reason}")
            return found

    def trial() -> float:
        answer()  # it has started
        publisher = Publisher(check.device, TRIAL_S)
        sent.put({"trial": publisher.address})
        reason = publish_trial(publisher)
        answer()
        if reason:
            raise RuntimeError(f"the process that publishes: {reason}")
        return 0

    try:
        if not check("trial before the first sync, failures", 0, trial):
            return  # a run takes weight_transport=shared_memory then
        for name, dtype in DTYPES.items():
            tensor = torch.randn(1000, 257, generator=generator).to(dtype).to(check.device)

            def differs(tensor: Tensor = tensor) -> float:
                sent.put(tensor)
                expected = tensor_fingerprint(tensor)
                return float(answer() != expected)

            check(f"{name}, fingerprint in the other process differs", 0, differs)

        def written() -> float:
            tensor = torch.zeros(4096, device=check.device)
            sent.put((tensor, 7.0))
            answer()
            return float((tensor != 7).sum())

        check("elements not seen that the other process wrote", 0, written)

        held = used_mib(check.device) if check.is_cuda else 0.0
        check("transport ipc, weights that differ", 0, lambda: streamed(check, sent, answer))

        def left() -> float:
            check.need_cuda()
            return used_mib(check.device) - held

        def expandable() -> float:
            check.need_cuda()
            configure = torch._C._accelerator_setAllocatorSettings
            torch.cuda.empty_cache()
            configure("expandable_segments:True")
            try:
                return streamed(check, sent, answer)
            finally:
                configure("expandable_segments:False")

        name = "transport ipc with expandable segments, weights that differ"
        check(name, 0, expandable)
        check("transport ipc, MiB left on the device", 2, left)
    finally:
        sent.put(None)
        process.join(10)
        if process.is_alive():
            process.kill()


def streamed(check: Checks, sent: Any, answer: Callable[[], Any]) -> float:
    """Return the weights that do not arrive as they were published, in several buckets."""
    generator = torch.Generator().manual_seed(6)
    named = [
        (f"{name} {i}", torch.randn(300 + i, 257, generator=generator).to(dtype).to(check.device))
        for name, dtype in DTYPES.items()
        for i in range(9)
    ]
    publisher = Publisher(check.device, TRIAL_S)
    try:
        sent.put({"address": publisher.address})
        publish(named, [publisher], bucket_bytes=1 << 20)
    finally:
        publisher.close()
        found = answer()  # says why, if the other process has closed the stream
    expected = {name: tensor_fingerprint(tensor) for name, tensor in named}
    return len(found.items() ^ expected.items())


def serve_ipc(sent: Any, answers: Any) -> None:
    """Answer each tensor with its fingerprint; fill it first if a number comes with it. Answer an
    address with the fingerprints of what is published there. An answer is a pair: what was found,
    and why nothing was."""
    answers.put((None, ""))  # started
    while True:
        try:
            if (message := sent.get()) is None:  # opens the sender's memory
                return
            if isinstance(message, dict):
                (what, address), found = message.popitem(), None
                stream, reason = BucketStream((address,), timeout_s=TRIAL_S), ""
                if what == "trial":
                    reason = read_trial(stream)
                else:
                    found = {name: tensor_fingerprint(tensor) for name, tensor in stream}
                answers.put((found, reason))
                continue
            if isinstance(message, tuple):
                message[0].fill_(message[1])
                message = message[0]
            found = tensor_fingerprint(message)
            if message.is_cuda:
                torch.cuda.synchronize()
            del message  # releases the sender's memory
            answers.put((found, ""))
        except Exception as error:
            answers.put((None, error_line(error)))


GROUPS: dict[str, Callable[[Checks], None]] = {
    "attention": attention,
    "ipc": ipc,
    "training": training,
    "trees": trees,
    "memory": memory,
    "hf": partial(engines, name="hf"),
    "fingerprints": fingerprints,
    "checkpoint": checkpoint,
    "adapters": adapters,
    "plan": planned,
    "compiled": compiled,
    "vllm": partial(engines, name="vllm"),
}


def run_group(results: Results, name: str, device: str, shape: str) -> None:
    """Run one group in this process."""
    torch.backends.cuda.matmul.allow_tf32 = False
    # The plan runs engines in process groups of its own.
    group = contextlib.nullcontext() if name == "plan" else one_rank(device)
    with tempfile.TemporaryDirectory() as folder, group:
        check = Checks(results, torch.device(device), shape, Path(folder))
        try:
            GROUPS[name](check)
        except Skip as reason:
            results.write("all", {"status": "skipped", "reason": str(reason), "limit": 0.0})
        except Exception as error:  # what a group sets up before its checks
            reason = f"{type(error).__name__}: {error}"
            results.write("all", {"status": "failed", "reason": reason, "limit": 0.0})


@contextlib.contextmanager
def one_rank(device: str) -> Iterator[None]:
    """A process group of one rank, unless there is one already."""
    if dist.is_initialized():
        yield
        return
    backends = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():  # vLLM destroys it when it ends
            dist.destroy_process_group()
