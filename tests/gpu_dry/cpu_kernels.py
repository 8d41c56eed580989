"""Operators on CUDA tensors, computed on the CPU in the simulated GPU's memory.

Allocations, views, streams and copies between devices stay torch's own calls of the CUDA runtime.
"""

import ctypes
import threading
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.gpu_dry import gpu

aten: Any = torch.ops.aten
NATIVE = (
    "empty empty_strided empty_like new_empty new_empty_strided detach alias _unsafe_view "
    "_reshape_alias set_ _local_scalar_dense is_pinned _pin_memory record_stream resize_ lift_fresh"
).split()
"""Names of operators that compute nothing; `item` is a copy to the host."""


class MixedDevices(Exception):
    """A kernel was given a tensor in host memory, or on another GPU."""


class CpuKernels(TorchDispatchMode):
    """Within the context, operators on CUDA tensors have values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it computes with its local tensors
        kwargs = kwargs or {}
        flat, spec = tree_flatten((args, kwargs))
        tensors = [x for x in flat if isinstance(x, Tensor)]
        target = kwargs.get("device")
        goes_to_gpu = target is not None and torch.device(target).type == "cuda"
        if not (goes_to_gpu or any(x.is_cuda for x in tensors)):
            return func(*args, **kwargs)
        if any(isinstance(x, FakeTensor) for x in tensors):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and func._can_decompose():
            with self:  # such as `to`, which autograd has taken apart elsewhere
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if _name(func) in NATIVE or _is_view(func):
            return func(*args, **kwargs)
        if (
            func is aten._to_copy.default
            and torch.device(target or "cuda").type != args[0].device.type
        ):
            return _to_copy(*args, **kwargs)
        if func is aten.copy_.default and args[0].is_cuda != args[1].is_cuda:
            return _copy(*args, **kwargs)
        if func in (aten.copy_.default, aten.clone.default) and _are_bytes(*args[:2]):
            return func(*args, **kwargs)
        return _compute(func, flat, spec, target if goes_to_gpu else None)


def install() -> None:
    """Compute on the CPU in all threads of this process from now on."""
    run = threading.Thread.run

    def run_with_kernels(self: threading.Thread) -> None:
        with CpuKernels():
            run(self)

    threading.Thread.run = run_with_kernels  # type: ignore[method-assign]
    from tests.gpu_dry.nccl import Nccl
    from verlite.algorithms import logprobs

    logprobs._compiled = _fused  # type: ignore[assignment]

    torch.distributed.ProcessGroupNCCL = Nccl  # type: ignore[misc]
    torch.distributed.distributed_c10d.ProcessGroupNCCL = Nccl  # type: ignore[misc]
    for kernel in ("flash", "mem_efficient", "cudnn"):  # not torch's own choice between them
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)
    CpuKernels().__enter__()


def in_host(x: Tensor, written: bool = False) -> Tensor:
    """Return a CPU tensor in a CUDA tensor's memory, for an operator on the current stream."""
    storage = x.untyped_storage()
    if not storage.nbytes() or not x.numel():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    elements = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    gpu.operator(x.device, x.data_ptr(), elements * x.itemsize, written)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    raw = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=x.dtype).set_(raw, x.storage_offset(), x.shape, x.stride())


