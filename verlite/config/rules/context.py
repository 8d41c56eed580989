"""What every rule gets, and small helpers for messages."""

from dataclasses import dataclass

from verlite.config.schema import Config


@dataclass
class Context:
    """The configuration under check, and what is known about it so far."""

    config: Config
    user_keys: frozenset[str]
    """Keys that the user set."""
    broken: set[str]
    """Keys with a reported problem.

    A rule does not compute with their values, and reports no second problem.
    """

    def ok(self, *keys: str) -> bool:
        """Return whether none of these keys has a reported problem."""
        return self.broken.isdisjoint(keys)


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """Return the largest divisor of `number` below `wanted` and the smallest above it."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < wanted]
    above = [d for d in divisors if d > wanted]
    return [*below[-1:], *above[:1]]


def nearest_legal(number: int, wanted: int) -> str:
    """Return a remedy that names the nearest divisors."""
    return f"Nearest legal values: {' or '.join(map(str, nearest_divisors(number, wanted)))}."
