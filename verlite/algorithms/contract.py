"""Contract tests for a user's own estimator or policy loss: run it on small known batches and say what is wrong.

Each check returns a list of sentences, empty when nothing was found. Nothing here needs a model, a GPU or a configuration.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verlite.algorithms.advantages import AdvantageInputs, Estimator
from verlite.algorithms.aggregation import token_weights
from verlite.algorithms.losses import PolicyLoss, PolicyLossInputs, policy_loss
from verlite.config.correction import RolloutCorrection

ROWS, WIDTH = 6, 5


def check_estimator(
    estimator: Estimator, whitens: bool = False, extra: Mapping[str, Any] | None = None
) -> list[str]:
    """What is wrong with an advantage estimator (AdvantageInputs) -> (advantages, returns); `extra` is passed on as inputs.extra.

    Checked on a batch of three groups of two rows with ragged lengths, a tool span, and NaN wherever the mask is 0: that it
    runs; float shapes [B, R]; finite values; zeros outside the mask; inputs left unchanged; the order of rows has no
    influence; rows with valid=False get zeros and have no influence on others; a batch without trainable tokens gives zeros;
    other prompts' rewards have no influence, unless `whitens` says that the estimator normalises over the batch on purpose.
    """
    inputs = _advantage_inputs(extra)
    before = {
        key: value.clone() for key, value in vars(inputs).items() if isinstance(value, Tensor)
    }
    results, problem = _attempt(estimator, inputs)
    if problem:
        return [problem]
    if (
        not isinstance(results, tuple)
        or len(results) != 2
        or not all(isinstance(x, Tensor) for x in results)
    ):
        return [
            f"returned {type(results).__name__}, expected a pair of tensors (advantages, returns)"
        ]
    shape = tuple(inputs.response_mask.shape)
    problems = [
        f"{name}: shape {tuple(x.shape)}, expected {shape} (rows, response tokens)"
        for name, x in zip(("advantages", "returns"), results, strict=True)
        if tuple(x.shape) != shape
    ]
    if problems:
        return problems
    for name, x in zip(("advantages", "returns"), results, strict=True):
        if not x.is_floating_point():
            problems.append(f"{name}: dtype {x.dtype}, expected a floating-point one")
        elif not x[inputs.mask].isfinite().all():
            problems.append(
                f"{name}: NaN or infinite on trainable tokens: NaN under mask 0 leaked; use inputs.rewards and inputs.mask"
            )
        elif not (x[~inputs.mask] == 0).all():
            problems.append(
                f"{name}: not 0 outside the mask (tool text, padding, rows with valid=False)"
            )
    changed = [
        key
        for key, value in before.items()
        if not torch.allclose(value, getattr(inputs, key), 0, 0, equal_nan=True)
    ]
    problems += [f"{key} was edited in place: return new tensors" for key in changed]
    if problems:
        return problems

    order = torch.tensor([3, 0, 5, 1, 4, 2])
    moved, problem = _attempt(estimator, _rows(inputs, order))
    if problem or not _same(moved[0], results[0][order]):
        problems.append(
            problem
            or "the order of rows matters: group rows by inputs.uid (inputs.groups), not by position"
        )

    others = torch.tensor([0, 1, 2, 3, 5])
    failed = _advantage_inputs(extra, valid=torch.tensor([True] * 4 + [False, True]))
    failed.token_level_rewards[4] = torch.nan
    with_failed, problem = _attempt(estimator, failed)
    without, problem_without = _attempt(estimator, _rows(failed, others))
    if problem or problem_without:
        problems.append(problem or problem_without)
    elif not _same(with_failed[0][others], without[0]):
        problems.append(
            "a row with valid=False influences other rows: it has no vote in any mean or standard deviation"
        )

    empty, problem = _attempt(
        estimator, _advantage_inputs(extra, mask=torch.zeros(ROWS, WIDTH, dtype=torch.int64))
    )
    if problem or not (empty[0] == 0).all():
        problems.append(problem or "a batch without trainable tokens does not give zeros")

    shifted = _advantage_inputs(extra)
    mine = torch.from_numpy(inputs.uid == "a")
    shifted.token_level_rewards[~mine] *= 3.0
    after, problem = _attempt(estimator, shifted)
    if problem or not (whitens or _same(after[0][mine], results[0][mine])):
        problems.append(
            problem
            or "rewards of other prompts change a prompt's advantages: compare within groups (inputs.groups)"
        )
    return problems


def check_policy_loss(loss: PolicyLoss, extra: Mapping[str, Any] | None = None) -> list[str]:
    """What is wrong with a policy loss (PolicyLossInputs) -> (loss, metrics); `extra` is passed on as inputs.extra.

    Checked on a small batch with NaN wherever the mask is 0, called as training calls it: that it runs; a scalar loss;
    detached scalar metrics; finite loss and gradient, also for log-prob differences of 60; a gradient at all; on-policy, a
    positive advantage raises the log-prob; micro-batches add up to the whole batch in loss, gradient and metrics; and nothing
    to train gives 0. (Gradients of masked tokens need no check: policy_loss cuts them off.)
    """
    inputs = _loss_inputs(extra)
    outcome, problem = _attempt(lambda given: _loss_and_gradient(loss, given), inputs)
    if problem:
        return [problem]
    value, gradient, metrics = outcome
    problems = [
        f"metric {key!r}: {type(metric).__name__} of shape {tuple(getattr(metric, 'shape', ()))}, expected a detached scalar tensor"
        for key, metric in metrics.items()
        if not isinstance(metric, Tensor) or metric.dim() or metric.requires_grad
    ]
    if not value.isfinite() or not gradient.isfinite().all():
        problems.append("loss or gradient is NaN or infinite on ordinary inputs")
    elif (gradient == 0).all():
        problems.append("log_prob has no gradient at all")
    if problems:
        return problems

    far = replace(
        inputs, log_prob=torch.where(inputs.mask, torch.tensor([-65.0, -1.0] * 3).unsqueeze(1), 0.0)
    )
    far.old_log_prob = torch.where(inputs.mask, torch.tensor([-5.0, -61.0] * 3).unsqueeze(1), 0.0)
    outcome, problem = _attempt(lambda given: _loss_and_gradient(loss, given), far)
    if problem or not (outcome[0].isfinite() and outcome[1].isfinite().all()):
        problems.append(
            problem
            or "log-prob differences of +-60 make loss or gradient infinite: use inputs.log_ratio, which is limited"
        )

    on_policy = replace(
        inputs, log_prob=inputs.old_log_prob.clone(), advantages=torch.ones_like(inputs.advantages)
    )
    outcome, problem = _attempt(lambda given: _loss_and_gradient(loss, given), on_policy)
    if problem or not (outcome[1] <= 0).all():
        problems.append(
            problem or "on-policy, a positive advantage lowers the log-prob: the sign is wrong"
        )

    parts = [
        _attempt(lambda given: _loss_and_gradient(loss, given), _loss_rows(inputs, slice(i, i + 2)))
        for i in range(0, ROWS, 2)
    ]
    if any(part_problem for _, part_problem in parts):
        problems.append(next(part_problem for _, part_problem in parts if part_problem))
    else:
        sums = sum(part[0] for part, _ in parts)
        gradients = torch.cat([part[1] for part, _ in parts])
        if not _same(sums, value) or not _same(gradients, gradient):
            problems.append(
                "the sum over micro-batches is not the whole: weigh token losses by inputs.weights and use no batch statistics"
            )
        for key in metrics:
            if not _same(sum(part[2][key] for part, _ in parts), metrics[key]):
                problems.append(
                    f"metric {key!r} does not add up over micro-batches: use inputs.token_mean"
                )

    nothing = _loss_inputs(extra, mask=torch.zeros(ROWS, WIDTH, dtype=torch.int64))
    outcome, problem = _attempt(lambda given: _loss_and_gradient(loss, given), nothing)
    if problem or outcome[0] != 0:
        problems.append(
            problem
            or f"a micro-batch without trainable tokens has loss {float(outcome[0])}, expected 0"
        )
    return problems


def _attempt(function: Callable[[Any], Any], inputs: Any) -> tuple[Any, str]:
    """The result and "", or None and what was raised: a user's function may raise anything, and that is a finding."""
    try:
        return function(inputs), ""
    except Exception as error:
        return None, f"raised {type(error).__name__}: {error}"


