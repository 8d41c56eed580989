"""Look at the workers that `control.watch` doubts, and say what was found."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verlite.control import limits
from verlite.control.watch import IN_BACKGROUND, Moves, Rank, Watch, not_entered, position
from verlite.controller.failures import FROZEN, STUCK
from verlite.controller.node import Diagnosis
from verlite.controller.stacks import collect, ranks_text, render
from verlite.controller.worker_handle import WorkerHandle, diagnose

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unresponsive:
    """Workers that do nothing, and how that shows.

    Attributes:
        kind: FROZEN or STUCK.
        call: the call that they have not answered within limit_s, if they meet in collectives, so
            that one of them may have stopped all; else None.
    """

    workers: list[WorkerHandle]
    kind: str
    why: str
    call: Any = None
    limit_s: float = 0.0


def look(
    watch: Watch,
    needed: Sequence[WorkerHandle],
    workers: Sequence[WorkerHandle],
    outstanding: Sequence[Any],
    run_s: float,
    warn: Callable[[str], None],
) -> Iterator[Unresponsive]:
    """Yield the workers that are frozen, then those that make no progress. Warn about the latter
    some time earlier, once, and again when they go on.

    Args:
        needed: the workers whose silence matters.
        workers, outstanding: of the run. No call waits for a worker any more that was yielded.
        run_s: `trainer.phase_timeout_s`.
    """
    yield from _frozen(watch, needed, workers, outstanding)
    for future in outstanding:
        ranks = {worker.rank: worker for worker in list(future.pending.values())}
        for verdict in watch.look(future, future.facts(), run_s):
            one_engine = future.method == IN_BACKGROUND
            if isinstance(verdict, Moves):
                what = f"{future.role}.{future.method}"
                what = ranks[verdict.ranks[0].rank].name if one_engine else what
                warn(f"{what} makes progress again")
                continue
            path = write_stacks(workers, collect(workers, outstanding))
            text = f"{describe(future, verdict.ranks, ranks)}. Stacks of all processes: {path}"
            if verdict.over:
                over = [ranks[rank.rank] for rank in verdict.over]
                call = future if verdict.in_group else None
                yield Unresponsive(over, STUCK, text, call, verdict.limit_s)
                continue
            what = "engine is replaced" if one_engine else "call is ended"
            warn(f"{text}. The {what} after {verdict.limit_s:.0f} s without progress")


def _frozen(
    watch: Watch,
    needed: Sequence[WorkerHandle],
    workers: Sequence[WorkerHandle],
    outstanding: Sequence[Any],
) -> Iterator[Unresponsive]:
    """Yield the workers whose heartbeats have stopped and that do not answer a signal either.

    A worker in native code that holds Python's lock sends no heartbeats, but it answers.
    """
    silent_s = watch.silent(worker.heartbeat for worker in needed)
    silent = [worker for worker in needed if worker.heartbeat in silent_s]
    if not silent:
        return
    # Stacks are written once per silence.
    if watch.have_signed(silent_s) and not any(map(is_gone, diagnose(silent))):
        for worker in silent:
            watch.sign(worker.heartbeat, watch.clock)
        return
    clock = watch.clock
    dump = collect(workers, outstanding)
    path = write_stacks(workers, dump)
    for worker, answer in zip(workers, dump["workers"], strict=True):
        if worker not in silent:
            continue
        heard = watch.heard[worker.heartbeat]
        if answer["stacks"] or heard.heard > clock:
            watch.sign(worker.heartbeat, clock)
            continue
        why = (
            f"no heartbeat for {silent_s[worker.heartbeat]:.0f} s and no answer to a signal; "
            f"the process is {answer['state']}. "
            f"Last position: {position(heard.beat.at)}. Stacks of the others: {path}"
        )
        yield Unresponsive([worker], FROZEN, why)


def straggler(watch: Watch, future: Any) -> str:
    """Note a finished call. Return what to say about a rank that has just become a straggler, else
    ""."""
    answered = future.answered
    seconds = {rank: (one.heartbeat, took) for rank, (one, took) in answered.items()}
    slow = watch.finished(future, seconds)
    if slow is None:
        return ""
    work = ", ".join(f"rank {rank}: {slow.work[rank]:.1f} s" for rank in sorted(slow.work))
    worker = answered[slow.rank][0]
    return (
        f"{worker.name} is a straggler: in the last {limits.SLOW_CALLS} calls of {future.method} "
        f"it worked longest ({work}). Process {worker.pid} on node {worker.node}"
    )


def is_gone(found: Diagnosis | None) -> bool:
    """Whether a process cannot run: its node does not answer, or it is stopped or has ended."""
    return found is None or found.state in ("stopped by a signal", "gone", "dead")


def describe(future: Any, still: Sequence[Rank], workers: Mapping[int, WorkerHandle]) -> str:
    """Return what is known about a call without progress: where its ranks are, and which of them
    the others wait for."""
    seconds = min(rank.still_s for rank in still)
    ranks = ranks_text(rank.rank for rank in still)
    text = f"{future.role}.{future.method}: no progress of {ranks} for {seconds:.0f} s"
    behind = not_entered(still, future.method)
    if behind:
        text += f". The others wait for {ranks_text(behind)}"
    shown = [rank for rank in still if rank.rank in behind] or list(still)
    for rank in shown[:4]:
        worker = workers[rank.rank]
        text += (
            f". Rank {rank.rank} (process {worker.pid} on node {worker.node}): {position(rank.at)}"
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
