"""The keys of `verlite.main_sft`: a schema of its own beside the training loop's, with verl's names where verl has the key."""

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verlite.config import keys, plan, rules
from verlite.config.problems import ConfigError, Problem, nearest
from verlite.config.schema import Files, FSDPConfig, ModelConfig, OptimConfig
from verlite.config.sources import COMMAND_LINE, from_command_line, from_our_yaml, from_yaml


@dataclass
class SFTDataConfig:
    """Examples: a prompt and the response to learn."""

    train_files: Files = MISSING
    """Parquet file, or list of files, with a prompt and a response column."""
    val_files: Files = None
    """As train_files, for the validation loss. null: no validation."""
    prompt_key: str = "prompt"
    """Column of the prompt: text, or chat messages (a list of role and content)."""
    response_key: str = "response"
    """Column of the response: text. The end-of-sequence token is added to it."""
    train_batch_size: int = 256
    """Examples per optimizer step, over all devices."""
    max_length: int = 1024
    """Longest example in tokens: prompt, response and end-of-sequence token."""
    truncation: str = "error"
    """What happens to a longer example: error, or right (its end is cut off)."""
    max_token_len_per_gpu: int = 8192
    """Tokens per forward and backward pass on one device."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments for the tokenizer's chat template."""
    shuffle: bool = True
    """Shuffle the examples anew in each epoch."""


@dataclass
class SFTTrainerConfig:
    """How long, how often, where to."""

    total_epochs: int = 4
    """Passes over the training data."""
    total_training_steps: Optional[int] = None
    """Exactly this many steps, in place of total_epochs."""
    test_freq: int = -1
    """Validation loss every this many steps and at the end. -1: never."""
    project_name: str = "verlite_sft"
    """First part of the run's name."""
    experiment_name: str = "sft"
    """Second part of the run's name."""
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """The run directory: metrics.jsonl, config.yaml, and the trained model in huggingface/."""
    device: str = "auto"
    """auto (GPU where there is one), cuda or cpu."""
    seed: int = 42
    """Seed of the data order."""


@dataclass
class SFTConfig:
    """Supervised training."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    """Examples."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model to train."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """AdamW and its schedule."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding and precision."""
    grad_clip: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
    """How long, how often, where to."""


def compose(
    config_name: str | None = None,
    overrides: Sequence[str] = (),
    config_dir: str | Path | None = None,
) -> SFTConfig:
    """The configuration from conf/sft.yaml (or a file of yours) and overrides in Hydra's grammar.

    Raises ConfigError with every unknown key, wrong type, missing value and violated rule.
    """
    known = keys.table(SFTConfig())
    arguments, _, problems = from_command_line(overrides, config_dir, known)
    name = (config_name or "sft").removesuffix(".yaml")
    sections = frozenset(key for key in known if "." not in key)
    if config_dir is None:
        assignments = from_our_yaml(name, sections)
    else:
        assignments = from_yaml(name, Path(config_dir).expanduser().resolve(), (), sections)
    tree = OmegaConf.structured(SFTConfig)
    broken = set()
    for assignment in [*assignments, *arguments]:
        for key, value in _leaves(assignment.key, assignment.value, known):
            shown = key if assignment.origin == COMMAND_LINE else f"{key} ({assignment.origin})"
            owner = keys.find(key, known)
            if owner is None or owner.section:
                close = nearest(key, (name for name, one in known.items() if not one.section))
                remedy = (
                    f"Did you mean {' or '.join(close)}?"
                    if close
                    else "python -m verlite.main_sft --help lists the keys."
                )
                problems.append(Problem(shown, value, "there is no such key", remedy))
                broken.update(close[:1])
                continue
            if isinstance(value, dict) and not owner.free:
                problems.append(Problem(shown, value, f"expected {owner.type}, got a mapping"))
                broken.add(key)
                continue
            try:
                OmegaConf.update(
                    tree,
                    key,
                    copy.deepcopy(owner.default) if assignment.delete else value,
                    merge=False,
                    force_add=owner.free,
                )
            except (OmegaConfBaseException, ValueError, TypeError):
                problems.append(Problem(shown, value, f"expected {owner.type}, got {value!r}"))
                broken.add(key)
    for key in OmegaConf.missing_keys(tree) - broken:
        problems.append(Problem(key, None, "must be given", known[key].doc))
    if problems:
        raise ConfigError(problems)
    config: SFTConfig = OmegaConf.to_object(tree)  # type: ignore[assignment]
    config.model.path = os.path.expanduser(
        config.model.path
    )  # a shell does not expand the ~ after an = sign
    problems = list(_check(config))
    if problems:
        raise ConfigError(problems)
    return config


def _leaves(key: str, value: Any, known: dict[str, keys.Key]):
    """One assignment of a mapping as assignments of its entries, except to a key that holds a value."""
    if isinstance(value, dict) and not (key in known and not known[key].section):
        for name, entry in value.items():
            yield from _leaves(f"{key}.{name}", entry, known)
    else:
        yield key, value


TWIN = "actor_rollout_ref.actor."
"""Where the training loop has the same optimizer and sharding: what is legal there is legal here."""
CHOICES = {"data.truncation": ("error", "right")}
BOUNDS = {"data.max_length": ">= 1", "data.max_token_len_per_gpu": ">= 1", "trainer.seed": ">= 0"}
"""Keys that the training loop has with another meaning, or not at all. The others are legal as there."""


def _check(config: SFTConfig):
    """Rules on values. What is in files and folders is looked at when they are read."""
    for key in (key.name for key in keys.table(config).values() if not key.section):
        value = rules.get(config, key)
        legal = CHOICES.get(key) or rules.choices(key) or rules.choices(TWIN + key)
        if legal and value not in legal:
            yield Problem(key, value, f"must be one of {', '.join(legal)}")
        words = BOUNDS.get(key) or rules.bound(key) or rules.bound(TWIN + key)
        for item in value if isinstance(value, list) else [value]:
            if words and item is not None and not rules.within(item, words):
                yield Problem(key, value, f"must be {words}")
    if len(config.optim.betas) != 2:
        yield Problem(
            "optim.betas", config.optim.betas, "must be two numbers", "Usual: [0.9,0.999]."
        )
    size, world = config.fsdp_config.fsdp_size, int(os.environ.get("WORLD_SIZE", "1"))
    if size > 0 and world % size:
        yield Problem(
            "fsdp_config.fsdp_size",
            size,
            f"must divide the {world} processes of this run",
            "-1 shards over all of them.",
        )
    if config.trainer.device == "cuda" and not plan.visible_gpus():
        yield Problem(
            "trainer.device", "cuda", "this machine shows no GPU", "Use trainer.device=cpu."
        )
    if config.trainer.test_freq > 0 and config.data.val_files is None:
        yield Problem(
            "trainer.test_freq",
            config.trainer.test_freq,
            "needs validation data",
            "Set data.val_files, or trainer.test_freq=-1.",
        )
    for key, path in (
        ("model.path", config.model.path),
        ("model.tokenizer_path", config.model.tokenizer_path),
    ):
        if path and not Path(path).exists() and not rules.HUB_NAME.fullmatch(path):
            yield Problem(
                key,
                path,
                "there is no such folder",
                "Give a folder, or a name on the hub such as Qwen/Qwen2.5-0.5B.",
            )
    yield from rules.model_trained("model.", config.model)
    yield from rules.adapter_files("model.", config.model)
    yield from rules.files_named(config.data.train_files, config.data.val_files)
    yield from rules.unwritable("trainer.default_local_dir", config.trainer.default_local_dir)
