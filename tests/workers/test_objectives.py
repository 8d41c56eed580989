"""Losses of actor and critic equal float64 loops over tokens, with and without micro-batches."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from verlite.algorithms.gap import gap_metrics
from verlite.config.compile import policy_loss_spec
from verlite.config.schema import (
    ActorConfig,
    Config,
    DistillationConfig,
    DistillationLossConfig,
)
from verlite.engine.fsdp import Counts
from verlite.spec.correction import RolloutCorrection
from verlite.spec.roles import Micro, Updates
from verlite.workers.actor import policy_objective
from verlite.workers.critic import value_objective

B, R = 6, 7


class ObjectivePlan:
    """The attributes of a plan that the objectives read."""

    clip_low = 0.2
    clip_high = 0.3
    loss_scale = 8.0
    loss_mode = "vanilla"
    correction = RolloutCorrection()
    critic = Updates(2, 2, 1, 3, Micro(2, None), False, "token-mean")


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)

    def draw(scale=1.0):
        return (torch.randn(B, R, generator=generator) * scale).double()

    mask = torch.ones(B, R, dtype=torch.int64)
    mask[0, 3:] = 0
    mask[1, 2:4] = 0  # tool text in the middle
    mask[2] = 0  # an excluded row
    old = -draw().abs()
    columns = {
        "response_mask": mask,
        "advantages": draw(),
        "old_log_probs": old,
        "rollout_log_probs": old + draw(0.01),
        "ref_log_prob": old + draw(0.1),
        "values": draw(),
        "returns": draw(),
    }
    outputs = {
        "log_probs": old + draw(0.4),
        "entropy": draw().abs(),
        "values": columns["values"] + draw(),
    }
    return TensorDict(columns, batch_size=[B]), outputs


def config(**actor) -> Config:
    result = Config()
    result.actor_rollout_ref.actor = ActorConfig(**actor)
    return result


def value_spec(config: Config, plan: Any) -> Any:
    """Return what the critic's loss reads of its spec."""
    return SimpleNamespace(
        updates=plan.critic,
        loss_scale=plan.loss_scale,
        cliprange_value=config.critic.cliprange_value,
    )


def tokens_of(rows):
    """Return (row, position) of each token of the mask."""
    return [(i, j) for i in range(B) for j in range(R) if rows["response_mask"][i, j]]


def in_parts(objective, rows, outputs, counts, parts):
    """Return the sums of loss and metrics over micro-batches with these rows."""
    total, sums = 0.0, {}
    for part in parts:
        loss, metrics = objective(rows[part], {k: v[part] for k, v in outputs.items()}, counts)
        total += loss.item()
        for key, value in metrics.items():
            sums[key] = sums.get(key, 0.0) + float(value)
    return total, sums


PARTS = [[list(range(B))], [[0, 1], [2, 3], [4, 5]], [[5], [2], [0, 3, 4], [1]]]


