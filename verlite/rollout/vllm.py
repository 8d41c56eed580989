"""vLLM in this process, and every place where verlite depends on vLLM's version (0.26 to 0.32).

Two facts decide how weights are checked here (vLLM 0.32):
- On a CPU, vLLM packs each linear layer's weight for oneDNN and drops the original. The packed form cannot be read, but a
  matrix product with the identity gives every weight back exactly: all other terms are zeros. That costs one prompt as long as
  the widest layer, so it is done at the first sync alone. From then on a weight that a sync brings is summed as it is packed
  (`_noting`), and some of its columns are asked of the very kernel that generates. A kernel that mispacks some columns at a later sync and
  none at the first would go unseen; one that was not packed anew, or in any other way, is read whole.
- With tied embeddings on a CPU, `reload_weights` renews the embedding but not the output layer's packed copy of it. It
  would go on generating with the old output weights. `_repack_tied_heads` repairs that; the checksum would show it.
"""

import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from verlite.config.schema import ModelConfig, RolloutConfig
from verlite.protocol.weights import combine, read_buckets, tensor_fingerprint, write_buckets
from verlite.rollout.batched import Finished
from verlite.rollout.types import Sampling

_IDENTITY_ROWS = 256  # rows of the identity per product: bounds the memory of the unpacked block
_PROBES = 16  # columns of a packed weight that are read back
_choose = random.Random(0)  # other ones at every sync; no other random numbers are disturbed


class VLLMCore:
    """Batched generation with vLLM; see `batched.Core`."""

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        seed: int,
        pretrained: bool,
    ):
        set_environment(device)
        from vllm import LLMEngine

        args = _engine_args(model, rollout, dtype, device, max_model_len, seed, pretrained)
        self.engine = LLMEngine.from_engine_args(args)
        self.tokenizer = self.engine.get_tokenizer()
        self.max_model_len = max_model_len
        self.vocab_size = self.engine.model_config.get_vocab_size()
        self._shards = rollout.tensor_model_parallel_size
        self._bucket_bytes = rollout.sync_bucket_mb << 20
        self._sleeps = args.enable_sleep_mode
        # vLLM compiles one sampling helper even in eager mode, which costs as much as the rest of the start.
        self._stance = "force_eager" if args.enforce_eager else "default"
        self._eos = _eos_ids(self.engine)

    def add(self, request_id: int, prompt_ids: list[int], sampling: Sampling) -> None:
        """Queue a request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            stop_token_ids=None if sampling.ignore_eos else self._eos,
            ignore_eos=sampling.ignore_eos,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.engine.add_request(str(request_id), _token_prompt(prompt_ids), params)

    def abort(self, request_id: int) -> None:
        """Forget a request."""
        self.engine.abort_request([str(request_id)])

    def pending(self) -> int:
        """Requests queued or running."""
        return self.engine.get_num_unfinished_requests()

    def step(self) -> list[Finished]:
        """Advance all running sequences."""
        with torch.compiler.set_stance(self._stance):
            outputs = self.engine.step()
        finished = []
        for output in outputs:
            if output.finished:
                answer = output.outputs[0]
                ids = list(answer.token_ids)
                reason = (
                    answer.finish_reason if answer.finish_reason in ("stop", "length") else "abort"
                )
                finished.append(
                    Finished(
                        int(output.request_id),
                        ids,
                        _sampled_log_probs(answer.logprobs, ids),
                        reason,
                    )
                )
        return finished

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights. One device reads them here; several read buckets from shared memory."""
        if self._shards == 1:
            self.engine.collective_rpc("verlite_load", args=(named,))
            return
        buckets = write_buckets(named, self._bucket_bytes)
        try:
            self.engine.collective_rpc("verlite_load_buckets", args=(buckets.paths,))
        finally:
            buckets.close()

    def reset_caches(self) -> None:
        """Forget all cached prefixes."""
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    def fingerprint(self) -> int:
        """Checksum of the weights in vLLM's layers; see the module's docstring and `WorkerExtension`."""
        return combine_shards(self.engine.collective_rpc("verlite_fingerprints"))

    def sleep(self) -> set[str]:
        """Free weights and KV cache on a GPU with free_cache_engine; otherwise nothing."""
        if not self._sleeps:
            return set()
        self.engine.sleep(level=2)
        return {"weights", "kv_cache"}

    def wake(self, tag: str) -> None:
        """Take back what sleep freed."""
        self.engine.wake_up(tags=[tag])

    def close(self) -> None:
        """End vLLM's executor, and its worker processes if it has any."""
        self.engine.engine_core.shutdown()
        del self.engine


