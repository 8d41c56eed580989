"""Export of weights under Hugging Face names: whole tensors, one layer at a time."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from verlite import progress
from verlite.engine import lora
from verlite.engine.checkpoint import TensorFile, local_part, persistent_buffers
from verlite.files import replace_file

CPU = torch.device("cpu")

Part = Literal["merged", "base", "adapters", "trained"]
"""What to export of a model with LoRA: the weights with the adapters merged into them, the weights
without them, A and s B alone, or what training changes, A and B, by their names in the model.
Without LoRA "merged" and "base" are equal."""

SHARD_BYTES = 5 << 30
"""Maximum size of one safetensors file, unless a single tensor is larger."""

HEADER_BYTES = 128 << 10
"""Size of a file's header, which is enough for about 800 tensors."""


def named_weights(
    model: PreTrainedModel,
    dtype: torch.dtype | None,
    device: torch.device,
    part: Part = "merged",
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over parameters and persistent buffers as the model stores them, sharded or not.

    Tied weights appear once, under the name that save_pretrained keeps. Weights that are merged
    with LoRA adapters are on `device`, in `dtype`, one at a time, so all ranks must iterate.
    """
    if part == "adapters":
        yield from lora.scaled(model, dtype, device)
        return
    if part == "trained":
        yield from ((name, parameter.detach()) for name, parameter in lora.trained(model))
        return
    tied = set(model._tied_weights_keys or ())
    by_identity: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = by_identity.get(id(parameter))
        if known is None or known[0] in tied:
            by_identity[id(parameter)] = (name, parameter.detach())
    adapted = lora.layers(model)
    for name, tensor in [*by_identity.values(), *persistent_buffers(model)]:
        if lora.is_adapter(name):
            continue
        if name in adapted and part == "merged":
            tensor = lora.merged(adapted[name], dtype, device)
        yield lora.base_name(name), tensor


class Sizes(NamedTuple):
    """Elements of all weights, of the largest decoder layer, and of the largest weight."""

    all: int
    layer: int
    tensor: int


def sizes(model: PreTrainedModel) -> Sizes:
    """Return the sizes of a model's parameters, sharded or not, adapters included."""
    numbers = [(layer_prefix(name), p.numel()) for name, p in model.named_parameters()]
    layers: Counter[str] = Counter()
    for layer, number in numbers:
        layers[layer] += number
    return Sizes(layers.total(), max(layers.values()), max(number for _, number in numbers))


def full_weights(
    model: PreTrainedModel,
    dtype: torch.dtype | None,
    device: torch.device,
    snapshot: bool = True,
    target: torch.device | None = CPU,
    part: Part = "merged",
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over (name in a Hugging Face checkpoint, whole tensor).

    All ranks must iterate in step, because each tensor is gathered from them. At most one decoder
    layer is in memory at a time.

    Args:
        model: the sharded model.
        dtype: dtype of the yielded tensors; None keeps the model's.
        device: where tensors are gathered.
        snapshot: False allows yielding the model's own tensors, which its next update changes.
        target: where the yielded tensors are: the CPU, or `device`. None: this rank only helps to
            gather; it yields nothing.
        part: what to export of a model with LoRA.
    """
    named = named_weights(model, dtype, device, part)
    for _, layer in groupby(named, key=lambda item: layer_prefix(item[0])):
        progress.tick("gathering weights")
        whole: dict[str, Tensor] = {}
        for name, tensor in layer:
            gathered = _gather(tensor, dtype, device)
            if target is not None:
                whole[name] = _placed(gathered, tensor, target, snapshot)
        # transformers may fuse or rename weights in memory. Checkpoints and generation engines use
        # the hub's names.
        if target is not None:
            yield from revert_weight_conversion(model, whole).items()


def layer_prefix(name: str) -> str:
    """Return the beginning of a weight's name up to its layer's number; the name if it has none."""
    numbered = re.match(r".*?\.\d+\.", name)
    return numbered.group() if numbered else name


def _gather(tensor: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """Return the whole tensor on `device`."""
    cast = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
    return cast.full_tensor() if isinstance(cast, DTensor) else cast


def _placed(whole: Tensor, source: Tensor, target: torch.device, snapshot: bool) -> Tensor:
    """Move a gathered tensor to `target`."""
    placed = whole.to(target)
    # On a single rank nothing may have been copied so far.
    is_own = placed.data_ptr() == local_part(source).data_ptr()
    return placed.clone() if snapshot and is_own else placed


class _ShardWriter:
    """Writes a stream of weights as safetensors files of limited size, one tensor at a time."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.total_bytes = 0
        self._shard_of: dict[str, int] = {}
        self._count = 0
        self._open_next()

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a weight, to a new file if it does not fit into the current one."""
        is_full = self._file.data_bytes + tensor.nbytes > SHARD_BYTES
        if self._file.names and (is_full or not self._file.has_room(name, tensor)):
            self._file.close()
            self._open_next()
        self._file.add(name, tensor)
        self._shard_of[name] = self._count
        self.total_bytes += tensor.nbytes

    def _open_next(self) -> None:
        self._count += 1
        self._file = TensorFile(self._temporary(self._count), HEADER_BYTES, {"format": "pt"})

    def _temporary(self, number: int) -> Path:
        return self.folder / f"shard-{number}.tmp"

    def finish(self) -> None:
        """End the last shard, give all files their final names, and write the index if there are
        several."""
        self._file.close()
        names = ["model.safetensors"]
        if self._count > 1:
            names = [
                f"model-{i:05d}-of-{self._count:05d}.safetensors" for i in range(1, self._count + 1)
            ]
        for number, name in enumerate(names, 1):
            self._temporary(number).replace(self.folder / name)
        if self._count > 1:
            weight_map = {name: names[number - 1] for name, number in self._shard_of.items()}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            text = json.dumps(index, indent=2)
            replace_file(self.folder / "model.safetensors.index.json", text)


def save_pretrained(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    model: PreTrainedModel,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    write: bool,
) -> None:
    """Write a folder that from_pretrained and vLLM load. Every rank must call it and consumes
    `weights`.

    Args:
        folder: where to write.
        weights: a stream of whole tensors.
        model: the model, for its class and generation config.
        config: the model's config as loaded, without changes made for training.
        tokenizer: written too, unless None.
        write: whether this rank writes to disk.
    """
    if not write:
        for _ in weights:
            pass
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writer = _ShardWriter(folder)
        for name, tensor in weights:
            writer.add(name, tensor)
            if tensor.is_floating_point():
                config.dtype = tensor.dtype
        writer.finish()
    except OSError:
        for _ in weights:  # the other ranks gather them in step
            pass
        raise
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if model.is_remote_code():
        custom_object_save(model, str(folder), config=config)  # type: ignore[arg-type]
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
