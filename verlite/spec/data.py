"""What the driver needs to know to read prompts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OwnClass:
    """A class or function of the user. Without a path there is none."""

    path: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class DataSpec:
    """How rows become prompts, and in which order. Names are those of the keys under `data`."""

    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    max_prompt_length: int = 512
    train_max_samples: int = -1
    val_max_samples: int = -1
    shuffle: bool = True
    seed: int = 42
    filter_overlong_prompts: bool = False
    truncation: str = "error"
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    custom_cls: OwnClass = OwnClass()
    sampler: OwnClass = OwnClass()
    section: Any = None
    """The section `data`, which the user's own classes get as their configuration."""
