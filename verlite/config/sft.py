"""The configurations of main_sft, and of main_dpo, whose rows have two responses.

Keys that verl has too keep verl's names.
"""

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Optional, Union

from omegaconf import MISSING

from verlite import hub, machine
from verlite.config.keys import Key, key, section
from verlite.config.problems import Problem
from verlite.config.rules import data, declared, devices, errors, models, trainer
from verlite.config.schema import Files, FSDPConfig, ModelConfig, OptimConfig, RunConfig

EACH_EPOCH = "after_each_epoch"
"""verl's name for as many steps as an epoch has."""


# fmt: off
@dataclass
class RowsConfig:
    """Files of rows, and how rows become batches."""

    train_files: Files = key(MISSING, "File, or list of files: parquet, jsonl, json or csv.")
    val_files: Files = key(None,
        "File, or list of files, for the validation loss. null: no validation.")
    prompt_key: str = key("prompt",
        "Column of the prompt: text, or chat messages (a list of role and content).")
    prompt_dict_keys: Optional[list[str]] = key(None,
        "For a column of mappings: the names that lead to the prompt, outermost first. "
        "prompt_key=extra_info with prompt_dict_keys=[question] reads extra_info.question.")
    tools_key: str = key("tools",
        "Column of the tools that the chat template shows to the model: a list of JSON schemas, "
        "or that as JSON text. Read if the file has it.")
    train_batch_size: int = key(256, "Rows per optimizer step over all devices.", bound=">= 1")
    max_length: int = key(1024,
        "Maximum tokens of an example: prompt, response and end-of-sequence token.",
        bound=">= 1")
    truncation: str = key("error",
        "Longer examples: error stops the run; right truncates their end.",
        choices=("error", "right"))
    micro_batch_size_per_gpu: Optional[int] = key(None,
        "Rows per forward and backward pass on one device. null: max_token_len_per_gpu limits a "
        "pass.",
        bound=">= 1")
    use_dynamic_bsz: Optional[bool] = key(None,
        "Fill passes by tokens (true) or count rows (false). null: false if "
        "micro_batch_size_per_gpu is set. The results are the same.")
    max_token_len_per_gpu: int = key(8192,
        "Maximum tokens per forward and backward pass on one device.",
        bound=">= 1")
    train_max_samples: int = key(-1, "Use only the first training rows. -1: all.",
        bound=">= 1 or -1")
    val_max_samples: int = key(-1, "Use only the first validation rows. -1: all.",
        bound=">= 1 or -1")
    apply_chat_template_kwargs: dict[str, Any] = key({},
        "Extra arguments for the tokenizer's chat template.")
    shuffle: bool = key(True, "Shuffle the rows in each epoch.")

    def by_examples(self) -> bool:
        """Return whether passes count examples instead of tokens."""
        if self.use_dynamic_bsz is None:
            return self.micro_batch_size_per_gpu is not None
        return not self.use_dynamic_bsz


@dataclass
class SFTDataConfig(RowsConfig):
    """Training examples: a row has a prompt and a response, or a conversation."""

    response_key: str = key("response",
        "Column of the response: text. The end-of-sequence token is appended.")
    messages_key: Optional[str] = key(None,
        "Column of conversations: a list of messages with role and content, or that as JSON "
        "text. The assistant's messages are learned. null: messages, in a file that has this "
        "column and none of data.prompt_key.")
    response_dict_keys: Optional[list[str]] = key(None, "The same for the column of the response.")


@dataclass
class SFTTrainerConfig(RunConfig):
    """Duration, validation and output."""

    usual_epochs: ClassVar[int] = 4

    test_freq: Union[int, str] = key(-1,
        "Steps between validation losses, or after_each_epoch. With data.val_files there is "
        "always one at the end. -1: only that one.",
        bound=">= 1 or -1", choices=(EACH_EPOCH,), remedy="Use -1 for a single one at the end.")
    save_freq: Union[int, str] = key(-1,
        "Save a checkpoint every this many steps, or after_each_epoch, and at the end. -1: only "
        "if a signal or trainer.max_runtime stops the run.",
        bound=">= 1 or -1", choices=(EACH_EPOCH,),
        remedy="Use -1 to save only if the run is stopped.")
    max_ckpt_to_keep: Optional[int] = key(None, "Keep this many newest checkpoints. null: all.",
        bound=">= 1")
    project_name: str = key("verlite_sft", "First part of the default run directory.")
    experiment_name: str = key("sft", "Second part of the default run directory.")
    seed: int = key(42, "Seed of the data order.", bound=">= 0")


