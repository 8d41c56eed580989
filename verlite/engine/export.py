"""Weights leave the engine: under Hugging Face names, whole, one layer at a time."""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from verlite.engine import lora
from verlite.engine.checkpoint import local_part, persistent_buffers

SHARD_BYTES = 5 << 30


def named_weights(
    model: PreTrainedModel, dtype: torch.dtype | None, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers as they lie in the model (sharded or not), tied ones once, under the name that
    save_pretrained keeps. Weights that have adapters come merged with them, in `dtype`, one at a time: all ranks must iterate."""
    tied = set(model._tied_weights_keys or ())
    names: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = names.get(id(parameter))
        if known is None or known[0] in tied:
            names[id(parameter)] = (name, parameter.detach())
    adapted = lora.layers(model)
    for name, tensor in [*names.values(), *persistent_buffers(model)]:
        if not lora.is_adapter(name):
            yield (
                lora.plain(name),
                lora.merged(adapted[name], dtype, device) if name in adapted else tensor,
            )


def full_weights(
    model: PreTrainedModel, dtype: torch.dtype | None, device: torch.device, snapshot: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """(name as in the Hugging Face checkpoint, whole tensor on the CPU), cast to `dtype` (None: as they are).

    Without `snapshot` they may be the model's own, which its next update changes.

    All ranks must iterate in step: each tensor is gathered from them on `device`. At most one decoder layer is held at a time.
    """
    for _, layer in groupby(
        named_weights(model, dtype, device), key=lambda item: _layer_of(item[0])
    ):
        whole = {name: _gather(tensor, dtype, device, snapshot) for name, tensor in layer}
        # transformers may hold weights fused or renamed; checkpoints and generation engines know them as on the hub.
        yield from revert_weight_conversion(model, whole).items()


def _layer_of(name: str) -> str:
    numbered = re.match(r".*?\.\d+\.", name)
    return numbered.group() if numbered else name


def _gather(
    tensor: Tensor, dtype: torch.dtype | None, device: torch.device, snapshot: bool
) -> Tensor:
    cast = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
    whole = (cast.full_tensor() if isinstance(cast, DTensor) else cast).cpu()
    # A world of one rank needs no copy to gather.
    return (
        whole.clone() if snapshot and whole.data_ptr() == local_part(tensor).data_ptr() else whole
    )


def save_pretrained(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    model: PreTrainedModel,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    write: bool,
) -> None:
    """Write a folder that from_pretrained and vLLM load, from a stream of weights: one shard in memory at a time.

    Every rank must call it and consume the stream; only those with `write` touch the disk. `config` is the model's as
    loaded, without what training changed in it.
    """
    shards: list[dict[str, Tensor]] = [{}]
    index: dict[str, str] = {}
    count = size = total = 0

    def flush() -> None:
        nonlocal count
        count += 1
        save_file(shards[0], folder / f"shard-{count}.tmp", metadata={"format": "pt"})
        index.update(dict.fromkeys(shards[0], str(count)))
        shards[0] = {}

    if write:
        folder.mkdir(parents=True, exist_ok=True)
    for name, tensor in weights:
        if not write:
            continue
        if shards[0] and size + tensor.nbytes > SHARD_BYTES:
            flush()
            size = 0
        shards[0][name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
        config.dtype = tensor.dtype if tensor.is_floating_point() else config.dtype
    if not write:
        return
    flush()
    names = {
        str(i): "model.safetensors" if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors"
        for i in range(1, count + 1)
    }
    for i, final in names.items():
        (folder / f"shard-{i}.tmp").replace(folder / final)
    if count > 1:
        weight_map = {name: names[i] for name, i in index.items()}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        (folder / "model.safetensors.index.json").write_text(text)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if model.is_remote_code():
        custom_object_save(model, str(folder), config=config)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
