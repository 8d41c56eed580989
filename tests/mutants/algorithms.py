"""Mutants of verlite.algorithms: numbers that are wrong without an error message."""

import dataclasses

from tests.mutants import Mutant
from tests.mutants.patches import argument, attribute, calls, constant, result, returns

T = "tests/algorithms/test_"
MASKED = "verlite.algorithms.masked:"
WEIGHTS = "verlite.algorithms.aggregation:token_weights"
KL = "verlite.algorithms.kl:"
DISTILLATION = "verlite.algorithms.distillation:"
ADVANTAGES = "verlite.algorithms.advantages:"
LOSSES = "verlite.algorithms.losses:"
LOG_PROBS = "verlite.algorithms.logprobs:"
BALANCING = "verlite.algorithms.balancing:"
CORRECTION = "verlite.algorithms.rollout_correction:"
SHAPING = "verlite.algorithms.advantages:"
GAP = "verlite.algorithms.gap:"
STALENESS = "verlite.algorithms.gap:"


def _inputs(name, change):
    """Change one field of an estimator's or a loss's inputs."""
    return argument("inputs", attribute(name, change))


def _scale_both(factor):
    """Scale advantages and returns."""
    return result(lambda pair: (pair[0] * factor, pair[1] * factor))


def _multiplied(original, x, mask, dim=None):
    kept = x * mask
    return kept.sum() if dim is None else kept.sum(dim)


def _mean_over_padding(original, x, mask, dim=None):
    kept = x.where(mask.bool(), 0)
    return kept.mean() if dim is None else kept.mean(dim)


def _counts_of_the_micro_batch(original, response_mask, mode, *, tokens, sequences, scale=None):
    mask = response_mask.bool()
    own_tokens = int(mask.sum())
    own_sequences = int(mask.any(-1).sum())
    return original(response_mask, mode, tokens=own_tokens, sequences=own_sequences, scale=scale)


def _groups_by_position(original, self):
    import numpy as np

    pairs = np.arange(len(self.uid)) // 2
    return original(dataclasses.replace(self, uid=pairs.astype(object)))


def _score_on_last_column(original, scores, response_mask):
    import torch

    placed = torch.zeros(response_mask.shape)
    placed[:, -1] = scores
    return placed


def _mean_with_itself(original, inputs):
    advantages, returns = original(inputs)
    size = inputs.groups.size().unsqueeze(-1)
    factor = ((size - 1) / size.clamp(min=1)).float()
    return advantages * factor, returns * factor


def _parts_added_first(original, inputs):
    parts = inputs.gdpo_rewards
    weights = parts.new_tensor(inputs.gdpo_reward_weights or [1.0] * parts.shape[1])
    total = (parts * weights).sum(1, keepdim=True)
    return original(dataclasses.replace(inputs, gdpo_rewards=total, gdpo_reward_weights=None))


def _lambda_complement(original, inputs):
    return original(dataclasses.replace(inputs, lam=1 - inputs.lam))


def _swapped_clips(original, inputs):
    swapped = dataclasses.replace(inputs, clip_low=inputs.clip_high, clip_high=inputs.clip_low)
    return original(swapped)


def _own_token_count(original, self, x):
    own = dataclasses.replace(self, tokens=int(self.mask.sum()))
    return original(own, x)


def _upside_down(original, log_prob, rollout_log_prob, mask):
    return original(rollout_log_prob, log_prob, mask)


def _clipped_before_scaled(original, scores, mean, std, clip_range):
    if clip_range is not None:
        scores = scores.clamp(*clip_range)
    return original(scores, mean, std, None)


def _keeps_every_token(original, *args, **kwargs):
    kept, *rest = original(*args, **kwargs)
    return (kept | True, *rest)


