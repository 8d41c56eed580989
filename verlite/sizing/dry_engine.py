"""TrainEngine on fake tensors: it runs every operator's shapes and no arithmetic.

One process stands for rank 0 of any number of ranks, which has the largest shards. The tensors have
no values, so what depends on values is replaced: counts over ranks, the gradient norm, the checks
of the weights.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
from tensordict import TensorDict
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from transformers import PreTrainedModel

from verlite.algorithms import logprobs
from verlite.engine import attention, loading, lora, sharding
from verlite.engine.fsdp import TrainEngine
from verlite.engine.micro import MicroBatch, ModelInputs
from verlite.engine.model import HeadedModel, load_skeleton
from verlite.spec.roles import FSDPSpec, ModelSpec, OptimSpec

# Live bytes of fake tensors, in segments of a run

Place = tuple[str | int, ...]
"""Where in a run a segment is. Its last element is a layer's number where it belongs to one."""


@dataclass(frozen=True)
class Segment:
    """A part of a run between two marks.

    place: where it is.
    peak: most live bytes within it.
    live: live bytes at its end.
    """

    place: Place
    peak: int
    live: int


def _temporary_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that an operator allocates and frees inside its kernel."""
    if func is torch.ops.aten.logsumexp.default:
        return int(args[0].nbytes)  # exp(x - max)
    return 0


class BytesTracker(TorchDispatchMode):
    """Counts the storage of every fake tensor of `mode` that an operator returns, until it is
    freed."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self.live = 0
        self.peak = 0
        self.segments: list[Segment] = []
        self._sizes: dict[int, int] = {}
        self._is_paused = False

    def mark(self, *place: str | int) -> None:
        """End a segment here; `place` names it."""
        self.segments.append(Segment(place, self.peak, self.live))
        self.peak = self.live

    def take_segments(self) -> list[Segment]:
        """Return the segments since the last call."""
        taken, self.segments = self.segments, []
        return taken

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing within the context."""
        before, self._is_paused = self._is_paused, True
        yield
        self._is_paused = before

    def note(self, value: object) -> None:
        """Count a tensor's storage."""
        if isinstance(value, DTensor):
            value = value._local_tensor
        if not isinstance(value, FakeTensor) or value.fake_device.type == "meta":
            return
        if value.fake_mode is not self.mode:
            return  # DTensor's own, with which it infers shapes of whole tensors
        storage = value.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            self._set(key, storage.nbytes())
            weakref.finalize(storage, self._free, key)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count the new size of a storage."""
        if storage._cdata in self._sizes:
            self._set(storage._cdata, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.live += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first splits it into operators on local tensors
        result = func(*args, **(kwargs or {}))
        if self._is_paused:
            return result
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self.note(value)
        self.peak = max(self.peak, self.live + _temporary_bytes(func, args))
        return result


@contextmanager
def resizes_noted(tracker: BytesTracker) -> Iterator[None]:
    """Tell the tracker when FSDP frees or reallocates a storage. No operator runs then."""
    resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def noted(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        tracker.resized(storage)
        return result

    torch.UntypedStorage.resize_ = noted  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@dataclass(frozen=True)
class DryEngineSpec:
    """What determines the memory of one role's engine.

    model, fsdp, optim: as for TrainEngine.
    head: "lm" or "value".
    ranks: processes of the role.
    sequence_parallel: neighboring ranks that share their rows.
    kind: "cuda" or "cpu"; it selects the attention kernel, and how many logits exist at a time.
    dtype: compute dtype, not auto.
    """

    model: ModelSpec
    fsdp: FSDPSpec
    optim: OptimSpec | None
    head: str
    ranks: int
    sequence_parallel: int
    kind: str
    dtype: str


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that are sharded one by one, in order."""
    classes = model._no_split_modules or ()
    names = {*classes, *(f"FSDP{name}" for name in classes)}  # fully_shard renames classes
    return [module for module in model.modules() if type(module).__name__ in names]