@pytest.mark.parametrize("parts", PARTS)
def test_policy_loss_equals_loops_over_tokens(rows, parts):
    rows, outputs = rows
    tokens = tokens_of(rows)
    counts = Counts(tokens=len(tokens), sequences=5)
    objective = policy_objective(
        policy_loss_spec(
            config(entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3"),
            ObjectivePlan(),
        )
    )
    pg = kl = entropy = clipped = 0.0
    for i, j in tokens:
        lp, old, ref, a = (
            float(t[i, j])
            for t in (
                outputs["log_probs"],
                rows["old_log_probs"],
                rows["ref_log_prob"],
                rows["advantages"],
            )
        )
        ratio = math.exp(lp - old)
        loss = max(-a * ratio, -a * min(max(ratio, 0.8), 1.3))
        pg += min(loss, -a * 3.0) if a < 0 else loss
        clipped += max(-a * ratio, -a * min(max(ratio, 0.8), 1.3)) > -a * ratio
        kl += math.exp(ref - lp) - (ref - lp) - 1
        entropy += float(outputs["entropy"][i, j])
    n = len(tokens)
    total, metrics = in_parts(objective, rows, outputs, counts, parts)
    assert total == pytest.approx((pg - 0.01 * entropy + 0.1 * kl) / n, rel=1e-6)
    assert metrics["actor/pg_loss"] == pytest.approx(pg / n, rel=1e-6)
    assert metrics["actor/kl_loss"] == pytest.approx(kl / n, rel=1e-6)
    assert metrics["actor/entropy"] == pytest.approx(entropy / n, rel=1e-6)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(clipped / n, rel=1e-6)
    assert not gap_metrics(metrics)  # the stage old_log_probs measured it


def test_the_importance_weighted_kl_is_that_of_trl(rows):
    """TRL multiplies k3 by the ratio, with gradient through both factors."""
    rows, outputs = rows
    rows["advantages"] = torch.zeros(B, R).double()
    log_probs = outputs["log_probs"].requires_grad_()
    mask = rows["response_mask"].bool()
    log_probs.data[~mask] = float("nan")
    objective = policy_objective(
        policy_loss_spec(
            config(
                use_kl_loss=True,
                kl_loss_coef=0.1,
                kl_loss_type="low_var_kl+",
                kl_loss_importance_weighted=True,
            ),
            ObjectivePlan(),
        )
    )
    n = int(mask.sum())
    loss, metrics = objective(rows, outputs, Counts(tokens=n, sequences=5))
    (found,) = torch.autograd.grad(loss, log_probs)

    lp = log_probs.detach()[mask].requires_grad_()
    d = lp - rows["ref_log_prob"][mask]
    ratio = (lp - rows["old_log_probs"][mask]).exp()
    naive = (((-d).exp() + d - 1) * ratio).sum() / n
    (expected,) = torch.autograd.grad(0.1 * naive, lp)
    assert metrics["actor/kl_loss"].item() == pytest.approx(naive.item(), rel=1e-6)
    torch.testing.assert_close(found[mask], expected, rtol=1e-6, atol=1e-12)
    assert (found[~mask] == 0).all()


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("mode", ["seq-mean-token-sum", "seq-mean-token-mean"])
def test_sequence_means_divide_by_rows_with_tokens(rows, parts, mode):
    """Five of six rows have tokens. Without old log-probs the token loss is -A."""
    rows, outputs = rows
    tokens = tokens_of(rows)
    objective = policy_objective(policy_loss_spec(config(loss_agg_mode=mode), ObjectivePlan()))
    total, _ = in_parts(
        objective, rows.exclude("old_log_probs"), outputs, Counts(len(tokens), 5), parts
    )
    by_row = [[-float(rows["advantages"][t]) for t in tokens if t[0] == i] for i in range(B)]
    expected = (
        sum(sum(row) / (len(row) if mode.endswith("token-mean") else 1) for row in by_row if row)
        / 5
    )
    assert total == pytest.approx(expected, rel=1e-6)


def test_without_old_log_probs_the_ratio_is_one_and_the_gap_is_measured(rows):
    rows, outputs = rows
    tokens = tokens_of(rows)
    outputs["log_probs"].requires_grad_(True)
    loss, metrics = policy_objective(policy_loss_spec(config(), ObjectivePlan()))(
        rows.exclude("old_log_probs"), outputs, Counts(len(tokens), 5)
    )
    assert float(loss.detach()) == pytest.approx(
        -sum(float(rows["advantages"][t]) for t in tokens) / len(tokens), rel=1e-6
    )
    gap = sum(
        abs(float(outputs["log_probs"][t].detach() - rows["rollout_log_probs"][t])) for t in tokens
    ) / len(tokens)
    assert gap_metrics(metrics)["training/log_prob_gap"] == pytest.approx(gap, rel=1e-6)
    entropy = sum(float(outputs["entropy"][t]) for t in tokens) / len(tokens)
    assert float(metrics["actor/entropy"]) == pytest.approx(entropy, rel=1e-6)
    loss.backward()
    expected = -rows["advantages"] * rows["response_mask"] / len(tokens)
    torch.testing.assert_close(outputs["log_probs"].grad, expected, rtol=1e-6, atol=0)


def distilling(use_task_rewards: bool, coefficient: float = 1.0, **loss: Any) -> Config:
    result = config()
    result.distillation = DistillationConfig(
        enabled=True,
        distillation_loss=DistillationLossConfig(
            use_task_rewards=use_task_rewards, distillation_loss_coef=coefficient, **loss
        ),
    )
    return result


REVERSE_KL = [{"loss_mode": "k1", "use_policy_gradient": True}, {"loss_mode": "k2"}]
SHARES = [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[3], [0, 2], [1]], [[2], [0], [3], [1]]]


