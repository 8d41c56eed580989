"""Sharding a model over all ranks with FSDP2, and the execution options of its layers: gradient
checkpointing, activation offload, torch.compile.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from verlite.engine.folder import ModelError
from verlite.engine.model import HeadedModel, value_head
from verlite.spec.roles import FSDPSpec

# Execution options of a model's layers in training: gradient checkpointing, activation offload,
# torch.compile.


_ATTENTION = {
    "torch_attn::_varlen_attn",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
}
_KEPT = {
    "attention": _ATTENTION,
    "products": _ATTENTION | {"aten::mm", "aten::addmm", "aten::_grouped_mm"},
}
"""Operators whose outputs are kept, by the value of enable_gradient_checkpointing. Not bmm: its
outputs are attention's scores of all pairs where no fused kernel runs."""


def checkpoint_layers(model: PreTrainedModel, kept: bool | str, offload: bool) -> None:
    """Recompute each layer in the backward pass.

    Args:
        model: the model to change.
        kept: enable_gradient_checkpointing. True: store only each layer's inputs. A name: also
            the outputs of some of its operators, which are not computed again.
        offload: keep each layer's inputs in host memory.

    Raises:
        ModelError: transformers cannot do this for the model.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"model.enable_gradient_checkpointing={kept}: {model.config.model_type} does not "
            "support it in transformers. Set it to False"
        )
    options: dict[str, Any] = {"use_reentrant": False}
    if isinstance(kept, str):
        policy = partial(_policy, _KEPT[kept])
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    model.gradient_checkpointing_enable(options)
    modules = [x for x in model.modules() if hasattr(x, "_gradient_checkpointing_func")]
    if modules:  # none in a Hub's model that ignores `options`: its checkpoints may be reentrant,
        model.disable_input_require_grads()  # which need the inputs' gradient
    for module in modules if offload else []:
        module._gradient_checkpointing_func = _checkpoint_offloaded  # type: ignore[assignment]


def _policy(kept: set[str], context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    if operator.name() in kept:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _checkpoint_offloaded(layer: Callable[..., Any], *inputs: Any) -> Any:
    # What the layer itself saves goes through the checkpoint's own hooks, so only its inputs are
    # offloaded.
    with save_on_cpu(pin_memory=True):
        return checkpoint(layer, *inputs, use_reentrant=False)


def compile_layer(layer: nn.Module) -> None:
    """Compile a layer for rows of any length. Layers of one kind share its graphs.

    Must run before FSDP wraps the layer: hooks and checkpoints stay outside, so one compiled layer
    serves all. Sizes become symbols when they change, which those of the model never do: with
    dynamic=True they would be symbols in every kernel, the size of a head too.
    """
    # A kind of layer has one graph for each way it is run: with and without gradients, adapters,
    # shared prefixes, in the first and in later layers, forward and recomputed.
    torch._dynamo.config.recompile_limit = _GRAPHS
    layer.forward = torch.compile(layer.forward)


_GRAPHS = 32  # torch runs what exceeds them without compiling


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(key: str, name: str) -> torch.dtype:
    """Return the dtype called `name`, the value of fsdp_config.`key`."""
    if name not in _DTYPES:
        raise ValueError(f"fsdp_config.{key}={name!r} must be one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


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


def compute_dtype(config: FSDPSpec, device: torch.device, is_trained: bool) -> torch.dtype:
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
    config: FSDPSpec,
    dtype: torch.dtype,
) -> None:
    """Shard the model in place, one decoder layer at a time. It takes no memory while the model is
    on the meta device; `loading.fill` gives the shards their values.

    Args:
        headed: the model.
        mesh: of all ranks.
        config: reshard_after_forward and use_torch_compile.
        dtype: dtype of forward and backward passes. Gradients are reduced in float32, and a value
            head computes in float32.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": config.reshard_after_forward,
    }
    hf_model: Any = headed.model
    layer_classes = hf_model._no_split_modules or ()
    outermost: list[str] = []
    for name, module in list(hf_model.named_modules()):
        is_nested = any(name.startswith(f"{layer}.") for layer in outermost)
        if type(module).__name__ in layer_classes and not is_nested:
            outermost.append(name)
            if config.use_torch_compile:
                compile_layer(module)
            fully_shard(module, mp_policy=policy, **options)
    if headed.kind == "value":
        _, head = value_head(hf_model)
        float32 = MixedPrecisionPolicy(torch.float32, torch.float32)
        fully_shard(head, mp_policy=float32, **options)
    # Embeddings and output head are needed first and last, so they stay gathered from forward to
    # backward. They are far larger than a layer: one group of both would double the buffers of
    # gradients that are reduced. Tied ones are a single parameter of the root module.
    options["reshard_after_forward"] = False
    embeddings, head = hf_model.get_input_embeddings(), hf_model.get_output_embeddings()
    if head is None or head.weight is not embeddings.weight:
        for module in (embeddings, head):
            if module is not None:
                fully_shard(module, mp_policy=policy, **options)
        if head is not None:
            register_fsdp_forward_method(head, "token_outputs")
    fully_shard(headed, mp_policy=policy, **options)
