"""Start rollout engines that died again, within the run.

The supervisor raises `RankDied` from the call that an engine did not answer. The stage that made
the call then uses `restart_engines`, gives all engines the weights (`stages.weights`), and sends
the call again to the new engines only. The seed of every sample is in its request, and a new engine
gets the same rows as the dead one, so it draws the same samples.

Samples of the dead engine that were finished but not yet read by the trainer are lost with its
process. If it dies between generation and the step's first update, the run therefore ends.
"""

import time

from verlite.controller.failures import RankDied, StuckError, WorkerError
from verlite.controller.worker_group import group
from verlite.trainer.run import Run


def restart_engines(run: Run, died: RankDied) -> None:
    """Wait until all other calls are answered, and start new engines in place of the dead ones.

    The new engines sleep and have no weights. `rollout.max_restarts` limits the restarts of one
    training step.

    Raises:
        WorkerError: the limit is reached, or a new engine could not be started. The message is that
            of the step's first death.
    """
    began = time.monotonic()
    engines = group(run.rollout)
    step = run.current
    limit = run.config.actor_rollout_ref.rollout.max_restarts
    while True:
        step.first_death = step.first_death or died.with_traceback(None)
        dead = engines.supervisor.settle(died.workers)
        if step.engine_restarts + len(dead) > limit:
            raise _first_cause(run, f"at most {limit} are started again")
        step.engine_restarts += len(dead)
        try:
            engines.restart(dead)
            break
        except RankDied as again:
            died = again
        except (WorkerError, StuckError) as error:
            if error.role != engines.role:
                raise
            raise _first_cause(run, f"a new engine could not be started: {error}") from error
    run.actor.engine_restarted()
    run.metrics["perf/engine_restarts"] = float(step.engine_restarts)
    names = ", ".join(worker.name for worker in dead)
    run.display.warn(
        f"{str(died).splitlines()[0]}. Started again in {time.monotonic() - began:.1f} s: {names} "
        f"({step.engine_restarts} of actor_rollout_ref.rollout.max_restarts={limit} in this step)"
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
    return first
