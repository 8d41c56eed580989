"""The embedded engine: any causal language model of transformers, with its own batched generation loop.

Layout: the n running sequences are rows 0..n-1 of preallocated tensors, each starting at slot 0, so that a token's slot is
its position. A row that finishes is replaced by the last one, and new requests join behind, so every step computes exactly
the running rows. Prompts are prefilled up to their last token; that one goes through the same decode step as sampled tokens.

Letters: n rows, L slots, V vocabulary, H key-value heads, D head size.
"""

import logging
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_utils import AttentionInterface

from verlite.config.schema import ModelConfig
from verlite.protocol.weights import combine, tensor_fingerprint
from verlite.rollout.batched import Finished
from verlite.rollout.sampling import mix64, sample, uniform
from verlite.rollout.types import Sampling

log = logging.getLogger(__name__)

_ATTENTION = "verlite_rollout"
_PREFILL_TOKENS = 8192  # padded prompt tokens of one prefill pass: bounds activation memory
_MIN_SLOTS = 64


class KVCache:
    """Keys and values of all layers, [rows, H, L, D] each, and the attention that reads them.

    Attention does its own cache writes, so the model runs as if it had no cache and none of its mask code runs.
    """

    def __init__(self) -> None:
        self.rows = self.slots = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._prefill: tuple[Tensor, Tensor] | None = None
        self._positions = torch.empty(0, dtype=torch.int64)
        self._index = torch.empty(0, dtype=torch.int64)
        self._masks: dict[int | None, Tensor] = {}

    def reserve(self, rows: int, slots: int) -> None:
        """Make room. Grows by doubling and never shrinks."""
        if rows <= self.rows and slots <= self.slots:
            return
        self.rows = max(self.rows, 1 << (rows - 1).bit_length())
        self.slots = max(self.slots, _MIN_SLOTS, 1 << (slots - 1).bit_length())
        self._layers = {
            layer: (self._grown(keys), self._grown(values))
            for layer, (keys, values) in self._layers.items()
        }

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros(self.rows, old.shape[1], self.slots, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def begin_prefill(self, rows: Tensor, source: Tensor) -> None:
        """Next pass: prompts [m, P]; row rows[i] takes the keys and values of prompt source[i]."""
        self._prefill = (rows, source)

    def begin_decode(self, positions: Tensor) -> None:
        """Next pass: one token for each of the first n rows, at `positions` [n]."""
        self._prefill = None
        self._positions = positions
        self._index = torch.arange(len(positions), device=positions.device)
        self._length = int(positions.max()) + 1
        self._masks.clear()

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` slots of rows `sources` over rows `targets`."""
        for keys, values in self._layers.values():
            keys[targets, :, :length] = keys[sources, :, :length]
            values[targets, :, :length] = values[sources, :, :length]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        """Attention of one layer for the pass that was begun; query [b, heads, q, D] -> [b, q, heads, D]."""
        if layer not in self._layers:
            self._layers[layer] = (
                key.new_zeros(self.rows, key.shape[1], self.slots, key.shape[3]),
                value.new_zeros(self.rows, value.shape[1], self.slots, value.shape[3]),
            )
        keys, values = self._layers[layer]
        if self._prefill is not None:
            rows, source = self._prefill
            length = key.shape[2]
            keys[rows, :, :length] = key[source]
            values[rows, :, :length] = value[source]
            mask = None
            if window is not None and window < length:
                age = torch.arange(length, device=key.device)[:, None] - torch.arange(
                    length, device=key.device
                )
                mask = (age >= 0) & (age < window)
            out = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=key.shape[1] != query.shape[1],
            )
            return out.transpose(1, 2)
        keys[self._index, :, self._positions] = key[:, :, 0]
        values[self._index, :, self._positions] = value[:, :, 0]
        n, heads, _, size = query.shape
        # The query heads that share one key-value head become that head's query positions: nothing is repeated.
        grouped = query.view(n, key.shape[1], heads // key.shape[1], size)
        out = F.scaled_dot_product_attention(
            grouped,
            keys[:n, :, : self._length],
            values[:n, :, : self._length],
            attn_mask=self._mask(window, query.dtype),
            scale=scale,
        )
        return out.reshape(n, 1, heads, values.shape[3])

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive [n, 1, 1, L] mask of this decode step, for all layers with this window."""
        if window not in self._masks:
            age = self._positions[:, None] - torch.arange(
                self._length, device=self._positions.device
            )
            seen = age >= 0 if window is None else (age >= 0) & (age < window)
            self._masks[window] = torch.zeros(
                seen.shape, dtype=dtype, device=seen.device
            ).masked_fill_(~seen, -torch.inf)[:, None, None]
        return self._masks[window]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    rollout_cache: KVCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    special = [
        name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None
    ]
    if rollout_cache is None or special:
        raise NotImplementedError(f"cached generation does not know {special}")
    return rollout_cache.attend(module.layer_idx, query, key, value, scaling, sliding_window), None


AttentionInterface.register(_ATTENTION, _attention)


@dataclass
class _Row:
    """A running sequence."""

    request_id: int
    sampling: Sampling
    prompt_length: int


class HFCore:
    """Batched generation with a transformers model; see `batched.Core`."""

    def __init__(
        self,
        model: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_num_seqs: int,
        max_model_len: int,
        seed: int,
        pretrained: bool,
    ):
        """`pretrained`: load the checkpoint's weights; otherwise they stay random until `load`."""
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code
        )
        self.model = _build_model(model, dtype, pretrained).to(device)
        self.dtype = dtype
        self.device = device
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self._eos = torch.tensor(
            sorted(eos_ids(model.path, self.model, self.tokenizer)),
            dtype=torch.int64,
            device=device,
        )
        self.vocab_size = self.model.get_input_embeddings().weight.shape[0]
        self._seeds = random.Random(seed)
        self._waiting: deque[tuple[int, list[int], Sampling]] = deque()
        self._rows: list[_Row] = []
        self._enders: dict[tuple[str, ...], Tensor] = {}
        self._cache = KVCache()
        self._allocate_rows(0, 0)
        self._caching = self._cache_agrees()

    # Requests

    def add(self, request_id: int, prompt_ids: list[int], sampling: Sampling) -> None:
        """Queue a request."""
        self._waiting.append((request_id, prompt_ids, sampling))

    @torch.inference_mode()
    def abort(self, request_id: int) -> None:
        """Forget a request."""
        self._waiting = deque(request for request in self._waiting if request[0] != request_id)
        self._remove([i for i, row in enumerate(self._rows) if row.request_id == request_id])

    def pending(self) -> int:
        """Requests queued or running."""
        return len(self._waiting) + len(self._rows)

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Take in as many requests as fit, then sample one token for each running row."""
        if self._waiting and len(self._rows) < self.max_num_seqs:
            self._admit()
        n = len(self._rows)
        rows, position = self._row_index[:n], self._position[:n]
        logits = self._next_logits(self._tokens[rows, position], position)
        draws = uniform(self._key[:n], position + 1)
        ids, log_probs = sample(
            logits,
            self._temperature[:n],
            self._top_k[:n],
            self._top_p[:n],
            draws,
            filtered=self._filtered,
        )
        position += 1
        self._tokens[rows, position] = ids
        self._log_probs[rows, position] = log_probs
        stopped = torch.isin(ids, self._eos) & self._heeds_eos[:n]
        if self._watched:
            stopped |= self._completes_stop_string(ids)
        ended = stopped | (position + 1 >= self._limit[:n])
        if not ended.any():
            return []
        finished = []
        indices = ended.nonzero().flatten().tolist()
        for i, stop, last in zip(
            indices, stopped[indices].tolist(), position[indices].tolist(), strict=True
        ):
            new = slice(self._rows[i].prompt_length, last + 1)
            reason = "stop" if stop else "length"
            finished.append(
                Finished(
                    self._rows[i].request_id,
                    self._tokens[i, new].tolist(),
                    self._log_probs[i, new].tolist(),
                    reason,
                )
            )
        self._remove(indices)
        return finished

    # Weights and memory

    @torch.no_grad()
    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all weights into the model. Raises ValueError naming what is unknown, misshapen or missing."""
        targets = self.model.state_dict()
        missing = {tensor.data_ptr(): name for name, tensor in targets.items()}
        arrived: dict[str, Tensor] = {}
        foreign: dict[str, Tensor] = {}
        for name, tensor in named:
            if name in targets:
                _copy(name, tensor, targets[name])
                missing.pop(targets[name].data_ptr(), None)
                arrived[name] = targets[name]
            else:
                foreign[name] = tensor.clone()
        if foreign:
            for name, tensor in self._converted(arrived | foreign).items():
                _copy(name, tensor, targets[name])
                missing.pop(targets[name].data_ptr(), None)
        if missing:
            raise ValueError(
                f"{len(missing)} weights did not come, such as {min(missing.values())}"
            )

    def _converted(self, checkpoint: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights by the names inside the model, from those of its checkpoints: transformers fuses some, such as experts."""
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

    def reset_caches(self) -> None:
        """Nothing outlives a request: keys and values are computed anew for each."""

    def fingerprint(self) -> int:
        """Checksum of the model's tensors, tied ones once."""
        unique = {tensor.data_ptr(): tensor for tensor in self.model.state_dict().values()}
        return combine(*(tensor_fingerprint(tensor, self.dtype) for tensor in unique.values()))

    def sleep(self) -> set[str]:
        """Free the key-value cache. It grows again by itself, so nothing needs waking; weights stay."""
        self._cache = KVCache()
        self._allocate_rows(0, 0)
        return set()

    def wake(self, tag: str) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Free everything."""
        self._rows.clear()
        self.sleep()
        del self.model

    # Rows

    def _allocate_rows(self, rows: int, slots: int) -> None:
        """Make room for `rows` sequences of `slots` tokens, keeping the running ones."""
        self._cache.reserve(rows, slots)
        rows, slots = self._cache.rows, self._cache.slots

        def grown(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
            new = torch.zeros(shape, dtype=dtype, device=self.device)
            old = getattr(self, name, None)
            if old is not None and self._rows:
                new[tuple(slice(size) for size in old.shape)] = old
            return new

        self._tokens = grown("_tokens", torch.int64, rows, slots)
        self._log_probs = grown("_log_probs", torch.float32, rows, slots)
        self._position = grown("_position", torch.int64, rows)  # slot of the newest token
        self._limit = grown("_limit", torch.int64, rows)  # slots it may fill
        self._key = grown("_key", torch.int64, rows)  # of its random numbers
        self._temperature = grown("_temperature", torch.float32, rows)
        self._top_k = grown("_top_k", torch.int64, rows)
        self._top_p = grown("_top_p", torch.float32, rows)
        self._heeds_eos = grown("_heeds_eos", torch.bool, rows)
        self._row_index = torch.arange(rows, device=self.device)
        self._note_rows()

    def _note_rows(self) -> None:
        """What a step would otherwise ask of every row."""
        self._filtered = any(row.sampling.top_p < 1 or row.sampling.top_k > 0 for row in self._rows)
        self._watched = any(row.sampling.stop for row in self._rows)

    def _admit(self) -> None:
        """Prefill waiting requests into new rows. Equal prompts are computed once."""
        taken = [
            self._waiting.popleft()
            for _ in range(min(len(self._waiting), self.max_num_seqs - len(self._rows)))
        ]
        taken.sort(key=lambda request: (len(request[1]), request[1]))
        first = len(self._rows)
        limits = [
            min(len(prompt) + sampling.max_tokens, self.max_model_len)
            for _, prompt, sampling in taken
        ]
        if first + len(taken) > self._cache.rows or max(limits) > self._cache.slots:
            self._allocate_rows(first + len(taken), max(limits))
        self._rows += [
            _Row(request_id, sampling, len(prompt)) for request_id, prompt, sampling in taken
        ]
        prompts, samplings = (
            [prompt for _, prompt, _ in taken],
            [sampling for *_, sampling in taken],
        )
        new = slice(first, len(self._rows))
        padded = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(prompt) for prompt in prompts], batch_first=True
        )
        self._tokens[new, : padded.shape[1]] = padded.to(self.device)

        def fill(tensor: Tensor, values: list[Any]) -> None:
            tensor[new] = torch.tensor(values, dtype=tensor.dtype, device=self.device)

        fill(self._position, [len(prompt) - 1 for prompt in prompts])
        fill(self._limit, limits)
        fill(
            self._key,
            [mix64(self._seeds.getrandbits(63) if s.seed is None else s.seed) for s in samplings],
        )
        fill(self._temperature, [s.temperature for s in samplings])
        fill(
            self._top_k,
            [
                self.vocab_size if s.greedy or s.top_k < 1 else min(s.top_k, self.vocab_size)
                for s in samplings
            ],
        )
        fill(self._top_p, [1.0 if s.greedy else s.top_p for s in samplings])
        fill(self._heeds_eos, [not s.ignore_eos for s in samplings])
        self._note_rows()
        if self._caching:
            self._prefill([prompt[:-1] for prompt in prompts], first)

    def _prefill(self, contexts: list[list[int]], first: int) -> None:
        """Fill the cache of rows first, first + 1, ... with their contexts, which are sorted by length."""
        batch: dict[tuple[int, ...], list[int]] = {}
        for row, context in enumerate(map(tuple, contexts), first):
            if not context:
                continue
            if batch and context not in batch and (len(batch) + 1) * len(context) > _PREFILL_TOKENS:
                self._prefill_batch(batch)
                batch = {}
            batch.setdefault(context, []).append(row)
        if batch:
            self._prefill_batch(batch)

    def _prefill_batch(self, batch: dict[tuple[int, ...], list[int]]) -> None:
        """One pass over distinct contexts, right-padded (causal attention makes padding harmless); rows that share one copy it."""
        ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.int64, device=self.device)
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
        """Drop rows; the last rows move into the gaps."""
        dropped = set(indices)
        n = len(self._rows) - len(dropped)
        targets = sorted(i for i in dropped if i < n)
        sources = [i for i in range(n, len(self._rows)) if i not in dropped]
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
                self._heeds_eos,
            ):
                tensor[targets] = tensor[sources]
        del self._rows[n:]
        self._note_rows()

    # The model

    def _next_logits(self, ids: Tensor, position: Tensor) -> Tensor:
        """Logits [n, V] after the newest token `ids` [n] of each row, at `position` [n]."""
        if not self._caching:
            return self._recomputed_logits(position)
        self._cache.begin_decode(position)
        out = self.model(
            input_ids=ids[:, None],
            position_ids=position[:, None],
            use_cache=False,
            rollout_cache=self._cache,
        )
        return out.logits[:, -1]

    def _recomputed_logits(self, position: Tensor) -> Tensor:
        """The same from whole sequences, for models whose layers the cache cannot serve."""
        length = int(position.max()) + 1
        ids, kept = self._tokens[: len(position), :length], []
        mask = torch.arange(length, device=self.device) <= position[:, None]
        for i in range(0, len(position), step := max(1, _PREFILL_TOKENS // length)):
            part = slice(i, i + step)
            logits = self.model(
                input_ids=ids[part], attention_mask=mask[part].long(), use_cache=False
            ).logits
            kept.append(logits[self._row_index[: len(logits)], position[part]])
        return torch.cat(kept)

    @torch.inference_mode()
    def _cache_agrees(self) -> bool:
        """Try cached generation on random tokens against whole sequences; False makes every step recompute them."""
        generator = torch.Generator().manual_seed(0)
        sequences = [
            torch.randint(self.vocab_size, (length,), generator=generator).tolist()
            for length in (5, 9)
        ]
        last = torch.tensor([len(sequence) - 1 for sequence in sequences], device=self.device)
        self._allocate_rows(2, 9)
        for i, sequence in enumerate(sequences):
            self._tokens[i, : len(sequence)] = torch.tensor(sequence)
        expected = self._recomputed_logits(last).float()
        try:
            self.model.set_attn_implementation(_ATTENTION)
            self._caching = True
            self._prefill([sequence[:-2] for sequence in sequences], 0)
            for position in (last - 1, last):
                logits = self._next_logits(self._tokens[self._row_index[:2], position], position)
            problem = (
                ""
                if (logits.float() - expected).abs().max() <= 0.02 * expected.std()
                else "its cached logits differ"
            )
        except (NotImplementedError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            log.warning(
                "the hf engine cannot cache keys and values of a %s model (%s); it computes every sequence anew for each token, which is "
                "slow. rollout.name=vllm does not have this limit.",
                self.model.config.model_type,
                problem,
            )
            self.model.set_attn_implementation("eager")
        self.sleep()
        return not problem

    def _completes_stop_string(self, ids: Tensor) -> Tensor:
        """Rows [n] whose newest token `ids` [n] completes one of their stop strings."""
        done = torch.zeros(len(ids), dtype=torch.bool, device=self.device)
        for i, (row, token) in enumerate(zip(self._rows, ids.tolist(), strict=True)):
            stop = row.sampling.stop
            if not stop or not self._may_end(stop)[token]:
                continue
            # A character is at most four tokens (its bytes), and a few special tokens may lie between.
            tail = max(row.prompt_length, int(self._position[i]) + 1 - 4 * max(map(len, stop)) - 8)
            text = self.tokenizer.decode(
                self._tokens[i, tail : int(self._position[i]) + 1].tolist(),
                skip_special_tokens=True,
            )
            done[i] = any(string in text for string in stop)
        return done

    def _may_end(self, stop: tuple[str, ...]) -> list[bool]:
        """Which tokens can complete one of these strings: those with one of their last characters, or part of a character."""
        if stop not in self._enders:
            texts = self.tokenizer.batch_decode([[i] for i in range(self.vocab_size)])
            self._enders[stop] = [
                any(string[-1] in text for string in stop) or "\ufffd" in text for text in texts
            ]
        return self._enders[stop]


def eos_ids(path: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every id that ends a sequence, by generation_config.json, the model's config or the tokenizer."""
    try:
        generation = GenerationConfig.from_pretrained(
            path
        )  # a model built from its config alone does not read the file
    except OSError:  # there is none
        generation = model.generation_config
    found: set[int] = set()
    for ids in (generation.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return found


def _build_model(model: ModelConfig, dtype: torch.dtype, pretrained: bool) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    for key, value in model.override_config.items():
        setattr(config, key, value)
    # eager is the one attention that knows everything a model may ask for, such as soft caps; the cache replaces it where it can
    options: dict[str, Any] = {
        "dtype": dtype,
        "trust_remote_code": model.trust_remote_code,
        "attn_implementation": "eager",
    }
    if pretrained:
        built = AutoModelForCausalLM.from_pretrained(model.path, config=config, **options)
    else:
        built = AutoModelForCausalLM.from_config(config, **options)
    return built.eval().requires_grad_(False)


def _copy(name: str, source: Tensor, target: Tensor) -> None:
    if source.shape != target.shape:
        raise ValueError(
            f"{name} has shape {list(source.shape)}, the engine's has {list(target.shape)}"
        )
    target.copy_(source)
