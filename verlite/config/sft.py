"""The configuration of `verlite.main_sft`. Keys that verl has too keep verl's names."""

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verlite.config import keys, load, machine
from verlite.config.facts import key, section
from verlite.config.problems import ConfigError, Problem, nearest
from verlite.config.rules import data, devices, models, trainer, values
from verlite.config.schema import Files, FSDPConfig, ModelConfig, OptimConfig
from verlite.config.sources import (
    COMMAND_LINE,
    Assignment,
    from_command_line,
    from_our_yaml,
    from_yaml,
)


@dataclass
class SFTDataConfig:
    """Training examples: prompts and the responses to learn."""

    train_files: Files = key(
        MISSING, "Parquet file, or list of files, with a prompt and a response column."
    )
    val_files: Files = key(
        None, "Parquet file, or list of files, for the validation loss. null: no validation."
    )
    prompt_key: str = key(
        "prompt", "Column of the prompt: text, or chat messages (a list of role and content)."
    )
    response_key: str = key(
        "response", "Column of the response: text. The end-of-sequence token is appended."
    )
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
    max_token_len_per_gpu: int = key(
        8192, "Maximum tokens per forward and backward pass on one device.", bound=">= 1"
    )
    apply_chat_template_kwargs: dict[str, Any] = key(
        {}, "Extra arguments for the tokenizer's chat template."
    )
    shuffle: bool = key(True, "Shuffle the examples in each epoch.")


