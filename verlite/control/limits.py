"""Every time, in seconds, and every other bound that the control decides with.

Settings of the user (trainer.stop_grace_s, outage_wait_s) are in `policy.Policy` and in the events.
"""

WATCH_S = 0.2
"""How often `Watched` comes once a stop was requested or the exit code is decided."""
REPEAT_S = 1.0
"""A second signal within this time is the first one again: `timeout`, for example, sends it to the
process and then to its group."""
END_S = 8.0
"""How long cleaning up may take after a stop when nothing has to be saved."""
LEAVE_S = 20.0
"""How long the process may live after its exit code is decided: trackers send their last metrics,
workers close, Ray ends."""

LAST_WORDS_S = 2.0
"""How long a message of an ending process may take: a terminal or a disk may not answer."""
CHECKPOINT_S = 1.0
"""How long a message waits for the disk to find the last checkpoint."""
ATEXIT_S = 3.0
"""How long functions of `atexit` may run."""

SIGTERM_TO_ALL_S = 1.0
"""How long SIGTERM may take to reach all processes of a local cluster."""
CLOSE_S = 6.0
"""How long workers may take to close."""
FREE_S = 4.0
"""How long freeing the devices may take."""
RAY_END_S = 10.0
"""How long leaving or stopping Ray may take."""
RESTORE_EVERY_S = 0.01
"""How long a signal handler may be missing while Ray ends."""

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

ALIVE_S = 5.0
"""How often `verlite launch` tells the hosts that it is there."""
SILENCE_S = 120.0
"""A host that hears nothing for so long ends its command: with SIGTERM, then"""
LEASE_GRACE_S = 20.0
"""this much later with SIGKILL."""

AFTER_STOP_S = 1.0
"""Pause before `verlite supervise` starts a command again that was stopped."""
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
"""Pause before a restart after a failure: the first, and the limit of its doubling."""
LOOK_S = 0.2
"""How often `verlite supervise` looks at its command."""
FROZEN_S = 15.0
"""A command that SIGSTOP has stopped for so long is reported."""
FROZEN_END_S = 60.0
"""A command that SIGSTOP has stopped for so long is killed."""

POLL_S = 0.2
"""Longest single wait inside Ray. Python handles signals between waits."""
GATHER_S = 0.05
"""How long the driver waits, after an answer, for the other ranks' answers to the same call before
it takes what has arrived: a look at all ranks costs 5 µs for each."""
GRACE_S = 3.0
"""How long to wait for the first cause after a failure that may be a consequence of another."""
BEAT_S = 2.0
"""Time between two heartbeats of a worker."""
SAMPLE_S = 0.25
"""How often a worker looks whether it waits in a collective."""
CHECK_EVERY_S = 1.0
"""How often heartbeats are compared with the calls that the driver waits for."""
LATE_S = 3 * BEAT_S
"""A rank whose heartbeats are later than this may be frozen, so other ranks may be waiting for it:
nothing is said about them yet."""
HEARTBEAT_TIMEOUT_S = 45.0
"""`trainer.heartbeat_timeout_s` of a cluster that is started without a configuration."""
END_FACTOR = 4
"""A call without progress is named after `trainer.heartbeat_timeout_s`, and ended after that many
times as long at the earliest: a file system or a network may pause for a minute."""
ADAPTIVE_FACTOR = 10
"""A call without progress is ended after that many times the longest pause of its earlier calls."""
SLOW_RATIO = 1.5
SLOW_S = 1.0
"""A rank is slow if its work takes SLOW_RATIO times as long as the median of the others, and at
least SLOW_S seconds longer."""
SLOW_CALLS = 3
"""A straggler is the slow rank of that many calls of a method in a row."""

ENGINES_LOOK_S = 10.0
"""How long the engines may take to say what running samples have so far. An engine that is stuck
must not hold up a save."""
ENGINES_WAIT_S = 0.25
"""How long the engines wait for their next finished group before they answer that there is none. A
request to stop is noticed between two answers."""

PROBE_EVERY_S = 3.0
PROBE_TIMEOUT_S = 5.0
LOST_PROBES = 4
"""A node is lost after this many failed probes in a row: after 12 s if the connection is refused,
after 32 s if nothing answers."""
HEAD_EVERY_S = 8.0
HEAD_TIMEOUT_S = 5.0
HEAD_FAILURES = 4
"""A worker's guardian gives up a silent head after 4 x (8 + 5) = 52 s, later than the driver gives
up a silent node: the run's own message comes first."""
VIEW_EVERY_S = 5.0
VIEW_FAILURES = 6
"""`verlite cluster start` on another node ends its Ray if the head has not answered this many times
in a row: after 30 s if connections are refused, 60 s if nothing answers. Ray itself needs more than
two minutes."""
DAEMONS_EVERY_S = 1.0
"""How often the processes of Ray on this machine and the guardian are looked at."""
FROZEN_LOOKS = 8
"""Such a process that is stopped in so many looks in a row is taken for lost."""
FIND_LOOKS = 10
FIND_UNTIL = 60
"""Daemons are looked for every FIND_LOOKS looks, FIND_UNTIL looks long: one may start others."""
REACT_S = 3.0
"""How long the main thread has to raise the error of a lost daemon. It may hang in a call into
Ray."""
