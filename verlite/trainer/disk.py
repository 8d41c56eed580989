"""Does the disk hold the run's checkpoints? An estimate from the sizes of the model's weights."""

import math
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open

from verlite.config import plan as plans
from verlite.files import size_text
from verlite.trainer.checkpoints import steps_on_disk
from verlite.trainer.preflight import Preflight

STATES = 3
"""Numbers in a checkpoint for each parameter: the weight, and two moments of AdamW."""


def disk_space(found: Preflight) -> None:
    """Warn if the disk of the run directory has too little space for its checkpoints.

    That is not known for adapters, and for weights that are not in a folder here as safetensors.
    """
    config, trainer = found.config, found.config.trainer
    actor = config.actor_rollout_ref.actor.fsdp_config.model_dtype
    sizes = [checkpoint_bytes(config.actor_rollout_ref.model.path, actor)]
    if plans.needs_critic(config):
        model = config.critic.model
        path = model.path or config.actor_rollout_ref.model.path
        sizes.append(checkpoint_bytes(path, config.critic.model.fsdp_config.model_dtype))
    size = sum(sizes)
    if trainer.save_freq <= 0 or not all(sizes) or plans.uses_lora(config.actor_rollout_ref.model):
        return
    _, steps = found.plan.steps(found.rows["train"].in_files)
    saves = max(1, math.ceil(steps / trainer.save_freq))
    kept = trainer.max_actor_ckpt_to_keep
    # A new checkpoint is complete before the oldest one is deleted.
    most = saves if kept is None else min(saves, kept + 1)
    folder = Path(trainer.default_local_dir).expanduser()
    missing = max(1, most - len(steps_on_disk(folder)))
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if missing * size <= free:
        return
    remedy = "Lower trainer.max_actor_ckpt_to_keep or raise trainer.save_freq"
    if size > free:
        remedy = "Free some space"
    found.findings.warnings.append(
        f"trainer.default_local_dir={trainer.default_local_dir}: {size_text(free)} are free, but a "
        f"checkpoint takes about {size_text(size)}, and up to {most} are kept "
        f"(trainer.save_freq={trainer.save_freq}, "
        f"trainer.max_actor_ckpt_to_keep={'null' if kept is None else kept}). {remedy}, or choose "
        "a folder on another disk"
    )


def checkpoint_bytes(model: str, dtype: str) -> int:
    """Return the size of a checkpoint of a model folder whose parameters have `dtype`; 0: unknown.

    Formula: parameters x STATES x bytes of the dtype.
    """
    try:
        numbers = sum(map(_numbers, Path(model).glob("*.safetensors")))
    except (OSError, SafetensorError):
        return 0
    return numbers * STATES * (4 if dtype == "float32" else 2)


def _numbers(file: Path) -> int:
    """Return how many numbers a safetensors file has, by its header."""
    with safe_open(file, "np") as content:
        return sum(math.prod(content.get_slice(name).get_shape()) for name in content.keys())
