"""Build a generation engine."""

from collections.abc import Callable

import torch

from verlite.rollout.batched import BatchedEngine, Core
from verlite.rollout.types import EngineOptions
from verlite.spec.catalog import ENGINES, resolve
from verlite.spec.roles import GenerationSpec, ModelSpec

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def engine_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype of an engine's weights for rollout.dtype.

    "auto" means bfloat16 on a GPU and float32 on a CPU.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in _DTYPES:
        raise ValueError(f"rollout.dtype={dtype!r} must be one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def build_engine(
    name: str,
    model: ModelSpec,
    rollout: GenerationSpec,
    max_model_len: int,
    device: torch.device,
    seed: int,
    *,
    pretrained: bool = False,
) -> BatchedEngine:
    """Start a generation engine.

    Args:
        name: rollout.name: an entry of the catalog, or the user's own "package.module:name".
        model: the model to generate with.
        rollout: the engine's settings.
        max_model_len: maximum number of prompt and response tokens of one sequence.
        device: where the engine computes.
        seed: seed of requests that have none of their own.
        pretrained: start with the checkpoint's weights as version 0. Otherwise the engine refuses
            to generate until `load_weights`.

    Raises:
        ValueError: the name or a setting is not supported. Other exceptions of the engine's
            constructor are passed on.
    """
    make_core: Callable[[EngineOptions], Core] = resolve(name, ENGINES, "rollout.name")
    options = EngineOptions(
        model=model,
        rollout=rollout,
        dtype=engine_dtype(rollout.dtype, device),
        device=device,
        max_model_len=max_model_len,
        seed=seed,
        pretrained=pretrained,
    )
    return BatchedEngine(
        lambda: make_core(options),
        has_weights=pretrained,
        request_timeout_s=rollout.request_timeout_s,
    )
