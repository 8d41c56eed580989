"""Weights between the trainer and the generation engines."""

TIMEOUT_S = 600.0
"""How long one side waits for the other, for example while the trainer gathers a bucket."""
JOIN_S = 120.0
"""How long a side waits until the other has connected."""
GOODBYE_S = 5.0
"""How long a side that fails waits for the other: to tell it why, or to be told why."""


class TransportError(RuntimeError):
    """The weights did not arrive completely."""
