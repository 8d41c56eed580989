"""Key names of verl's supervised fine-tuning, of both its generations, and what happens to them.

`aliases` says what each table means. Names of the model, the engine and the optimizer are
those of RL training in other sections, so their entries come from there.
"""

from collections.abc import Mapping
from typing import Any

from verlite.config import aliases
from verlite.config.translation import Fixed, Style, Tables

SECTIONS = {
    "model": ("model",),
    "fsdp_config": ("engine", "model.fsdp_config"),
    "optim": ("optim",),
    "checkpoint": (),
}
"""Section of a role in RL training -> its names in verl's supervised fine-tuning.

Checkpoints differ.
"""

_CHECKPOINT = "a checkpoint has the model, the optimizer, the schedule and random states"
_CONVERSATIONS = "conversations are read with the chat template's own mask"
_PROCESSES = "torchrun starts the processes: --nnodes and --nproc_per_node"
_ORDER = "batches are balanced by filling passes up to data.max_token_len_per_gpu"


def _in_sections(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table's entries for any role, "*.section.key" and "*.key", under their names
    here.
    """
    found: dict[str, Any] = {}
    for pattern, entry in table.items():
        if not pattern.startswith("*."):
            continue
        section, _, rest = pattern.removeprefix("*.").partition(".")
        places = SECTIONS.get(section)
        names = [pattern] if places is None else [f"{place}.{rest}" for place in places]
        found |= dict.fromkeys(names, entry)
    return found


RENAMED = {
    "model.partial_pretrain": "model.path",
    "trainer.resume_path": "trainer.resume_from_path",
    "model.lora.rank": "model.lora_rank",
    "model.lora.alpha": "model.lora_alpha",
    "model.lora.adapter_path": "model.lora_adapter_path",
    "model.lora.target_modules": "model.target_modules",
    "model.lora.exclude_modules": "model.exclude_modules",
    "data.multiturn.messages_key": "data.messages_key",
    "data.multiturn.tools_key": "data.tools_key",
    "data.chat_template": "model.custom_chat_template",
    "use_remove_padding": "model.use_remove_padding",
    "engine.use_remove_padding": "model.use_remove_padding",
    "optim.clip_grad": "grad_clip",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "optim.warmup_style": "optim.lr_scheduler_type",
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
    "engine.ulysses_sequence_parallel_size": "ulysses_sequence_parallel_size",
    **{
        f"{section}.{name}": f"fsdp_config.{name}"
        for section in SECTIONS["fsdp_config"]
        for name in (
            "param_offload",
            "optimizer_offload",
            "reshard_after_forward",
            "model_dtype",
            "dtype",
            "fsdp_size",
        )
    },
}

_OFFLOADED = (True, {"fsdp_config.param_offload": True, "fsdp_config.optimizer_offload": True})

FIXED: dict[str, Fixed] = {
    **_in_sections(aliases.FIXED),
    "engine": (("fsdp",), "training engines always use FSDP2"),
    "optim": (("fsdp",), "the optimizer is torch.optim.AdamW"),
    "model": (("hf_model",), "models are those of transformers"),
    "model.fsdp_config.cpu_offload": (
        (False,),
        "use fsdp_config.param_offload and optimizer_offload",
    ),
    "data.custom_cls.*": (
        (None,),
        "write a file with a prompt and a response column, or with a messages column",
    ),
    "trainer.default_hdfs_dir": ((None,), "the run directory is on a file system"),
}

REFUSED = {
    **_in_sections(aliases.REFUSED),
    "data.enable_thinking_key": "Use data.apply_chat_template_kwargs={enable_thinking:true}.",
    "data.enable_thinking_default": "Use data.apply_chat_template_kwargs={enable_thinking:true}.",
    "engine.*": "fsdp_config has the engine's settings.",
}

IGNORED = {
    **_in_sections(aliases.IGNORED),
    "checkpoint.*": _CHECKPOINT,
    "trainer.checkpoint.*": _CHECKPOINT,
    **{
        f"{section}.use_torch_compile": aliases.ENTROPY_ONLY
        for section in SECTIONS["fsdp_config"]
        if section != "fsdp_config"
    },
    "engine.seed": "trainer.seed is the seed of the data order",
    "data.micro_batch_size": "verl reads data.micro_batch_size_per_gpu instead",
    "data.multiturn.enable": "a file with a column data.messages_key has conversations",
    "data.multiturn.*": _CONVERSATIONS,
    "data.ignore_input_ids_mismatch": _CONVERSATIONS,
    "data.pad_mode": "passes are packed without padding",
    "data.balance_dp_token": _ORDER,
    "trainer.balance_batch": _ORDER,
    "data.num_workers": "examples are read in one process",
    "data.use_shm": "files are read in place",
    "model.fsdp_config.offload_params": "use fsdp_config.param_offload",
    "trainer.nnodes": _PROCESSES,
    "trainer.n_gpus_per_node": _PROCESSES,
    "trainer.profile_interval": "metrics.jsonl has the loss, the gradient norm and the tokens",
    "global_profiler.*": "metrics.jsonl has the loss, the gradient norm and the tokens",
    "profiler.*": "metrics.jsonl has the loss, the gradient norm and the tokens",
    "hydra.*": "the run directory is trainer.default_local_dir",
}

STYLES = (
    Style(
        "verl's fsdp_sft_trainer",
        (
            "model.partial_pretrain",
            "model.fsdp_config.*",
            "optim.lr_scheduler",
            "optim.warmup_steps_ratio",
            "use_remove_padding",
            "data.micro_batch_size",
            "data.chat_template",
            "data.multiturn.*",
            "trainer.checkpoint.*",
        ),
        {
            "optim.lr": 1e-5,
            "optim.betas": [0.9, 0.95],
            "optim.lr_warmup_steps_ratio": 0.1,
            "optim.lr_scheduler_type": "cosine",
            "optim.min_lr_ratio": 0.0,
        },
    ),
    Style(
        "verl's sft_trainer",
        ("*",),
        {
            "optim.lr": 1e-3,
            "optim.betas": [0.9, 0.999],
            "optim.lr_warmup_steps_ratio": 0.0,
            "optim.lr_scheduler_type": "constant",
            "optim.min_lr_ratio": 0.0,
        },
    ),
)
"""verl's SFT trainers: up to version 0.6, and from 0.6 on. Keys that both have, such as
trainer.default_hdfs_dir, are taken for those of the newer one unless there is an older name."""

TABLES = Tables(
    renamed=RENAMED,
    fixed=FIXED,
    refused=REFUSED,
    ignored=IGNORED,
    null_means={"optim.lr_scheduler_type": "constant"},
    spellings=aliases.SPELLINGS
    | {
        f"fsdp_config.{name}": aliases.SPELLINGS["*.fsdp_config.model_dtype"]
        for name in ("model_dtype", "dtype")
    },
    sets={
        "engine.offload_policy": _OFFLOADED,
        "model.fsdp_config.cpu_offload": _OFFLOADED,
    },
    implied={"trainer.logger": aliases.IMPLIED["trainer.logger"]},
    styles=STYLES,
)
"""The tables of main_sft."""
