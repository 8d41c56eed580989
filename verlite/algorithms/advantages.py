"""From scores to advantages: one function (AdvantageInputs) -> (advantages, returns) per estimator,
and what happens to scores before: normalization, clipping, length penalty, group filtering.

Conventions that all estimators share, for B rows (samples) and R response tokens:

- Only sampled tokens (response_mask 1) count. Tool text and padding are skipped: sums, discounts
  and values continue at the next sampled token. Advantages and returns are 0 outside the mask,
  and inputs outside the mask may hold anything, including NaN.
- A row counts if it is valid and has a sampled token. Other rows get 0 and are excluded from
  means, standard deviations and whitening.
- Rows are grouped by uid, not by position. In a group with a single row that counts, the advantage
  is 0 in every estimator that compares the rows of a group. (verl's grpo uses the raw score there.)
  With rollout.n=1 no row is compared, and the baseline is 0, as in verl (`alone`).
- Standard deviations are unbiased. 1e-6 is added to a group's standard deviation, 1e-8 to the
  variance in whitening.
- Statistics over groups are float64 on [B] numbers. Token columns are float32.

In formulas: R_i is a row's score, the sum of its token rewards. mean and std are over the rows of
its group. G_t is the reward-to-go from token t.

To add an estimator, write the function and add one entry to ESTIMATORS in
verlite/spec/catalog.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verlite.algorithms.masked import masked_whiten
from verlite.spec import catalog

STD_EPS = 1e-6


@dataclass(kw_only=True)
class AdvantageInputs:
    """Inputs of an advantage estimator.

    token_level_rewards: [B, R] float32. The score on the last token that response_mask marks,
        plus rewards per token such as the KL penalty.
    response_mask: [B, R], 1 on sampled tokens of rows that count.
    uid: [B] object array. The rows of one prompt share a uid.
    valid: [B] bool, False for rows whose rollout or reward failed. None: all rows are valid.
    values: [B, R], the critic's values, for gae.
    reward_baselines: [B], score of the greedy response to the same prompt, for remax.
    token_level_scores: [B, R], rewards before the KL penalty, for rloo_token_kl. None: the same as
        token_level_rewards.
    old_log_probs, sum_pi_squared: [B, R], log-prob of each token, and the sum over the vocabulary
        of squared probabilities at its position, for optimal_token_baseline.
    rollout_is_weights: [B, R], importance weights of rollout correction, for
        optimal_token_baseline.
    gdpo_rewards: [B, K], the K parts of each row's reward that gdpo normalizes separately.
    gdpo_reward_weights: weights of the K parts. None: 1 each.
    gamma, lam: discount per token, and lambda of GAE.
    norm_adv_by_std_in_grpo: divide by the standard deviation of the group (grpo, grpo_passk).
    reward_clip_range: bounds of the score part of the advantage in rloo_token_kl.
    alone: every prompt has one sample (rollout.n=1). Its score is then its advantage: no baseline,
        and a standard deviation of 1.
    extra: further settings and columns for estimators outside verlite.
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    uid: np.ndarray
    valid: Tensor | None = None
    values: Tensor | None = None
    reward_baselines: Tensor | None = None
    token_level_scores: Tensor | None = None
    old_log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    rollout_is_weights: Tensor | None = None
    gdpo_rewards: Tensor | None = None
    gdpo_reward_weights: tuple[float, ...] | None = None
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    reward_clip_range: tuple[float, float] = (-10.0, 10.0)
    alone: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def mask(self) -> Tensor:
        """Return the sampled tokens of valid rows, [B, R] bool."""
        mask = self.response_mask.bool()
        if self.valid is None or self.valid.all():
            return mask
        return mask & self.valid.bool().unsqueeze(-1)

    @cached_property
    def rewards(self) -> Tensor:
        """Return token rewards, [B, R] float32, 0 outside `mask`."""
        return torch.where(self.mask, self.token_level_rewards.to(torch.float32), 0)

    @cached_property
    def scores(self) -> Tensor:
        """Return each row's sum of rewards, [B] float64.

        Raises:
            ValueError: a sum is not finite.
        """
        scores = self.rewards.sum(-1).double()
        self._require_finite(scores, "reward")
        return scores

    @cached_property
    def parts(self) -> list[Tensor]:
        """Return each part of `gdpo_rewards`, [B] float64, 0 in rows that do not count.

        Raises:
            ValueError: a part of a row that counts is not finite.
        """
        assert self.gdpo_rewards is not None
        parts = self.gdpo_rewards.double().masked_fill(~self.groups.valid.unsqueeze(-1), 0)
        for number, part in enumerate(parts.unbind(1)):
            self._require_finite(part, f"reward part {number}")
        return list(parts.unbind(1))

    def _require_finite(self, values: Tensor, what: str) -> None:
        """Raise ValueError if an entry of `values` [B] is not finite."""
        broken = (~values.isfinite()).nonzero().flatten().tolist()
        if broken:
            first = broken[0]
            raise ValueError(
                f"{len(broken)} of {len(values)} rows have a {what} that is not finite, first row "
                f"{first} (uid {self.uid[first]}) with {values[first]}. Mark a row whose reward "
                "failed with valid=False."
            )

    @cached_property
    def groups(self) -> "Groups":
        """Group the rows that count by uid."""
        return Groups.by_uid(self.uid, self.mask.any(-1), self.alone)


