"""Loading a model whose shards are spread over all ranks.

Rank 0 alone reads the checkpoint. Every rank builds the model on the meta device, which takes no
memory, and shards it there (sharding.py). Then the weights are sent one at a time: every rank
allocates its shard, receives the whole weight in the checkpoint's dtype, and keeps its part.

Memory, for N parameters on R ranks with b bytes per parameter (fsdp_config.model_dtype): each rank
has N b / R bytes for its shards plus one weight at a time, on its own device. A safetensors
checkpoint is not copied to host memory: rank 0 maps its files, whose pages the system can drop.
Only weights that transformers fuses (experts), and checkpoints in other formats, are held in rank
0's host memory until they are sent, in the checkpoint's dtype.

A model that gets its weights from another engine (`refill`) reads whole tensors on every rank, one
decoder layer at a time, and copies only its own part of each.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from verlite import progress
from verlite.engine import family, lora
from verlite.engine.checkpoint import local_part, persistent_buffers
from verlite.engine.export import layer_prefix
from verlite.engine.folder import ModelError
from verlite.engine.model import checkpoint_dtype, load_model, load_skeleton
from verlite.spec.roles import ModelSpec

T = TypeVar("T")


@dataclass(frozen=True)
class Weights:
    """The weights of a model as rank 0 read them, by the model's names.

    tensors: whole tensors on rank 0's CPU; empty on the other ranks.
    dtypes: dtype of each, known on all ranks.
    """

    tensors: dict[str, Tensor]
    dtypes: dict[str, torch.dtype]


def proven(model: ModelSpec, kind: str) -> tuple[ModelSpec, str | None]:
    """Return the model as all ranks train it, and the warning, of `family.check` on rank 0. All
    ranks must call it.

    Raises:
        ModelError: on all ranks, if the engine cannot train it.
    """
    found, warning = _on_rank_zero(lambda: family.check(model, kind))
    return replace(model, share_prefixes=found.share_prefixes), warning


def read_on_rank_zero(
    model: ModelSpec, kind: str, dtype: torch.dtype
) -> tuple[PreTrainedModel, Weights]:
    """Read the checkpoint on rank 0 and build the model on the meta device on every rank. All ranks
    must call it.

    Args:
        model: the model to load, with LoRA adapters if it asks for them.
        kind: "lm" or "value"; see `load_model`.
        dtype: dtype of the parameters.

    Raises:
        ModelError: on all ranks, if rank 0 cannot load the model, or a rank's model differs from
            rank 0's.
    """
    tensors: dict[str, Tensor] = {}

    def read() -> Any:
        loaded = load_model(model, kind, checkpoint_dtype(model.path) or dtype)
        tensors.update(loaded.named_parameters(remove_duplicate=False))
        tensors.update(persistent_buffers(loaded))
        return _ties(loaded), getattr(loaded, "_weight_conversions", None)

    ties, conversions = _on_rank_zero(read)
    skeleton = load_skeleton(model, kind, dtype)
    skeleton._weight_conversions = conversions
    for name in _ties(skeleton).keys() - ties.keys():
        _untie(skeleton, name)
    lora.add(skeleton, model)

    def describe() -> Any:
        values = {
            name: tensors[lora.base_name(name)].detach()
            for name, _ in _stored(skeleton)
            if not lora.is_adapter(name)
        }
        values |= lora.initial_weights(skeleton, model)
        tensors.clear()
        tensors.update(values)
        dtypes = {name: tensor.dtype for name, tensor in values.items()}
        return _layout(skeleton), dtypes

    layout, dtypes = _on_rank_zero(describe)
    different = _ranks_where(_layout(skeleton) != layout)
    if different:
        raise ModelError(
            f"model.path={model.path} has another model on rank {different[0]} than on rank 0"
        )
    return skeleton, Weights(tensors, dtypes)


def fill(model: PreTrainedModel, weights: Weights, device: torch.device) -> None:
    """Give the tensors of a sharded model on the meta device memory on `device` and the values that
    rank 0 has. All ranks must call it.

    Args:
        model: the sharded model. Tied parameters stay tied.
        weights: what `read_on_rank_zero` returned. Each tensor is released when it has been sent.
        device: this rank's device.
    """
    materialize(model, device)
    for name, tensor in _stored(model):
        own = weights.tensors.pop(name, None)
        whole = _receive(own, tensor.shape, weights.dtypes[name], device)
        copy_own_part(tensor, whole)


def copy_own_part(tensor: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of a whole tensor, which may be on another device, into a tensor that
    is sharded or not."""
    if isinstance(tensor, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
            whole = whole.narrow(dim, min(offset, whole.shape[dim]), size)
    local_part(tensor).copy_(whole)


@torch.no_grad()
def refill(model: PreTrainedModel, named: Iterable[tuple[str, Tensor]]) -> None:
    """Replace the values that training changes: all parameters; with LoRA the adapters.

    Args:
        model: the sharded model.
        named: whole tensors by Hugging Face name; with LoRA the adapters by their names in the
            model. Other weights that training does not change may be among them.

    Raises:
        ValueError: a weight is unknown, has another shape, or is missing. The message names it.
    """
    trained = {id(parameter) for _, parameter in lora.trained(model)}
    missing = {id(parameter): name for name, parameter in lora.trained(model)}
    targets: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    frozen = {name for name, tensor in targets.items() if id(tensor) not in trained}
    frozen |= {name for name, _ in persistent_buffers(model)}
    for name, whole in _model_names(model, progress.ticking(named)):
        if name in frozen:
            continue
        if name not in targets:
            raise ValueError(f"the model has no weight called {name}")
        target = targets[name]
        if whole.shape != target.shape:
            raise ValueError(
                f"{name} has shape {list(whole.shape)}, but the model's has {list(target.shape)}"
            )
        copy_own_part(target, whole)
        missing.pop(id(target), None)
    if missing:
        raise ValueError(f"{len(missing)} weights are missing, such as {min(missing.values())}")


def _model_names(
    model: PreTrainedModel, named: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Convert weights with checkpoint names to the model's own, one decoder layer at a time:
    transformers renames some and fuses others, such as experts. The reverse of what export does."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    if not conversions or lora.layers(model):  # adapters have the model's names
        yield from named
        return
    known = model.state_dict()
    for _, layer in groupby(named, key=lambda item: layer_prefix(item[0])):
        yield from _converted(model, dict(layer), conversions, known).items()


def _converted(
    model: PreTrainedModel,
    weights: Mapping[str, Tensor],
    conversions: list[Any],
    known: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Return the model's own weights from those of a checkpoint, as from_pretrained does.

    conversions: transformers' rules for this model. known: the model's own names.
    """
    renamings = [rule for rule in conversions if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in conversions if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    collected: dict[str, Any] = {}
    for name in sorted(weights, key=dot_natural_key):
        new_name, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, known
        )
        if new_name not in known and name in known:
            new_name, pattern = name, None
        rule: WeightRenaming | WeightConverter
        if pattern is None:
            pattern, rule = name, WeightRenaming(name, new_name)
        else:
            rule = copy.deepcopy(by_pattern[pattern])
        collected.setdefault(new_name, rule).add_tensor(new_name, name, pattern, weights[name])
    found: dict[str, Tensor] = {}
    for name, rule in collected.items():
        for new_name, value in rule.convert(name, model=model, config=model.config).items():
            found[new_name] = value[0] if isinstance(value, list) else value
    return found


def materialize(model: nn.Module, device: torch.device) -> None:
    """Replace tensors on the meta device by uninitialized ones on `device`.

    All shards are allocated before the first weight arrives, so that the memory of weights in
    transit is not scattered between them.
    """
    for _, tensor in _stored(model):
        empty: Tensor = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, empty)


def _receive(
    own: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return rank 0's tensor on this rank's device."""
    if own is None:
        whole = torch.empty(shape, dtype=dtype, device=device)
    else:
        whole = own.to(device).contiguous()
    if dist.get_world_size() > 1:
        dist.broadcast(whole, 0)
    return whole


def _stored(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return parameters, each once, and persistent buffers: the tensors on the meta device."""
    return [*model.named_parameters(), *persistent_buffers(model)]


def _layout(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors}


def _ties(model: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter that has several, by its other names."""
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            ties[name] = known
    return ties


def _untie(model: nn.Module, name: str) -> None:
    """Give a parameter memory of its own: config.json says that it is tied, but the checkpoint has
    different values."""
    module, _, attribute = name.rpartition(".")
    owner = model.get_submodule(module)
    setattr(owner, attribute, nn.Parameter(torch.empty_like(getattr(owner, attribute))))


def _on_rank_zero(compute: Callable[[], T]) -> T:
    """Return what `compute` returns on rank 0. If it fails there, all ranks fail: rank 0 with that
    error, the others with a ModelError that names it."""
    shared: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            shared[0] = compute()
        except Exception as error:  # the other ranks must not wait for the broadcast
            failure = error
            shared[1] = str(error) if isinstance(error, ModelError) else repr(error)
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(shared)
    result, message = shared
    if failure is not None:
        raise failure
    if message is not None:
        raise ModelError(message)
    return result


def _ranks_where(condition: bool) -> list[int]:
    """Return the ranks on which the condition holds."""
    conditions = [condition]
    if dist.get_world_size() > 1:
        conditions = [False] * dist.get_world_size()
        dist.all_gather_object(conditions, condition)
    return [rank for rank, holds in enumerate(conditions) if holds]
