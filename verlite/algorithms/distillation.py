"""On-policy distillation: a KL term between the policy and a teacher, on the policy's own samples.

With d = log pi - log pi_teacher on sampled tokens, `loss_mode` names an estimator of
KL(pi || pi_teacher) per token (verlite.algorithms.kl). It is trained

as policy gradient: the negative estimate is the advantage of its token. With k1 and one update per
    step the expected gradient is that of KL(pi || pi_teacher) given the tokens before it (Thinking
    Machines Lab 2025, "On-Policy Distillation").
as loss: the estimate's own gradient. k2, and every kind with a +, has the same expectation; k3 has
    that of KL(pi_teacher || pi); k1's is 0.

The loss is a sum over tokens, as those of verlite.algorithms.losses.
"""

from dataclasses import replace

import torch
from torch import Tensor

from verlite.algorithms.kl import kl_estimate
from verlite.algorithms.losses import Metrics, PolicyLoss, PolicyLossInputs, policy_loss
from verlite.spec.roles import DistillationSpec


def distillation_loss(
    spec: DistillationSpec, inputs: PolicyLossInputs, teacher_log_prob: Tensor, function: PolicyLoss
) -> tuple[Tensor, Metrics]:
    """Return the distillation term: a scalar with gradient, and additive metrics.

    Args:
        spec: the section distillation.distillation_loss.
        inputs: one micro-batch; its advantages are those of the task and are not used.
        teacher_log_prob: [b, R], log-probs of the sampled tokens under the teacher. Entries under
            mask 0 change neither value nor gradient, even if they are NaN.
        function: the actor's policy loss, by which the policy-gradient form is trained.
    """
    log_prob = torch.where(inputs.mask, inputs.log_prob, 0)
    teacher = torch.where(inputs.mask, teacher_log_prob, 0)
    kl = kl_estimate(log_prob, teacher, "k1").detach()
    if spec.log_prob_min_clamp is not None:
        log_prob = log_prob.clamp(min=spec.log_prob_min_clamp)
        teacher = teacher.clamp(min=spec.log_prob_min_clamp)
    estimate = kl_estimate(log_prob, teacher, spec.loss_mode)
    metrics = {
        "distillation/kl": inputs.token_mean(kl),
        "distillation/abs_loss": inputs.token_mean(estimate.abs()),
    }
    if spec.loss_max_clamp is not None:
        estimate = estimate.clamp(-spec.loss_max_clamp, spec.loss_max_clamp)
    if spec.use_policy_gradient:
        loss, measured = policy_loss(function, replace(inputs, advantages=-estimate.detach()))
        metrics |= {name.replace("actor/", "distillation/"): measured[name] for name in measured}
    else:
        loss = (estimate * inputs.weights).sum()
    return loss, metrics | {"distillation/loss": loss.detach()}
