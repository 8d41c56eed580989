"""Start rollout engines that died again, within the run.

The supervisor raises `RankDied` from the call that an engine did not answer. The stage that made
the call then uses `restart_engines`, gives all engines the weights (`stages.weights`), and sends
the call again to the new engines only. The seed of every sample is in its request, and a new engine
gets the same rows as the dead one, so it draws the same samples.

Samples of the dead engine that were finished but not yet read by the trainer are lost with its
process. If it dies between generation and the step's first update, the run therefore ends.
"""

import time

from verlite.controller.failures import KINDS, RankDied, StuckError, WorkerError
from verlite.controller.worker_group import group
from verlite.trainer.run import Run


def restart_engines(run: Run, died: RankDied, may_stop: bool = False) -> None:
    """Wait until all other calls are answered, and start new engines in place of the dead ones.

    Afterwards all engines sleep, and the new ones have no weights. On a GPU the others may have had
    weights and a KV cache, which fill the memory that the actor needs to publish its weights.
    `rollout.max_restarts` limits the restarts of one training step.

    Args:
        may_stop: whether a stop ends the engines instead, because the step needs them no more.

    Raises:
        StepAborted: may_stop, and a stop was requested. No engine runs any more.
        WorkerError: the limit is reached, or a new engine could not be started. The message is that
            of the step's first death.
    """
    engines = group(run.rollout)
    step = run.current
    limit = run.config.actor_rollout_ref.rollout.max_restarts
    while True:
        began = time.monotonic()
        step.first_death = step.first_death or died.error
        dead = engines.supervisor.settle(died.workers)
        if may_stop:
            run.can_abort = True
            run.obey_stop()
        if step.engine_restarts + len(dead) > limit:
            raise _first_cause(run, f"at most {limit} are started again")
        step.engine_restarts += len(dead)
        names = ", ".join(worker.name for worker in dead)
        _warn(run, died, names)
        try:
            engines.restart(dead)
            run.display.info(f"Started again in {time.monotonic() - began:.1f} s: {names}")
            run.rollout.sleep()
            break
        except RankDied as again:
            died = again
        except (WorkerError, StuckError) as error:
            if error.role != engines.role:
                raise
            raise _first_cause(run, f"a new engine could not be started: {error}") from error
    run.actor.engine_restarted()
    run.metrics["perf/engine_restarts"] = float(step.engine_restarts)


def _warn(run: Run, died: RankDied, names: str) -> None:
    """Say why an engine died, and which are started again. That may take long on a GPU."""
    restarts, limit = run.current.engine_restarts, run.config.actor_rollout_ref.rollout.max_restarts
    run.display.warn(
        f"{str(died).splitlines()[0]}. Starting again: {names} ({restarts} of "
        f"actor_rollout_ref.rollout.max_restarts={limit} in this step)"
    )


def _first_cause(run: Run, reason: str) -> WorkerError:
    """Return the error of the first death in this step, with why no engine is started again."""
    first = run.current.first_death
    assert first is not None
    more = (
        f"{run.current.engine_restarts} rollout engines were started again in step {run.step}, and "
        f"{reason} (actor_rollout_ref.rollout.max_restarts)"
    )
    first.args = (f"{first}\n  {more}",)
    if first.kind == KINDS["EngineDied"] and run.current.engine_restarts:
        first.may_pass = False  # the same samples have failed in several processes
    return first