@pytest.mark.parametrize("parts", SHARES)
@pytest.mark.parametrize("loss", REVERSE_KL)
def test_distillation_equals_the_closed_form_of_the_reverse_kl(parts, loss):
    """Tokens a, b, c with probabilities 1/2, 1/4, 1/4, and as often in four rows: their mean is the
    expectation. Of the teacher 1/4, 1/4, 1/2. d KL / d logit_i = p_i (log p_i/q_i - KL)."""
    logits = torch.tensor([math.log(2), 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([0, 1, 0, 2])
    log_probs = logits.log_softmax(-1)[tokens][:, None]
    teacher = torch.tensor([1 / 4, 1 / 4, 1 / 2], dtype=torch.float64).log()[tokens][:, None]
    columns = {
        "response_mask": torch.ones(4, 1, dtype=torch.int64),
        "advantages": torch.tensor([[3.0], [1.0], [-2.0], [5.0]], dtype=torch.float64),
        "rollout_log_probs": log_probs.detach(),
        "ref_log_prob": torch.zeros(4, 1, dtype=torch.float64),
        "teacher_log_prob": teacher,
    }
    rows = TensorDict(columns, batch_size=[4])
    counts = Counts(tokens=4, sequences=4)

    def gradient(setting: Config) -> torch.Tensor:
        objective = policy_objective(policy_loss_spec(setting, ObjectivePlan()))
        losses = [objective(rows[part], {"log_probs": log_probs[part]}, counts) for part in parts]
        (found,) = torch.autograd.grad(sum(one for one, _ in losses), logits, retain_graph=True)
        return found

    log2 = math.log(2)
    kl = log2 / 2 - log2 / 4
    expected = torch.tensor([(log2 - kl) / 2, (0 - kl) / 4, (-log2 - kl) / 4], dtype=torch.float64)
    torch.testing.assert_close(gradient(distilling(False, **loss)), expected, rtol=0, atol=1e-12)
    # Beside the task's rewards it is added with its weight.
    task = gradient(config())
    both = gradient(distilling(True, 0.3, **loss))
    torch.testing.assert_close(both, task + 0.3 * expected, rtol=0, atol=1e-12)
    assert task.abs().max() > 0.1


@pytest.mark.parametrize("parts", PARTS)
def test_critic_loss_equals_loops_over_tokens(rows, parts):
    rows, outputs = rows
    tokens = tokens_of(rows)
    objective = value_objective(value_spec(config(), ObjectivePlan()))
    total, metrics = in_parts(objective, rows, outputs, Counts(len(tokens), 5), parts)
    expected = 0.0
    for i, j in tokens:
        v, old, g = (
            float(outputs["values"][i, j]),
            float(rows["values"][i, j]),
            float(rows["returns"][i, j]),
        )
        expected += 0.5 * max((v - g) ** 2, (min(max(v, old - 0.5), old + 0.5) - g) ** 2)
    assert total == pytest.approx(expected / len(tokens), rel=1e-6)
    assert metrics["critic/vf_loss"] == pytest.approx(expected / len(tokens), rel=1e-6)
    assert metrics["critic/vpred_mean"] == pytest.approx(
        sum(float(outputs["values"][t]) for t in tokens) / len(tokens), rel=1e-6
    )


def test_importance_weights_and_selected_tokens_reach_the_loss(rows):
    rows, outputs = rows
    tokens = tokens_of(rows)
    weights = torch.rand(B, R, dtype=torch.float64)
    chosen = torch.rand(B, R) < 0.5
    rows["rollout_is_weights"] = weights
    rows["selected_tokens"] = chosen
    plan = ObjectivePlan()
    plan.loss_mode = "clip_cov"
    total, _ = in_parts(
        policy_objective(policy_loss_spec(config(), plan)),
        rows,
        outputs,
        Counts(len(tokens), 5),
        [[0, 1, 2], [3, 4, 5]],
    )
    expected = 0.0
    for i, j in tokens:
        lp, old, a = (
            float(t[i, j])
            for t in (outputs["log_probs"], rows["old_log_probs"], rows["advantages"])
        )
        ratio = math.exp(lp - old)
        expected += (
            0.0
            if chosen[i, j]
            else float(weights[i, j]) * max(-a * ratio, -a * min(max(ratio, 0.8), 1.3))
        )
    assert total == pytest.approx(expected / len(tokens), rel=1e-6)


def test_loss_uses_its_settings(rows):
    rows, outputs = rows
    plan = ObjectivePlan()
    losses = []
    for tau in (1.0, 4.0):
        plan.loss_mode = "sapo"
        objective = policy_objective(policy_loss_spec(config(tau_pos=tau, tau_neg=tau), plan))
        losses.append(float(objective(rows, outputs, Counts(len(tokens_of(rows)), 5))[0]))
        expected = 0.0
        for i, j in tokens_of(rows):
            ratio = math.exp(float(outputs["log_probs"][i, j] - rows["old_log_probs"][i, j]))
            expected -= (
                float(rows["advantages"][i, j]) * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
            )
        assert losses[-1] == pytest.approx(expected / len(tokens_of(rows)), rel=1e-6)
    assert losses[0] != losses[1]