def _mask() -> Tensor:
    lengths = torch.tensor([5, 1, 4, 3, 2, 5])
    mask = (torch.arange(WIDTH) < lengths.unsqueeze(1)).long()
    mask[0, 2] = 0  # tool text
    return mask


def _noise(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def _advantage_inputs(
    extra: Mapping[str, Any] | None, mask: Tensor | None = None, valid: Tensor | None = None
) -> AdvantageInputs:
    mask = _mask() if mask is None else mask
    hidden = mask == 0
    return AdvantageInputs(
        token_level_rewards=(
            _noise(1) * 0.1 + torch.tensor([1.0, 0, 0.5, 2, -1, 0.3]).unsqueeze(1)
        ).masked_fill(hidden, torch.nan),
        response_mask=mask,
        uid=np.array(["a", "b", "a", "c", "b", "c"], dtype=object),
        valid=torch.ones(ROWS, dtype=torch.bool) if valid is None else valid,
        values=_noise(2).masked_fill(hidden, torch.nan),
        reward_baselines=torch.linspace(-1, 1, ROWS),
        token_level_scores=(_noise(1) * 0.1).masked_fill(hidden, torch.nan),
        old_log_probs=-_noise(3).abs().masked_fill(hidden, torch.nan),
        sum_pi_squared=torch.full((ROWS, WIDTH), 0.3).masked_fill(hidden, torch.nan),
        gamma=0.99,
        lam=0.95,
        extra=dict(extra or {}),
    )


def _rows(inputs: AdvantageInputs, index: Tensor) -> AdvantageInputs:
    tensors = {
        f.name: getattr(inputs, f.name)[index]
        for f in fields(inputs)
        if isinstance(getattr(inputs, f.name), Tensor)
    }
    return replace(inputs, uid=inputs.uid[index.numpy()], **tensors)


def _loss_inputs(extra: Mapping[str, Any] | None, mask: Tensor | None = None) -> PolicyLossInputs:
    mask = _mask() if mask is None else mask
    hidden = mask == 0
    old = -_noise(3).abs() - 0.1
    counts = {"tokens": int(mask.sum()), "sequences": int(mask.any(-1).sum())}
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


def _loss_and_gradient(
    loss: PolicyLoss, inputs: PolicyLossInputs
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    log_prob = inputs.log_prob.detach().clone().requires_grad_()
    value, metrics = policy_loss(loss, replace(inputs, log_prob=log_prob))
    if not isinstance(value, Tensor) or value.dim():
        raise TypeError(
            f"loss is {type(value).__name__} of shape {tuple(getattr(value, 'shape', ()))}, expected a scalar tensor"
        )
    if not value.requires_grad:
        raise TypeError("loss has no gradient: it must be computed from inputs.log_prob")
    value.backward()
    assert log_prob.grad is not None
    return value.detach(), log_prob.grad, metrics


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)
