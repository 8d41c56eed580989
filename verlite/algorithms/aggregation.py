"""Loss aggregation: every mode is a weight per token, and the loss is sum(token loss * weight).

The denominators count the whole optimizer step, over all micro-batches and ranks. The weighted sums
of micro-batches and ranks therefore add up to the loss of the step, and its gradient does not
depend on how rows are split.
"""

import torch
from torch import Tensor

from verlite.spec.catalog import AGGREGATION_MODES


def token_weights(
    response_mask: Tensor,
    mode: str,
    *,
    tokens: int,
    sequences: int,
    scale: float | None = None,
    row_tokens: Tensor | None = None,
) -> Tensor:
    """Return the weight of each token's loss, [b, R] float32, 0 where the mask is 0.

    token-mean               1 / tokens (DAPO, arXiv:2503.14476, eq. 12)
    token-sum                1
    seq-mean-token-sum       1 / sequences
    seq-mean-token-mean      1 / (sequences * row_tokens) (GRPO, arXiv:2402.03300, eq. 3)
    seq-mean-token-sum-norm  1 / (sequences * scale) (Dr. GRPO, arXiv:2503.20783)

    Args:
        response_mask: [b, R], 1 on trainable tokens; the rows of one micro-batch.
        mode: one of catalog.AGGREGATION_MODES.
        tokens: trainable tokens of the whole optimizer step, over all ranks. If it is 0, all
            weights are 0.
        sequences: samples of the optimizer step with at least one trainable token, over all ranks.
        row_tokens: [b] trainable tokens of each row, and of the rows that belong to the same
            sample (protocol.branches). None: of the row.
        scale: divisor of seq-mean-token-sum-norm, a constant such as the maximum response length.

    Raises:
        ValueError: the mode is unknown, or it needs a scale and `scale` is not above 0.
    """
    mask = response_mask.to(torch.float32)
    tokens = max(tokens, 1)
    sequences = max(sequences, 1)
    if mode == "token-mean":
        return mask / tokens
    if mode == "token-sum":
        return mask
    if mode == "seq-mean-token-sum":
        return mask / sequences
    if mode == "seq-mean-token-mean":
        own = mask.sum(-1) if row_tokens is None else row_tokens
        return mask / (own.clamp(min=1)[:, None] * sequences)
    if mode == "seq-mean-token-sum-norm":
        if scale is None or scale <= 0:
            raise ValueError(
                f"loss_scale_factor={scale} must be above 0: "
                "loss_agg_mode=seq-mean-token-sum-norm divides by it"
            )
        return mask / (sequences * scale)
    raise ValueError(
        f"unknown loss_agg_mode {mode!r}: choose one of {', '.join(AGGREGATION_MODES)}"
    )
