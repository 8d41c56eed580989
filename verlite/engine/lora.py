"""LoRA (Hu et al. 2021, arXiv:2106.09685) through peft: frozen weights with small trained adapters.

A linear layer W [out, in] gets A [r, in] and B [out, r] and computes W x + s B A x with s =
lora_alpha / r. A starts random and B starts at 0, so training starts from the base model. Without
adapters the model is the base model, which serves as the reference.

peft adds the adapters as modules: `q_proj.weight` becomes `q_proj.base_layer.weight`, beside
`q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`. These names stay inside the
engine: exported weights are merged and have the base model's names, unless the caller asks for the
base model and the adapters separately.
"""

import math
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

from verlite.engine.folder import ModelError
from verlite.engine.model import VALUE_HEADS
from verlite.spec.roles import ModelSpec

FOLDER = "lora_adapter"
"""Subfolder of an exported Hugging Face folder with the adapter in peft's own format."""

_NAME = "default"
_BASE = ".base_layer."
_ADAPTER = f".{_NAME}."
_PREFIX = "base_model.model."  # precedes the model's names in peft's files
_WEIGHTS_FILE = "adapter_model.safetensors"

# Features of peft adapters besides A and B. Merging without them would be silently wrong.
_UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "use_qalora",
)


def add(model: PreTrainedModel, config: ModelSpec) -> None:
    """Add float32 adapters on the meta device to the layers that `config` names. Does nothing
    without LoRA.

    The head of a value model stays trainable.

    Args:
        model: the model to change.
        config: lora_rank, lora_alpha, target_modules, exclude_modules and lora_adapter_path.

    Raises:
        ModelError: target_modules names unknown layers, layers that are not linear, or the output
            head; or the adapter has more than A and B.
    """
    if not config.trains_adapters:
        return
    from peft import LoraConfig, inject_adapter_in_model  # takes a second to import

    if config.lora_adapter_path:
        adapter = _read_config(config.lora_adapter_path)
    else:
        adapter = LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            target_modules=config.target_modules,
            exclude_modules=config.exclude_modules,
        )
    is_value_model = any(hasattr(model, name) for name in VALUE_HEADS)
    # With the task type, peft finds the head that target_modules=all-linear must leave out.
    adapter.task_type = "SEQ_CLS" if is_value_model else "CAUSAL_LM"
    adapter.inference_mode = False
    adapter.lora_dropout = 0.0  # see training_config in engine.model for the reason
    try:
        inject_adapter_in_model(adapter, model, _NAME, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ModelError(
            f"model.target_modules={config.target_modules} cannot be adapted: {error}"
        ) from error
    _check_layers(model, config)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()


def initial_weights(model: PreTrainedModel, config: ModelSpec) -> dict[str, Tensor]:
    """Return the values of A and B by their names in the adapted model, float32 on the CPU: those
    of lora_adapter_path if it is set, otherwise a random A and B = 0.

    Raises:
        ModelError: the adapter belongs to another model.
    """
    if config.lora_adapter_path:
        return _read_weights(model, Path(config.lora_adapter_path))
    values = {}
    for name, layer in layers(model).items():
        adapter = name.removesuffix(f"{_BASE}weight")
        # Drawn like peft draws them, so that a seed gives the adapters that it gives with peft.
        a = nn.Linear(layer.in_features, layer.r[_NAME], bias=False).weight
        b = nn.Linear(layer.r[_NAME], layer.out_features, bias=False).weight
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        values[f"{adapter}.lora_A{_ADAPTER}weight"] = a.detach()
        values[f"{adapter}.lora_B{_ADAPTER}weight"] = torch.zeros_like(b)
    return values


def _check_layers(model: PreTrainedModel, config: ModelSpec) -> None:
    """Raise ModelError if an adapted layer is the output head or is not linear."""
    from peft.tuners.lora import Linear, LoraLayer

    value_heads = [getattr(model, name, None) for name in VALUE_HEADS]
    heads = [model.get_output_embeddings(), *value_heads]
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        if module in heads:
            problem = "is the output head"
        elif not isinstance(module, Linear):
            problem = f"is not a linear layer but {type(module.get_base_layer()).__name__}"
        else:
            continue
        raise ModelError(
            f"model.target_modules={config.target_modules}: {name} {problem}. "
            "Exclude it with model.exclude_modules"
        )


def is_adapter(name: str) -> bool:
    """Return True if the parameter is an A or a B."""
    return _ADAPTER in name


def base_name(name: str) -> str:
    """Return the name of a frozen parameter in a model without adapters."""
    return name.replace(_BASE, ".")


def layers(model: nn.Module) -> dict[str, Any]:
    """Return the adapted layers, each a peft.tuners.lora.Linear, by the name of their frozen
    weight."""
    return {
        f"{name}{_BASE}weight": module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that training changes: all; with adapters, the adapters and the head of
    a value model."""
    named = list(model.named_parameters())
    if not any(is_adapter(name) for name, _ in named):
        return named
    return [
        (name, parameter)
        for name, parameter in named
        if is_adapter(name) or name.split(".")[0] in VALUE_HEADS
    ]


def frozen(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that training does not change."""
    trained_names = {name for name, _ in trained(model)}
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if name not in trained_names
    ]


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Disable all adapters within the context. Parameters must not be gathered on entry and
    exit."""
    adapted = layers(model).values()
    try:
        for layer in adapted:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in adapted:
            layer.enable_adapters(True)


def merged(layer: Any, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """Return W + s B A, sharded like W. All ranks must call it.

    The sum is computed on `device` in float32 and cast to `dtype` (None: W's dtype). Each rank
    computes the rows of its own shard in the same way for every layout, so the fingerprint of the
    shards equals that of the whole.
    """
    base = layer.base_layer.weight.detach()
    a = layer.lora_A[_NAME].weight.detach().to(device=device, dtype=torch.float32)
    b = layer.lora_B[_NAME].weight.detach().to(device=device, dtype=torch.float32)
    whole_a = a.redistribute(placements=[Replicate()] * a.device_mesh.ndim)
    change = (b @ whole_a) * layer.scaling[_NAME]
    if layer.fan_in_fan_out:
        change = change.t()
    change = change.redistribute(placements=base.placements)
    result = base.to(device=device, dtype=torch.float32) + change
    return result.to(dtype or base.dtype)


def scaled(
    model: nn.Module, dtype: torch.dtype | None, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over A and s B of each adapter, sharded like the parameters, under names that end in
    lora_A.weight and lora_B.weight.

    The product is computed on `device` in float32, element by element, and cast to `dtype` (None:
    float32), so the fingerprint of the shards equals that of the whole.
    """
    for name, layer in layers(model).items():
        adapter = name.removesuffix(f"{_BASE}weight")
        a = layer.lora_A[_NAME].weight.detach().to(device=device, dtype=torch.float32)
        b = layer.lora_B[_NAME].weight.detach().to(device=device, dtype=torch.float32)
        yield f"{adapter}.lora_A.weight", a.to(dtype or torch.float32)
        yield f"{adapter}.lora_B.weight", (b * layer.scaling[_NAME]).to(dtype or torch.float32)


def save(
    folder: Path, model: PreTrainedModel, path: str, device: torch.device, write: bool
) -> None:
    """Write the adapter in peft's format. All ranks must call it.

    Args:
        folder: where to write.
        model: the adapted model.
        path: the base model's path, which is recorded in the adapter's config.
        device: where tensors are gathered.
        write: whether this rank writes to disk.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            whole = parameter.detach().to(device).full_tensor()  # type: ignore[attr-defined]
            tensors[_file_name(name)] = whole.cpu().contiguous()
    if not write:
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / _WEIGHTS_FILE, metadata={"format": "pt"})
    config = model.peft_config[_NAME]
    config.base_model_name_or_path = path
    config.inference_mode = True
    config.save_pretrained(str(folder))


def _file_name(name: str) -> str:
    """Return the name of an adapter's parameter in peft's files."""
    return _PREFIX + name.replace(_ADAPTER, ".")


def _read_config(path: str) -> Any:
    """Read the config of the adapter at lora_adapter_path. Raises ModelError if it is not plain
    LoRA."""
    from peft import LoraConfig, PeftConfig

    key = f"model.lora_adapter_path={path}"
    try:
        adapter = PeftConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{key} is not an adapter that peft can read: {error}") from error
    if not isinstance(adapter, LoraConfig):
        raise ModelError(f"{key} is a {type(adapter).__name__}, not LoRA")
    unsupported = [name for name in _UNSUPPORTED if getattr(adapter, name, None)]
    if adapter.bias != "none":
        unsupported.append("bias")
    if unsupported:
        raise ModelError(
            f"{key} has {', '.join(unsupported)}, which is not supported: "
            "an adapter may have only A and B"
        )
    return adapter


def _read_weights(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Read A and B from an adapter's folder. Raises ModelError if names or shapes differ from the
    model's."""
    try:
        tensors = load_file(folder / _WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"model.lora_adapter_path={folder} cannot be read: {error}") from error
    expected = {
        _file_name(name): parameter
        for name, parameter in model.named_parameters()
        if is_adapter(name)
    }
    different = tensors.keys() ^ expected.keys()
    if not different:
        different = {n for n, p in expected.items() if p.shape != tensors[n].shape}
    if different:
        raise ModelError(
            f"model.lora_adapter_path={folder} is another model's adapter: "
            f"{len(different)} weights differ, such as {min(different)}"
        )
    return {
        name: tensors[_file_name(name)] for name, _ in model.named_parameters() if is_adapter(name)
    }