class WorkerExtension:
    """Methods that vLLM mixes into each of its workers (`worker_extension_cls`)."""

    model_runner: Any
    model_config: Any
    reload_weights: Any
    rank: int

    def verlite_load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Load full weights by Hugging Face names; this worker keeps its shard."""
        model = self.model_runner.get_model()
        with _noting(model, self.rank, self.model_config.dtype):
            try:
                self.reload_weights(weights_iterator=named)
            except BaseException:
                _abandon_reload(model, self.model_config)
                raise
            _repack_tied_heads(model)

    def verlite_load_buckets(self, paths: list[str]) -> None:
        """The same from files."""
        self.verlite_load(read_buckets(paths))

    def verlite_fingerprints(self) -> dict[str, int]:
        """Checksum of each weight on this worker, for `combine_shards`. Raises RuntimeError where one copy is stale."""
        model, dtype = self.model_runner.get_model(), self.model_config.dtype
        found: dict[str, int] = {}
        seen: set[int] = set()
        heads = [module for module in model.modules() if type(module).__name__ == "ParallelLMHead"]
        for name, module in model.named_modules(remove_duplicate=True):
            weights = {
                key: p
                for key, p in module.named_parameters(recurse=False)
                if p.numel() and p.data_ptr() not in seen
            }
            seen.update(p.data_ptr() for p in weights.values())
            for key, weight in weights.items():
                found |= {
                    f"{name}.{key}{part}": value
                    for part, value in _parts(weight, module, self.rank, dtype).items()
                }
            if hasattr(module, "cpu_linear") and not _is_only_looked_up(module, heads):
                packed, kept = _packed_parts(name, module, self.rank, dtype), module.weight
                if not kept.numel():
                    found |= {f"{name}.weight{part}": value for part, value in packed.items()}
                elif tensor_fingerprint(kept, dtype) != combine(*packed.values()):
                    raise RuntimeError(
                        f"vLLM computes {name} with weights that are not those it holds for it"
                    )
        return found


def combine_shards(workers: list[dict[str, int]]) -> int:
    """The model's checksum from its workers': a weight that is equal everywhere is a copy and counts once, others are shards."""
    total = 0
    for name in {name for worker in workers for name in worker}:
        parts = [worker[name] for worker in workers if name in worker]
        total = combine(total, *(parts[:1] if len(set(parts)) == 1 else parts))
    return total


def _parts(weight: Tensor, module: Any, rank: int, dtype: torch.dtype) -> dict[str, int]:
    """The checksum of one weight, under ""; of fused q, k, v in two parts, because several workers can share key-value heads."""
    replicas = getattr(module, "num_kv_head_replicas", 1)
    if replicas == 1:
        return {"": tensor_fingerprint(weight, dtype)}
    q_rows = module.num_heads * module.head_size
    return {
        "[q]": tensor_fingerprint(weight[:q_rows], dtype),
        f"[kv {rank // replicas}]": tensor_fingerprint(weight[q_rows:], dtype),
    }


class _Packed(NamedTuple):
    """What is known of a weight that was packed into `kernel`: its checksum's parts, and the numbers in some columns [out, c]."""

    kernel: Any
    parts: dict[str, int]
    columns: list[int]
    numbers: Tensor


@contextmanager
def _noting(model: nn.Module, rank: int, dtype: torch.dtype) -> Iterator[None]:
    """Meanwhile, note of every linear layer's weight what is packed for the CPU (`_Packed`)."""
    methods = {
        id(module.quant_method): module.quant_method
        for module in model.modules()
        if hasattr(module, "cpu_linear")
    }

    def noting(pack: Callable[[Any], None]) -> Callable[[Any], None]:
        def pack_and_note(layer: Any) -> None:
            weight = layer.weight.detach()
            pack(layer)
            columns = _choose.sample(range(weight.shape[1]), min(_PROBES, weight.shape[1]))
            layer.verlite_packed = _Packed(
                layer.cpu_linear, _parts(weight, layer, rank, dtype), columns, weight[:, columns]
            )

        return pack_and_note

    for method in methods.values():
        method.process_weights_after_loading = noting(method.process_weights_after_loading)
    try:
        yield
    finally:
        for method in methods.values():
            del method.process_weights_after_loading  # the class's own is back


def _packed_parts(name: str, module: Any, rank: int, dtype: torch.dtype) -> dict[str, int]:
    """The checksum's parts of the weight that a layer's kernel computes with. RuntimeError: it is not the one that was packed."""
    noted: _Packed | None = getattr(module, "verlite_packed", None)
    if noted is None or noted.kernel is not module.cpu_linear:
        return _parts(_unpacked(module, dtype), module, rank, dtype)
    if not hasattr(module, "verlite_read"):
        if _parts(_unpacked(module, dtype), module, rank, dtype) != noted.parts:
            raise RuntimeError(f"vLLM computes {name} with weights that are not those it was given")
        module.verlite_read = True
        return noted.parts
    rows = torch.zeros(len(noted.columns), _width(module), dtype=dtype)
    rows[range(len(noted.columns)), noted.columns] = 1
    if not torch.equal(numbers := module.cpu_linear(rows, module.weight, None).t(), noted.numbers):
        finite = "" if numbers.isfinite().all() else ", or those are not finite"
        raise RuntimeError(
            f"vLLM computes {name} with weights that are not those it was given{finite}"
        )
    return noted.parts


