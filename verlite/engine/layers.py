"""How a model's layers run in training: recomputed, with what they start from in host memory, compiled."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel


def checkpoint_layers(model: PreTrainedModel, offload: bool) -> None:
    """Recompute each layer in the backward pass. `offload`: what it starts from, all that is kept of it, waits in host memory."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules() if offload else ():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = _offloaded


def _offloaded(layer: Callable[..., Any], *inputs: Any) -> Any:
    # What the layer itself would save goes through the checkpoint's own hooks, so that only its inputs meet these.
    with save_on_cpu(pin_memory=True):
        return checkpoint(layer, *inputs, use_reentrant=False)


def compile_layer(layer: nn.Module) -> None:
    """torch.compile for rows of any length, before FSDP: hooks and checkpoints stay outside, so that one compiled layer serves all."""
    layer.forward = torch.compile(layer.forward, dynamic=True)
