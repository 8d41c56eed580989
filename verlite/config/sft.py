"""The configuration of `verlite.main_sft`. Keys that verl has too keep verl's names."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Optional, cast

from omegaconf import MISSING

from verlite.config import catalog, load, machine, sft_aliases, verl
from verlite.config.command import Command
from verlite.config.facts import key, section
from verlite.config.load import LoadedConfig
from verlite.config.problems import Problem
from verlite.config.rules import data, devices, models, trainer, values
from verlite.config.schema import (
    DEVICE_HINTS,
    TRACKER_HINTS,
    Files,
    FSDPConfig,
    ModelConfig,
    OptimConfig,
)


@dataclass
class SFTDataConfig:
    """Training examples: prompts and the responses to learn."""

    train_files: Files = key(
        MISSING,
        "File, or list of files, with a prompt and a response column: parquet, jsonl, json or csv.",
    )
    val_files: Files = key(
        None, "File, or list of files, for the validation loss. null: no validation."
    )
    prompt_key: str = key(
        "prompt", "Column of the prompt: text, or chat messages (a list of role and content)."
    )
    response_key: str = key(
        "response", "Column of the response: text. The end-of-sequence token is appended."
    )
    prompt_dict_keys: Optional[list[str]] = key(
        None,
        "For a column of mappings: the names that lead to the prompt, outermost first. "
        "prompt_key=extra_info with prompt_dict_keys=[question] reads extra_info.question.",
    )
    response_dict_keys: Optional[list[str]] = key(None, "The same for the column of the response.")
    train_batch_size: int = key(256, "Examples per optimizer step over all devices.", bound=">= 1")
    max_length: int = key(
        1024,
        "Maximum tokens of an example: prompt, response and end-of-sequence token.",
        bound=">= 1",
    )
    truncation: str = key(
        "error",
        "Longer examples: error stops the run; right truncates their end.",
        choices=("error", "right"),
    )
    micro_batch_size_per_gpu: Optional[int] = key(
        None,
        "Examples per forward and backward pass on one device. null: max_token_len_per_gpu limits "
        "a pass.",
        bound=">= 1",
    )
    use_dynamic_bsz: Optional[bool] = key(
        None,
        "Fill passes by tokens (true) or count examples (false). null: false if "
        "micro_batch_size_per_gpu is set. The results are the same.",
    )
    max_token_len_per_gpu: int = key(
        8192, "Maximum tokens per forward and backward pass on one device.", bound=">= 1"
    )
    train_max_samples: int = key(
        -1, "Use only the first training rows. -1: all.", bound=">= 1 or -1"
    )
    val_max_samples: int = key(
        -1, "Use only the first validation rows. -1: all.", bound=">= 1 or -1"
    )
    apply_chat_template_kwargs: dict[str, Any] = key(
        {}, "Extra arguments for the tokenizer's chat template."
    )
    shuffle: bool = key(True, "Shuffle the examples in each epoch.")

    def by_examples(self) -> bool:
        """Return whether passes count examples instead of tokens."""
        if self.use_dynamic_bsz is None:
            return self.micro_batch_size_per_gpu is not None
        return not self.use_dynamic_bsz


@dataclass
class SFTTrainerConfig:
    """Duration, validation and output."""

    total_epochs: int = key(4, "Passes over the training data.", bound=">= 1")
    total_training_steps: Optional[int] = key(
        None, "Optimizer steps; overrides total_epochs.", bound=">= 1"
    )
    test_freq: int = key(
        -1,
        "Steps between validation losses. With data.val_files there is always one at the end. "
        "-1: only that one.",
        bound=">= 1 or -1",
        remedy="Use -1 for a single one at the end.",
    )
    project_name: str = key("verlite_sft", "First part of the default run directory.")
    experiment_name: str = key("sft", "Second part of the default run directory.")
    logger: list[str] = key(
        ["console"],
        "Trackers, as main_ppo's. metrics.jsonl is always written.",
        choices=("console", *catalog.TRACKERS),
        own="class",
        hints=TRACKER_HINTS,
    )
    default_local_dir: str = key(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        "Run directory for metrics.jsonl, config.yaml, and the trained model in huggingface/.",
    )
    device: str = key(
        "auto",
        "auto (a GPU if available), cuda or cpu.",
        choices=("auto", "cuda", "cpu"),
        hints=DEVICE_HINTS,
    )
    seed: int = key(42, "Seed of the data order.", bound=">= 0")


@dataclass
class SFTConfig:
    """Supervised fine-tuning."""

    data: SFTDataConfig = section(SFTDataConfig, "Training examples.")
    model: ModelConfig = section(ModelConfig, "The model to train.")
    optim: OptimConfig = section(OptimConfig, "AdamW and its learning-rate schedule.", lr=1e-5)
    fsdp_config: FSDPConfig = section(FSDPConfig, "Sharding and precision.")
    grad_clip: float = key(
        1.0, "Maximum gradient norm; larger gradients are scaled down to it.", bound="> 0"
    )
    ulysses_sequence_parallel_size: int = key(
        1,
        "Adjacent devices that share each pass, each with an equal part of its tokens, for long "
        "examples. It must divide the devices and the model's attention heads. A pass then has "
        "max_token_len_per_gpu tokens for each device of the group.",
        bound=">= 1",
    )
    trainer: SFTTrainerConfig = section(SFTTrainerConfig, "Duration, validation and output.")


LoadedSFT = LoadedConfig[SFTConfig]
"""A configuration that satisfies every rule."""


def compose(
    config_name: str | None = None,
    overrides: Sequence[str] = (),
    config_dir: str | Path | None = None,
    elsewhere: bool = False,
) -> LoadedSFT:
    """Build the configuration from a YAML file (default conf/sft.yaml) and overrides.

    Raises:
        ConfigError: with every unknown key, wrong type, missing value and violated rule.
    """
    loaded: Any = load.compose(config_name, overrides, config_dir, True, elsewhere, SFT)
    return cast(LoadedSFT, loaded)


def _check(config: SFTConfig, user_keys: Collection[str]) -> Iterator[Problem]:
    """Yield violated rules on values. The contents of files are checked when they are read."""
    yield from values.names(config, SFT.keys)
    yield from values.numbers(config, SFT.keys)
    if len(config.optim.betas) != 2:
        yield Problem(
            "optim.betas", config.optim.betas, "must be two numbers", "Usual: [0.9,0.999]."
        )
    yield from _check_processes(config)
    if config.trainer.device == "cuda" and not machine.visible_gpus():
        rule = "this machine shows no GPU"
        yield Problem("trainer.device", "cuda", rule, "Use trainer.device=cpu.", is_local=True)
    if config.trainer.device != "cpu":
        yield from devices.torch_for_gpus(config.trainer.device)
    if config.data.by_examples() and config.data.micro_batch_size_per_gpu is None:
        rule = "needs data.micro_batch_size_per_gpu"
        yield Problem("data.use_dynamic_bsz", False, rule, "Set it, or use_dynamic_bsz=true.")
    test_freq = config.trainer.test_freq
    if test_freq > 0 and config.data.val_files is None:
        remedy = "Set data.val_files, or trainer.test_freq=-1."
        yield Problem("trainer.test_freq", test_freq, "needs validation data", remedy)
    yield from _check_model_path("model.path", config.model.path)
    yield from _check_model_path("model.tokenizer_path", config.model.tokenizer_path)
    yield from models.model_settings("model.", config.model)
    yield from models.adapter_files("model.", config.model)
    yield from data.named(config.data.train_files, config.data.val_files)
    yield from data.missing("data.train_files", config.data.train_files)
    yield from data.missing("data.val_files", config.data.val_files)
    yield from trainer.unwritable("trainer.default_local_dir", config.trainer.default_local_dir)


def _check_processes(config: SFTConfig) -> Iterator[Problem]:
    """The processes that torchrun started can be divided as configured."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    sharing = config.ulysses_sequence_parallel_size
    rule = f"must divide the {processes} processes of this run"
    start = "torchrun --nproc_per_node starts several."
    for name, size, remedy in (
        ("fsdp_config.fsdp_size", config.fsdp_config.fsdp_size, "-1 shards over all of them."),
        ("ulysses_sequence_parallel_size", sharing, "1 shares no pass."),
    ):
        if size > 0 and processes % size:
            yield Problem(name, size, rule, f"{remedy} {start}", is_local=True)
    if sharing > 1 and not config.model.use_remove_padding:
        rule = "needs packed rows, but model.use_remove_padding=false"
        yield Problem("ulysses_sequence_parallel_size", sharing, rule, "Leave one of the two out.")


