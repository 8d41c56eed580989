"""LoRA (Hu et al. 2021, arXiv:2106.09685) through peft: frozen weights, and beside them small ones that are trained.

A linear layer W [out, in] gets A [r, in] and B [out, r] and computes W x + s B A x, s = lora_alpha / r. A starts random and B at 0, so
that training starts from the model itself; without them the model is again what it was, which makes it its own reference.

peft puts them into the model's modules: `q_proj.weight` becomes `q_proj.base_layer.weight`, with `q_proj.lora_A.default.weight` and
`q_proj.lora_B.default.weight` beside it. Nobody outside of the engine sees these names: weights leave it merged, under the model's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from transformers import PreTrainedModel

from verlite.config.plan import uses_lora
from verlite.config.schema import ModelConfig
from verlite.engine.folder import ModelError
from verlite.engine.model import VALUE_HEADS

FOLDER = "lora_adapter"
"""Of a Hugging Face folder: the adapter in peft's own format."""

_NAME = "default"
_BASE, _ADAPTER = ".base_layer.", f".{_NAME}."
_PREFIX = "base_model.model."  # in peft's files, before the names of the model

# What an adapter from elsewhere may have beside A and B. Merging without it would be silently wrong.
_REFUSED = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "use_qalora",
)


def add(model: PreTrainedModel, config: ModelConfig, read_weights: bool = True) -> None:
    """Freeze the model's weights and put float32 adapters beside those that `config` names; nothing where it asks for none.

    The head of a value model stays trainable. `read_weights`: take A and B from lora_adapter_path, where that is set.
    Raises ModelError for names that the model does not have, for layers that are not linear, for the output head, and for an
    adapter that is another model's or more than A and B.
    """
    if not uses_lora(config):
        return
    from peft import (
        LoraConfig,
        inject_adapter_in_model,
    )  # a second to import, and of use with LoRA alone
    from peft.tuners.lora import Linear, LoraLayer

    head = any(hasattr(model, name) for name in VALUE_HEADS)
    adapter = (
        _read_config(config)
        if config.lora_adapter_path
        else LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            target_modules=config.target_modules,
            exclude_modules=config.exclude_modules,
        )
    )
    adapter.task_type = (
        "SEQ_CLS" if head else "CAUSAL_LM"
    )  # how peft knows which layer all-linear leaves out: the head
    adapter.inference_mode, adapter.lora_dropout = (
        False,
        0.0,
    )  # dropout: engine.model says why there is none
    try:
        inject_adapter_in_model(adapter, model, _NAME)
    except ValueError as error:
        raise ModelError(
            f"model.target_modules={config.target_modules} cannot be adapted: {error}"
        ) from error
    heads = (model.get_output_embeddings(), *(getattr(model, name, None) for name in VALUE_HEADS))
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and (not isinstance(module, Linear) or module in heads):
            why = (
                "is the output head"
                if module in heads
                else f"is no linear layer but {type(module.get_base_layer()).__name__}"
            )
            raise ModelError(
                f"model.target_modules={config.target_modules}: {name} {why}; leave it out with model.exclude_modules"
            )
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()
    if config.lora_adapter_path and read_weights:
        _read_weights(model, Path(config.lora_adapter_path))


def is_adapter(name: str) -> bool:
    """Whether a parameter is A or B."""
    return _ADAPTER in name


def plain(name: str) -> str:
    """A parameter's name in a model without adapters."""
    return name.replace(_BASE, ".")


def layers(model: nn.Module) -> dict[str, Any]:
    """The adapted layers, each a peft.tuners.lora.Linear, by the name of their frozen weight."""
    return {
        f"{name}{_BASE}weight": module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that training changes: all, or with adapters those and the head of a value model."""
    named = list(model.named_parameters())
    if not any(is_adapter(name) for name, _ in named):
        return named
    return [
        (name, parameter)
        for name, parameter in named
        if is_adapter(name) or name.split(".")[0] in VALUE_HEADS
    ]


def frozen(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The other parameters, which adapters leave as they were."""
    changing = {name for name, _ in trained(model)}
    return [
        (name, parameter) for name, parameter in model.named_parameters() if name not in changing
    ]


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """The model as it was before `add`. Parameters must not be gathered on entry and exit."""
    adapted = layers(model).values()
    try:
        for layer in adapted:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in adapted:
            layer.enable_adapters(True)


def merged(layer: Any, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """W + s B A, sharded as W is, computed on `device` in float32 and cast to `dtype` (None: W's). All ranks must call it.

    Each rank computes the rows that it holds, always in the same way: the checksum of the shards is that of the whole.
    """
    base = layer.base_layer.weight.detach()
    a, b = (
        part[_NAME].weight.detach().to(device=device, dtype=torch.float32)
        for part in (layer.lora_A, layer.lora_B)
    )
    change = (b @ a.redistribute(placements=[Replicate()] * a.device_mesh.ndim)) * layer.scaling[
        _NAME
    ]
    change = (change.t() if layer.fan_in_fan_out else change).redistribute(
        placements=base.placements
    )
    return (base.to(device=device, dtype=torch.float32) + change).to(dtype or base.dtype)


def save(
    folder: Path, model: PreTrainedModel, path: str, device: torch.device, write: bool
) -> None:
    """Write the adapter as peft reads it, above a model that lies at `path`. All ranks must call it; those with `write` write."""
    tensors = {}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            tensors[_PREFIX + name.replace(_ADAPTER, ".")] = (
                parameter.detach().to(device).full_tensor().cpu().contiguous()
            )
    if not write:
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config[_NAME]
    config.base_model_name_or_path, config.inference_mode = path, True
    config.save_pretrained(str(folder))


def _read_config(config: ModelConfig) -> Any:
    from peft import LoraConfig, PeftConfig

    where = f"model.lora_adapter_path={config.lora_adapter_path}"
    try:
        adapter = PeftConfig.from_pretrained(config.lora_adapter_path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{where} is no adapter that peft can read: {error}") from error
    if not isinstance(adapter, LoraConfig):
        raise ModelError(f"{where} is a {type(adapter).__name__}, not LoRA")
    more = [name for name in _REFUSED if getattr(adapter, name, None)] + (
        ["bias"] if adapter.bias != "none" else []
    )
    if more:
        raise ModelError(
            f"{where} has {', '.join(more)}, which is not built in: an adapter here is A and B alone"
        )
    return adapter


def _read_weights(model: nn.Module, folder: Path) -> None:
    try:
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"model.lora_adapter_path={folder} cannot be read: {error}") from error
    mine = {
        _PREFIX + name.replace(_ADAPTER, "."): parameter
        for name, parameter in model.named_parameters()
        if is_adapter(name)
    }
    if wrong := {name for name in tensors.keys() ^ mine.keys()} or {
        n for n, p in mine.items() if p.shape != tensors[n].shape
    }:
        raise ModelError(
            f"model.lora_adapter_path={folder} is another model's adapter: {len(wrong)} weights differ, such as {min(wrong)}"
        )
    for name, parameter in mine.items():
        parameter.data.copy_(tensors[name])
