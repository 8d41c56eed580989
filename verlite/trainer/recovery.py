"""Start rollout engines that died again, within the run.

The supervisor raises `RankDied` from the call that an engine did not answer. The stage that made
the call then uses `restart_engines`, gives all engines the weights (`stages.weights`), and sends
the call again to the new engines only. The seed of every sample is in its request, and a new engine
gets the same rows as the dead one, so it draws the same samples.

With trainer.mode=sync, samples of the dead engine that were finished but not yet read by the
trainer are lost with its process. If it dies between generation and the step's first update, the
run therefore ends.
"""

import time

from verlite.control.commands import Fail
from verlite.control.machine import Machine
from verlite.controller.failures import KINDS, RankDied, StuckError, WorkerError
from verlite.controller.worker_group import group
from verlite.trainer.run import Run


def restart_engines(run: Run, died: RankDied) -> None:
    """Wait until all other calls are answered, and start new engines in place of the dead ones.

    Afterwards the new engines have no weights, and all sleep. On a GPU the others may have had
    weights and a KV cache, which fill the memory that the actor needs to publish its weights. In
    asynchronous training the others go on, and the samples of the dead ones are drawn again.

    Raises:
        StepAborted: a stop was requested, which waits for no engine. None runs any more.
        WorkerError: `rollout.max_restarts` in this step is reached, or a new engine could not be
            started. The message is that of the step's first death.
    """
    engines = group(run.rollout)
    step = run.current
    lost: set[int] = set()
    while True:
        began = time.monotonic()
        step.first_death = step.first_death or died.error
        dead = engines.supervisor.settle(died.workers)
        lost.update(worker.rank for worker in dead)
        names = ", ".join(worker.name for worker in dead)
        cause = str(died).splitlines()[0]
        by_samples = died.error.kind == KINDS["EngineDied"]
        following = run.tell(Machine.engines_died, len(dead), names, cause, by_samples)
        if isinstance(following, Fail):
            raise _first_cause(step.first_death, following)
        try:
            engines.restart(dead)
            run.display.info(f"Started again in {time.monotonic() - began:.1f} s: {names}")
            if run.groups is None:
                run.rollout.sleep()
            else:
                run.groups.engines_replaced(sorted(lost))
            break
        except RankDied as again:
            died = again
        except (WorkerError, StuckError) as error:
            if error.role != engines.role:
                raise
            following = run.tell(Machine.restart_failed, str(error))
            assert isinstance(following, Fail)
            raise _first_cause(step.first_death, following) from error
    run.actor.engine_restarted()
    run.tell(Machine.engines_restarted)
    run.metrics["perf/engine_restarts"] = float(run.stop.machine.restarts)


def _first_cause(first: WorkerError, end: Fail) -> WorkerError:
    """Return the error of the first death in this step, with why no engine is started again."""
    first.args = (f"{first}\n  {end.reason}",)
    first.may_pass = first.may_pass and end.may_pass
    return first
