"""The optimizer and its learning-rate schedule."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verlite.spec.roles import OptimSpec


def learning_rate(config: OptimSpec, step: int, total_steps: int | None) -> float:
    """Return the learning rate of training step `step`, counted from 0.

    During a warm-up of w steps: lr (step + 1) / w, so that the first step already learns (verl
    starts at 0). After the warm-up:
    - constant: lr;
    - cosine: lr max(m, m + (1 - m) (1 + cos(2 pi c p)) / 2) with m = min_lr_ratio, c = num_cycles
      and p = (step - w) / (total_steps - w), the progress after the warm-up;
    - linear: lr (m + (1 - m) (1 - p)).
    """
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    if config.lr_scheduler_type not in ("cosine", "linear"):
        raise ValueError(
            f"optim.lr_scheduler_type={config.lr_scheduler_type!r} must be constant, cosine or "
            "linear"
        )
    total = _require_total(total_steps, f"lr_scheduler_type={config.lr_scheduler_type}")
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    floor = config.min_lr_ratio
    if config.lr_scheduler_type == "linear":
        return config.lr * (floor + (1 - floor) * (1 - progress))
    cosine = math.cos(2 * math.pi * config.num_cycles * progress)
    return config.lr * max(floor, floor + (1 - floor) * (1 + cosine) / 2)


def warmup_steps(config: OptimSpec, total_steps: int | None) -> int:
    """Return the number of warm-up steps.

    This is lr_warmup_steps, or if that is negative, lr_warmup_steps_ratio of all steps.
    """
    if config.lr_warmup_steps >= 0:
        return config.lr_warmup_steps
    if config.lr_warmup_steps_ratio <= 0:
        return 0
    return int(config.lr_warmup_steps_ratio * _require_total(total_steps, "lr_warmup_steps_ratio"))


def _require_total(total_steps: int | None, key: str) -> int:
    if total_steps is None:
        raise ValueError(
            f"optim.{key} needs the number of training steps. Pass total_training_steps "
            "to the engine"
        )
    return total_steps


def build_adamw(parameters: Iterable[nn.Parameter], config: OptimSpec) -> torch.optim.AdamW:
    """Build AdamW with its state allocated at once.

    Memory use is then final from the start, and a checkpoint can be loaded into the state. The
    fused version runs one kernel per parameter instead of a dozen sharded-tensor operations.
    """
    betas = (config.betas[0], config.betas[1])
    optimizer = torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that their norm over all parameters and all ranks is at most `max_norm`.

    A norm that is not finite scales nothing.

    Returns:
        The norm before scaling, a scalar equal on all ranks.
    """
    with_gradients = [p for p in parameters if p.grad is not None]
    if not with_gradients:
        return torch.zeros(())
    gradients = [p.grad for p in with_gradients if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):  # the ranks' parts of the norm are not reduced yet
        norm = norm.full_tensor()
    if torch.isfinite(norm):
        torch.nn.utils.clip_grads_with_norm_(with_gradients, max_norm, norm)
    return norm
