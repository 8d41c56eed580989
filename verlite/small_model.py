"""Small copies of a model with random weights: few and narrow layers, short windows, chunks and
position thresholds. What is true of the architecture is proven on a copy in a moment, on sequences
that are longer than all of them.

The rules go by the names of configuration values, so they also cover models that transformers does
not have yet. A copy that cannot be built is None, never an error.
"""

import copy
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from verlite.spec.rope import position_limit

LENGTHS = (42, 23, 33)
"""Tokens of the sequences that a copy is checked with, if it has so many positions."""

_LARGEST = 100_000
_MOST_LAYERS = 8
_MOST_PARAMETERS = 40_000_000

# Largest values of integers, by patterns of their names. The first that matches counts.
_CAPS = (
    (r"vocab_size|vocab$", 128),
    (r"original_max_position|floor_scale", 16),
    (r"max_position|n_positions|n_ctx|max_seq_len|max_target_positions|context_length", 64),
    (r"max_window_layers|first_k_dense|num_kv_shared|num_dense_layers|start_index", 1),
    (r"layers_per_stack", 1),
    (r"window(?!.*(layers|pattern))", 6),
    (r"chunk_size(?!_feed)|compress_rate|index_topk|block_size", 8),
    (r"experts?_per_tok|moe_top_?k|moe_k$|top_k_experts|moe_topk|router_top_?k", 2),
    (r"n_group$|topk_group|num_expert_group|n_expert_groups", 1),
    (r"num_nextn|num_mtp|mtp_num", 0),
    (r"experts$", 4),
)
_SOFT_CAP = re.compile(r"soft_?cap|logit_?cap")
_HEADS = re.compile(r"(heads|n_head|heads_kv|n_head_kv|num_query_groups)$")
_SIZES = re.compile(
    r"(hidden_size|d_model|n_embd|embedding_size|lru_width|embedding_dim|emb_dim|channels|d_ssm)$"
)
_INNER = re.compile(r"intermediate|ffn_dim|ffn_hidden|^dff$|dim_ff|d_ff$|d_inner|n_inner|mlp_dim")
_LAYERS = re.compile(r"^(num_hidden_layers|n_layers?|num_layers|decoder_layers|num_blocks)$")
_PERIOD = re.compile(r"(period|interval|every|_step|pattern|_freq|stride|offset)")
_INDICES = re.compile(r"(layer_ids|idxs?|only_layers|layer_idx|indices|moe_layers)$")


def small_config(config: PretrainedConfig, **options: Any) -> PretrainedConfig | None:
    """Return the configuration of a small copy that runs in transformers; None if there is none.

    Of a model of images and text whose copy as a whole is too large or does not run, the copy is of
    its text part, which is what transformers builds as its causal language model.

    options: arguments of AutoModelForCausalLM.from_config.
    """
    from transformers import AutoModelForCausalLM

    small = _small_config(config, **options)
    text = config.get_text_config()
    if small is None and text is not config and type(text) in AutoModelForCausalLM._model_mapping:
        return _small_config(text, **options)
    return small


def _small_config(config: PretrainedConfig, **options: Any) -> PretrainedConfig | None:
    text = config.get_text_config()
    for name in ("hidden_size", "num_hidden_layers"):
        size = getattr(text, name, None) or 0
        if not isinstance(size, int) or size > _LARGEST:
            return None  # a damaged config.json: loading the model says what is wrong
    for divisor in _divisors(text):
        small = copy.deepcopy(config)
        try:
            _shrink(small, divisor)
            with torch.device("meta"):
                whole = _build(copy.deepcopy(small), **options)  # which changes its configuration
            parameters = sum(parameter.numel() for parameter in whole.parameters())
            if parameters > _MOST_PARAMETERS:
                return None  # a smaller divisor leaves more of them
            model = small_model(small, attn_implementation="eager", **options)
            with torch.no_grad():
                model(input_ids=sequences(small)[0][None], use_cache=False)
        except Exception:  # libraries raise anything about values that do not fit each other
            continue
        return small
    return None


