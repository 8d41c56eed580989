"""The hf engine: batched generation with any causal language model of transformers.

The n running sequences are rows 0..n-1 of preallocated tensors. Each sequence starts at slot 0, so
a token's slot is its position. When a row finishes, the last row takes its place; new requests are
added behind. Every step therefore computes exactly the running rows. A prompt is prefilled except
for its last token, which goes through the same decode step as sampled tokens.

Shapes: n rows, L slots, V vocabulary size.
"""

import itertools
import logging
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from verlite.rollout.batched import FinishedRequest, eos_ids
from verlite.rollout.engines.kv_cache import CACHED_ATTENTION, KVCache
from verlite.rollout.sampling import mix64, sample, uniform
from verlite.rollout.types import Completion, EngineOptions, Sampling
from verlite.small_model import sequences, small_config, small_model, unsuitable
from verlite.spec.roles import ModelSpec
from verlite.spec.rope import beyond_limit, position_limit
from verlite.weights.fingerprint import fingerprint

log = logging.getLogger(__name__)

_PREFILL_TOKENS = 8192  # padded prompt tokens per prefill pass; bounds activation memory
_SLOT_STEP = 64  # slots of the cache are a multiple of it, so that it is not resized often
_CACHE_TOLERANCE = 0.02  # largest difference of cached logits, in standard deviations of the logits
_REPLACEMENT_CHARACTER = "\ufffd"  # what an incomplete UTF-8 character decodes to
_NOTHING = Completion([], [], "", [])
_OTHER = "Use rollout.name=vllm, or a model of another architecture (docs/models.md)"


@dataclass
class _Row:
    """A running sequence."""

    request_id: int
    sampling: Sampling
    prompt_length: int


@dataclass
class _WaitingRequest:
    """A request that has no row yet."""

    request_id: int
    prompt_ids: list[int]
    sampling: Sampling
    so_far: Completion

    @property
    def context(self) -> list[int]:
        return self.prompt_ids + self.so_far.ids


class UnsupportedModel(ValueError):
    """The engine would compute other numbers than the model."""


