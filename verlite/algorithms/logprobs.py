"""Log-probs of chosen tokens from hidden states, without storing logits for all tokens.

Notation: T tokens, H hidden size, V vocabulary size.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

log = logging.getLogger(__name__)

CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**27}
"""Logits per chunk: 64 and 512 MiB in float32, enough rows for a fast matrix product."""

CHUNK_ROWS = 4096
"""At most: the last chunk may be padded, which must cost little for a small vocabulary too."""


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
        probs = _scaled(rows @ weight.t(), temperature).softmax(-1)
        sums.append(probs.square().sum(-1))
    return torch.cat(sums)


def _chunk_for(weight: Tensor) -> int:
    rows = CHUNK_ELEMENTS.get(weight.device.type, 2**24) // weight.shape[0]
    return min(max(1, rows), CHUNK_ROWS)


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
            logits, column = rows @ weight.t(), target.unsqueeze(1)
            chosen, normalizer, entropy = _fused(
                _outputs, chunk, logits, temperature, with_entropy, column
            )
            log_probs.append(chosen)
            normalizers.append(normalizer)
            entropies.append(entropy)
        normalizer, entropy = torch.cat(normalizers), torch.cat(entropies)
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
            of_tokens = [normalizer, grad_log_probs]
            if grad_entropy is not None:
                of_tokens += [entropy, grad_entropy]
            columns = [values[at].unsqueeze(1) for values in of_tokens]
            target = labels[at].unsqueeze(1)
            logits = hidden[at] @ weight.t()
            of_labels = _gradient(logits.gather(1, target), temperature, True, *columns)
            grad_logits = _fused(_gradient, chunk, logits, temperature, False, *columns)
            grad_logits.scatter_(1, target, of_labels)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[at])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.t(), hidden[at])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


# Elementwise work on a chunk's logits, products [n, V]. They may be overwritten. What belongs to a
# token is [n, 1]. A temperature is a float, or [] where the work is compiled.


def _divided(values: Tensor, temperature: float | Tensor) -> Tensor:
    is_one = isinstance(temperature, float | int) and temperature == 1
    return values if is_one else values.div_(temperature)


def _scaled(logits: Tensor, temperature: float | Tensor) -> Tensor:
    return _divided(_upcast(logits), temperature)


def _outputs(
    logits: Tensor, temperature: float | Tensor, with_entropy: bool, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs of `labels`, normalizers, and entropies ([0] if not asked for)."""
    logits = _scaled(logits, temperature)
    normalizer = logits.logsumexp(-1)
    log_probs = logits.gather(1, labels).squeeze(1) - normalizer
    if not with_entropy:
        return log_probs, normalizer, normalizer.new_empty(0)
    log_p = logits.sub_(normalizer.unsqueeze(1))
    entropy = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)
    return log_probs, normalizer, entropy


def _gradient(
    logits: Tensor,
    temperature: float | Tensor,
    is_label: bool,
    normalizer: Tensor,
    grad_log_prob: Tensor,
    entropy: Tensor | None = None,
    grad_entropy: Tensor | None = None,
) -> Tensor:
    """Return the gradient of logits in their dtype: of the labels', or of others.

    d log p_label / d logit_v = [v = label] - p_v, d entropy / d logit_v = -p_v (log p_v + entropy).
    """
    log_p = _scaled(logits, temperature).sub_(normalizer)
    if entropy is None or grad_entropy is None:
        gradient = log_p.exp_().mul_(-grad_log_prob)
    else:
        p = log_p.exp()
        factor = log_p.clamp_(min=torch.finfo(p.dtype).min)
        factor.add_(entropy).mul_(grad_entropy)
        gradient = p.mul_(factor.add_(grad_log_prob).neg_())
    if is_label:
        gradient.add_(grad_log_prob)
    return _divided(gradient, temperature).to(logits.dtype)


# On a GPU

_unfused: set[Callable[..., Any]] = set()
"""Functions that cannot be compiled on this machine."""


def _fused(
    function: Callable[..., Any], chunk: int, logits: Tensor, temperature: float, *arguments: Any
) -> Any:
    """Call a function of at most `chunk` rows of logits. On a GPU it is compiled: two kernels that
    read the logits in their dtype, in place of ten that pass over them in float32."""
    if logits.is_cuda and function not in _unfused:
        try:
            return _whole_chunk(function, chunk, logits, temperature, *arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _unfused.add(function)
            log.warning(
                "log-probs take longer than they could: torch.compile does not work here (%s: %s)",
                type(error).__name__,
                str(error).partition("\n")[0],
            )
    return function(logits, temperature, *arguments)


def _whole_chunk(
    function: Callable[..., Any],
    chunk: int,
    logits: Tensor,
    temperature: float,
    flag: bool,
    *columns: Tensor,
) -> Any:
    """Call the compiled function with rows of zeros up to `chunk`.

    All chunks have one shape, so a row's numbers come from one kernel, wherever the row stands and
    whatever this process computed before: a resumed run repeats them.
    """
    rows = len(logits)
    padding = (0, 0, 0, chunk - rows)
    if rows < chunk:
        logits = pad(logits, padding)
    scale = torch.full((), temperature, dtype=_upcast(logits[:0]).dtype, device=logits.device)
    padded = [pad(column, padding) for column in columns]  # copies: equally aligned in memory
    results = _compiled(function)(logits, scale, flag, *padded)
    return tree_map(lambda result: result[:rows], results)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # deterministic: kernels are not chosen by their times.
    return torch.compile(function, dynamic=False, options={"deterministic": True})


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, which may be float32 where they are not."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda and _adds_wide(left.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


@functools.cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a product of this dtype can be added to float32 in one kernel there."""
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=total.dtype, out=total)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())
