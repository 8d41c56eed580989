"""Log-probabilities of chosen tokens, straight from hidden states, without ever holding logits for all tokens.

Notation: T tokens, H hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = {
    "cpu": 2**24,
    "cuda": 2**27,
}  # logits at a time, 64 and 512 MiB in float32: enough rows for a fast matrix product


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [T] of `labels` [T] under softmax(hidden @ weight.T / temperature), and the entropies [T] if asked for.

    hidden: [T, H]. weight: [V, H], the output embedding. Both results are float32 (float64 for float64 inputs) and carry
    gradients to hidden and weight. Log-softmax runs in float32 whatever the inputs' dtype. Only `chunk` rows of logits exist
    at a time, in the backward pass too, where they are computed again: extra memory is O(chunk V + T), extra time one
    product with the output embedding. chunk=None chooses a size for the device. Logits of -inf (forbidden tokens) count 0.
    """
    log_probs, entropy = _TokenLogProbs.apply(
        hidden, weight, labels, temperature, chunk or _chunk_for(weight), with_entropy
    )
    return log_probs, entropy if with_entropy else None


def log_probs_from_logits(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The same for logits [..., V] that exist anyway, and labels [...]; differentiable."""
    log_softmax = torch.log_softmax(_upcast(logits) / temperature, -1)
    log_probs = log_softmax.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if not with_entropy:
        return log_probs, None
    return log_probs, -(
        log_softmax.exp() * log_softmax.clamp(min=torch.finfo(log_softmax.dtype).min)
    ).sum(-1)


@torch.no_grad()
def sum_pi_squared(
    hidden: Tensor, weight: Tensor, temperature: float = 1.0, chunk: int | None = None
) -> Tensor:
    """[T] sum of squared probabilities over the vocabulary, for the estimator optimal_token_baseline; no gradient."""
    chunk = chunk or _chunk_for(weight)
    return torch.cat(
        [
            _logits(rows, weight, temperature).softmax(-1).square().sum(-1)
            for rows in hidden.split(chunk)
        ]
    )


def _chunk_for(weight: Tensor) -> int:
    return max(1, CHUNK_ELEMENTS.get(weight.device.type, 2**24) // weight.shape[0])


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        normalisers, log_probs, entropies = [], [], []
        for rows, target in zip(hidden.split(chunk), labels.split(chunk), strict=True):
            logits = _logits(rows, weight, temperature)
            normaliser = logits.logsumexp(-1)
            log_probs.append(logits.gather(1, target.unsqueeze(1)).squeeze(1) - normaliser)
            normalisers.append(normaliser)
            if with_entropy:
                entropies.append(_entropy(logits.sub_(normaliser.unsqueeze(1))))
        normaliser, entropy = (
            torch.cat(normalisers),
            torch.cat(entropies) if with_entropy else torch.empty(0),
        )
        ctx.save_for_backward(hidden, weight, labels, normaliser, entropy)
        ctx.settings = temperature, chunk
        ctx.set_materialize_grads(
            False
        )  # an entropy that is only looked at costs the backward pass nothing
        return torch.cat(log_probs), entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, labels, normaliser, entropy = ctx.saved_tensors
        temperature, chunk = ctx.settings
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(normaliser)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = (
            torch.zeros_like(weight, dtype=normaliser.dtype) if ctx.needs_input_grad[1] else None
        )
        for start in range(0, len(labels), chunk):
            at = slice(start, start + chunk)
            log_p = _logits(hidden[at], weight, temperature).sub_(normaliser[at].unsqueeze(1))
            p = log_p.exp_() if grad_entropy is None else log_p.exp()
            upstream = grad_log_probs[at].unsqueeze(1)
            # d log p_label / d logit_v = [v = label] - p_v, and d entropy / d logit_v = -p_v (log p_v + entropy).
            if grad_entropy is not None:
                factor = (
                    log_p.clamp_(min=torch.finfo(p.dtype).min)
                    .add_(entropy[at].unsqueeze(1))
                    .mul_(grad_entropy[at].unsqueeze(1))
                )
                grad_logits = p.mul_(factor.add_(upstream).neg_())
            else:
                grad_logits = p.mul_(-upstream)
            grad_logits.scatter_add_(1, labels[at].unsqueeze(1), upstream)
            if temperature != 1:
                grad_logits.div_(temperature)
            grad_logits = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[at])
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[at]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None,
            None,
            None,
        )


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = _upcast(hidden @ weight.t())
    return logits if temperature == 1 else logits.div_(temperature)


def _entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)