class HFCore:
    """Batched generation with a transformers model; see `batched.Core`.

    Without options.pretrained the weights are random until `load`.
    """

    def __init__(self, options: EngineOptions):
        extra = options.rollout.engine_kwargs.get("hf")
        if extra:
            raise ValueError(
                f"rollout.engine_kwargs.hf.{min(extra)} is not supported: "
                "the hf engine has no extra arguments. Remove it"
            )
        model = options.model
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code
        )
        built = _build_model(model, options.dtype, options.pretrained, options.device)
        self._trust_remote_code = model.trust_remote_code
        self.model = built.to(options.device)  # type: ignore[arg-type]  # its wrapper hides self
        limit = position_limit(self.model.config.get_text_config().to_dict())
        if limit is not None and options.max_model_len > limit[1]:
            raise ValueError(beyond_limit(*limit, options.max_model_len))
        self.dtype = options.dtype
        self.device = options.device
        self.max_num_seqs = options.rollout.max_num_seqs
        self.max_model_len = options.max_model_len
        self._kv_at_update = options.rollout.kv_at_update
        self._utilization = options.rollout.gpu_memory_utilization
        self._eos = torch.tensor(
            eos_ids(model.path, self.model.config, self.tokenizer),
            dtype=torch.int64,
            device=self.device,
        )
        self.vocab_size = self.model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr]
        self._seeds = random.Random(options.seed)
        self._waiting: deque[_WaitingRequest] = deque()
        self._rows: list[_Row] = []
        self._filtered = self._stopping = 0  # running rows with top_p or top_k, with stop strings
        self._stop_candidates: dict[tuple[str, ...], list[bool]] = {}
        self._slot_bytes = 0  # of the key-value cache, for one token
        self._drop_cache()
        self._frees_weights = _frees_weights(options)
        self._freed: list[tuple[torch.UntypedStorage, int]] = []  # storages and their bytes
        self._is_caching = self._check_cache()

    # Requests

    def add(
        self,
        request_id: int,
        prompt_ids: list[int],
        sampling: Sampling,
        so_far: Completion | None = None,
    ) -> None:
        """Queue a request. Its random numbers depend on its seed and on positions, so after the
        tokens so far it goes on with those that it would have had."""
        request = _WaitingRequest(request_id, prompt_ids, sampling, so_far or _NOTHING)
        self._waiting.append(request)

    @torch.inference_mode()
    def abort(self, request_id: int) -> None:
        """Drop a request."""
        self._waiting = deque(r for r in self._waiting if r.request_id != request_id)
        self._remove([i for i, row in enumerate(self._rows) if row.request_id == request_id])

    def pending(self) -> int:
        """Return the number of queued and running requests."""
        return len(self._waiting) + len(self._rows)

    @torch.inference_mode()
    def step(self) -> list[FinishedRequest]:
        """Admit as many waiting requests as fit, then sample one token for each running row."""
        count = self._admissible() if self._waiting else 0
        if count:
            self._admit(count)
        n = len(self._rows)
        rows = self._row_index[:n]
        position = self._position[:n]
        logits = self._next_logits(self._tokens[rows, position], position)
        ids, log_probs = sample(
            logits,
            self._temperature[:n],
            self._top_k[:n],
            self._top_p[:n],
            uniform(self._key[:n], position + 1),
            filtered=self._filtered > 0,
        )
        position += 1
        self._tokens[rows, position] = ids
        self._log_probs[rows, position] = log_probs
        stopped = torch.isin(ids, self._eos) & self._stops_at_eos[:n]
        if self._stopping:
            stopped |= self._completes_stop_string(ids)
        ended = stopped | (position + 1 >= self._limit[:n])
        if not ended.any():
            return []
        indices = ended.nonzero().flatten().tolist()
        finished = [
            self._tokens_of(i, "stop" if is_stopped else "length")
            for i, is_stopped in zip(indices, stopped[indices].tolist(), strict=True)
        ]
        self._remove(indices)
        return finished

    def _tokens_of(self, i: int, finish_reason: str) -> FinishedRequest:
        """Return the tokens that a row has."""
        new = slice(self._rows[i].prompt_length, int(self._position[i]) + 1)
        return FinishedRequest(
            self._rows[i].request_id,
            _list_of(self._tokens[i, new]),
            _list_of(self._log_probs[i, new]),
            finish_reason,
        )

    def so_far(self) -> list[FinishedRequest]:
        """Return the tokens of all requests so far."""
        waiting = [
            FinishedRequest(one.request_id, one.so_far.ids, one.so_far.log_probs, "")
            for one in self._waiting
        ]
        return [self._tokens_of(i, "") for i in range(len(self._rows))] + waiting

    def progress(self) -> dict[int, int]:
        """Return {request: number of its tokens so far}."""
        positions = self._position[: len(self._rows)].tolist()
        return {
            row.request_id: position + 1 - row.prompt_length
            for row, position in zip(self._rows, positions, strict=True)
        }

    # Weights and memory

    @torch.no_grad()
    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all weights into the model.

        Raises:
            ValueError: a weight is unknown, has another shape, or is missing. The message names it.
        """
        targets = self.model.state_dict()
        missing = {tensor.data_ptr(): name for name, tensor in targets.items()}
        loaded: dict[str, Tensor] = {}
        renamed: dict[str, Tensor] = {}
        for name, tensor in named:
            if name in targets:
                _copy(name, tensor, targets[name])
                missing.pop(targets[name].data_ptr(), None)
                loaded[name] = targets[name]
            else:
                renamed[name] = tensor.to("cpu", copy=True)  # two models may not fit a device
        if renamed:
            for name, tensor in self._convert(loaded | renamed).items():
                _copy(name, tensor, targets[name])
                missing.pop(targets[name].data_ptr(), None)
        if missing:
            raise ValueError(f"{len(missing)} weights are missing, such as {min(missing.values())}")

    def _convert(self, checkpoint: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert weights with checkpoint names to the model's own names: transformers fuses some,
        such as experts."""
        twin, report = type(self.model).from_pretrained(
            None,
            config=self.model.config,
            state_dict=checkpoint,
            dtype=self.dtype,
            output_loading_info=True,
        )
        if report["unexpected_keys"]:
            raise ValueError(f"the model has no weight called {min(report['unexpected_keys'])}")
        return {
            name: tensor
            for name, tensor in twin.state_dict().items()
            if name not in report["missing_keys"]
        }

    @torch.inference_mode()
    def reset_caches(self) -> None:
        """With kv_at_update "fresh", recompute the keys and values of running requests.
        Without a cache they are recomputed in each step."""
        if self._is_caching and self._kv_at_update == "fresh":
            lengths = self._position[: len(self._rows)].tolist()
            self._prefill({row: self._tokens[row, :n].tolist() for row, n in enumerate(lengths)})

    def fingerprint(self) -> int:
        """Return the fingerprint of the model's tensors, tied ones once."""
        named = self.model.state_dict().items()
        unique = {tensor.data_ptr(): (name, tensor) for name, tensor in named}
        return fingerprint(unique.values(), self.dtype)

    @torch.inference_mode()
    def log_probs(self, ids: list[int]) -> list[float]:
        """Return the log-prob of each token but the first, computed as prompts are."""
        tokens = torch.tensor([ids], device=self.device)
        if self._is_caching:
            cache = KVCache()  # the engine's own stays as it is
            cache.reserve(1, len(ids))
            row = torch.zeros(1, dtype=torch.int64, device=self.device)
            cache.begin_prefill(row, row)
            positions = torch.arange(len(ids), device=self.device)[None]
            out = self.model(
                input_ids=tokens, position_ids=positions, use_cache=False, rollout_cache=cache
            )
        else:
            out = self.model(input_ids=tokens, use_cache=False)
        log_probs = out.logits[0, :-1].float().log_softmax(-1)
        found: list[float] = log_probs.gather(1, tokens[0, 1:, None]).squeeze(1).tolist()
        return found

    def sleep(self) -> set[str]:
        """Free the key-value cache, and on a GPU with rollout.free_cache_engine the weights.

        The cache is reallocated on demand, so it does not need `wake`. Buffers stay: they are
        small, and no sync sends those that the model computes.
        """
        self._drop_cache()
        if self._frees_weights and not self._freed:
            storages = {p.untyped_storage().data_ptr(): p for p in self.model.parameters()}
            for storage in [p.untyped_storage() for p in storages.values()]:
                self._freed.append((storage, storage.nbytes()))
                storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # for the other processes on this GPU
        return {"weights"} if self._freed else set()

    def wake(self, tag: str) -> None:
        """Reallocate the weights, without their values."""
        if tag == "weights":
            for storage, size in self._freed:
                storage.resize_(size)
            self._freed.clear()

    def close(self) -> None:
        """Free everything."""
        self._rows.clear()
        self._drop_cache()
        del self.model

    def _drop_cache(self) -> None:
        self._cache = KVCache()
        self._cache_limit: int | None = None  # bytes; None until a request is admitted
        self._allocate_rows(0, 0)

    # Rows

    def _allocate_rows(self, rows: int, slots: int) -> None:
        """Make room for `rows` sequences of `slots` tokens; keep the running ones."""
        self._cache.reserve(rows, slots)

        def grow(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
            new = torch.zeros(shape, dtype=dtype, device=self.device)
            old = getattr(self, name, None)
            if old is not None and self._rows:
                kept = tuple(map(slice, map(min, old.shape, shape)))
                new[kept] = old[kept]
            return new

        self._tokens = grow("_tokens", torch.int64, rows, slots)
        self._log_probs = grow("_log_probs", torch.float32, rows, slots)
        self._position = grow("_position", torch.int64, rows)  # slot of the newest token
        self._limit = grow("_limit", torch.int64, rows)  # number of slots the row may fill
        self._key = grow("_key", torch.int64, rows)  # key of its random numbers
        self._temperature = grow("_temperature", torch.float32, rows)
        self._top_k = grow("_top_k", torch.int64, rows)
        self._top_p = grow("_top_p", torch.float32, rows)
        self._stops_at_eos = grow("_stops_at_eos", torch.bool, rows)
        self._row_index = torch.arange(rows, device=self.device)

    def _count(self, rows: Iterable[_Row], change: int) -> None:
        """Count rows that begin (change 1) or end (-1) to run."""
        for sampling in (row.sampling for row in rows):
            self._filtered += change * (sampling.top_p < 1 or sampling.top_k > 0)
            self._stopping += change * bool(sampling.stop)

    def _admissible(self) -> int:
        """Return how many waiting requests get rows now: as many as the memory of the cache
        allows, and one if nothing runs."""
        if self._cache_limit is None:
            self._cache_limit = _cache_limit(self.device, self._utilization)
        running = len(self._rows)
        slots = self._cache.slots
        count = 0
        for request in itertools.islice(self._waiting, self.max_num_seqs - running):
            slots = max(slots, self._slots_of(request))
            if running + count and running + count >= self._most_rows(slots):
                break
            count += 1
        return count

    def _slots_of(self, request: _WaitingRequest) -> int:
        """Return the number of tokens that the request may have in the end."""
        return min(len(request.prompt_ids) + request.sampling.max_tokens, self.max_model_len)

    def _most_rows(self, slots: int) -> int:
        """Return how many sequences of `slots` tokens may run at the same time."""
        assert self._cache_limit is not None  # `_admissible` runs first
        row_bytes = max(1, self._slot_bytes * _rounded_up(slots))
        return min(self.max_num_seqs, self._cache_limit // row_bytes)

    def _make_room(self, rows: int, slots: int) -> None:
        """Resize the cache for `rows` sequences of `slots` tokens, if they do not fit. Rows double,
        as far as memory allows; a cache with longer rows may have fewer of them."""
        if rows <= self._cache.rows and slots <= self._cache.slots:
            return
        slots = _rounded_up(max(slots, self._cache.slots))
        doubled = max(self._cache.rows, 1 << (rows - 1).bit_length())
        self._allocate_rows(max(rows, min(doubled, self._most_rows(slots))), slots)

    def _admit(self, count: int) -> None:
        """Move `count` waiting requests into new rows and prefill them. Equal prompts are computed
        once."""
        admitted = [self._waiting.popleft() for _ in range(count)]
        admitted.sort(key=lambda request: (len(request.context), request.context))
        contexts = [request.context for request in admitted]
        samplings = [request.sampling for request in admitted]
        limits = [self._slots_of(request) for request in admitted]
        first = len(self._rows)
        self._make_room(first + count, max(limits))
        for request in admitted:
            row = _Row(request.request_id, request.sampling, len(request.prompt_ids))
            self._rows.append(row)
        new = slice(first, len(self._rows))
        padded = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(context) for context in contexts], batch_first=True
        )
        self._tokens[new, : padded.shape[1]] = padded.to(self.device)
        for i, request in enumerate(admitted, first):
            if request.so_far.ids:
                begin, end = len(request.prompt_ids), len(request.context)
                self._log_probs[i, begin:end] = torch.tensor(request.so_far.log_probs)

        def fill(tensor: Tensor, values: list[Any]) -> None:
            tensor[new] = torch.tensor(values, dtype=tensor.dtype, device=self.device)

        fill(self._position, [len(context) - 1 for context in contexts])
        fill(self._limit, limits)
        fill(self._key, [self._random_key(s) for s in samplings])
        fill(self._temperature, [s.temperature for s in samplings])
        fill(self._top_k, [self._effective_top_k(s) for s in samplings])
        fill(self._top_p, [1.0 if s.greedy else s.top_p for s in samplings])
        fill(self._stops_at_eos, [not s.ignore_eos for s in samplings])
        self._count(self._rows[new], 1)
        if self._is_caching:
            self._prefill({row: context[:-1] for row, context in enumerate(contexts, first)})

    def _random_key(self, sampling: Sampling) -> int:
        seed = sampling.seed
        return mix64(self._seeds.getrandbits(63) if seed is None else seed)

    def _effective_top_k(self, sampling: Sampling) -> int:
        if sampling.greedy or sampling.top_k < 1:
            return self.vocab_size
        return min(sampling.top_k, self.vocab_size)

    def _prefill(self, contexts: dict[int, list[int]]) -> None:
        """Fill the cache of each row with its context."""
        batch: dict[tuple[int, ...], list[int]] = {}
        for row, ids in sorted(contexts.items(), key=lambda item: len(item[1])):
            context = tuple(ids)
            if not context:
                continue
            is_full = (len(batch) + 1) * len(context) > _PREFILL_TOKENS
            if batch and context not in batch and is_full:
                self._prefill_batch(batch)
                batch = {}
            batch.setdefault(context, []).append(row)
        if batch:
            self._prefill_batch(batch)

    def _prefill_batch(self, batch: dict[tuple[int, ...], list[int]]) -> None:
        """Run one pass over distinct contexts and copy each result to all rows that share the
        context.

        Contexts are padded on the right, which causal attention makes harmless.
        """
        longest = max(len(context) for context in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64, device=self.device)
        for i, context in enumerate(batch):
            ids[i, : len(context)] = torch.tensor(context)
        rows = [row for rows in batch.values() for row in rows]
        source = [i for i, rows in enumerate(batch.values()) for _ in rows]
        self._cache.begin_prefill(
            torch.tensor(rows, device=self.device), torch.tensor(source, device=self.device)
        )
        positions = torch.arange(ids.shape[1], device=self.device).expand_as(ids)
        self.model.base_model(
            input_ids=ids, position_ids=positions, use_cache=False, rollout_cache=self._cache
        )

    def _remove(self, indices: list[int]) -> None:
        """Remove rows. The last rows move into the gaps."""
        self._count((self._rows[i] for i in indices), -1)
        removed = set(indices)
        n = len(self._rows) - len(removed)
        targets = sorted(i for i in removed if i < n)
        sources = [i for i in range(n, len(self._rows)) if i not in removed]
        for source, target in zip(sources, targets, strict=True):
            self._rows[target] = self._rows[source]
        if targets:
            length = int(self._position[sources].max()) + 1
            self._cache.move(sources, targets, length)
            for tensor in (self._tokens, self._log_probs):
                tensor[targets, :length] = tensor[sources, :length]
            for tensor in (
                self._position,
                self._limit,
                self._key,
                self._temperature,
                self._top_k,
                self._top_p,
                self._stops_at_eos,
            ):
                tensor[targets] = tensor[sources]
        del self._rows[n:]

    # Model

    def _next_logits(self, ids: Tensor, position: Tensor) -> Tensor:
        """Return logits [n, V] after the newest token `ids` [n] of each row, at `position` [n]."""
        if not self._is_caching:
            return self._recompute_logits(position)
        self._cache.begin_decode(position)
        out = self.model(
            input_ids=ids[:, None],
            position_ids=position[:, None],
            use_cache=False,
            rollout_cache=self._cache,
        )
        return out.logits[:, -1]

    def _recompute_logits(self, position: Tensor) -> Tensor:
        """Return the same logits from whole sequences, for models with layers that the cache does
        not support."""
        length = int(position.max()) + 1
        ids = self._tokens[: len(position), :length]
        mask = torch.arange(length, device=self.device) <= position[:, None]
        rows_per_pass = max(1, _PREFILL_TOKENS // length)
        newest = []
        for start in range(0, len(position), rows_per_pass):
            part = slice(start, start + rows_per_pass)
            logits = self.model(
                input_ids=ids[part], attention_mask=mask[part].long(), use_cache=False
            ).logits
            newest.append(logits[self._row_index[: len(logits)], position[part]])
        return torch.cat(newest)

    @torch.no_grad()
    def _check_cache(self) -> bool:
        """Compare cached generation with whole sequences on random tokens, in float32.

        In half precision the two round differently: their logits differ by 0.03 to 0.06 standard
        deviations in bfloat16, as much as wrong positions change those of random weights. There
        the cache only has to run, because other kernels may be used.

        Returns:
            True if they agree. Otherwise a warning is logged and every step recomputes whole
            sequences.
        """
        problem = ""
        try:
            problem = self._check_copy()
            with _computing_in_float32(self.model):
                expected = self._logits_of_check(is_caching=False)
                self.model.set_attn_implementation(CACHED_ATTENTION)
                found = self._logits_of_check(is_caching=True)
            if problem:
                pass  # the cache fails on longer sequences
            elif not _agree(found, expected):
                problem = "its cached logits differ"
            elif not self._logits_of_check(is_caching=True).isfinite().all():
                problem = f"its cached logits in {self.dtype} are not finite"
        except (torch.OutOfMemoryError, UnsupportedModel):  # they say nothing about the cache
            raise
        except (NotImplementedError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            log.warning(
                "the hf engine cannot cache keys and values of a %s model (%s). It recomputes "
                "every sequence for each token, which is slow. rollout.name=vllm does not have "
                "this limit.",
                self.model.config.model_type,
                problem,
            )
            self.model.set_attn_implementation("eager")
        else:
            self._slot_bytes = self._cache.slot_bytes()
        self._drop_cache()
        return not problem

    def _check_copy(self) -> str:
        """Compare generation by a small copy of the model with transformers' own, untouched model:
        sequences longer than its windows and chunks, one at a time, with eager attention.

        Returns:
            Why keys and values cannot be cached, or "".

        Raises:
            UnsupportedModel: whole sequences in one batch, which need no cache, differ too.
        """
        small = small_config(self.model.config, trust_remote_code=self._trust_remote_code)
        name = self.model.config.model_type
        if small is None:
            log.warning(
                "no small copy of a %s model can be built, so the hf engine checks its cache with "
                "short sequences only",
                name,
            )
            return ""
        real = self.model, self.vocab_size
        options = {"attn_implementation": "eager", "trust_remote_code": self._trust_remote_code}
        copied = small_model(small, **options).to(self.device)  # type: ignore[arg-type]
        reason = unsuitable(copied, self.device)
        if reason is not None:
            raise UnsupportedModel(f"the hf engine does not support {name}: {reason}. {_OTHER}")
        contexts = sorted(sequences(small), key=len)
        expected = torch.stack(
            [copied(ids[None].to(self.device), use_cache=False).logits[0, -1] for ids in contexts]
        )
        lists = [ids.tolist() for ids in contexts]
        self.model, self.vocab_size = copied, len(expected[0])
        try:
            whole = self._logits_of_check(is_caching=False, contexts=lists)
            if not _agree(whole, expected):
                raise UnsupportedModel(
                    f"the hf engine does not support {name}: logits of sequences in one batch "
                    f"differ from those of the model's own pass. {_OTHER}"
                )
            copied.set_attn_implementation(CACHED_ATTENTION)
            found = self._logits_of_check(is_caching=True, contexts=lists)
            return "" if _agree(found, expected) else "its cached logits differ on a small copy"
        finally:
            self.model, self.vocab_size = real
            self._drop_cache()

    def _logits_of_check(self, is_caching: bool, contexts: list[list[int]] | None = None) -> Tensor:
        """Return the logits [n, V] after n sequences, the shortest first; None: two of random
        tokens.

        With the cache, the last two tokens of each are decoded and the others prefilled.
        """
        if contexts is None:
            generator = torch.Generator().manual_seed(0)
            contexts = [
                torch.randint(self.vocab_size, (length,), generator=generator).tolist()
                for length in (5, 9)
            ]
        last = torch.tensor([len(sequence) - 1 for sequence in contexts], device=self.device)
        self._drop_cache()
        self._allocate_rows(len(contexts), _SLOT_STEP)
        for i, sequence in enumerate(contexts):
            self._tokens[i, : len(sequence)] = torch.tensor(sequence)
        self._is_caching = is_caching
        if is_caching:
            self._prefill({row: sequence[:-2] for row, sequence in enumerate(contexts)})
            rows = self._row_index
            self._next_logits(self._tokens[rows, last - 1], last - 1)
        return self._next_logits(self._tokens[self._row_index, last], last)

    # Stop strings

    def _completes_stop_string(self, ids: Tensor) -> Tensor:
        """Return [n] bool: rows whose newest token `ids` [n] completes one of their stop
        strings."""
        done = torch.zeros(len(ids), dtype=torch.bool, device=self.device)
        for i, (row, token) in enumerate(zip(self._rows, ids.tolist(), strict=True)):
            stop = row.sampling.stop
            if not stop or not self._may_complete(stop)[token]:
                continue
            # A character takes at most four tokens (its bytes), plus a few special tokens in
            # between.
            end = int(self._position[i]) + 1
            start = max(row.prompt_length, end - 4 * max(map(len, stop)) - 8)
            text = self.tokenizer.decode(
                self._tokens[i, start:end].tolist(), skip_special_tokens=True
            )
            done[i] = any(string in text for string in stop)
        return done

    def _may_complete(self, stop: tuple[str, ...]) -> list[bool]:
        """Return for each token whether it can complete one of these strings.

        These are the tokens that contain the last character of a string, or a part of a character.
        """
        if stop not in self._stop_candidates:
            texts = self.tokenizer.batch_decode([[i] for i in range(self.vocab_size)])
            self._stop_candidates[stop] = [
                _REPLACEMENT_CHARACTER in text or any(string[-1] in text for string in stop)
                for text in texts
            ]
        return self._stop_candidates[stop]


def _list_of(row: Tensor) -> list[Any]:
    """Return the numbers of a row. numpy's tolist takes a microsecond where torch's takes 80."""
    found: list[Any] = row.cpu().numpy().tolist()
    return found


def _agree(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= _CACHE_TOLERANCE * expected.std())


def _frees_weights(options: EngineOptions) -> bool:
    """Return whether sleep frees the weights. On a CPU a sync overwrites them in place."""
    return options.device.type != "cpu" and options.rollout.free_cache_engine


def _cache_limit(device: torch.device, utilization: float) -> int:
    """Return the bytes that a new key-value cache may take: on a GPU this share of the memory that
    is free now."""
    if device.type != "cuda":
        return sys.maxsize
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(utilization * (free + unused))


def _rounded_up(slots: int) -> int:
    return -(-slots // _SLOT_STEP) * _SLOT_STEP


def _build_model(
    model: ModelSpec, dtype: torch.dtype, pretrained: bool, device: torch.device
) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    for key, value in model.override_config.items():
        setattr(config, key, value)
    # Eager attention supports everything a model may need, such as soft-capping. Cached attention
    # replaces it where possible.
    options: dict[str, Any] = {
        "dtype": dtype,
        "trust_remote_code": model.trust_remote_code,
        "attn_implementation": "eager",
    }
    if pretrained:
        built = AutoModelForCausalLM.from_pretrained(model.path, config=config, **options)
    else:
        with device:  # drawing the random weights takes minutes on a CPU
            built = AutoModelForCausalLM.from_config(config, **options)
    return built.eval().requires_grad_(False)


@contextmanager
def _computing_in_float32(model: nn.Module) -> Iterator[None]:
    """Within the context, every module computes in float32 with its own, exact weights.

    Weights become float32 one module at a time, so this takes the memory of the largest one.
    """
    originals: dict[Tensor, Tensor] = {}

    def to_float32(value: Any) -> Any:
        is_half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if is_half else value

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for weight in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if to_float32(weight) is not weight:
                originals[weight] = weight.data
                weight.data = weight.data.float()
        return tuple(map(to_float32, args)), {k: to_float32(v) for k, v in kwargs.items()}

    def after(module: nn.Module, args: Any, output: Any) -> None:
        for weight in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if weight in originals:
                weight.data = originals.pop(weight)

    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(module.register_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for weight, data in originals.items():
            weight.data = data


def _copy(name: str, source: Tensor, target: Tensor) -> None:
    if source.shape != target.shape:
        raise ValueError(
            f"{name} has shape {list(source.shape)}, but the engine's has {list(target.shape)}"
        )
    target.copy_(source)
