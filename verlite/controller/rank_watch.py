"""Compare heartbeats with the calls that the driver waits for; see `controller.liveness`."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verlite.controller import liveness
from verlite.controller.heartbeat import EVERY_S, Heard, Receiver
from verlite.controller.liveness import Rank, Stragglers
from verlite.controller.stacks import collect, ranks_text, render
from verlite.controller.worker_handle import WorkerHandle, diagnose

CHECK_EVERY_S = 1.0
LATE_S = 3 * EVERY_S
"""A rank whose heartbeats are later than this may be frozen, so other ranks may be waiting for it:
nothing is said about them yet."""
HEARTBEAT_TIMEOUT_S = 45.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Frozen:
    """A worker that does not respond, and how that shows."""

    worker: WorkerHandle
    why: str


@dataclass(frozen=True)
class Still:
    """A call without progress.

    Attributes:
        workers: those that make none.
        in_group: whether they meet in collectives, so that one of them may have stopped all.
        limit_s: the limit that was exceeded.
        why: for the message.
    """

    workers: list[WorkerHandle]
    in_group: bool
    limit_s: float
    why: str


class RankWatch:
    """What one run's driver knows about its workers from their heartbeats.

    Args:
        heartbeats: None: there are none, and only the run's limit on calls applies.
        timeout_s: a rank without heartbeats for this time is looked at, and a call without progress
            is named.

    Attributes:
        warn: shows a warning to the user.
        stragglers: see `liveness.Stragglers`.
    """

    def __init__(
        self, heartbeats: Receiver | None = None, timeout_s: float = HEARTBEAT_TIMEOUT_S
    ) -> None:
        self.heartbeats = heartbeats
        self.timeout_s = timeout_s
        self.warn: Callable[[str], None] = _log.warning
        self.stragglers = Stragglers()
        self._pauses: dict[tuple[str, str], float] = {}
        self._answered: dict[str, float] = {}
        self._checked = 0.0
        self._named: set[str] = set()
        """Engines whose background sampling was named as without progress."""

    def is_due(self) -> bool:
        """Return True at most once per CHECK_EVERY_S, and never without heartbeats."""
        now = time.monotonic()
        if self.heartbeats is None or now - self._checked < CHECK_EVERY_S:
            return False
        self._checked = now
        return True

    def look_now(self) -> None:
        """Let `is_due` return True the next time."""
        self._checked = 0.0

    def facts(self, future: Any) -> list[tuple[WorkerHandle, Rank]]:
        """Return the facts about each rank that has not answered a call (`supervise.Future`)."""
        clock = 0.0 if self.heartbeats is None else self.heartbeats.clock
        elapsed_s = time.monotonic() - future.started
        return [
            (worker, liveness.rank_facts(worker.rank, self._heard(worker), clock, elapsed_s))
            for worker in list(future.pending.values())
        ]

    def _heard(self, worker: WorkerHandle) -> Heard | None:
        return self.heartbeats.heard.get(worker.heartbeat) if self.heartbeats else None

    def exceeds(self, future: Any, limit_s: float) -> bool:
        """Return whether ranks of a call have made no progress for longer than the limit."""
        return bool(liveness.still_ranks([rank for _, rank in self.facts(future)], limit_s))

    def frozen(
        self,
        needed: Sequence[WorkerHandle],
        workers: Sequence[WorkerHandle],
        outstanding: Sequence[Any],
    ) -> list[Frozen]:
        """Return the workers whose heartbeats have stopped and that do not answer a signal either.

        A worker in native code that holds Python's lock sends no heartbeats, but it answers.

        Args:
            needed: the workers to look at.
            workers, outstanding: of the run, for the stacks.
        """
        assert self.heartbeats is not None
        clock = self.heartbeats.clock
        silent = {}
        for worker in needed:
            heard = self._heard(worker)
            if heard is not None:
                since = max(heard.heard, self._answered.get(worker.heartbeat, 0.0))
                if clock - since > self.timeout_s:
                    silent[worker] = clock - heard.heard
        if not silent or self._still_answers(list(silent)):
            return []
        dump = collect(workers, outstanding)
        path = write_stacks(workers, dump)
        found = []
        for worker, answer in zip(workers, dump["workers"], strict=True):
            if worker not in silent:
                continue
            heard = self._heard(worker)
            if answer["stacks"] or heard is None or heard.heard > clock:
                self._answered[worker.heartbeat] = clock
                continue
            why = (
                f"no heartbeat for {silent[worker]:.0f} s and no answer to a signal; the "
                f"process is {answer['state']}. "
                f"Last position: {liveness.position(heard.beat.at)}. Stacks of the others: {path}"
            )
            found.append(Frozen(worker, why))
        return found

    def _still_answers(self, silent: Sequence[WorkerHandle]) -> bool:
        """Whether these workers have answered a signal since their last heartbeats, and none has
        been stopped since. Stacks are written once per silence."""
        assert self.heartbeats is not None
        for worker in silent:
            heard = self._heard(worker)
            if heard is None or self._answered.get(worker.heartbeat, -1.0) < heard.heard:
                return False
        found = diagnose(silent)
        if any(
            one is None or one.state in ("stopped by a signal", "gone", "dead") for one in found
        ):
            return False
        self._answered.update({one.heartbeat: self.heartbeats.clock for one in silent})
        return True

    def restarted(self, role: str) -> None:
        """Forget how long calls of a role have paused: a new process does everything for the first
        time."""
        self._pauses = {key: pause for key, pause in self._pauses.items() if key[0] != role}

    def still(
        self, future: Any, workers: Sequence[WorkerHandle], outstanding: Sequence[Any], run_s: float
    ) -> Still | None:
        """Return the ranks of a call that have made no progress for too long, else None.

        Warns about them some time earlier, once, and again when they go on.

        Args:
            future: the call.
            workers, outstanding: of the run, for the stacks.
            run_s: `trainer.phase_timeout_s`.
        """
        if future.method == liveness.IN_BACKGROUND:
            return self._still_engines(future, workers, outstanding, run_s)
        facts = self.facts(future)
        judged = [rank for _, rank in facts if liveness.is_judged(rank, future.method)]
        in_group = any(rank.at is not None and rank.at.in_group for _, rank in facts)
        if in_group and len(judged) < len(facts):
            return None
        pause_s = min if in_group else max
        future.pause_s = max(future.pause_s, pause_s((r.still_s for r in judged), default=0.0))
        limit_s = liveness.end_limit(
            run_s, self.timeout_s, self._pauses.get((future.role, future.method))
        )
        still = liveness.still_ranks(judged, self.timeout_s)
        if not still:
            if future.is_named:
                self.warn(f"{future.role}.{future.method} makes progress again")
            future.is_named = False
            return None
        ended = liveness.still_ranks(judged, limit_s)
        is_late = any((rank.silent_s or 0.0) > LATE_S for rank in still)
        if not ended and (future.is_named or is_late):
            return None
        path = write_stacks(workers, collect(workers, outstanding))
        text = describe(future, still, [worker for worker, _ in facts])
        if ended:
            found = [worker for worker, rank in facts if rank in ended]
            return Still(found, in_group, limit_s, f"{text}. Stacks of all processes: {path}")
        future.is_named = True
        self.warn(
            f"{text}. Stacks of all processes: {path}. The call is ended after {limit_s:.0f} s "
            "without progress"
        )
        return None

    def _still_engines(
        self, future: Any, workers: Sequence[WorkerHandle], outstanding: Sequence[Any], run_s: float
    ) -> Still | None:
        """The same for engines that sample in the background, each on its own."""
        clock = 0.0 if self.heartbeats is None else self.heartbeats.clock
        for worker, facts in self.facts(future):
            heard = self._heard(worker)
            rank = liveness.engine_facts(facts, heard, clock)
            if rank.still_s <= self.timeout_s:
                if worker.heartbeat in self._named:
                    self._named.discard(worker.heartbeat)
                    self.warn(f"{worker.name} makes progress again")
                continue
            limit_s = liveness.end_limit(run_s, self.timeout_s, heard.pause_s if heard else None)
            is_ended = rank.still_s > limit_s
            is_late = (rank.silent_s or 0.0) > LATE_S
            if not is_ended and (worker.heartbeat in self._named or is_late):
                continue
            path = write_stacks(workers, collect(workers, outstanding))
            text = f"{describe(future, [rank], [worker])}. Stacks of all processes: {path}"
            if is_ended:
                return Still([worker], False, limit_s, text)
            self._named.add(worker.heartbeat)
            self.warn(f"{text}. The engine is replaced after {limit_s:.0f} s without progress")
        return None

    def finished(self, future: Any) -> None:
        """Note a finished call: its longest pause, and how long each rank worked."""
        if self.heartbeats is None or future.method == "construction":
            return
        key = (future.role, future.method)
        self._pauses[key] = max(self._pauses.get(key, 0.0), future.pause_s)
        work = {
            rank: liveness.own_work(seconds, self._heard(worker))
            for rank, (worker, seconds) in future.answered.items()
        }
        slow = self.stragglers.add(future.role, future.method, work)
        if slow is not None:
            seconds = ", ".join(f"rank {rank}: {work[rank]:.1f} s" for rank in sorted(work))
            worker = future.answered[slow][0]
            self.warn(
                f"{worker.name} is a straggler: in the last {liveness.SLOW_CALLS} calls of "
                f"{future.method} it worked longest ({seconds}). Process {worker.pid} on "
                f"node {worker.node}"
            )


def describe(future: Any, still: Sequence[Rank], workers: Sequence[WorkerHandle]) -> str:
    """Return what is known about a call without progress: where its ranks are, and which of them
    the others wait for."""
    by_rank = {worker.rank: worker for worker in workers}
    seconds = min(rank.still_s for rank in still)
    ranks = ranks_text(rank.rank for rank in still)
    text = f"{future.role}.{future.method}: no progress of {ranks} for {seconds:.0f} s"
    behind = liveness.not_entered(still, future.method)
    if behind:
        text += f". The others wait for {ranks_text(behind)}"
    shown = [rank for rank in still if rank.rank in behind] or list(still)
    for rank in shown[:4]:
        worker = by_rank[rank.rank]
        text += (
            f". Rank {rank.rank} (process {worker.pid} on node {worker.node}): "
            f"{liveness.position(rank.at)}"
        )
    return text


def write_stacks(workers: Sequence[WorkerHandle], dump: dict[str, Any]) -> Path:
    """Write the stacks into the folder of the workers' logs and return the path."""
    path = Path(workers[0].log).with_name(f"stacks_{time.strftime('%Y%m%d_%H%M%S')}.txt")
    try:
        path.write_text(render(dump) + "\n")
    except OSError as error:
        _log.warning("the stacks could not be written: %s", error)
    return path
