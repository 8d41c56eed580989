"""The vLLM engine, in this process. This file and vllm_worker.py contain all code that depends on
vLLM's version (0.29 to 0.32).

Importing this module sets the environment variables that vLLM reads at import, and imports vLLM,
which takes most of the engine's start time.
"""

import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

# Read by vLLM when it is imported. The engine loop runs in this process; sharded workers still get
# their own processes.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm import EngineArgs, SamplingParams
from vllm.config.lora import MaxLoRARanks
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.llm_engine import LLMEngine

from verlite.machine import old_vllm
from verlite.rollout.batched import FinishedRequest
from verlite.rollout.engines import vllm_worker
from verlite.rollout.types import Completion, EngineOptions, Sampling, after_tokens
from verlite.spec.roles import ModelSpec
from verlite.threads import dividing
from verlite.weights.buckets import BucketFiles
from verlite.weights.ipc import BucketStream
from verlite.weights.shared_memory import MemoryFiles
from verlite.weights.transport import publish

_LOG_PROBS_REQUEST = "log-probs"
_NOTHING = Completion([], [], "", [])
_UNREADABLE = "llvmlite.binding.ffi"
"""A module of numba's, which tools and reward functions may import (bm25s does). When vLLM 0.32
starts on a CPU, it looks into every object of every module, and fails at one of this module that
claims to have every attribute."""