MUTANTS = [
    # masked reductions
    Mutant(
        "a masked sum multiplies by the mask, so NaN in padding reaches the result",
        MASKED + "masked_sum",
        calls(_multiplied),
        (T + "masked.py",),
    ),
    Mutant(
        "a masked mean divides by the number of all entries",
        MASKED + "masked_mean",
        calls(_mean_over_padding),
        (T + "masked.py",),
    ),
    # aggregation
    Mutant(
        "the loss is divided by the token count of its micro-batch",
        WEIGHTS,
        calls(_counts_of_the_micro_batch),
        (T + "aggregation.py",),
    ),
    # KL
    Mutant(
        "KL is that of the reference against the policy",
        KL + "kl_estimate",
        calls(lambda original, log_prob, ref, kind: original(ref, log_prob, kind)),
        (T + "kl.py",),
    ),
    Mutant(
        "distillation trains the KL of the teacher against the policy",
        DISTILLATION + "kl_estimate",
        calls(lambda original, log_prob, teacher, kind: original(teacher, log_prob, kind)),
        (T + "distillation.py",),
    ),
    Mutant(
        "distillation by policy gradient has the estimate's own gradient",
        DISTILLATION + "distillation_loss",
        argument("spec", attribute("use_policy_gradient", lambda on: False)),
        (T + "distillation.py",),
    ),
    Mutant(
        "distillation does not limit log-probs",
        DISTILLATION + "distillation_loss",
        argument("spec", attribute("log_prob_min_clamp", lambda least: None)),
        (T + "distillation.py",),
    ),
    Mutant("k3 has no upper limit", KL + "K3_LIMIT", constant(1e30), (T + "kl.py",)),
    Mutant(
        "log 0 minus log 0 is NaN", KL + "LOG_PROB_FLOOR", constant(float("-inf")), (T + "kl.py",)
    ),
    Mutant(
        "the straight-through KL has its own gradient",
        KL + "kl_estimate",
        argument("kind", lambda kind: kind.removesuffix("+")),
        (T + "kl.py",),
    ),
    Mutant(
        "the KL penalty in the reward is a bonus",
        KL + "apply_kl_penalty",
        calls(
            lambda original, s, lp, ref, mask, beta, kind: original(s, lp, ref, mask, -beta, kind)
        ),
        (T + "kl.py",),
    ),
    Mutant(
        "the KL penalty is also charged on tool text",
        KL + "apply_kl_penalty",
        calls(
            lambda original, s, lp, ref, mask, beta, kind: original(
                s, lp, ref, mask | True, beta, kind
            )
        ),
        (T + "kl.py",),
    ),
    # advantages
    Mutant(
        "failed rows count in their group",
        ADVANTAGES + "AdvantageInputs.mask",
        calls(lambda original, self: self.response_mask.bool()),
        (T + "advantages.py",),
    ),
    Mutant(
        "groups are formed by position",
        ADVANTAGES + "AdvantageInputs.groups",
        calls(_groups_by_position),
        (T + "advantages.py",),
    ),
    Mutant(
        "the score is placed on the last column, which may be padding",
        ADVANTAGES + "place_scores",
        calls(_score_on_last_column),
        (T + "advantages.py",),
    ),
    Mutant(
        "GAE uses 1 - lambda", ADVANTAGES + "gae", calls(_lambda_complement), (T + "advantages.py",)
    ),
    Mutant(
        "GAE is not whitened",
        ADVANTAGES + "gae",
        calls(
            lambda original, inputs: (
                (original(inputs)[1] - inputs.values.where(inputs.mask, 0)),
                original(inputs)[1],
            )
        ),
        (T + "advantages.py",),
    ),
    Mutant(
        "the returns of GAE are its advantages",
        ADVANTAGES + "gae",
        result(lambda pair: (pair[0], pair[0])),
        (T + "advantages.py",),
    ),
    Mutant(
        "GRPO always divides by the standard deviation",
        ADVANTAGES + "grpo",
        _inputs("norm_adv_by_std_in_grpo", lambda flag: True),
        (T + "advantages.py",),
    ),
    Mutant("GRPO's sign is flipped", ADVANTAGES + "grpo", _scale_both(-1), (T + "advantages.py",)),
    Mutant(
        "RLOO's baseline includes the row itself",
        ADVANTAGES + "rloo",
        calls(_mean_with_itself),
        (T + "advantages.py",),
    ),
    Mutant(
        "GDPO adds the parts of the reward before it normalizes them",
        ADVANTAGES + "gdpo",
        calls(_parts_added_first),
        (T + "advantages.py",),
    ),
    Mutant(
        "RLOO with token KL lets KL enter the baseline",
        ADVANTAGES + "rloo_token_kl",
        _inputs("token_level_scores", lambda scores: None),
        (T + "advantages.py",),
    ),
    Mutant(
        "the optimal token baseline ignores importance weights",
        ADVANTAGES + "optimal_token_baseline",
        _inputs("rollout_is_weights", lambda weights: None),
        (T + "advantages.py",),
    ),
    # policy losses
    Mutant(
        "PPO does not clip",
        LOSSES + "vanilla",
        calls(
            lambda original, inputs: original(
                dataclasses.replace(inputs, clip_low=1e9, clip_high=1e9)
            )
        ),
        (T + "losses.py",),
    ),
    Mutant(
        "the two clip ranges are swapped",
        LOSSES + "vanilla",
        calls(_swapped_clips),
        (T + "losses.py",),
    ),
    Mutant(
        "the loss is maximized",
        LOSSES + "vanilla",
        result(lambda pair: (-pair[0], pair[1])),
        (T + "losses.py",),
    ),
    Mutant(
        "the ratio is detached from the graph",
        LOSSES + "vanilla",
        _inputs("log_prob", lambda log_prob: log_prob.detach() + 0 * log_prob),
        (T + "losses.py",),
    ),
    Mutant(
        "importance weights are ignored",
        LOSSES + "policy_loss",
        _inputs("rollout_is_weights", lambda weights: None),
        (T + "losses.py",),
    ),
    Mutant(
        "metrics are means over the micro-batch",
        LOSSES + "PolicyLossInputs.token_mean",
        calls(_own_token_count),
        (T + "losses.py",),
    ),
    Mutant(
        "the entropy bonus counts tool text",
        LOSSES + "entropy_sum",
        calls(lambda original, entropy, mask, weights: (entropy * weights.max()).sum()),
        (T + "losses.py",),
    ),
    # log-probs
    Mutant(
        "the temperature is dropped from log-probs",
        LOG_PROBS + "token_log_probs",
        argument("temperature", lambda temperature: 1.0),
        (T + "logprobs.py",),
    ),
    Mutant(
        "log-softmax is taken in half precision",
        LOG_PROBS + "_upcast",
        calls(lambda original, x: x),
        (T + "logprobs.py",),
    ),
    # packing and balancing
    Mutant(
        "every micro-batch is allowed twice the token budget",
        BALANCING + "micro_batches_by_tokens",
        argument("max_tokens", lambda limit: 2 * limit),
        (T + "balancing.py",),
    ),
    Mutant(
        "micro-batches of a tree count a shared prefix with each sample",
        BALANCING + "micro_batches_of_tree",
        argument("shared", lambda shared: [0, *(min(1, tokens) for tokens in shared[1:])]),
        (T + "prefix_tree.py",),
    ),
    # rollout correction
    Mutant(
        "the importance ratio is upside down",
        CORRECTION + "log_ratios",
        calls(_upside_down),
        (T + "rollout_correction.py",),
    ),
    Mutant(
        "importance weights are not truncated",
        CORRECTION + "bounded_weights",
        calls(lambda original, ratios, settings: ratios),
        (T + "rollout_correction.py",),
    ),
    Mutant(
        "rejection keeps every token",
        CORRECTION + "rejection_mask",
        calls(_keeps_every_token),
        (T + "rollout_correction.py",),
    ),
    # reward shaping
    Mutant(
        "scores are clipped before they are scaled",
        SHAPING + "shape_scores",
        calls(_clipped_before_scaled),
        (T + "shaping.py",),
    ),
    Mutant(
        "the length penalty starts too late",
        SHAPING + "overlong_penalty",
        argument("buffer", lambda buffer: max(1, buffer // 2)),
        (T + "shaping.py",),
    ),
    # trainer against rollout engine
    Mutant(
        "the log-prob gap counts tool text",
        GAP + "gap_rows",
        argument("mask", lambda mask: mask | 1),
        (T + "gap.py",),
    ),
    Mutant(
        "a GPU stores all attention scores of grouped heads",
        "verlite.algorithms.attention:_flash_fits",
        returns(True),
        (T + "attention.py",),
    ),
    # asynchronous training
    Mutant(
        "only the newest version of a response has an age",
        STALENESS + "age_metrics",
        argument("spans", lambda spans: [row[-1:] for row in spans]),
        (T + "staleness.py",),
    ),
]