@contextmanager
def fake_ranks(number: int) -> Iterator[None]:
    """Initialize torch.distributed as rank 0 of a group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def kernels_of(kind: str, tracker: BytesTracker) -> Iterator[None]:
    """Choose kernels and chunks as on devices of this kind. What is one kernel on a GPU holds
    nothing but its results."""

    def one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with tracker.paused():
                results = function(*arguments)
            tree_map(tracker.note, results)
            return results

        return call

    with ExitStack() as stack:
        if kind == "cuda":
            chunks = {"cpu": logprobs.CHUNK_ELEMENTS["cuda"]}
            product = one_kernel(logprobs._add_product)
            stack.enter_context(mock.patch.dict(logprobs.CHUNK_ELEMENTS, chunks))
            for module, name, own in (
                (attention, "_fits_varlen_kernel", _fits),
                (logprobs, "_fused", logprobs._whole_chunk),
                (logprobs, "_compiled", one_kernel),
                (logprobs, "_add_product", product),
            ):
                stack.enter_context(mock.patch.object(module, name, own))
        yield


def _fits(query: Tensor, value: Tensor) -> bool:
    """As attention._fits_varlen_kernel for a tensor on an NVIDIA GPU from Ampere on."""
    size = query.shape[-1]
    fits = size == value.shape[-1] <= attention._MAX_HEAD_DIM and size % 8 == 0
    return fits and query.dtype in (torch.bfloat16, torch.float16)


class DryEngine(TrainEngine):
    """TrainEngine of which every tensor is fake; `tracker` counts them."""

    def __init__(self, spec: DryEngineSpec, tracker: BytesTracker, mode: FakeTensorMode):
        self.tracker = tracker
        self.fake = mode
        self._in_backward = False
        self._offloads = spec.kind == "cuda" and spec.model.enable_activation_offload
        self.offloaded = 0
        """Activations of one micro-batch in host memory."""
        fsdp = replace(spec.fsdp, dtype=spec.dtype, use_torch_compile=False)
        super().__init__(
            spec.model,
            fsdp,
            spec.optim,
            head=spec.head,
            device="cpu",
            sequence_parallel=spec.sequence_parallel,
            total_training_steps=1,
        )
        if self.optimizer is not None:
            self._step = self.optimizer.step
            self.optimizer.step = self._step_outside  # type: ignore[method-assign,assignment]

    # Replacements of what needs values, files or other ranks

    def _read(self, head: str, dtype: torch.dtype) -> tuple[PreTrainedModel, loading.Weights]:
        skeleton = load_skeleton(self.model_config, head, dtype)
        lora.add(skeleton, self.model_config)
        return skeleton, loading.Weights({}, {})

    def _fill(self, model: PreTrainedModel, weights: loading.Weights) -> None:
        with self.fake, self.tracker.paused():
            loading.materialize(model, self.device)
            for module in model.modules():  # derived tables, which have values
                for name, buffer in module._buffers.items():
                    if buffer is not None and name in module._non_persistent_buffers_set:
                        module._buffers[name] = self._like(buffer)
        for tensor in [*model.parameters(), *model.buffers()]:
            self.tracker.note(tensor.data)

    def _build_model(self, head: str) -> HeadedModel:
        headed = super()._build_model(head)
        if self._offloads and self.optim_config is not None:
            sharding.checkpoint_layers(headed.model, True, offload=True)
        self._mark_layers(headed.model)
        return headed

    def _self_check(self) -> None:
        pass

    def _require_finite(self, action: str) -> None:
        pass

    def _count(self, mask: Tensor) -> list[int]:
        return [1, 1]

    def _clip(self) -> float:
        return 1.0

    def _step_outside(self) -> None:
        # Within the mode, DTensor infers shapes from whole tensors that would be counted.
        with unset_fake_temporarily():
            self._step()

    def _gather_rows(self, rows: TensorDict) -> tuple[TensorDict, slice]:
        return rows, slice(None)

    def _sum_and_max(self, numbers: list[int], largest: int) -> tuple[list[int], int]:
        return numbers, largest

    def _sum_metrics(self, sums: dict[str, Tensor]) -> dict[str, float]:
        return {}

    def _inputs(
        self, rows: TensorDict, part: MicroBatch | None
    ) -> tuple[ModelInputs, TensorDict | None]:
        self._in_backward = False
        with unset_fake_temporarily():
            inputs, micro_rows = super()._inputs(rows, part)
        assert micro_rows is not None
        items = {name: self._like(values) for name, values in micro_rows.items()}
        return inputs.mapped(self._like), items  # type: ignore[return-value]

    def _like(self, tensor: Any) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    # Marks

    def _mark_layers(self, model: PreTrainedModel) -> None:
        for number, layer in enumerate(decoder_layers(model)):
            layer.register_forward_hook(self._after_layer(number))

    def _after_layer(self, number: int) -> Callable[[nn.Module, object, object], None]:
        def marked(module: nn.Module, inputs: object, output: object) -> None:
            if self._in_backward:
                return  # the layer is computed again
            self.tracker.mark("forward", number)
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda _: self._before_backward(number))

        return marked

    def _offload(self, pin_memory: bool) -> saved_tensors_hooks:
        """Stands for save_on_cpu: a saved tensor leaves the device until it is needed."""

        def pack(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
            self.offloaded += tensor.nbytes
            return tensor.shape, tensor.dtype

        def unpack(saved: tuple[torch.Size, torch.dtype]) -> Tensor:
            return torch.empty(saved[0], dtype=saved[1])

        return saved_tensors_hooks(pack, unpack)

    def _before_backward(self, number: int) -> None:
        name = "backward" if self._in_backward else "head"
        self._in_backward = True
        # What ends here is the backward pass of the layer after this one.
        self.tracker.mark(*(("backward", number + 1) if name == "backward" else ("head",)))

    def _backward(self, *arguments: Any) -> dict[str, Tensor]:
        self.offloaded = 0
        with mock.patch.object(sharding, "save_on_cpu", self._offload):
            result = super()._backward(*arguments)
        self.tracker.mark("backward", 0)
        return result