class VLLMCore:
    """Batched generation with vLLM; see `batched.Core`."""

    def __init__(self, options: EngineOptions):
        old = old_vllm()
        if old:  # a worker's machine may have another version than the driver's
            raise ValueError(f"vLLM {old} is too old: pyproject.toml names the versions that work")
        if options.device.type == "cpu":
            # Several engines and trainers share the cores, so vLLM must not bind its threads to
            # them.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        self._kv_at_update = options.rollout.kv_at_update
        if self._kv_at_update and options.rollout.syncs_adapters:
            raise ValueError(
                "rollout.lora_sync=adapter: a running request keeps its adapter, so weights cannot "
                "be loaded while requests run. Use rollout.lora_sync=merged"
            )
        args = engine_args(options)
        self._shards = options.rollout.tensor_model_parallel_size
        # A worker of one shard is this process, and others may be forks of it.
        hidden = _hidden(_UNREADABLE) if options.device.type == "cpu" else nullcontext()
        with dividing(self._shards), hidden:
            self.engine = LLMEngine.from_engine_args(args)
        self.tokenizer = self.engine.get_tokenizer()
        self.max_model_len = options.max_model_len
        self.vocab_size = self.engine.model_config.get_vocab_size()
        if self._shards > 1 and options.device.type == "cpu":
            self.engine.collective_rpc("verlite_unlink_shared_memory")
        self._bucket_bytes = options.rollout.sync_bucket_mb << 20
        self._frees_memory = args.enable_sleep_mode
        self._syncs_adapters = options.rollout.syncs_adapters
        self._adapter: LoRARequest | None = None
        self._adapter_ids = itertools.count(1)
        self._completed: list[FinishedRequest] = []  # which the next step returns
        self._so_far: dict[int, Completion] = {}  # of requests that were added with tokens
        self._loads = 0
        # Even in eager mode vLLM compiles one sampling helper, which takes as long as the rest of
        # the start.
        self._stance = "force_eager" if args.enforce_eager else "default"
        self._eos = _eos_ids(self.engine)

    def add(
        self,
        request_id: int,
        prompt_ids: list[int],
        sampling: Sampling,
        so_far: Completion | None = None,
    ) -> None:
        """Queue a request. vLLM takes the tokens so far for a part of its prompt."""
        if so_far is not None:
            self._so_far[request_id] = so_far
            prompt_ids = prompt_ids + so_far.ids
            sampling = after_tokens(sampling, len(so_far.ids))
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
            logprobs=0,  # only those of the sampled tokens
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._add_request(str(request_id), prompt_ids, params)
        if so_far is not None and sampling.stop:  # a stop string may begin in them
            detokenizer = self._states()[request_id].detokenizer
            detokenizer.output_text = self.tokenizer.decode(so_far.ids, skip_special_tokens=True)

    def _add_request(self, name: str, ids: list[int], params: SamplingParams) -> None:
        prompt = tokens_input(ids, cache_salt=self._salt())
        self.engine.add_request(name, prompt, params, lora_request=self._adapter)

    def _salt(self) -> str | None:
        """Return the salt of the prefix cache: requests with different salts share no blocks."""
        return f"load {self._loads}" if self._kv_at_update == "salted" else None

    def abort(self, request_id: int) -> None:
        """Drop a request."""
        self._completed = [done for done in self._completed if done.request_id != request_id]
        self._so_far.pop(request_id, None)
        self.engine.abort_request([str(request_id)])

    def pending(self) -> int:
        """Return the number of queued and running requests."""
        return self.engine.get_num_unfinished_requests() + len(self._completed)

    def step(self) -> list[FinishedRequest]:
        """Advance all running sequences."""
        completed, self._completed = self._completed, []
        return completed + [self._finished(output) for output in self._finished_outputs()]

    def progress(self) -> dict[int, int]:
        """Return {request: number of its tokens so far}, after the steps that vLLM's asynchronous
        scheduling has begun."""
        self._end_steps()
        counts = {
            number: state.detokenizer.num_output_tokens() + len(self._before(number).ids)
            for number, state in self._states().items()
        }
        return counts | {done.request_id: len(done.ids) for done in self._completed}

    def so_far(self) -> list[FinishedRequest]:
        """Return the tokens of all requests so far, after the steps that have begun."""
        self._end_steps()
        found = list(self._completed)
        for number, state in self._states().items():
            ids, before = list(state.detokenizer.output_token_ids), self._before(number)
            log_probs = _sampled_log_probs(state.logprobs_processor.logprobs, ids)
            found.append(
                FinishedRequest(number, before.ids + ids, before.log_probs + log_probs, "")
            )
        return found

    def _end_steps(self) -> None:
        """End the steps that vLLM's asynchronous scheduling has begun."""
        core = self._engine_core()
        if core.batch_queue:
            core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            while core.batch_queue:
                self._completed += map(self._finished, self._finished_outputs())
            core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _states(self) -> dict[int, Any]:
        """Return vLLM's state of each request that is not complete."""
        running: Iterable[Any] = self.engine.output_processor.request_states.values()
        return {int(state.external_req_id): state for state in running}

    def _before(self, request_id: int) -> Completion:
        """Return the tokens that a request had when it was added."""
        return self._so_far.get(request_id, _NOTHING)

    def _finished(self, output: Any) -> FinishedRequest:
        done = _finished_request(output)
        before = self._before(done.request_id)
        self._so_far.pop(done.request_id, None)
        return done._replace(ids=before.ids + done.ids, log_probs=before.log_probs + done.log_probs)

    def _engine_core(self) -> Any:
        """Return vLLM's scheduling engine, which is in this process."""
        client: Any = self.engine.engine_core
        return client.engine_core

    def _finished_outputs(self) -> list[Any]:
        with torch.compiler.set_stance(self._stance):
            return [output for output in self.engine.step() if output.finished]

    def log_probs(self, ids: list[int]) -> list[float]:
        """Return the log-prob of each token but the first. vLLM does not read its prefix cache for
        them."""
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._add_request(_LOG_PROBS_REQUEST, ids, params)
        finished: list[Any] = []
        while not finished:
            for output in self._finished_outputs():
                if output.request_id == _LOG_PROBS_REQUEST:
                    finished.append(output)
                else:
                    self._completed.append(self._finished(output))
        scored = finished[0].prompt_logprobs[1:]
        return [found[token].logprob for found, token in zip(scored, ids[1:], strict=True)]

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights; with rollout.lora_sync=adapter the adapters, and the base model if
        `named` has it. With several devices, each device's process iterates over `named` itself if
        it can be sent there; otherwise over a copy in shared memory."""
        self._adapter = None
        adapter = self._next_adapter() if self._syncs_adapters else None
        if self._shards == 1 or isinstance(named, BucketFiles | BucketStream):
            self._load(named, adapter)
        else:
            files = MemoryFiles()
            try:
                publish(named, [files], self._bucket_bytes)
                self._load(BucketFiles(tuple(files.paths)), adapter)
            finally:
                files.close()
        self._adapter = adapter

    def read_trial(self, stream: BucketStream) -> str:
        """Read the trial of the transport ipc in each device's process. Return the first reason why
        one cannot, or ""."""
        reasons = self.engine.collective_rpc("verlite_read_trial", args=(stream,))
        return next(filter(None, reasons), "")

    def _load(self, named: Iterable[tuple[str, Tensor]], adapter: LoRARequest | None) -> None:
        number = adapter.lora_int_id if adapter else None
        self.engine.collective_rpc("verlite_load", args=(named, number))

    def _next_adapter(self) -> LoRARequest:
        """Return the request of an adapter that no earlier load had, a failed one included. vLLM
        keys its prefix cache by the name, and does not reload a number that it has."""
        number = next(self._adapter_ids)
        return vllm_worker.adapter_request(number)

    def reset_caches(self) -> None:
        """Drop all cached prefixes; those that running requests use as `kv_at_update` says.

        Without `reset_running_requests` vLLM refuses to reset its cache while requests run.
        """
        self._loads += 1
        if self._kv_at_update in ("salted", "mixed") and self.pending():
            if self._kv_at_update == "salted":
                self._salt_queued_requests()
            return
        if not self.engine.reset_prefix_cache(reset_running_requests=self._kv_at_update == "fresh"):
            raise RuntimeError("vLLM did not reset its prefix cache")

    def _salt_queued_requests(self) -> None:
        """Give requests that have computed nothing the new salt."""
        for request in self._engine_core().scheduler.requests.values():
            if not request.num_computed_tokens and not request.num_preemptions:
                request.cache_salt = self._salt()
                request.block_hashes.clear()
                request.update_block_hashes()

    def fingerprint(self) -> int:
        """Return the fingerprint of the weights in vLLM's layers; see `vllm_worker`."""
        return vllm_worker.combine_shards(self.engine.collective_rpc("verlite_fingerprints"))

    def sleep(self) -> set[str]:
        """Free weights and KV cache on a GPU with rollout.free_cache_engine; otherwise nothing.

        vLLM's level 1 keeps the weights in host memory, because the next sync has only adapters.
        Level 2 drops them.
        """
        if not self._frees_memory:
            return set()
        self.engine.sleep(level=1 if self._adapter else 2)
        return {"weights", "kv_cache"}

    def wake(self, tag: str) -> None:
        """Reallocate what `sleep` freed."""
        self.engine.wake_up(tags=[tag])

    def close(self) -> None:
        """Stop vLLM's executor and its worker processes, if any."""
        self.engine.engine_core.shutdown()
        del self.engine


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Take a module out of sys.modules for the time of the block."""
    module = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[name] = module


def engine_args(options: EngineOptions) -> EngineArgs:
    """Return vLLM's arguments. rollout.engine_kwargs.vllm overrides everything else.

    Raises:
        ValueError: vLLM does not know a key of rollout.engine_kwargs.vllm.
    """
    model = options.model
    rollout = options.rollout
    shards = rollout.tensor_model_parallel_size
    args: dict[str, Any] = {
        "model": model.path,
        "tokenizer": model.tokenizer_path or model.path,
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": dict(model.override_config),
        "dtype": str(options.dtype).removeprefix("torch."),
        "seed": options.seed,
        "load_format": "auto" if options.pretrained else "dummy",
        "max_model_len": options.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "tensor_parallel_size": shards,
        # Inside a Ray actor vLLM would choose Ray and wait for devices of a placement group that
        # this run occupies itself.
        "distributed_executor_backend": "mp" if shards > 1 else "uni",
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enforce_eager": rollout.enforce_eager,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_sleep_mode": options.device.type == "cuda" and rollout.free_cache_engine,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": f"{vllm_worker.__name__}.{vllm_worker.WorkerExtension.__name__}",
        "disable_log_stats": True,
    }
    if rollout.syncs_adapters:
        args |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _max_lora_rank(model)}
    if options.device.type == "cpu":
        args["kv_cache_memory_bytes"] = int(rollout.kv_cache_gb * 2**30)
        # On CPUs vLLM cannot take back the random number of a seeded request whose prompt it
        # computed in part: the step fails.
        args["enable_chunked_prefill"] = False
        args["max_num_batched_tokens"] = max(rollout.max_num_batched_tokens, options.max_model_len)
    extra = dict(rollout.engine_kwargs.get("vllm") or {})
    known = {field.name for field in fields(EngineArgs)}
    unknown = sorted(set(extra) - known)
    if unknown:
        raise ValueError(
            f"rollout.engine_kwargs.vllm.{unknown[0]}: vLLM's EngineArgs has no such argument"
        )
    return EngineArgs(**(args | extra))


def _max_lora_rank(model: ModelSpec) -> int:
    """Return the smallest rank of vLLM's kernels that the policy's adapters fit into.

    Raises:
        ValueError: no rank is large enough.
    """
    rank = model.lora_rank
    if model.lora_adapter_path:
        adapter = json.loads(Path(model.lora_adapter_path, "adapter_config.json").read_text())
        rank = max(adapter["r"], *(adapter.get("rank_pattern") or {}).values(), 0)
    legal = sorted(get_args(MaxLoRARanks))
    if rank > legal[-1]:
        raise ValueError(
            f"rollout.lora_sync=adapter: vLLM applies adapters up to rank {legal[-1]}, and these "
            f"have rank {rank}. Use rollout.lora_sync=merged"
        )
    return next(size for size in legal if size >= rank)


def _finished_request(output: Any) -> FinishedRequest:
    answer = output.outputs[0]
    ids = list(answer.token_ids)
    reason = answer.finish_reason if answer.finish_reason in ("stop", "length") else "abort"
    log_probs = _sampled_log_probs(answer.logprobs, ids)
    return FinishedRequest(int(output.request_id), ids, log_probs, reason)


def _sampled_log_probs(log_probs: Any, ids: list[int]) -> list[float]:
    """Extract the sampled tokens' log-probs from vLLM's flat form: a run of candidates per token,
    the sampled one first."""
    starts = log_probs.start_indices
    sampled = [log_probs.token_ids[start] for start in starts]
    if sampled != ids:
        raise RuntimeError("vLLM's log-probs do not belong to the tokens that it sampled")
    return [log_probs.logprobs[start] for start in starts]


def _eos_ids(engine: Any) -> list[int]:
    """Return every id that ends a sequence, by the generation config, the model's config or the
    tokenizer."""
    config = engine.model_config
    sources = (
        config.try_get_generation_config().get("eos_token_id"),
        getattr(config.hf_config, "eos_token_id", None),
        engine.get_tokenizer().eos_token_id,
    )
    found: set[int] = set()
    for ids in sources:
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return sorted(found)