@dataclass
class TuningConfig:
    """Training on given texts: what main_sft and main_dpo share."""

    data: RowsConfig = section(RowsConfig, "Training data.")
    model: ModelConfig = section(ModelConfig, "The model to train.")
    optim: OptimConfig = section(OptimConfig,
        "AdamW and its learning-rate schedule. The learning rate warms up, then follows a cosine "
        "down to a tenth of its maximum.",
        lr=1e-5, lr_warmup_steps_ratio=0.03, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    fsdp_config: FSDPConfig = section(FSDPConfig, "Sharding and precision.")
    grad_clip: float = key(1.0, "Maximum gradient norm; larger gradients are scaled down to it.",
        bound="> 0")
    ulysses_sequence_parallel_size: int = key(1,
        "Adjacent devices that share each pass, each with an equal part of its tokens, for long "
        "examples. It must divide the devices and the model's attention heads. A pass then has "
        "max_token_len_per_gpu tokens for each device of the group.",
        bound=">= 1")
    trainer: SFTTrainerConfig = section(SFTTrainerConfig, "Duration, validation and output.")


@dataclass
class SFTConfig(TuningConfig):
    """Supervised fine-tuning."""

    data: SFTDataConfig = section(SFTDataConfig,
        "Training examples: a row has a prompt and a response (data.prompt_key, "
        "data.response_key) or a conversation (data.messages_key).")


@dataclass
class DPODataConfig(RowsConfig):
    """Preferences: a row has a prompt, a better response and a worse one."""

    chosen_key: str = key("chosen",
        "Column of the better response: text, or messages of which the last one is the response. "
        "Without a column data.prompt_key, the messages before it are the prompt.")
    rejected_key: str = key("rejected", "The same for the worse response.")


@dataclass
class DPOTrainerConfig(SFTTrainerConfig):
    """Duration, validation and output."""

    usual_epochs: ClassVar[int] = 1


@dataclass
class DPOConfig(TuningConfig):
    """Direct preference optimization."""

    data: DPODataConfig = section(DPODataConfig, "Preferences.", train_batch_size=64)
    optim: OptimConfig = section(OptimConfig, "AdamW and its learning-rate schedule.", lr=1e-6,
        lr_warmup_steps_ratio=0.1, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    trainer: DPOTrainerConfig = section(DPOTrainerConfig, "Duration, validation and output.",
        project_name="verlite_dpo", experiment_name="dpo")
    beta: float = key(0.1,
        "How much a log-prob may differ from that at the start of the run: a response's reward "
        "is beta * (log p - log p at the start). Smaller values allow more.",
        bound="> 0")
# fmt: on


def check(config: TuningConfig, known: dict[str, Key]) -> Iterator[Problem]:
    """Yield violated rules on values. The contents of files are checked when they are read.

    known: every key of the command.
    """
    yield from declared.names(config, known)
    yield from declared.numbers(config, known)
    yield from errors.violations(errors.OPTIMIZER, config.optim, section="optim.")
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
    is_due = test_freq > 0 if isinstance(test_freq, int) else test_freq == EACH_EPOCH
    if is_due and config.data.val_files is None:
        remedy = "Set data.val_files, or trainer.test_freq=-1."
        yield Problem("trainer.test_freq", test_freq, "needs validation data", remedy)
    yield from _check_model_path("model.path", config.model.path)
    yield from _check_model_path("model.tokenizer_path", config.model.tokenizer_path)
    yield from models.model_settings("model.", config.model, config, "fsdp_config")
    yield from models.adapter_files("model.", config.model)
    yield from data.named(config.data.train_files, config.data.val_files)
    yield from data.missing("data.train_files", config.data.train_files)
    yield from data.missing("data.val_files", config.data.val_files)
    yield from trainer.run_section(config.trainer)
    yield from trainer.run_folders(config.trainer)
    yield from trainer.missing_trackers(config.trainer.logger)


def _check_processes(config: TuningConfig) -> Iterator[Problem]:
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
        wrong = models.folder_of_text(key, path) if path else None
        found = [wrong] if wrong else []
        if path and not wrong and key == "model.path":
            found = list(models.weights_of(key, path))
        yield from (replace(problem, is_local=True) for problem in found)
        return
    remedy = "Give a folder, or a name on the hub such as Qwen/Qwen2.5-0.5B."
    if Path(path).is_file():
        yield Problem(key, path, "is a file, not a model folder", remedy)
    elif not hub.NAME.fullmatch(path):
        yield Problem(key, path, "this folder does not exist", remedy)


def effects(
    config: TuningConfig, user_keys: Collection[str], known: dict[str, Key]
) -> tuple[dict[str, str], list[str]]:
    """Return the user's keys without effect, with reasons, and no remarks."""
    reasons = {
        name: f"used only {declared.words(condition.text)}"
        for name in sorted(user_keys & known.keys())
        for condition in known[name].conditions
        if declared.compare(condition.text, config) is False
    }
    by_count = "data.micro_batch_size_per_gpu limits a pass (data.use_dynamic_bsz=false)"
    if config.data.by_examples() and "data.max_token_len_per_gpu" in user_keys:
        reasons["data.max_token_len_per_gpu"] = by_count
    if not config.data.by_examples() and "data.micro_batch_size_per_gpu" in user_keys:
        reasons["data.micro_batch_size_per_gpu"] = (
            "data.max_token_len_per_gpu limits a pass (data.use_dynamic_bsz=true)"
        )
    return reasons, []
