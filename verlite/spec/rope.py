"""Rotary embeddings that transformers computes from the longest position of a pass."""

from collections.abc import Iterator, Mapping
from typing import Any


def position_limit(described: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the rope type whose factors depend on the longest sequence of a pass, and the tokens
    up to which they do not; None if the model has no such embedding.

    Beyond it one sequence has other log-probs alone than beside a longer one, and other keys in a
    cache that it has outgrown.

    Args:
        described: the values of the model's config.json, or of its text_config.
    """
    limits = []
    for parameters in _rope_parameters(described):
        kind = parameters.get("rope_type", parameters.get("type"))
        limit = described.get("max_position_embeddings")
        if kind == "longrope":
            name = "original_max_position_embeddings"
            limit = parameters.get(name) or described.get(name) or limit
        elif not isinstance(kind, str) or "dynamic" not in kind:
            continue
        if isinstance(limit, int):
            limits.append((str(kind), limit))
    return min(limits, key=lambda item: item[1], default=None)


def beyond_limit(kind: str, limit: int, tokens: int) -> str:
    """Return the error for a sequence that is longer than `position_limit` allows."""
    return (
        f"a sequence of {tokens} tokens: the model has rope_type={kind}, whose embedding changes "
        "with the longest sequence of a pass beyond "
        f"{limit} tokens. Limit prompt and response to at most {limit} tokens together"
    )


def _rope_parameters(described: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of each kind of rotary embedding: of the model, or per layer type."""
    for name in ("rope_parameters", "rope_scaling"):
        parameters = described.get(name)
        if isinstance(parameters, Mapping):
            yield parameters
            yield from (value for value in parameters.values() if isinstance(value, Mapping))
