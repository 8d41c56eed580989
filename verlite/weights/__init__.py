"""Weights between the trainer and the generation engines."""

GAP_LIMIT = 0.05
"""Largest mean |log p_train - log p_rollout| of equal weights, unless rollout.log_prob_gap_limit
says it or the model is a mixture of experts. The log-prob probe derives its limit from it."""
TIMEOUT_S = 600.0
"""How long one side waits for the other, for example while the trainer gathers a bucket."""
JOIN_S = 120.0
"""How long a side waits until the other has connected."""
GOODBYE_S = 5.0
"""How long a side that fails waits for the other: to tell it why, or to be told why."""


class TransportError(RuntimeError):
    """The weights did not arrive completely."""