def _is_only_looked_up(module: nn.Module, heads: list[nn.Module]) -> bool:
    """An input embedding beside an output layer: vLLM packs it too, but never multiplies with it."""
    return bool(heads) and type(module).__name__ == "VocabParallelEmbedding"


def _unpacked(module: Any, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] of a layer that vLLM packed for the CPU, exactly, by multiplying with the identity."""
    identity = torch.eye(_width(module), dtype=dtype)
    return torch.cat(
        [module.cpu_linear(rows, module.weight, None) for rows in identity.split(_IDENTITY_ROWS)]
    ).t()


def _width(module: Any) -> int:
    """Numbers that go into a layer."""
    return int(
        module.input_size_per_partition
        if hasattr(module, "input_size_per_partition")
        else module.embedding_dim
    )


def _repack_tied_heads(model: nn.Module) -> None:
    """Renew the packed copies of weights that were loaded under another module's name."""
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.numel() and hasattr(module, "cpu_linear"):
            if owners.setdefault(weight.data_ptr(), module) is not module:
                module.quant_method.process_weights_after_loading(module)


def _abandon_reload(model: nn.Module, model_config: Any) -> None:
    """After a reload that raised: drop what it buffered. Otherwise the next reload would mix both."""
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


def set_environment(device: torch.device | None = None) -> None:
    """What vLLM reads from the environment: when it is imported, and of the device when it starts."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
        "0"  # the engine's loop in this process; sharded workers still get their own
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if device is not None and device.type == "cpu":
        os.environ.setdefault(
            "VLLM_CPU_OMP_THREADS_BIND", "nobind"
        )  # several engines and trainers share the cores


def _engine_args(
    model: ModelConfig,
    rollout: RolloutConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    seed: int,
    pretrained: bool,
) -> Any:
    """vLLM's arguments; rollout.engine_kwargs.vllm has the last word. Raises ValueError for one that vLLM does not know."""
    from vllm import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    args: dict[str, Any] = {
        "model": model.path,
        "tokenizer": model.tokenizer_path or model.path,
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": dict(model.override_config),
        "dtype": str(dtype).removeprefix("torch."),
        "seed": seed,
        "load_format": "auto" if pretrained else "dummy",
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        # Inside a Ray actor vLLM would choose Ray, and wait for devices of a placement group that this run has filled itself.
        "distributed_executor_backend": "mp" if rollout.tensor_model_parallel_size > 1 else "uni",
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enforce_eager": rollout.enforce_eager,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_sleep_mode": device.type == "cuda" and rollout.free_cache_engine,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": f"{__name__}.{WorkerExtension.__name__}",
        "disable_log_stats": True,
    }
    if device.type == "cpu":
        args["kv_cache_memory_bytes"] = int(rollout.kv_cache_gb * 2**30)
    extra = dict(rollout.engine_kwargs.get("vllm") or {})
    if unknown := sorted(set(extra) - known):
        raise ValueError(
            f"rollout.engine_kwargs.vllm.{unknown[0]}: vLLM's EngineArgs has no such argument"
        )
    return EngineArgs(**(args | extra))


def _token_prompt(ids: list[int]) -> Any:
    """A prompt of token ids, in the form that this vLLM wants."""
    try:
        from vllm.inputs import tokens_input
    except ImportError:
        return {"prompt_token_ids": ids}
    return tokens_input(ids)


def _sampled_log_probs(log_probs: Any, ids: list[int]) -> list[float]:
    """Log-probs of the sampled tokens from vLLM's flat form: a run of candidates for each token, the sampled one among them."""
    starts = log_probs.start_indices
    if list(map(log_probs.token_ids.__getitem__, starts)) != ids:
        raise RuntimeError("vLLM's log-probs do not belong to the tokens that it sampled")
    return [log_probs.logprobs[start] for start in starts]


def _eos_ids(engine: Any) -> list[int]:
    """Every id that ends a sequence, by the generation config, the model's config or the tokenizer."""
    config = engine.model_config
    sources = (
        config.try_get_generation_config().get("eos_token_id"),
        getattr(config.hf_config, "eos_token_id", None),
    )
    found: set[int] = set()
    for ids in (*sources, engine.get_tokenizer().eos_token_id):
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return sorted(found)
