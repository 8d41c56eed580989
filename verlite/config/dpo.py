"""The configuration of `verlite.main_dpo`: that of main_sft with rows of two responses."""

from dataclasses import dataclass
from typing import ClassVar

from verlite.config.command import Command
from verlite.config.facts import key, section
from verlite.config.schema import OptimConfig
from verlite.config.sft import PATHS, RowsConfig, SFTTrainerConfig, TuningConfig, check, effects
from verlite.config.translation import Tables


@dataclass
class DPODataConfig(RowsConfig):
    """Preferences: a row has a prompt, a better response and a worse one."""

    chosen_key: str = key(
        "chosen",
        "Column of the better response: text, or messages of which the last one is the response. "
        "Without a column data.prompt_key, the messages before it are the prompt.",
    )
    rejected_key: str = key("rejected", "The same for the worse response.")


@dataclass
class DPOTrainerConfig(SFTTrainerConfig):
    """Duration, validation and output."""

    usual_epochs: ClassVar[int] = 1


@dataclass
class DPOConfig(TuningConfig):
    """Direct preference optimization."""

    data: DPODataConfig = section(DPODataConfig, "Preferences.", train_batch_size=64)
    optim: OptimConfig = section(
        OptimConfig,
        "AdamW and its learning-rate schedule.",
        lr=1e-6,
        lr_warmup_steps_ratio=0.1,
        lr_scheduler_type="cosine",
        min_lr_ratio=0.1,
    )
    trainer: DPOTrainerConfig = section(
        DPOTrainerConfig,
        "Duration, validation and output.",
        project_name="verlite_dpo",
        experiment_name="dpo",
    )
    beta: float = key(
        0.1,
        "How much a log-prob may differ from that at the start of the run: a response's reward is "
        "beta * (log p - log p at the start). Smaller values allow more.",
        bound="> 0",
    )


DPO: Command = Command(
    schema=DPOConfig,
    config_name="dpo",
    tables=Tables(),
    verl_defaults=dict,
    verl_files={},
    rules=lambda config, user_keys: check(config, DPO.keys),
    effects=lambda config, user_keys, _: effects(config, user_keys, DPO.keys),
    paths=PATHS,
    list_keys="List keys: python -m verlite.main_dpo --help.",
    explain="verlite explain --dpo",
)
"""`verlite.main_dpo`."""
