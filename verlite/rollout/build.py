"""From configuration to engine."""

import torch

from verlite.config.schema import ModelConfig, RolloutConfig
from verlite.rollout.batched import BatchedEngine, Core

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def engine_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Dtype of an engine's weights for rollout.dtype: auto is bfloat16 on a GPU and float32 on a CPU."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in _DTYPES:
        raise ValueError(f"rollout.dtype={dtype!r} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def build_engine(
    name: str,
    model: ModelConfig,
    rollout: RolloutConfig,
    max_model_len: int,
    device: torch.device,
    seed: int,
    *,
    pretrained: bool = False,
) -> BatchedEngine:
    """Start a generation engine: `name` is vllm or hf.

    Weights come by `load_weights`; until then the engine refuses to generate. With `pretrained` it starts with the
    checkpoint's weights as version 0. Raises what the engine raises when it cannot start.
    """
    dtype = engine_dtype(rollout.dtype, device)
    if name == "vllm":
        from verlite.rollout.vllm import VLLMCore

        def make_core() -> Core:
            return VLLMCore(
                model,
                rollout,
                dtype=dtype,
                device=device,
                max_model_len=max_model_len,
                seed=seed,
                pretrained=pretrained,
            )

    elif name == "hf":
        from verlite.rollout.hf import HFCore

        if extra := rollout.engine_kwargs.get("hf"):
            raise ValueError(
                f"rollout.engine_kwargs.hf.{min(extra)}: the hf engine has no extra arguments"
            )

        def make_core() -> Core:
            return HFCore(
                model,
                dtype=dtype,
                device=device,
                max_num_seqs=rollout.max_num_seqs,
                max_model_len=max_model_len,
                seed=seed,
                pretrained=pretrained,
            )

    else:
        raise ValueError(f"rollout.name={name!r} is not an engine; there are vllm and hf")
    return BatchedEngine(
        make_core, has_weights=pretrained, request_timeout_s=rollout.request_timeout_s
    )
