"""Loading and verification of weights inside vLLM's workers.

Two facts about vLLM 0.32 on CPUs decide how weights are verified:

- vLLM packs each linear layer's weight for oneDNN and drops the original. The packed form cannot be
  read directly, but a product with the identity matrix returns every weight exactly, because all
  other terms of each sum are zero. That costs as much as one prompt as long as the widest layer, so
  it is done at the first sync only. At later syncs, each weight is summed when it is packed
  (`_recording_packs`), and a few columns are read back from the kernel that generates. A kernel
  that mispacks some columns at a later sync, and none at the first, would be missed. A kernel that
  was not repacked, or was replaced in another way, is read completely.
- With tied embeddings, `reload_weights` renews the embedding but not the output layer's packed
  copy, so vLLM would go on generating with the old output weights. `_repack_tied_heads` repairs
  that; the fingerprint would reveal it.
- vLLM packs the experts of a mixture of experts at the first load only, and a reload leaves them
  unpacked under a kernel that expects packed weights. `_recording_packs` packs them at every load.
  Packing only reorders values, so the fingerprint, which is computed over the packed copy, does not
  depend on it. Therefore each fingerprint also sends a few tokens through each expert of the kernel
  that generates, and compares the outputs with those of the weights that were loaded.
"""

import itertools
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from verlite.weights.fingerprint import combine, settle, sum_of_hashes, tensor_fingerprint
from verlite.weights.ipc import BucketStream, read_trial

_IDENTITY_ROWS = 256  # rows of the identity per product; bounds memory
_PROBED_COLUMNS = 16  # columns of a packed weight that are read back
_EXPERT_TOKENS = 2  # tokens that each expert computes for comparison
# Largest difference of the kernel's output from that of the loaded weights, relative to the layer's
# largest output. Rounding gives 1e-6 and 0.01; another layout or expert gives about 1.
_EXPERT_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")  # vLLM has no separate function of others here
_EXPERT_GAPS = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
_A, _B = ".lora_A.", ".lora_B."  # in the names of adapters
_column_sampler = random.Random(0)  # separate generator: no other random numbers change


