"""Execution options of a model's layers in training: gradient checkpointing, activation offload,
torch.compile."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from verlite.engine.folder import ModelError


def checkpoint_layers(model: PreTrainedModel, offload: bool) -> None:
    """Recompute each layer in the backward pass.

    Args:
        model: the model to change.
        offload: keep each layer's inputs, the only activations that are stored, in host memory.

    Raises:
        ModelError: transformers cannot do this for the model.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"model.enable_gradient_checkpointing=True: {model.config.model_type} does not support "
            "it in transformers. Set it to False"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if not offload:
        return
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = _checkpoint_offloaded  # type: ignore[assignment]


def _checkpoint_offloaded(layer: Callable[..., Any], *inputs: Any) -> Any:
    # What the layer itself saves goes through the checkpoint's own hooks, so only its inputs are
    # offloaded.
    with save_on_cpu(pin_memory=True):
        return checkpoint(layer, *inputs, use_reentrant=False)


def compile_layer(layer: nn.Module) -> None:
    """Compile a layer for rows of any length.

    Must run before FSDP wraps the layer: hooks and checkpoints stay outside, so one compiled layer
    serves all.
    """
    layer.forward = torch.compile(layer.forward, dynamic=True)
