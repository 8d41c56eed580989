"""Contract tests for a user's own advantage estimator or policy loss, on small known batches.

`check_estimator` and `check_policy_loss` return a list of problems, empty if there are none. They
need no model, no GPU and no config. `verlite contract` calls them.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verlite.algorithms.advantages import AdvantageInputs, Estimator
from verlite.algorithms.aggregation import token_weights
from verlite.algorithms.losses import PolicyLoss, PolicyLossInputs, policy_loss
from verlite.spec.correction import RolloutCorrection

ROWS = 6
WIDTH = 5

Extra = Mapping[str, Any] | None
LossResult = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Loss, gradient of log_prob [b, R], metrics."""


def check_estimator(
    estimator: Estimator, whitens: bool = False, extra: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the problems of an advantage estimator (AdvantageInputs) -> (advantages, returns).

    The batch has three groups of two rows with ragged lengths, tool text, and NaN wherever the mask
    is 0. Checked:

    - It runs and returns two finite float tensors [B, R] that are 0 outside the mask.
    - It does not modify its inputs.
    - The order of rows does not matter.
    - Rows with valid=False get 0 and do not influence other rows.
    - A batch without trainable tokens gives 0.
    - Rewards of other prompts do not matter, unless `whitens` is True.

    Args:
        estimator: the function to check.
        whitens: the estimator normalizes over the whole batch on purpose.
        extra: passed on as inputs.extra.
    """
    inputs = _advantage_inputs(extra)
    before = {k: v.clone() for k, v in vars(inputs).items() if isinstance(v, Tensor)}
    try:
        results = _attempt(estimator, inputs)
    except _Raised as raised:
        return [str(raised)]
    problems = _shape_problems(results, tuple(inputs.response_mask.shape))
    if problems:
        return problems
    problems = _value_problems(results, inputs.mask)
    for key, value in before.items():
        if not torch.allclose(value, getattr(inputs, key), 0, 0, equal_nan=True):
            problems.append(f"{key} was edited in place: return new tensors")
    if problems:
        return problems
    advantages = results[0]
    return _problems(
        partial(_row_order_problems, estimator, inputs, advantages),
        partial(_invalid_row_problems, estimator, extra),
        partial(_empty_batch_problems, estimator, extra),
        partial(_other_prompt_problems, estimator, extra, advantages, whitens),
    )


def _shape_problems(results: Any, shape: tuple[int, ...]) -> list[str]:
    is_pair = isinstance(results, tuple) and len(results) == 2
    if not is_pair or not all(isinstance(x, Tensor) for x in results):
        kind = type(results).__name__
        return [f"returned {kind}, expected a pair of tensors (advantages, returns)"]
    return [
        f"{name}: shape {tuple(x.shape)}, expected {shape} (rows, response tokens)"
        for name, x in zip(("advantages", "returns"), results, strict=True)
        if tuple(x.shape) != shape
    ]


def _value_problems(results: tuple[Tensor, Tensor], mask: Tensor) -> list[str]:
    problems = []
    for name, x in zip(("advantages", "returns"), results, strict=True):
        if not x.is_floating_point():
            problems.append(f"{name}: dtype {x.dtype}, expected a floating-point dtype")
        elif not x[mask].isfinite().all():
            problems.append(
                f"{name}: NaN or infinite on trainable tokens. NaN under mask 0 leaked; use "
                "inputs.rewards and inputs.mask"
            )
        elif not (x[~mask] == 0).all():
            problems.append(
                f"{name}: not 0 outside the mask (tool text, padding, rows with valid=False)"
            )
    return problems


def _row_order_problems(
    estimator: Estimator, inputs: AdvantageInputs, advantages: Tensor
) -> list[str]:
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    moved = _attempt(estimator, _rows(inputs, order))
    if _same(moved[0], advantages[order]):
        return []
    return ["the order of rows matters: group rows by inputs.uid (inputs.groups), not by position"]


def _invalid_row_problems(estimator: Estimator, extra: Extra) -> list[str]:
    """Compare a batch with one invalid row with the same batch without that row."""
    others = torch.tensor([0, 1, 2, 3, 5])
    inputs = _advantage_inputs(extra, valid=torch.tensor([True] * 4 + [False, True]))
    inputs.token_level_rewards[4] = torch.nan
    with_invalid = _attempt(estimator, inputs)
    without = _attempt(estimator, _rows(inputs, others))
    if _same(with_invalid[0][others], without[0]):
        return []
    return [
        "a row with valid=False influences other rows: exclude it from every mean and standard "
        "deviation (inputs.mask, inputs.groups)"
    ]


def _empty_batch_problems(estimator: Estimator, extra: Extra) -> list[str]:
    nothing = torch.zeros(ROWS, WIDTH, dtype=torch.int64)
    empty = _attempt(estimator, _advantage_inputs(extra, mask=nothing))
    if (empty[0] == 0).all():
        return []
    return ["a batch without trainable tokens does not give zeros"]


def _other_prompt_problems(
    estimator: Estimator, extra: Extra, advantages: Tensor, whitens: bool
) -> list[str]:
    """Scale the rewards of all prompts but one, and compare the advantages of that one."""
    inputs = _advantage_inputs(extra)
    mine = torch.from_numpy(inputs.uid == "a")
    inputs.token_level_rewards[~mine] *= 3.0
    after = _attempt(estimator, inputs)
    if whitens or _same(after[0][mine], advantages[mine]):
        return []
    return [
        "rewards of other prompts change a prompt's advantages: compare within groups "
        "(inputs.groups)"
    ]


def check_policy_loss(loss: PolicyLoss, extra: Mapping[str, Any] | None = None) -> list[str]:
    """Return the problems of a policy loss (PolicyLossInputs) -> (loss, metrics).

    The batch has NaN wherever the mask is 0, and the loss is called as training calls it. Checked:

    - It runs and returns a scalar loss with gradient, and detached scalar metrics.
    - Loss and gradient are finite, also for log-prob differences of 60.
    - On-policy, a positive advantage raises the log-prob.
    - Micro-batches add up to the whole batch in loss, gradient and metrics.
    - A micro-batch without trainable tokens gives 0.

    Gradients of masked tokens are not checked, because policy_loss blocks them.

    Args:
        loss: the function to check.
        extra: passed on as inputs.extra.
    """
    inputs = _loss_inputs(extra)
    try:
        result = _attempt_loss(loss, inputs)
    except _Raised as raised:
        return [str(raised)]
    problems = _ordinary_problems(result)
    if problems:
        return problems
    return _problems(
        partial(_overflow_problems, loss, inputs),
        partial(_sign_problems, loss, inputs),
        partial(_micro_batch_problems, loss, inputs, result),
        partial(_no_token_problems, loss, extra),
    )


def _ordinary_problems(result: LossResult) -> list[str]:
    value, gradient, metrics = result
    problems = [
        f"metric {key!r}: {type(metric).__name__} of shape {tuple(getattr(metric, 'shape', ()))}, "
        "expected a detached scalar tensor"
        for key, metric in metrics.items()
        if not isinstance(metric, Tensor) or metric.dim() or metric.requires_grad
    ]
    if not value.isfinite() or not gradient.isfinite().all():
        problems.append("loss or gradient is NaN or infinite on ordinary inputs")
    elif (gradient == 0).all():
        problems.append("the gradient of log_prob is 0 for all tokens")
    return problems


def _overflow_problems(loss: PolicyLoss, inputs: PolicyLossInputs) -> list[str]:
    new = torch.tensor([-65.0, -1.0] * 3).unsqueeze(1)
    old = torch.tensor([-5.0, -61.0] * 3).unsqueeze(1)
    far = replace(
        inputs,
        log_prob=torch.where(inputs.mask, new, 0.0),
        old_log_prob=torch.where(inputs.mask, old, 0.0),
    )
    result = _attempt_loss(loss, far)
    if result[0].isfinite() and result[1].isfinite().all():
        return []
    return [
        "log-prob differences of +-60 make loss or gradient infinite: use inputs.log_ratio, which "
        "is clamped"
    ]


def _sign_problems(loss: PolicyLoss, inputs: PolicyLossInputs) -> list[str]:
    on_policy = replace(
        inputs, log_prob=inputs.old_log_prob.clone(), advantages=torch.ones_like(inputs.advantages)
    )
    result = _attempt_loss(loss, on_policy)
    if (result[1] <= 0).all():
        return []
    return ["on-policy, a positive advantage lowers the log-prob: the sign is wrong"]


def _micro_batch_problems(
    loss: PolicyLoss, inputs: PolicyLossInputs, whole: LossResult
) -> list[str]:
    pairs = [slice(start, start + 2) for start in range(0, ROWS, 2)]
    parts = [_attempt_loss(loss, _loss_rows(inputs, pair)) for pair in pairs]
    value, gradient, metrics = whole
    problems = []
    total = torch.stack([part[0] for part in parts]).sum()
    if not _same(total, value) or not _same(torch.cat([part[1] for part in parts]), gradient):
        problems.append(
            "the sum over micro-batches is not the whole: weight token losses by inputs.weights "
            "and use no batch statistics"
        )
    for key, metric in metrics.items():
        if not _same(torch.stack([part[2][key] for part in parts]).sum(), metric):
            problems.append(
                f"metric {key!r} does not add up over micro-batches: use inputs.token_mean"
            )
    return problems


def _no_token_problems(loss: PolicyLoss, extra: Extra) -> list[str]:
    nothing = torch.zeros(ROWS, WIDTH, dtype=torch.int64)
    result = _attempt_loss(loss, _loss_inputs(extra, mask=nothing))
    if result[0] == 0:
        return []
    loss_value = float(result[0])
    return [f"a micro-batch without trainable tokens has loss {loss_value}, expected 0"]


class _Raised(Exception):
    """The user's function raised an exception."""


def _problems(*checks: Callable[[], list[str]]) -> list[str]:
    """Return the problems that the checks find. A call that fails ends its check alone."""
    problems = []
    for check in checks:
        try:
            problems += check()
        except _Raised as raised:
            problems.append(str(raised))
    return problems


def _attempt(function: Callable[[Any], Any], inputs: Any) -> Any:
    """Call a user's function, which may raise anything. Raises _Raised."""
    try:
        return function(inputs)
    except Exception as error:
        raise _Raised(f"raised {type(error).__name__}: {error}") from error


def _attempt_loss(loss: PolicyLoss, inputs: PolicyLossInputs) -> Any:
    return _attempt(lambda given: _loss_and_gradient(loss, given), inputs)


def _mask() -> Tensor:
    lengths = torch.tensor([5, 1, 4, 3, 2, 5])
    mask = (torch.arange(WIDTH) < lengths.unsqueeze(1)).long()
    mask[0, 2] = 0  # tool text
    return mask


def _noise(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def _advantage_inputs(
    extra: Extra, mask: Tensor | None = None, valid: Tensor | None = None
) -> AdvantageInputs:
    mask = _mask() if mask is None else mask
    hidden = mask == 0
    rewards = _noise(1) * 0.1 + torch.tensor([1.0, 0, 0.5, 2, -1, 0.3]).unsqueeze(1)
    return AdvantageInputs(
        token_level_rewards=rewards.masked_fill(hidden, torch.nan),
        response_mask=mask,
        uid=np.array(["a", "b", "a", "c", "b", "c"], dtype=object),
        valid=torch.ones(ROWS, dtype=torch.bool) if valid is None else valid,
        values=_noise(2).masked_fill(hidden, torch.nan),
        reward_baselines=torch.linspace(-1, 1, ROWS),
        token_level_scores=(_noise(1) * 0.1).masked_fill(hidden, torch.nan),
        old_log_probs=-_noise(3).abs().masked_fill(hidden, torch.nan),
        gdpo_rewards=torch.stack([torch.arange(ROWS) % 4 * 0.5, torch.linspace(-1, 1, ROWS)], 1),
        sum_pi_squared=torch.full((ROWS, WIDTH), 0.3).masked_fill(hidden, torch.nan),
        gamma=0.99,
        lam=0.95,
        extra=dict(extra or {}),
    )


def _rows(inputs: AdvantageInputs, index: Tensor) -> AdvantageInputs:
    """Select rows by index."""
    tensors = {
        f.name: getattr(inputs, f.name)[index]
        for f in fields(inputs)
        if isinstance(getattr(inputs, f.name), Tensor)
    }
    return replace(inputs, uid=inputs.uid[index.numpy()], **tensors)


def _loss_inputs(extra: Extra, mask: Tensor | None = None) -> PolicyLossInputs:
    mask = _mask() if mask is None else mask
    hidden = mask == 0
    old = -_noise(3).abs() - 0.1
    counts: Any = {"tokens": int(mask.sum()), "sequences": int(mask.any(-1).sum())}
    return PolicyLossInputs(
        log_prob=(old + 0.05 * _noise(4)).masked_fill(hidden, torch.nan),
        old_log_prob=old.masked_fill(hidden, torch.nan),
        advantages=_noise(5)[:, :1].expand(ROWS, WIDTH).masked_fill(hidden, torch.nan),
        response_mask=mask,
        weights=token_weights(mask, "token-mean", **counts),
        tokens=counts["tokens"],
        extra={"rollout_correction": RolloutCorrection(), **(extra or {})},
    )


def _loss_rows(inputs: PolicyLossInputs, rows: slice) -> PolicyLossInputs:
    names = ("log_prob", "old_log_prob", "advantages", "response_mask", "weights")
    return replace(inputs, **{name: getattr(inputs, name)[rows] for name in names})


def _loss_and_gradient(loss: PolicyLoss, inputs: PolicyLossInputs) -> LossResult:
    log_prob = inputs.log_prob.detach().clone().requires_grad_()
    value, metrics = policy_loss(loss, replace(inputs, log_prob=log_prob))
    if not isinstance(value, Tensor) or value.dim():
        shape = tuple(getattr(value, "shape", ()))
        kind = type(value).__name__
        raise TypeError(f"loss is {kind} of shape {shape}, expected a scalar tensor")
    if not value.requires_grad:
        raise TypeError("loss has no gradient: it must be computed from inputs.log_prob")
    torch.autograd.backward(value)
    assert log_prob.grad is not None
    return value.detach(), log_prob.grad, metrics


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)