class WorkerExtension:
    """Methods that vLLM mixes into each of its workers (`worker_extension_cls`)."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    reload_weights: Any
    add_lora: Any
    remove_lora: Any
    list_loras: Any
    rank: int

    def verlite_load(self, named: Iterable[tuple[str, Tensor]], adapter: int | None = None) -> None:
        """Load full weights by Hugging Face names; this worker keeps its shard.

        Args:
            named: the weights. With `adapter` also those of the adapters, or only these.
            adapter: number of the adapter that they become; None without adapters.
        """
        if isinstance(named, BucketStream):
            named = replace(named, rank=self.rank)
        if adapter is None:
            self._load_base(named)
            return
        adapters: dict[str, Tensor] = {}
        base = _take_adapters(named, adapters)
        first = next(base, None)
        if first is not None:
            self._load_base(itertools.chain([first], base))
        self._load_adapter(adapters, adapter)

    def verlite_read_trial(self, stream: BucketStream) -> str:
        """Return why this worker cannot read the trial of the transport ipc; "" if it can."""
        return read_trial(replace(stream, rank=self.rank))

    def _load_adapter(self, tensors: dict[str, Tensor], number: int) -> None:
        """Replace the adapter. vLLM reads one from a folder in peft's format."""
        for old in self.list_loras():
            self.remove_lora(old)
        if not tensors:
            raise ValueError("the sync has no adapters, and rollout.lora_sync=adapter needs them")
        request = adapter_request(number)
        rank = max(tensor.shape[0] for name, tensor in tensors.items() if _A in name)
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank,  # a scale of 1: the trainer's is part of B
            "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        }
        with tempfile.TemporaryDirectory(prefix="verlite-adapter-") as folder:
            Path(folder, "adapter_config.json").write_text(json.dumps(config))
            named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
            save_file(named, Path(folder, "adapter_model.safetensors"))
            request.lora_path = folder
            self.add_lora(request)

    def _load_base(self, named: Iterable[tuple[str, Tensor]]) -> None:
        model = self.model_runner.get_model()

        def reload() -> None:
            self.reload_weights(weights_iterator=named)

        load_base(model, self.model_config, self.rank, reload)

    def verlite_unlink_shared_memory(self) -> None:
        """Remove the names of the segments that vLLM's processes on a CPU have mapped.

        vLLM leaves them in /dev/shm. Without a name, a segment ends with its last process.
        """
        name = os.environ.get("VLLM_DIST_IDENT")
        for path in Path("/dev/shm").glob("*-cpushm_*") if name else ():
            if path.name.startswith(f"{name}-"):
                path.unlink(missing_ok=True)

    def verlite_settings(self) -> dict[str, Any]:
        """Return what a trainer checks before it uses a server; see `servers.vllm_server`."""
        config = self.vllm_config
        transfer = config.weight_transfer_config
        return {
            "max_model_len": config.model_config.max_model_len,
            "vocab_size": config.model_config.get_vocab_size(),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": config.model_config.logprobs_mode,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "weight_transfer": transfer.backend if transfer else None,
        }

    def verlite_fingerprints(self) -> dict[str, int]:
        """Return the fingerprint of each weight on this worker, as input of `combine_shards`. On a
        GPU it waits once.

        Raises:
            RuntimeError: a layer computes with other weights than it should.
        """
        model = self.model_runner.get_model()
        dtype = self.model_config.dtype
        found: dict[str, int | Tensor] = {}
        seen: set[int] = set()
        heads = [module for module in model.modules() if type(module).__name__ == "ParallelLMHead"]
        for name, module in model.named_modules(remove_duplicate=True):
            weights = {
                key: parameter
                for key, parameter in module.named_parameters(recurse=False)
                if parameter.numel() and parameter.data_ptr() not in seen
            }
            seen.update(parameter.data_ptr() for parameter in weights.values())
            for key, weight in weights.items():
                parts = _hashed_parts(weight, module, self.rank, dtype)
                found |= {f"{name}.{key}{part}": value for part, value in parts.items()}
            if _is_packed(module) and not _is_only_looked_up(module, heads):
                packed = _packed_parts(name, module, self.rank, dtype)
                original = module.weight
                if not original.numel():
                    found |= {f"{name}.weight{part}": value for part, value in packed.items()}
                elif tensor_fingerprint(original, dtype) != combine(*packed.values()):
                    raise RuntimeError(
                        f"vLLM computes {name} with weights that differ from the layer's own"
                    )
            _check_experts(name, module)
            found |= _adapter_parts(name, module, self.rank, dtype)
        return settle(found)


def load_base(model: Any, model_config: Any, rank: int, reload: Callable[[], None]) -> None:
    """Load full weights into a worker's model, so that its fingerprint can be taken afterwards.

    Args:
        model: of this worker.
        model_config: of that model.
        rank: of this worker.
        reload: loads them by vLLM's layerwise reload.
    """
    with _recording_packs(model, rank, model_config.dtype):
        try:
            reload()
        except BaseException:
            _abandon_reload(model, model_config)
            raise
        _repack_tied_heads(model)


def adapter_request(number: int) -> Any:
    """Return vLLM's request for the adapter of that number.

    Its path does not exist: vLLM fails if it has to load the adapter once more.
    """
    from vllm.lora.request import LoRARequest

    name = f"verlite-adapter-{number}"
    return LoRARequest(name, number, f"/nonexistent/{name}")