@dataclass
class Groups:
    """Rows grouped by prompt, with statistics over the valid rows of each group.

    group: [B] int64, each row's group number. valid: [B] bool, rows that count. sizes: [groups]
    float64, valid rows of each group. alone: as in AdvantageInputs.

    Every method takes and returns one number per row, [B]. Statistics are float64.
    """

    group: Tensor
    valid: Tensor
    sizes: Tensor
    alone: bool = False

    @classmethod
    def by_uid(cls, uid: np.ndarray, valid: Tensor, alone: bool = False) -> "Groups":
        """Group rows by `uid` [B]; `valid` [B] bool selects the rows that count."""
        numbers: dict[Any, int] = {}
        indices = [numbers.setdefault(name, len(numbers)) for name in uid]
        group = torch.tensor(indices, dtype=torch.int64, device=valid.device)
        sizes = torch.zeros(len(numbers), dtype=torch.float64, device=valid.device)
        return cls(group, valid, sizes.index_add_(0, group, valid.double()), alone)

    def size(self) -> Tensor:
        """Return the number of valid rows in each row's group."""
        return self.sizes[self.group]

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the valid rows of each row's group."""
        valid = x.double().masked_fill(~self.valid, 0)
        return torch.zeros_like(self.sizes).index_add_(0, self.group, valid)[self.group]

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of `x` over the valid rows of each row's group; 0 if there are none."""
        return self.sum(x) / self.size().clamp(min=1)

    def centered(self, x: Tensor) -> Tensor:
        """Return `x` minus its group mean; 0 for rows that `without_singletons` sets to 0."""
        return self.without_singletons(x - self.baseline(self.mean(x)))

    def baseline(self, x: Tensor) -> Tensor:
        """Return `x`; 0 if every prompt has one sample."""
        return torch.zeros_like(x) if self.alone else x

    def without_singletons(self, x: Tensor) -> Tensor:
        """Return `x`, with 0 for invalid rows and in groups with fewer than two valid rows.

        If every prompt has one sample, only invalid rows are 0.
        """
        compared = self.size() >= (1 if self.alone else 2)
        return x.masked_fill(~self.valid | ~compared, 0)

    def max(self, x: Tensor) -> Tensor:
        """Return the largest `x` of the valid rows in each row's group; -inf if there are none."""
        lowest = torch.full_like(self.sizes, -torch.inf)
        valid = x.double().masked_fill(~self.valid, -torch.inf)
        return lowest.scatter_reduce(0, self.group, valid, "amax")[self.group]

    def std(self, x: Tensor) -> Tensor:
        """Return the unbiased standard deviation of `x` over the valid rows of each row's group.

        It is 0 in groups with fewer than two valid rows, and 1 if every prompt has one sample.
        """
        if self.alone:
            return torch.ones_like(x, dtype=torch.float64)
        squares = self.sum(self.centered(x).square())
        return (squares / (self.size() - 1).clamp(min=1)).sqrt()


