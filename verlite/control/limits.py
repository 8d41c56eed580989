"""Every time, in seconds, and every other bound that the control decides with.

Settings of the user (trainer.stop_grace_s, outage_wait_s) are in `policy.Policy` and in the events.
"""

WATCH_S = 0.2
"""How often `Watched` comes once a stop was requested."""
REPEAT_S = 1.0
"""A second signal within this time is the first one again: `timeout`, for example, sends it to the
process and then to its group."""
END_S = 8.0
"""How long cleaning up may take after a stop when nothing has to be saved."""
LEAVE_S = 20.0
"""How long the process may live after its exit code is decided: trackers send their last metrics,
workers close, Ray ends."""

SPARE_S = 10.0
"""What trainer.max_runtime keeps besides the save and LEAVE_S."""
UNKNOWN_SAVE_S = 60.0
"""Time that is kept for a checkpoint before the first one has shown how long it takes."""
SLOWER = 1.5
"""A step or a save may take so much longer than the longest so far."""
EARLIER_STEPS = 20
"""Steps of an earlier run in the same directory that show how long steps and saves take."""

FAILED_SAVES_S = 120.0
"""With short steps that each save, a few failures in a row are seconds apart."""

HEALTH_EVERY_S = 2.0
"""How often a service that failed is asked whether it works again."""
SHORTEST_WAIT_S = 0.001
"""What is left of a wait may be a rounding error: a shorter one has ended."""
MAX_RESAMPLES = 3
"""Generations of the same samples after the first one, each after an outage. A health check that
passes does not guarantee success."""
