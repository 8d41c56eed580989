"""What a model's config.json says: parameters by kind, multiplications per token, KV cache.

The model is built on the meta device, so that no weights are needed and every number is counted
from its own tensors.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import PretrainedConfig

from verlite.config.rules.models import is_hub_name
from verlite.engine import lora
from verlite.engine.checkpoint import persistent_buffers
from verlite.engine.folder import ModelError, experts_of, load_config
from verlite.engine.model import load_skeleton
from verlite.spec.roles import ModelSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_KINDS = (
    ("embedding", ("embed", "wte", "wpe")),
    ("output head", ("lm_head", "score", "classifier", "embed_out")),
    ("norm", ("norm", "ln_")),
    ("attention", ("attn", "attention")),
    ("MLP", ("mlp", "feed_forward", "expert", "moe")),
)
"""Kind of a parameter by a part of its name, first match."""


@dataclass(frozen=True)
class ModelFacts:
    """Counts of one model.

    architecture: transformers' class.
    layers: decoder layers.
    kinds: parameters by kind, tied ones once.
    trained: parameters that training changes; with LoRA those of the adapters.
    matmul: parameters that each token is multiplied with. The output head counts even if it is
        tied, an embedding table does not, and of experts only those that a token visits.
    attention_width: query heads x head size, over all layers.
    kv_width: elements of the KV cache per token, over all layers.
    exported: parameters and buffers of one weight sync; adapters are merged into them.
    largest: elements of the largest parameter.
    """

    architecture: str
    layers: int
    kinds: dict[str, int]
    trained: int
    matmul: int
    attention_width: int
    kv_width: int
    exported: int
    largest: int

    @property
    def parameters(self) -> int:
        """All parameters."""
        return sum(self.kinds.values())

    @property
    def layer(self) -> int:
        """Parameters of a decoder layer, on average."""
        outside = sum(self.kinds.get(kind, 0) for kind in ("embedding", "output head"))
        return (self.parameters - outside) // self.layers

    def forward_flops(self, length: int) -> int:
        """Return the floating-point operations per token of a forward pass over sequences of
        `length` tokens: 2 per multiplied parameter, and full causal attention.

        A token attends to (length + 1) / 2 tokens on average, each with one product of queries and
        keys and one with values.
        """
        return 2 * self.matmul + 2 * self.attention_width * (length + 1)

    def update_flops(self, length: int, recomputes: bool | str) -> int:
        """Return those of a forward and a backward pass, which costs twice as much.

        recomputes: gradient checkpointing, which runs the forward pass a second time, except what
            it keeps: the outputs of attention, or of all products.
        """
        forward = self.forward_flops(length)
        return 3 * forward + {True: forward, "attention": 2 * self.matmul}.get(recomputes, 0)

    def kv_bytes(self, dtype: str) -> int:
        """Return the bytes of the KV cache per token."""
        return self.kv_width * DTYPE_BYTES[dtype]


def model_facts(model: ModelSpec, head: str = "lm") -> ModelFacts:
    """Count a model, "lm" or with a "value" head. Reads config.json only.

    Raises:
        ModelError: the path has no usable config.json, or LoRA does not fit the model.
    """
    if not is_hub_name(model.path) and not (Path(model.path) / "config.json").is_file():
        raise ModelError(f"model.path={model.path} is not a folder with a config.json")
    config = load_config(model)
    skeleton = load_skeleton(model, head)
    lora.add(skeleton, model)
    kinds = _kinds(skeleton)
    buffers = sum(buffer.numel() for _, buffer in persistent_buffers(skeleton))
    return ModelFacts(
        architecture=type(skeleton).__name__,
        layers=config.num_hidden_layers,
        kinds=kinds,
        trained=sum(p.numel() for _, p in lora.trained(skeleton)),
        matmul=_multiplied(skeleton, config),
        attention_width=_attention_width(config),
        kv_width=_kv_width(config),
        exported=sum(kinds.values()) - kinds.get("adapters", 0) + buffers,
        largest=max(parameter.numel() for parameter in skeleton.parameters()),
    )


def _kinds(model: nn.Module) -> dict[str, int]:
    kinds: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        kinds[_kind(name)] += parameter.numel()
    return dict(kinds.most_common())


def _kind(name: str) -> str:
    if lora.is_adapter(name):
        return "adapters"
    return next((kind for kind, parts in _KINDS if any(p in name for p in parts)), "other")


def _multiplied(model: nn.Module, config: PretrainedConfig) -> int:
    """Return the parameters that each token is multiplied with."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    experts, visited = experts_of(config)
    active = visited / experts if experts else 1.0
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or id(parameter) in embeddings:
            continue
        total += parameter.numel() * (active if ".experts." in name else 1)
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is not None and id(head.weight) in embeddings:
        total += head.weight.numel()
    return round(total)


def _head_size(config: PretrainedConfig) -> int:
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def _attention_width(config: PretrainedConfig) -> int:
    return int(config.num_hidden_layers * config.num_attention_heads * _head_size(config))


def _kv_width(config: PretrainedConfig) -> int:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * _head_size(config))