@dataclass
class SFTTrainerConfig:
    """Duration, validation and output."""

    total_epochs: int = key(4, "Passes over the training data.", bound=">= 1")
    total_training_steps: Optional[int] = key(
        None, "Optimizer steps; overrides total_epochs.", bound=">= 1"
    )
    test_freq: int = key(
        -1,
        "Steps between validation losses; there is also one at the end. -1: none.",
        bound=">= 1 or -1",
        remedy="Use -1 for never.",
    )
    project_name: str = key("verlite_sft", "First part of the default run directory.")
    experiment_name: str = key("sft", "Second part of the default run directory.")
    default_local_dir: str = key(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        "Run directory for metrics.jsonl, config.yaml, and the trained model in huggingface/.",
    )
    device: str = key(
        "auto", "auto (a GPU if available), cuda or cpu.", choices=("auto", "cuda", "cpu")
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
    trainer: SFTTrainerConfig = section(SFTTrainerConfig, "Duration, validation and output.")


@dataclass(frozen=True)
class LoadedSFT:
    """A configuration that satisfies every rule."""

    config: SFTConfig
    """Plain dataclasses with interpolations resolved."""
    tree: DictConfig
    """The same values as an OmegaConf tree that keeps interpolations."""
    provenance: dict[str, str]
    """Origin of each value that was set: the name of a YAML file or "command line"."""

    def dump(self) -> str:
        """Return the resolved configuration as YAML, with the origin of each value."""
        return load.dump(self, keys.table(SFTConfig()))


def compose(
    config_name: str | None = None,
    overrides: Sequence[str] = (),
    config_dir: str | Path | None = None,
) -> LoadedSFT:
    """Build the configuration from a YAML file (default conf/sft.yaml) and overrides.

    Raises:
        ConfigError: with every unknown key, wrong type, missing value and violated rule.
    """
    builder = _Builder()
    arguments, _, builder.problems = from_command_line(overrides, config_dir, builder.known)
    name = (config_name or "sft").removesuffix(".yaml")
    sections = frozenset(key for key in builder.known if "." not in key)
    if config_dir is None:
        assignments = from_our_yaml(name, sections)
    else:
        assignments = from_yaml(name, Path(config_dir).expanduser().resolve(), (), sections)
    for assignment in [*assignments, *arguments]:
        for leaf, value in _leaves(assignment.key, assignment.value, builder.known):
            builder.assign(assignment, leaf, value)
    return builder.finish()


class _Builder:
    """Collects assignments into the schema's tree, with the problems they cause."""

    def __init__(self) -> None:
        self.known = keys.table(SFTConfig())
        self.tree: DictConfig = OmegaConf.structured(SFTConfig)
        self.provenance: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.broken: set[str] = set()

    def assign(self, assignment: Assignment, key: str, value: Any) -> None:
        """Set one key."""
        shown = key if assignment.origin == COMMAND_LINE else f"{key} ({assignment.origin})"
        owner = keys.find(key, self.known)
        if owner is None or owner.section:
            self._unknown(shown, key, value)
            return
        if isinstance(value, dict) and not owner.free:
            self._problem(shown, key, value, f"expected {owner.type}, got a mapping")
            return
        if assignment.delete:
            value = copy.deepcopy(owner.default)
        try:
            OmegaConf.update(self.tree, key, value, merge=False, force_add=owner.free)
        except (OmegaConfBaseException, ValueError, TypeError):
            self._problem(shown, key, value, f"expected {owner.type}, got {value!r}")
            return
        self.provenance[key] = load.DEFAULT if assignment.delete else assignment.origin

    def _unknown(self, shown: str, key: str, value: Any) -> None:
        close = nearest(key, (name for name, known in self.known.items() if not known.section))
        remedy = "List keys: python -m verlite.main_sft --help."
        if close:
            remedy = f"Did you mean {' or '.join(close)}?"
        self.problems.append(Problem(shown, value, "unknown key", remedy))
        self.broken.update(close[:1])

    def _problem(self, shown: str, key: str, value: Any, rule: str) -> None:
        self.problems.append(Problem(shown, value, rule))
        self.broken.add(key)

    def finish(self) -> LoadedSFT:
        """Resolve the tree and apply the rules."""
        for name in OmegaConf.missing_keys(self.tree) - self.broken:
            self.problems.append(Problem(name, None, "must be given", self.known[name].doc))
        if self.problems:
            raise ConfigError(self.problems)
        # A shell does not expand the ~ after an = sign.
        self.tree.model.path = os.path.expanduser(self.tree.model.path)
        config: SFTConfig = OmegaConf.to_object(self.tree)  # type: ignore[assignment]
        problems = list(_check(config))
        if problems:
            raise ConfigError(problems)
        return LoadedSFT(config, self.tree, self.provenance)


def _leaves(key: str, value: Any, known: dict[str, keys.Key]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a mapping that is assigned to a section; else the assignment itself."""
    is_leaf = key in known and not known[key].section
    if isinstance(value, dict) and not is_leaf:
        for name, entry in value.items():
            yield from _leaves(f"{key}.{name}", entry, known)
    else:
        yield key, value


def _check(config: SFTConfig) -> Iterator[Problem]:
    """Yield violated rules on values. The contents of files are checked when they are read."""
    known = keys.table(config)
    yield from values.names(config, known)
    yield from values.numbers(config, known)
    if len(config.optim.betas) != 2:
        yield Problem(
            "optim.betas", config.optim.betas, "must be two numbers", "Usual: [0.9,0.999]."
        )
    size = config.fsdp_config.fsdp_size
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 0 and processes % size:
        rule = f"must divide the {processes} processes of this run"
        yield Problem("fsdp_config.fsdp_size", size, rule, "-1 shards over all of them.")
    if config.trainer.device == "cuda" and not machine.visible_gpus():
        rule = "this machine shows no GPU"
        yield Problem("trainer.device", "cuda", rule, "Use trainer.device=cpu.")
    if config.trainer.device != "cpu":
        yield from devices.torch_for_gpus(config.trainer.device)
    test_freq = config.trainer.test_freq
    if test_freq > 0 and config.data.val_files is None:
        remedy = "Set data.val_files, or trainer.test_freq=-1."
        yield Problem("trainer.test_freq", test_freq, "needs validation data", remedy)
    yield from _check_model_path("model.path", config.model.path)
    yield from _check_model_path("model.tokenizer_path", config.model.tokenizer_path)
    yield from models.model_settings("model.", config.model)
    yield from models.adapter_files("model.", config.model)
    yield from data.named(config.data.train_files, config.data.val_files)
    yield from trainer.unwritable("trainer.default_local_dir", config.trainer.default_local_dir)


def _check_model_path(key: str, path: str | None) -> Iterator[Problem]:
    if not path or Path(path).is_dir():
        return
    remedy = "Give a folder, or a name on the hub such as Qwen/Qwen2.5-0.5B."
    if Path(path).is_file():
        yield Problem(key, path, "is a file, not a model folder", remedy)
    elif not models.HUB_NAME.fullmatch(path):
        yield Problem(key, path, "this folder does not exist", remedy)