def small_model(
    config: PretrainedConfig, build: Callable[..., PreTrainedModel] | None = None, **options: Any
) -> PreTrainedModel:
    """Build a small copy in float32 on the CPU, with random weights of a size that makes every part
    of the model count. The same configuration gives the same weights.

    build: makes a model from the configuration; None: a causal language model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = (build or _build)(
            copy.deepcopy(config), dtype=torch.float32, **options
        )
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            # None near 0: a factor there would leave the choices that it scales to rounding.
            parameter.data += 0.2 * noise.sign() * (0.5 + noise.abs())
        else:
            parameter.data = noise / math.sqrt(parameter.shape[-1])
    model.eval()
    return model


@torch.no_grad()
def unsuitable(model: PreTrainedModel, device: torch.device | None = None) -> str | None:
    """Return why the numbers of a small copy are not a causal language model's whose sequences can
    share a pass; None if they are."""
    text = model.config.get_text_config()
    # doge and deepseek_v4: transformers' own pass over padded sequences differs, at some lengths.
    for name in ("keep_window_size", "compress_rates"):
        if getattr(text, name, None):
            return f"its attention chooses tokens in a way that padding changes ({name})"
    ids = sequences(model.config)[0][None].to(device or "cpu")
    whole = model(input_ids=ids, use_cache=False).logits[:, :-1]
    without_last = model(input_ids=ids[:, :-1], use_cache=False).logits
    if not (whole - without_last).abs().max() <= 1e-3 * whole.abs().max():
        return "its outputs for a token depend on later tokens"
    return None


def sequences(config: PretrainedConfig) -> list[Tensor]:
    """Return sequences of random tokens, as long as the small copy allows."""
    text = config.get_text_config()
    described = text.to_dict()
    limit = position_limit(described)
    bounds = [limit[1]] if limit else []
    bounds += [
        value
        for name, value in described.items()
        if isinstance(value, int) and re.search(_CAPS[2][0], name) and "original" not in name
    ]
    longest = min(bounds, default=LENGTHS[0])
    shorten = min(1.0, longest / max(LENGTHS))
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(4, text.vocab_size, (max(2, int(n * shorten)),), generator=generator)
        for n in LENGTHS
    ]


def _build(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):  # the process's random numbers stay as they are
        built: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
    return built


def _divisors(text: PretrainedConfig) -> Iterator[int]:
    """Yield by how much to divide widths, the most first. At least 32 channels remain, and two
    heads if the model has an even number of them."""
    hidden = getattr(text, "hidden_size", None) or 1
    heads = getattr(text, "num_attention_heads", None) or hidden
    if not isinstance(heads, int):
        heads = hidden
    fitting = [d for d in range(2, hidden // 32 + 1) if heads % d == 0 and hidden % d == 0]
    yield from sorted(fitting, key=lambda d: (d < heads, d), reverse=True)
    yield 1


def _shrink(config: PretrainedConfig, divisor: int) -> None:
    values = vars(config)
    for value in list(values.values()):
        if isinstance(value, PretrainedConfig):
            _shrink(value, divisor)
    depth_name = next((name for name in values if _LAYERS.match(name)), None)
    depth = values.get(depth_name) if depth_name else None
    kept = list(range(depth)) if isinstance(depth, int) else []
    if isinstance(depth, int) and depth > 2:
        kept = _layers(values, depth)
        values[str(depth_name)] = len(kept)
    by_layer = config.to_dict().get("per_layer_config")
    if by_layer:
        own = {int(layer): settings for layer, settings in by_layer.items()}
        config.per_layer_config = {i: own[old] for i, old in enumerate(kept) if old in own}
    for name, value in list(values.items()):
        if name == depth_name or name.startswith("_") or isinstance(value, PretrainedConfig):
            continue
        values[name] = _shrunk(name, value, divisor, depth, kept)


def _layers(values: dict[str, Any], depth: int) -> list[int]:
    """Return the layers to keep: the first of each kind, at least two. Without lists of kinds as
    many as the longest period has."""
    lists = [v for v in values.values() if isinstance(v, list) and len(v) == depth]
    if lists:
        kinds: dict[Any, int] = {}
        for layer in range(depth):
            kinds.setdefault(str([v[layer] for v in lists]), layer)
        kept = sorted(kinds.values())[:_MOST_LAYERS]
        return sorted({*kept, 0, 1, *([depth - 1] if len(kept) < 2 else [])})
    periods = [
        value
        for name, value in values.items()
        if _PERIOD.search(name) and type(value) is int and 1 < value < depth
    ]
    indices = [
        value
        for name, values_ in values.items()
        if _INDICES.search(name) and isinstance(values_, (list, tuple))
        for value in values_
        if type(value) is int
    ]
    count = max(2, *periods, *(1 + i for i in indices[:1]), 2)
    return list(range(min(depth, count, _MOST_LAYERS)))


def _shrunk(name: str, value: Any, divisor: int, depth: Any, kept: list[int]) -> Any:
    """Return the small copy's value of one setting."""
    if isinstance(value, dict):
        return {
            key: _shrunk(f"{name}.{key}", item, divisor, None, []) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)) and isinstance(depth, int) and kept:
        if len(value) == depth:
            return [_shrunk(name, value[layer], divisor, None, []) for layer in kept]
        if _INDICES.search(name) and all(type(item) is int for item in value):
            return [kept.index(item) for item in value if item in kept]
        return value
    if name.endswith("token_id"):
        ids = value if isinstance(value, list) else [value]
        ids = [min(i, 3) if type(i) is int else i for i in ids]
        return ids if isinstance(value, list) else ids[0]
    if type(value) is float and value > 1 and _SOFT_CAP.search(name):
        return 1.0  # small weights have small logits, which a larger cap does not change
    if type(value) is not int or value < 1:
        return value
    for pattern, cap in _CAPS:
        if re.search(pattern, name):
            is_off = pattern.startswith("max_window") and isinstance(depth, int) and value >= depth
            return len(kept) if is_off else min(value, cap)
    if divisor > 1 and (_HEADS.search(name) or _SIZES.search(name)):
        if value % divisor and value > divisor:
            raise ValueError(f"{name}={value} is not a multiple of {divisor}")
        return max(1, value // divisor)
    if divisor > 1 and _INNER.search(name):
        return max(1, value // divisor)
    return value
