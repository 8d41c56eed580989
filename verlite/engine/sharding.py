"""Loading a model on rank 0 and sharding it over all ranks with FSDP2."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from verlite.config.schema import FSDPConfig, ModelConfig
from verlite.engine import lora
from verlite.engine.folder import ModelError
from verlite.engine.layers import compile_layer
from verlite.engine.model import HeadedModel, load_model, load_skeleton, value_head

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(key: str, name: str) -> torch.dtype:
    """Return the dtype called `name`, the value of fsdp_config.`key`."""
    if name not in _DTYPES:
        raise ValueError(f"fsdp_config.{key}={name!r} must be one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def load_on_rank_zero(model: ModelConfig, kind: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load the whole model on rank 0, the only rank that reads the checkpoint. All ranks must call
    it.

    The other ranks build the same modules on the meta device; `shard` sends them the weights.

    Args:
        model: the model to load, with LoRA adapters if it asks for them.
        kind: "lm" or "value"; see `load_model`.
        dtype: dtype of the parameters.

    Raises:
        ModelError: on all ranks, if rank 0 cannot load the model, or a rank's model differs from
            rank 0's.
    """
    rank = dist.get_rank()
    error: str | None = None
    layout: Any = None
    conversions: Any = None
    if rank == 0:
        try:
            hf_model = load_model(model, kind, dtype)
            lora.add(hf_model, model)
            layout = _layout(hf_model)
            conversions = getattr(hf_model, "_weight_conversions", None)
        except ModelError as caught:
            error = str(caught)
    if dist.get_world_size() > 1:
        shared = [error, layout, conversions]
        dist.broadcast_object_list(shared)
        error, layout, conversions = shared
    if error is not None:
        raise ModelError(error)
    if rank > 0:
        hf_model = load_skeleton(model, kind)
        lora.add(hf_model, model, read_weights=False)
        hf_model._weight_conversions = conversions
        for name, tensor in [*hf_model.named_parameters(), *hf_model.named_buffers()]:
            _, tensor_dtype = layout[name]
            tensor.data = tensor.data.to(tensor_dtype)
        if _layout(hf_model) != layout:
            raise ModelError(
                f"model.path={model.path} has another model on rank {rank} than on rank 0"
            )
    return hf_model


def _layout(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors}


def build_mesh(device: torch.device, fsdp_size: int) -> DeviceMesh:
    """Build the mesh of all ranks: one dimension of shards, or replicas x shards if fsdp_size is
    smaller than the group.

    Raises:
        ValueError: fsdp_size does not divide the number of ranks.
    """
    ranks = dist.get_world_size()
    if fsdp_size in (-1, ranks):
        return init_device_mesh(device.type, (ranks,))
    if fsdp_size < 1 or ranks % fsdp_size:
        raise ValueError(
            f"fsdp_config.fsdp_size={fsdp_size} must divide the {ranks} devices of this role, "
            "or be -1 for all"
        )
    return init_device_mesh(
        device.type, (ranks // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "shard")
    )


def compute_dtype(config: FSDPConfig, device: torch.device, is_trained: bool) -> torch.dtype:
    """Return the dtype of forward and backward passes. "auto" means bfloat16 on a GPU and float32
    on a CPU.

    Raises:
        ValueError: the name is unknown, or the model is trained in float16.
    """
    name = config.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    dtype = parse_dtype("dtype", name)
    if dtype == torch.float16 and is_trained:
        raise ValueError(
            "fsdp_config.dtype=float16 needs loss scaling, which is not supported. Use bfloat16"
        )
    return dtype


def shard(
    headed: HeadedModel,
    mesh: DeviceMesh,
    config: FSDPConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Distribute rank 0's weights and shard the model in place, one decoder layer at a time. All
    ranks must call it.

    Args:
        headed: the model; on ranks other than 0 its tensors are on the meta device.
        mesh: of all ranks.
        config: reshard_after_forward and use_torch_compile.
        dtype: dtype of forward and backward passes. Gradients are reduced in float32, and a value
            head computes in float32.
        device: this rank's device.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": config.reshard_after_forward,
    }
    hf_model = headed.model
    layer_classes = hf_model._no_split_modules or ()
    for module in list(hf_model.modules()):
        if type(module).__name__ in layer_classes:
            _broadcast(module.parameters(), device)
            if config.use_torch_compile:
                compile_layer(module)
            fully_shard(module, mp_policy=policy, **options)
    _broadcast((p for p in hf_model.parameters() if not isinstance(p, DTensor)), device)
    _broadcast(hf_model.buffers(), device)
    if headed.kind == "value":
        _, head = value_head(hf_model)
        float32 = MixedPrecisionPolicy(torch.float32, torch.float32)
        fully_shard(head, mp_policy=float32, **options)
    # The root module owns the embeddings and the output head. They are needed first and last, so
    # they stay gathered from forward to backward.
    options["reshard_after_forward"] = False
    fully_shard(headed, mp_policy=policy, **options)


def _broadcast(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Replace whole tensors by rank 0's values on each rank's device. Tied tensors stay tied,
    because their identity is kept."""
    if dist.get_world_size() == 1:
        return
    for tensor in tensors:
        if dist.get_rank() == 0:
            whole = tensor.detach().to(device)
        else:
            whole = torch.empty_like(tensor, device=device)
        dist.broadcast(whole, 0)
        # A new tensor over the storage of `whole`, which the communication backend may still refer
        # to.
        replacement: Tensor
        if isinstance(tensor, nn.Parameter):
            replacement = nn.Parameter(whole, tensor.requires_grad)
        else:
            replacement = whole.detach()
        torch.utils.swap_tensors(tensor, replacement)
