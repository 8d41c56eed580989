"""How per-token losses become one number: every mode is a weight per token, and the loss is sum(loss * weight).

The denominators are counts over the whole optimizer step, all micro-batches and all ranks. So the sum over micro-batches
and ranks of the weighted sums is the loss of the step, and its gradient does not depend on how the rows were split.
"""

import torch
from torch import Tensor

from verlite.config.catalog import AGGREGATION_MODES


def token_weights(
    response_mask: Tensor, mode: str, *, tokens: int, sequences: int, scale: float | None = None
) -> Tensor:
    """Weight of each token's loss, [b, R] float32, 0 where the mask is 0.

    response_mask: [b, R], the rows of one micro-batch. tokens, sequences: trainable tokens, and rows with at least one of
    them, in the whole optimizer step over all ranks. scale: divisor of seq-mean-token-sum-norm, a constant such as the
    longest allowed response; never a property of the batch.

    token-mean               1 / tokens: every token counts the same (DAPO, arXiv:2503.14476, eq. 12)
    token-sum                1
    seq-mean-token-sum       1 / sequences
    seq-mean-token-mean      1 / (sequences * tokens of this row): every row counts the same (GRPO, arXiv:2402.03300, eq. 3)
    seq-mean-token-sum-norm  1 / (sequences * scale): no length bias (Dr.GRPO, arXiv:2503.20783)

    ValueError: an unknown mode, or a missing or non-positive scale where the mode needs one. A step without any trainable
    token has weights 0.
    """
    mask = response_mask.to(torch.float32)
    tokens, sequences = max(tokens, 1), max(sequences, 1)
    if mode == "token-mean":
        return mask / tokens
    if mode == "token-sum":
        return mask
    if mode == "seq-mean-token-sum":
        return mask / sequences
    if mode == "seq-mean-token-mean":
        return mask / (mask.sum(-1, keepdim=True).clamp(min=1) * sequences)
    if mode == "seq-mean-token-sum-norm":
        if scale is None or scale <= 0:
            raise ValueError(
                f"loss_agg_mode=seq-mean-token-sum-norm divides by loss_scale_factor, which must be above 0, not {scale}"
            )
        return mask / (sequences * scale)
    raise ValueError(
        f"unknown loss_agg_mode {mode!r}: choose one of {', '.join(AGGREGATION_MODES)}"
    )
