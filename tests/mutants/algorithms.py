"""Mutants of verlite.algorithms: numbers that are wrong without an error message."""

from tests.mutants import Mutant
from tests.mutants.patches import argument, calls, constant, result

MASKED = "verlite.algorithms.masked:"
WEIGHTS = "verlite.algorithms.aggregation:token_weights"
KL = "verlite.algorithms.kl:"
T = "tests/algorithms/test_"
MASKED_BY_HAND = f"{T}masked.py::test_hand_values"
SPLIT = f"{T}aggregation.py"


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


def _divided_by_the_width(original, response_mask, mode, **counts):
    if mode == "seq-mean-token-sum-norm":
        counts["scale"] = response_mask.shape[-1]
    return original(response_mask, mode, **counts)


MUTANTS = [
    Mutant(
        "a masked sum multiplies by the mask, so NaN in padding reaches the result",
        MASKED + "masked_sum",
        calls(_multiplied),
        (MASKED_BY_HAND,),
    ),
    Mutant(
        "a masked mean divides by the number of all entries",
        MASKED + "masked_mean",
        calls(_mean_over_padding),
        (MASKED_BY_HAND,),
    ),
    Mutant(
        "the loss is divided by the token count of its own micro-batch",
        WEIGHTS,
        calls(_counts_of_the_micro_batch),
        (SPLIT,),
    ),
    Mutant(
        "Dr.GRPO divides by the width of the batch",
        WEIGHTS,
        calls(_divided_by_the_width),
        (SPLIT,),
    ),
    Mutant(
        "KL has the wrong sign",
        KL + "kl_estimate",
        calls(lambda original, log_prob, ref, kind: original(ref, log_prob, kind)),
        (f"{T}kl.py",),
    ),
    Mutant("k3 has no upper limit", KL + "K3_LIMIT", constant(1e30), (f"{T}kl.py",)),
    Mutant(
        "the straight-through KL uses its own gradient",
        KL + "kl_estimate",
        argument("kind", lambda kind: kind.removesuffix("+")),
        (f"{T}kl.py",),
    ),
    Mutant(
        "the KL loss is doubled",
        KL + "kl_loss",
        result(lambda loss: 2 * loss),
        (f"{T}kl.py",),
    ),
]