def _compute(func: Any, flat: list[Any], spec: Any, target: Any) -> Any:
    gpu.note(f"op {_name(func)}")
    tensors = [x for x in flat if isinstance(x, Tensor)]
    devices = {x.device for x in tensors if x.dim() or x.is_cuda}
    if len(devices) > 1:
        shapes = [f"{list(x.shape)} on {x.device}" for x in tensors]
        raise MixedDevices(f"{func} was given {', '.join(shapes)}")
    device = next(iter(devices), torch.device(target or "cuda"))
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    own: dict[int, tuple[Tensor, Tensor]] = {}
    written = _written(func, *tree_unflatten(flat, spec))

    def to_cpu(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_cuda:
            out = in_host(x, id(x) in written)
            own[id(out)] = out, x
            return out
        return torch.device("cpu") if isinstance(x, torch.device) else x

    def to_gpu(x: Any) -> Any:
        if not isinstance(x, Tensor) or id(x) in own:
            return own[id(x)][1] if isinstance(x, Tensor) else x
        for _, theirs in own.values():
            storage = theirs.untyped_storage()
            if x.nbytes and x.untyped_storage().data_ptr() == storage.data_ptr():  # a part of it
                part = torch.empty(0, dtype=x.dtype, device=device)
                return part.set_(storage, x.storage_offset(), x.shape, x.stride())
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        in_host(made, True).copy_(x)
        return made

    args, kwargs = tree_unflatten([to_cpu(x) for x in flat], spec)
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    result = INSTEAD.get(_name(func), func)(*args, **kwargs)
    if getattr(func, "namespace", "") == "_c10d_functional":  # its later wait has another tensor
        result = tree_map(lambda x: torch.ops._c10d_functional.wait_tensor(x), result)
    return tree_map(to_gpu, result)


def _fused(function: Any) -> Any:
    """Stands for torch.compile: memory of the GPU holds results only."""
    return lambda *arguments: _compute(function, *tree_flatten((arguments, {})), None)


def _to_copy(x: Tensor, **options: Any) -> Tensor:
    """A copy to a new tensor on the other side."""
    device, non_blocking = torch.device(options["device"]), bool(options.get("non_blocking"))
    out = torch.empty_like(
        x, dtype=options.get("dtype") or x.dtype, device=device,
        memory_format=options.get("memory_format"),
        pin_memory=non_blocking and device.type == "cpu",
    )  # fmt: skip
    return _copy(out, x, non_blocking)


def _copy(out: Tensor, x: Tensor, non_blocking: bool = False) -> Tensor:
    """A copy between host and GPU. Whatever is not a copy of bytes is a kernel before or after."""
    x = x.expand(out.shape)
    if _are_bytes(out, x):
        return out.copy_(x, non_blocking)
    source = torch.empty(out.shape, dtype=x.dtype, device=x.device)
    (in_host(source, True) if x.is_cuda else source).copy_(in_host(x) if x.is_cuda else x)
    moved = torch.empty(out.shape, dtype=x.dtype, device=out.device).copy_(source, False)
    gpu.note("op copy_")
    (in_host(out, True) if out.is_cuda else out).copy_(in_host(moved) if moved.is_cuda else moved)
    return out


def _are_bytes(*tensors: Tensor) -> bool:
    """Return whether a copy between them is a copy of bytes, which the runtime does."""
    return len({(x.dtype, x.shape) for x in tensors}) == 1 and all(
        x.is_contiguous() for x in tensors
    )


def _written(func: Any, args: Any, kwargs: Any) -> set[int]:
    """Return the ids of the arguments that an operator writes."""
    if not hasattr(func, "_schema"):
        return set()
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    changed = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    return {id(x) for x in tree_flatten([named.get(name) for name in changed])[0]}


def _name(func: Any) -> str:
    return str(func._schema.name.split("::")[1]) if hasattr(func, "_schema") else str(func)


def _is_view(func: Any) -> bool:
    aliases = [x.alias_info for x in func._schema.returns] if hasattr(func, "_schema") else []
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


# Attention over sequences of several lengths, which torch has for GPUs only: [T, H, D].


def _varlen(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, window, *_, **__):  # type: ignore[no-untyped-def]
    out = torch.zeros_like(q)
    for q_part, k_part, rows, keys in _pieces(q, k, cu_q, cu_k):
        p = _weights(q_part, k_part, scale, window)
        out[rows] = (p @ _heads(v[keys], q)).transpose(0, 1).to(q.dtype)
    lse = torch.zeros(q.shape[1], q.shape[0])
    return out, lse, torch.zeros(2, dtype=torch.uint64)


def _varlen_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, rng, scale, window):  # type: ignore[no-untyped-def]
    scale = scale or q.shape[-1] ** -0.5
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    for q_part, k_part, rows, keys in _pieces(q, k, cu_q, cu_k):
        p, g = _weights(q_part, k_part, scale, window), grad[rows].transpose(0, 1).float()
        value = _heads(v[keys], q)
        dp = g @ value.transpose(1, 2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        dq[rows] = (ds @ k_part).transpose(0, 1)
        for d, parts in ((dk, ds.transpose(1, 2) @ q_part), (dv, p.transpose(1, 2) @ g)):
            d[keys] = parts.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _pieces(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor) -> Any:
    queries, keys = cu_q.tolist(), cu_k.tolist()
    for i in range(len(queries) - 1):
        rows, columns = slice(*queries[i : i + 2]), slice(*keys[i : i + 2])
        yield q[rows].transpose(0, 1).float(), _heads(k[columns], q), rows, columns


def _heads(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1).float()


def _weights(q: Tensor, k: Tensor, scale: float | None, window: list[int]) -> Tensor:
    """The queries are the last of the keys' tokens."""
    at = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
    hidden = (at < 0) | ((at > window[0]) if window[0] >= 0 else False)
    scores = q @ k.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1)


def _addmm(total, *factors, out=None, **more):  # type: ignore[no-untyped-def]
    """torch has products that are added to a wider dtype for GPUs only."""
    if out is None:
        return aten.addmm(total, *factors, **more)
    left, right, wide = factors  # a schema's out_dtype is not named
    assert wide == total.dtype == torch.float32 and not more, (factors, more)
    return out.copy_(total + left.float() @ right.float())


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return aten._softmax(x.float() if half_to_float else x, dim, False)


def _softmax_backward(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return aten._softmax_backward_data(grad, out, dim, out.dtype).to(dtype)


INSTEAD = {
    "_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "_varlen_attn": _varlen,
    "_varlen_attn_backward": _varlen_backward,
    "addmm": _addmm,
}