def _check_model_path(key: str, path: str | None) -> Iterator[Problem]:
    if not path or Path(path).is_dir():
        return
    remedy = "Give a folder, or a name on the hub such as Qwen/Qwen2.5-0.5B."
    if Path(path).is_file():
        yield Problem(key, path, "is a file, not a model folder", remedy)
    elif not models.HUB_NAME.fullmatch(path):
        yield Problem(key, path, "this folder does not exist", remedy)


def _effects(
    config: SFTConfig, user_keys: Collection[str], old_names: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return the user's keys without effect, with reasons, and no remarks."""
    reasons = {}
    by_count = "data.micro_batch_size_per_gpu limits a pass (data.use_dynamic_bsz=false)"
    if config.data.by_examples() and "data.max_token_len_per_gpu" in user_keys:
        reasons["data.max_token_len_per_gpu"] = by_count
    if not config.data.by_examples() and "data.micro_batch_size_per_gpu" in user_keys:
        reasons["data.micro_batch_size_per_gpu"] = (
            "data.max_token_len_per_gpu limits a pass (data.use_dynamic_bsz=true)"
        )
    return reasons, []


SFT = Command(
    schema=SFTConfig,
    config_name="sft",
    tables=sft_aliases.TABLES,
    verl_defaults=partial(verl.defaults, verl.SFT_TABLE),
    verl_files=verl.SFT_TRAINERS,
    rules=_check,
    effects=_effects,
    paths=(
        "data.train_files",
        "data.val_files",
        "model.path",
        "model.tokenizer_path",
        "trainer.default_local_dir",
    ),
    list_keys="List keys: python -m verlite.main_sft --help.",
    explain="verlite explain --sft",
)
"""`verlite.main_sft`."""