Estimator = Callable[[AdvantageInputs], tuple[Tensor, Tensor]]


def place_scores(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Put each row's score [B] on its last sampled token: [B, R] float32, 0 elsewhere.

    The score of a row without sampled tokens is dropped.
    """
    columns = response_mask.shape[-1]
    position = torch.arange(1, columns + 1, device=response_mask.device, dtype=torch.int32)
    length, last = torch.where(response_mask.bool(), position, 0).max(-1, keepdim=True)
    kept = scores.to(torch.float32).unsqueeze(-1).masked_fill(length == 0, 0)
    empty = torch.zeros(response_mask.shape, dtype=torch.float32, device=response_mask.device)
    return empty.scatter_(1, last, kept)


def compute_advantages(name: str, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns, [B, R] float32 each, 0 where the mask is 0.

    The two results may be the same tensor.

    Args:
        name: a key of catalog.ESTIMATORS or a user's own "package.module:function".
        inputs: the whole training batch.

    Raises:
        ValueError: the name is unknown, an input that the estimator needs is missing, a reward is
            not finite, or a result has the wrong shape or a number that is not finite.
    """
    estimator = catalog.resolve(name, catalog.ESTIMATORS, "advantage estimator")
    for wanted in catalog.estimator(name).measured:
        if getattr(inputs, wanted) is None:
            raise ValueError(f"adv_estimator={name} needs the input {wanted}, which is missing")
    _ = inputs.scores  # raises if a reward is not finite, also for estimators that use no row sums
    advantages, returns = estimator(inputs)
    shape = inputs.response_mask.shape
    if advantages.shape != shape or returns.shape != shape:
        raise ValueError(
            f"adv_estimator={name} returned shapes {tuple(advantages.shape)} and "
            f"{tuple(returns.shape)}, expected {tuple(shape)} for both"
        )
    for kind, result in (("advantages", advantages), ("returns", returns)):
        _check_finite(name, kind, result, inputs.uid)
    return advantages, returns


def _check_finite(name: str, kind: str, result: Tensor, uid: np.ndarray) -> None:
    """Raise ValueError if a number is not finite: it would make every weight of the model NaN."""
    # A sum is ten times as fast as testing each number.
    if result.sum().isfinite():
        return
    rows = (~result.isfinite()).any(-1).nonzero().flatten().tolist()
    if rows:
        raise ValueError(
            f"adv_estimator={name} returned {kind} that are not finite in {len(rows)} of "
            f"{len(result)} rows, first in row {rows[0]} (uid {uid[rows[0]]}). Look for a division "
            "by 0, such as a mean over no rows; masked_mean returns 0 there."
        )


def discounted_to_go(x: Tensor, mask: Tensor, decay: float) -> Tensor:
    """Return y [B, R] with y_t = x_t + decay * y_next, where "next" is the next token of the mask.

    `x` [B, R] must be 0 outside the mask. There, y is the y of the next token of the mask.
    """
    if decay == 1:
        return x.flip(-1).cumsum(-1).flip(-1)
    # One fused operation per column, on transposed memory where a column is contiguous.
    y = x.t().clone(memory_format=torch.contiguous_format)
    columns = y.unbind(0)
    factors = torch.where(mask.t().contiguous(), decay, 1.0).unbind(0)
    for t in range(len(columns) - 2, -1, -1):
        columns[t].addcmul_(factors[t], columns[t + 1])
    return y.t().contiguous()


def to_go(x: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of `x` [B, R] over each sampled token and the later ones; 0 elsewhere."""
    return torch.where(mask, discounted_to_go(torch.where(mask, x, 0), mask, 1.0), 0)


def rewards_to_go(inputs: AdvantageInputs) -> Tensor:
    """Return G_t = r_t + gamma * G_next over sampled tokens, [B, R]; 0 elsewhere."""
    return torch.where(inputs.mask, discounted_to_go(inputs.rewards, inputs.mask, inputs.gamma), 0)


def _per_token(row_values: Tensor, mask: Tensor) -> Tensor:
    """Copy each row's value [B] to its sampled tokens: [B, R] float32."""
    return torch.where(mask, row_values.to(torch.float32).unsqueeze(-1), 0)


def _leave_one_out(scores: Tensor, groups: Groups) -> Tensor:
    """Return each score [B] minus the mean of the other scores in its group."""
    size = groups.size()
    return groups.centered(scores) * size / (size - 1).clamp(min=1)


def gae(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, whitened (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma V_next - V_t and A_t = delta_t + gamma lam A_next, where "next" is the
    next sampled token. V_next and A_next are 0 after the last token: the end of a response is
    terminal, also if it is truncated. Returns are A + V, before whitening.

    The returns are computed directly as lambda-returns, in one pass:
    return_t = r_t + gamma s_next, with s_t = (1 - lam) V_t + lam return_t.
    """
    assert inputs.values is not None
    mask = inputs.mask
    gamma = inputs.gamma
    lam = inputs.lam
    values = torch.where(mask, inputs.values.to(torch.float32), 0)
    s = discounted_to_go(torch.lerp(values, inputs.rewards, lam), mask, gamma * lam)
    returns = inputs.rewards.clone()
    # Outside the mask, s is the s of the next sampled token.
    returns[:, :-1] += gamma * s[:, 1:]
    returns = torch.where(mask, returns, 0)
    return masked_whiten(returns - values, mask), returns


def grpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """GRPO: (R - mean) / (std + 1e-6) on every token (arXiv:2402.03300, section 4.1.2).

    norm_adv_by_std_in_grpo=False omits the division (Dr. GRPO, arXiv:2503.20783). Returns equal the
    advantages.
    """
    advantages = inputs.groups.centered(inputs.scores)
    if inputs.norm_adv_by_std_in_grpo:
        advantages = advantages / (inputs.groups.std(inputs.scores) + STD_EPS)
    return _twice(_per_token(advantages, inputs.mask))


def gdpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """GDPO: whiten(sum_k w_k (r_k - mean_k) / (std_k + 1e-6)) (arXiv:2601.05242, section 3.1).

    r_k is the k-th part of a row's reward, and mean_k and std_k are over the rows of its group. The
    weighted sum is whitened over all sampled tokens. Token rewards are not read. Returns equal the
    advantages.
    """
    groups = inputs.groups
    weights = inputs.gdpo_reward_weights or (1.0,) * len(inputs.parts)
    normalized = [groups.centered(part) / (groups.std(part) + STD_EPS) for part in inputs.parts]
    total = sum(weight * part for weight, part in zip(weights, normalized, strict=True))
    assert isinstance(total, Tensor)
    return _twice(masked_whiten(_per_token(total, inputs.mask), inputs.mask))


def rloo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """RLOO: R minus the mean of the group's other rows, on every token (arXiv:2402.14740).

    With KL in the reward, R includes the row's whole KL penalty; rloo_token_kl assigns it per
    token. Returns equal the advantages.
    """
    return _twice(_per_token(_leave_one_out(inputs.scores, inputs.groups), inputs.mask))


def reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """REINFORCE++: G_t, whitened over all sampled tokens (arXiv:2501.03262). Returns are G_t."""
    returns = rewards_to_go(inputs)
    return masked_whiten(returns, inputs.mask), returns


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with baseline: R - mean, whitened over all sampled tokens (arXiv:2501.03262).

    Returns equal the advantages.
    """
    centered = _per_token(inputs.groups.centered(inputs.scores), inputs.mask)
    return _twice(masked_whiten(centered, inputs.mask))


def remax(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """ReMax: G_t minus the score of the greedy response (arXiv:2310.10505, algorithm 1).

    Returns are G_t.
    """
    assert inputs.reward_baselines is not None
    returns = rewards_to_go(inputs)
    return returns - _per_token(inputs.reward_baselines, inputs.mask), returns


def grpo_passk(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Pass@k: the best row of a group gets (R_best - R_second) / (std + 1e-6) (arXiv:2503.19595).

    All other rows get 0. Two equally good best rows have no gap, so the whole group gets 0.
    norm_adv_by_std_in_grpo=False omits the division. Returns equal the advantages.
    """
    groups = inputs.groups
    scores = inputs.scores
    row = torch.arange(len(scores), device=scores.device)
    best = groups.max(scores)
    # The first of equally good rows is the best one.
    first = -groups.max(torch.where(scores == best, -row, -len(row)))
    second = groups.max(torch.where(row == first, -torch.inf, scores))
    advantages = groups.without_singletons(torch.where(row == first, best - second, 0))
    if inputs.norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.std(scores) + STD_EPS)
    return _twice(_per_token(advantages, inputs.mask))


def opo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """OPO: R minus the group's length-weighted mean reward (arXiv:2505.23585).

    The baseline is sum(length R) / sum(length) over the group; length counts sampled tokens.
    Returns equal the advantages.
    """
    length = inputs.mask.float().sum(-1).double()
    total = inputs.groups.sum(length * inputs.scores)
    baseline = total / inputs.groups.sum(length).clamp(min=1)
    advantages = inputs.groups.without_singletons(inputs.scores - inputs.groups.baseline(baseline))
    return _twice(_per_token(advantages, inputs.mask))


def gpg(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """GPG: alpha (R - mean), for the policy loss gpg (arXiv:2504.02546).

    alpha = rows that count / rows with a reward other than 0, as in verl. (The paper counts rows
    whose group has a gradient.) Returns equal the advantages.
    """
    alpha = inputs.groups.valid.sum() / inputs.scores.count_nonzero().clamp(min=1)
    return _twice(_per_token(alpha * inputs.groups.centered(inputs.scores), inputs.mask))


def rloo_token_kl(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """RLOO on the score, plus the KL penalty as a reward-to-go per token, as in OpenRLHF.

    A_t = clip(score - mean of the other scores, *reward_clip_range) + sum of the KL rewards from
    token t on. Unlike rloo, a row's KL does not enter the baselines of other rows, and a token pays
    only for its own and later KL. There is no discount. In a group with a single row the score part
    is 0 and the KL part remains. Returns equal the advantages.
    """
    token_scores = inputs.rewards
    if inputs.token_level_scores is not None:
        token_scores = torch.where(inputs.mask, inputs.token_level_scores.to(torch.float32), 0)
    advantage = _leave_one_out(token_scores.sum(-1).double(), inputs.groups)
    low, high = inputs.reward_clip_range
    advantage = advantage.clamp(low, high).to(torch.float32)
    kl_to_go = to_go(inputs.rewards - token_scores, inputs.mask)
    return _twice(torch.where(inputs.mask, kl_to_go + advantage.unsqueeze(-1), 0))


def optimal_token_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """G_t minus the baseline of least gradient variance at each token ("Optimal Token Baseline").

    B_t = sum_i(G_it W_it) / sum_i(W_it) over the group's rows that have a t-th sampled token.
    W_it is the running sum over the row of 1 - 2 pi + sum(pi^2), the expected squared norm of the
    gradient of log pi, times the squared rollout_is_weights if present. Where only one row is left,
    B_t is 0.

    t counts sampled tokens, so tool text does not shift the alignment (verl's
    tir_optimal_token_baseline). Returns are G_t. (Hao et al. 2025, "Optimal Token Baseline".)
    """
    assert inputs.old_log_probs is not None and inputs.sum_pi_squared is not None
    mask = inputs.mask
    groups = inputs.groups
    returns = rewards_to_go(inputs)
    energy = 1 - 2 * inputs.old_log_probs.exp() + inputs.sum_pi_squared
    if inputs.rollout_is_weights is not None:
        energy = energy * inputs.rollout_is_weights.square()
    weight = torch.where(mask, energy, 0).cumsum(-1)
    rank = (mask.cumsum(-1) - 1).clamp(min=0)

    def group_sum(x: Tensor) -> Tensor:
        """Sum `x` [B, R] over each group's sampled tokens of equal rank: [groups, R]."""
        aligned = torch.zeros_like(x).scatter_add(1, rank, torch.where(mask, x, 0))
        return x.new_zeros(len(groups.sizes), x.shape[1]).index_add_(0, groups.group, aligned)

    baseline = group_sum(weight * returns) / group_sum(weight).clamp(min=1e-8)
    has_others = group_sum(torch.ones_like(weight)) > 1
    baseline = torch.where(has_others, baseline, 0)[groups.group].gather(1, rank)
    compared = groups.without_singletons(torch.ones_like(inputs.scores)).bool().unsqueeze(-1)
    return torch.where(mask & compared, returns - baseline, 0), returns


def _twice(advantages: Tensor) -> tuple[Tensor, Tensor]:
    return advantages, advantages


# Before advantages: scores are shaped, and groups without a signal are left out.


def shape_scores(
    scores: Tensor, mean: float = 0.0, std: float = 1.0, clip: tuple[float, float] | None = None
) -> Tensor:
    """Return (scores - mean) / std, then clipped to `clip`; any shape.

    mean and std are constants from the config, not statistics of the batch.

    Raises:
        ValueError: std is not above 0, or the lower bound of `clip` is not below the upper one.
    """
    if not std > 0:
        raise ValueError(f"std={std} must be above 0: scores are divided by it. Pass 1 for none.")
    if clip is not None and not clip[0] < clip[1]:
        raise ValueError(f"clip={clip} needs a lower bound below the upper. Pass None for no clip.")
    shaped = (scores - mean) / std
    return shaped if clip is None else shaped.clamp(*clip)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Return DAPO's overlong penalty, added to scores (arXiv:2503.14476, eq. 13): [B] float32.

    The penalty is 0 up to max_length - buffer tokens. From there it decreases linearly to -factor
    at max_length.

    Args:
        lengths: [B], response tokens.
        max_length: maximum response length.
        buffer: tokens over which the penalty grows, from 1 to max_length.
        factor: size of the full penalty.

    Raises:
        ValueError: the buffer is not in this range.
    """
    if not 1 <= buffer <= max_length:
        rule = f"must be from 1 to max_length={max_length}"
        raise ValueError(f"buffer={buffer} {rule}. Usual: a fifth of it.")
    excess = lengths.to(torch.float32) - (max_length - buffer)
    return -factor * (excess / buffer).clamp(0, 1)


def rows_with_signal(metric: Tensor, uid: np.ndarray, valid: Tensor | None = None) -> Tensor:
    """Return the rows whose group has different metric values, [B] bool (DAPO's dynamic sampling).

    Groups with fewer than two valid rows are not selected. Invalid rows follow their group.
    (arXiv:2503.14476, section 3.2.)

    Args:
        metric: [B], compared within groups.
        uid: [B] object array, the group of each row.
        valid: [B] bool. None: all rows are valid.
    """
    if valid is None:
        valid = torch.ones_like(metric, dtype=torch.bool)
    groups = Groups.by_uid(uid, valid.bool())
    metric = metric.double()
    smallest = -groups.max(-metric)
    return groups.max(metric) > smallest
