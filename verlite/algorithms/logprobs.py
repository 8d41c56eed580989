"""Log-probs of chosen tokens from hidden states, without storing logits for all tokens.

Notation: T tokens, H hidden size, V vocabulary size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**27}
"""Logits per chunk: 64 and 512 MiB in float32, enough rows for a fast matrix product."""


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs of `labels` under softmax(hidden @ weight.T / temperature), and entropies.

    Only `chunk` rows of logits exist at a time. The backward pass recomputes them. Extra memory is
    O(chunk V + T); extra time is one product with the output embedding.

    Args:
        hidden: [T, H]. weight: [V, H], the output embedding. Both receive gradients.
        labels: [T], int64.
        temperature: divides the logits.
        chunk: rows of logits at a time. None: a size that suits the device.
        with_entropy: also compute entropies.

    Returns:
        log-probs [T], and entropies [T] in nats or None. float32, or float64 for float64 inputs.
        Log-softmax runs in that dtype, whatever the dtype of the inputs. Logits of -inf (forbidden
        tokens) add 0 to the entropy.
    """
    chunk = chunk or _chunk_for(weight)
    log_probs, entropy = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, temperature, chunk, with_entropy
    )
    return log_probs, entropy if with_entropy else None


@torch.no_grad()
def sum_pi_squared(
    hidden: Tensor, weight: Tensor, temperature: float = 1.0, chunk: int | None = None
) -> Tensor:
    """Return the sum over the vocabulary of squared probabilities, [T], without gradient.

    The estimator optimal_token_baseline needs it. Arguments are those of `token_log_probs`.
    """
    sums = []
    for rows in torch.split(hidden, chunk or _chunk_for(weight)):
        probs = _logits(rows, weight, temperature).softmax(-1)
        sums.append(probs.square().sum(-1))
    return torch.cat(sums)


def _chunk_for(weight: Tensor) -> int:
    return max(1, CHUNK_ELEMENTS.get(weight.device.type, 2**24) // weight.shape[0])


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _TokenLogProbs(torch.autograd.Function):
    """Log-probs and entropies with a backward pass that recomputes logits chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        normalizers = []
        log_probs = []
        entropies = []
        chunks = zip(torch.split(hidden, chunk), torch.split(labels, chunk), strict=True)
        for rows, target in chunks:
            logits = _logits(rows, weight, temperature)
            normalizer = logits.logsumexp(-1)
            log_probs.append(logits.gather(1, target.unsqueeze(1)).squeeze(1) - normalizer)
            normalizers.append(normalizer)
            if with_entropy:
                entropies.append(_entropy(logits.sub_(normalizer.unsqueeze(1))))
        normalizer = torch.cat(normalizers)
        entropy = torch.cat(entropies) if with_entropy else torch.empty(0)
        ctx.save_for_backward(hidden, weight, labels, normalizer, entropy)
        ctx.settings = temperature, chunk
        # Without this, an entropy that is only logged would cost time in the backward pass.
        ctx.set_materialize_grads(False)
        return torch.cat(log_probs), entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, normalizer, entropy = ctx.saved_tensors
        temperature, chunk = ctx.settings
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(normalizer)
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=normalizer.dtype) if needs_weight else None
        for start in range(0, len(labels), chunk):
            at = slice(start, start + chunk)
            log_p = _logits(hidden[at], weight, temperature).sub_(normalizer[at].unsqueeze(1))
            upstream = grad_log_probs[at].unsqueeze(1)
            # d log p_label / d logit_v = [v = label] - p_v
            # d entropy / d logit_v = -p_v (log p_v + entropy)
            if grad_entropy is None:
                grad_logits = log_p.exp_().mul_(-upstream)
            else:
                p = log_p.exp()
                factor = log_p.clamp_(min=torch.finfo(p.dtype).min)
                factor.add_(entropy[at].unsqueeze(1)).mul_(grad_entropy[at].unsqueeze(1))
                grad_logits = p.mul_(factor.add_(upstream).neg_())
            grad_logits.scatter_add_(1, labels[at].unsqueeze(1), upstream)
            if temperature != 1:
                grad_logits.div_(temperature)
            grad_logits = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[at])
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[at]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = _upcast(hidden @ weight.t())
    return logits if temperature == 1 else logits.div_(temperature)


def _entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)