def _take_adapters(
    named: Iterable[tuple[str, Tensor]], adapters: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Move the adapters to `adapters`, on the CPU, and yield all other weights."""
    for name, tensor in named:
        if _A in name or _B in name:
            adapters[name] = tensor.cpu().clone()  # the transport reuses its buckets
        else:
            yield name, tensor


def _adapter_parts(
    name: str, module: Any, rank: int, dtype: torch.dtype
) -> dict[str, int | Tensor]:
    """Return the hashes of a layer's A and B, which vLLM has for each of the matrices that it
    fused, padded with zeros to its largest rank."""
    found = {}
    for key in ("lora_a_stacked", "lora_b_stacked"):
        stacked = getattr(module, key, ())
        replicas = getattr(getattr(module, "base_layer", None), "num_kv_head_replicas", 1)
        for i, tensor in enumerate((stacked,) if isinstance(stacked, Tensor) else stacked):
            # Workers that share key-value heads have the same rows of B for k and v.
            group = f"[kv {rank // replicas}]" if replicas > 1 and i and "_b_" in key else ""
            found[f"{name}.{key}[{i}]{group}"] = sum_of_hashes(tensor, dtype)
    return found


def combine_shards(workers: list[dict[str, int]]) -> int:
    """Combine the workers' fingerprints into the model's.

    A weight with equal fingerprints on all workers is a copy and counts once; others are shards.
    """
    total = 0
    for name in {name for worker in workers for name in worker}:
        parts = [worker[name] for worker in workers if name in worker]
        is_copy = len(set(parts)) == 1
        total = combine(total, *(parts[:1] if is_copy else parts))
    return total


def _hashed_parts(
    weight: Tensor, module: Any, rank: int, dtype: torch.dtype
) -> dict[str, int | Tensor]:
    """Return the hash of one weight under the key "".

    A fused q, k, v weight has two parts if several workers share key-value heads: q, which is
    sharded, and k, v, which are replicated.
    """
    replicas = getattr(module, "num_kv_head_replicas", 1)
    if replicas == 1:
        return {"": sum_of_hashes(weight, dtype)}
    q_rows = module.num_heads * module.head_size
    return {
        "[q]": sum_of_hashes(weight[:q_rows], dtype),
        f"[kv {rank // replicas}]": sum_of_hashes(weight[q_rows:], dtype),
    }


class _PackedWeight(NamedTuple):
    """A record of a weight [out, in] at the moment it was packed into `kernel`."""

    kernel: Any
    parts: dict[str, int]
    """Its fingerprint parts."""
    columns: list[int]
    """Columns chosen to be read back."""
    values: Tensor
    """The weight's values in these columns, [out, c]."""


@contextmanager
def _recording_packs(model: nn.Module, rank: int, dtype: torch.dtype) -> Iterator[None]:
    """Within the context, record a `_PackedWeight` for every linear layer whose weight is packed
    for the CPU; pack experts, and record what they compute."""
    methods: dict[int, Any] = {
        id(module.quant_method): module.quant_method
        for module in model.modules()
        if _is_packed(module) or _cpu_experts(module) is not None
    }

    def recording(pack: Callable[[Any], None]) -> Callable[[Any], None]:
        def pack_and_record(layer: Any) -> None:
            experts = _cpu_experts(layer)
            if experts is not None:
                pack(layer)  # packs nothing, because it is not the first load
                is_checked = layer.activation.value in _EXPERT_ACTIVATIONS
                layer.verlite_outputs = _expected_outputs(layer) if is_checked else None
                experts.process_weights_after_loading(layer)
                return
            weight = layer.weight.detach()
            pack(layer)
            width = weight.shape[1]
            columns = _column_sampler.sample(range(width), min(_PROBED_COLUMNS, width))
            parts = settle(_hashed_parts(weight, layer, rank, dtype))
            layer.verlite_packed = _PackedWeight(
                layer.cpu_linear, parts, columns, weight[:, columns]
            )

        return pack_and_record

    for method in methods.values():
        method.process_weights_after_loading = recording(method.process_weights_after_loading)
    try:
        yield
    finally:
        for method in methods.values():
            del method.process_weights_after_loading  # restores the class's method


def _packed_parts(name: str, module: Any, rank: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the fingerprint parts of the weight that a layer's kernel computes with.

    Raises:
        RuntimeError: it is not the weight that was packed.
    """
    record: _PackedWeight | None = getattr(module, "verlite_packed", None)
    if record is None or record.kernel is not module.cpu_linear:
        return settle(_hashed_parts(_unpack(module, dtype), module, rank, dtype))
    mismatch = f"vLLM computes {name} with weights that differ from those it was given"
    if not hasattr(module, "verlite_read"):
        read = settle(_hashed_parts(_unpack(module, dtype), module, rank, dtype))
        if read != record.parts:
            raise RuntimeError(mismatch)
        module.verlite_read = True
        return record.parts
    rows = torch.zeros(len(record.columns), _input_size(module), dtype=dtype)
    rows[range(len(record.columns)), record.columns] = 1
    values = module.cpu_linear(rows, module.weight, None).t()
    if not torch.equal(values, record.values):
        finite = "" if values.isfinite().all() else ", or those are not finite"
        raise RuntimeError(f"{mismatch}{finite}")
    return record.parts


def _cpu_experts(module: Any) -> Any | None:
    """Return the kernel of a layer of unquantized experts on a CPU; None for any other layer."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    return experts if hasattr(module, "w13_weight") and hasattr(experts, "isa") else None


def _expert_inputs(layer: Any) -> Tensor:
    """Return random tokens [tokens, hidden size], the same each time."""
    generator = torch.Generator().manual_seed(0)
    hidden_size = layer.moe_config.hidden_dim
    tokens = torch.randn(_EXPERT_TOKENS, hidden_size, generator=generator)
    return tokens.to(layer.w13_weight.dtype)


def _expected_outputs(layer: Any) -> Tensor:
    """Return what each expert of a layer computes from `_expert_inputs`, by the layer's weights as
    they were loaded, before they are packed: [experts, tokens, hidden size]."""
    from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation

    gate_up, down = layer.w13_weight.detach(), layer.w2_weight.detach()
    inner = _expert_inputs(layer) @ gate_up.transpose(1, 2)
    if hasattr(layer, "w13_bias"):
        inner += layer.w13_bias[:, None]
    flat = inner.flatten(0, 1)
    active = torch.empty(len(flat), down.shape[2], dtype=flat.dtype)
    apply_moe_activation(layer.activation, active, flat)
    outputs = active.view(len(down), _EXPERT_TOKENS, -1) @ down.transpose(1, 2)
    return outputs + layer.w2_bias[:, None] if hasattr(layer, "w2_bias") else outputs


def _check_experts(name: str, layer: Any) -> None:
    """Compare what a layer's experts compute with `_expected_outputs`, if it has packed experts.

    Raises:
        RuntimeError: they differ.
    """
    experts, expected = _cpu_experts(layer), getattr(layer, "verlite_outputs", None)
    if experts is None or expected is None:
        return
    inputs = _expert_inputs(layer).repeat(len(expected), 1)
    found = torch.empty_like(inputs)
    experts.apply(
        found,
        inputs,
        layer.w13_weight,
        layer.w2_weight,
        topk_weights=torch.ones(len(inputs), 1),
        topk_ids=torch.arange(len(expected), dtype=torch.int32).repeat_interleave(_EXPERT_TOKENS)[
            :, None
        ],
        activation=layer.activation,
        global_num_experts=len(expected),
        expert_map=None,
        a1q_scale=None,
        a2_scale=None,
        workspace13=None,
        workspace2=None,
        expert_tokens_meta=None,
        apply_router_weight_on_input=False,
    )
    gap = (found.view_as(expected) - expected).abs().max() / expected.abs().max()
    if not gap <= _EXPERT_GAPS[expected.dtype]:  # also for NaN
        finite = "" if expected.isfinite().all() else ", or those are not finite"
        raise RuntimeError(
            f"vLLM computes {name} with experts that differ from those it was given{finite}"
        )


def _is_only_looked_up(module: nn.Module, heads: list[nn.Module]) -> bool:
    """Return True for an input embedding beside an output layer: vLLM packs it but never multiplies
    with it."""
    return bool(heads) and type(module).__name__ == "VocabParallelEmbedding"


def _is_packed(module: Any) -> bool:
    """Return True for a layer with a packed weight.

    A layer that vLLM wrapped for adapters only shows the attributes of the layer inside it, which
    is a module of the model too.
    """
    return hasattr(module, "cpu_linear") and not hasattr(module, "base_layer")


def _unpack(module: Any, dtype: torch.dtype) -> Tensor:
    """Return the exact weight [out, in] of a packed layer, by multiplying with the identity."""
    identity = torch.eye(_input_size(module), dtype=dtype)
    products = [
        module.cpu_linear(rows, module.weight, None) for rows in identity.split(_IDENTITY_ROWS)
    ]
    return torch.cat(products).t()


def _input_size(module: Any) -> int:
    """Return the number of inputs of a layer on this worker."""
    names = ("input_size_per_partition", "embedding_dim", "input_size")  # the last: routers
    return int(next(getattr(module, name) for name in names if hasattr(module, name)))


def _repack_tied_heads(model: nn.Module) -> None:
    """Renew the packed copies of weights that were loaded under another module's name."""
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.numel() and _is_packed(module):
            owner = owners.setdefault(weight.data_ptr(), module)
            if owner is not module:
                module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr,operator]


def _abandon_reload(model: nn.Module, model_config: Any) -> None:
    """Drop what a failed reload has buffered. Otherwise the next reload would mix both."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        get_layerwise_info,
    )

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0
    finalize_layerwise_reload(model, model_config)
