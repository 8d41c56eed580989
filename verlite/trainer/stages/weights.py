"""Weight sync from the actor to the roles that read its weights, and calls of rollout engines. Any
may die: it is started again within the run, and gets the weights again.

The supervisor raises `RankDied` from the call that an engine did not answer. Then `restart_engines`
starts new ones, all engines get the weights, and the call is sent again to the new engines only.
The seed of every sample is in its request, and a new engine gets the same rows as the dead one, so
it draws the same samples.

With trainer.mode=sync, samples of the dead engine that were finished but not yet read by the
trainer are lost with its process. If it dies between generation and the step's first update, the
run therefore ends.
"""

import functools
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import ParamSpec, TypeVar

from verlite.control.commands import Fail
from verlite.control.machine import Machine
from verlite.controller.failures import KINDS, RankDied, StuckError, WorkerError
from verlite.controller.worker_group import group, submit
from verlite.protocol.metrics import Metrics
from verlite.spec.weight_routes import WeightRoutes
from verlite.trainer.errors import StepAborted
from verlite.trainer.log_prob_gap import gap_limit
from verlite.trainer.run import Run, stage
from verlite.weights.probe import probe_limit
from verlite.workers.inference import InferenceWorker
from verlite.workers.rollout import RolloutWorker

P = ParamSpec("P")
T = TypeVar("T")
_PROBE_SHARE = 0.02
"""Share of a step's time that the log-prob probe may take with weight_probe=auto."""


@stage("update_weights")
def sync_weights(run: Run) -> None:
    """Give every rollout engine, and the role `inference`, the actor's weights under the next
    version. See `give_weights`."""
    with suppress(StepAborted):  # a stop has ended the engines: nothing is generated after it
        run.metrics.update(give_weights(run, run.version + 1))
    run.version += 1
    if run.groups is not None:
        run.groups.flow.published()


def give_weights(run: Run, version: int) -> Metrics:
    """Give every rollout engine, and the role `inference`, the actor's weights under a version.
    Return the metrics of the sync.

    If an engine dies meanwhile, it is started again and the sync is repeated.

    Raises:
        StepAborted: a stop came while an engine was started again.
    """
    while True:
        try:
            return _give_weights(run, version)
        except RankDied as died:
            restart_engines(run, died)


def _give_weights(run: Run, version: int) -> Metrics:
    """Those that take weights from the actor's GPU or from another host do so while it publishes.
    For the others, all ranks of the actor write their weights and free their device memory before
    any engine allocates its own. Each reader compares fingerprints, and with the log-prob probe
    also log-probs, before it keeps the version. If any part fails, this raises; engines refuse to
    generate, and `inference` to compute log-probs, with weights that were loaded in part. Copies in
    memory are then freed when their process exits."""
    readers: list[RolloutWorker | InferenceWorker] = [run.rollout]
    if run.inference is not None:
        readers.append(run.inference)
    routes = run.routes or _choose_routes(run)
    offers = run.actor.offer_weights(version, _probe_limit(run), routes)
    lack = next(filter(None, (offer.lack for offer in offers)), "")
    if lack and routes.fallback is not None:
        run.routes = routes = routes.fallback
        _tell_routes(run, lack)
    offers = [replace(offer, routes=routes) for offer in offers]  # one object: calls are smaller
    if routes.is_streaming:
        engines = group(run.rollout)
        engines.supervisor.raise_if_worker_died(engines.workers)  # the actor would wait for it
        calls = [submit(run.actor.publish_weights, offers[0])]
        calls += [submit(reader.fetch_weights, offers) for reader in readers]
        exports = [export for call in calls for export in call.result()]
    else:
        exports = run.actor.publish_weights(offers[0])
    loading = None
    if run.inference is not None:
        loading = submit(run.inference.load_weights, offers[0], exports)
    probes = run.rollout.load_weights(offers[0], exports)
    if loading is not None:
        loading.result()
    run.actor.release_weights()
    if routes.receivers:
        for reader in readers:
            reader.release_weights()
    metrics = {name: max(probe[name] for probe in probes) for name in probes[0]}
    return metrics | {"perf/weight_sync_bytes": float(max(export.bytes for export in exports))}


def _choose_routes(run: Run) -> WeightRoutes:
    """Return the plan's routes. If they are on trial, each engine that would share memory with the
    actor reads a few tensors that way first; if one cannot, return their fallback."""
    routes = run.plan.weights
    run.routes = routes.fallback or routes
    if routes.fallback is None:
        return routes
    try:
        calls = [submit(run.rollout.read_trial, routes, run.actor.open_trial(routes))]
        calls += [submit(run.actor.publish_trial)]
        reason = next(filter(None, (reason for call in calls for reason in call.result())), "")
    except RankDied:
        _tell_routes(run, "The trial of ipc ended with the death of a worker")
        raise
    if not reason:
        run.routes = routes
    _tell_routes(run, f"The trial of ipc {f'failed: {reason}' if reason else 'succeeded'}")
    return run.routes


def _tell_routes(run: Run, why: str) -> None:
    assert run.routes is not None
    run.display.info(f"weight sync: {replace(run.routes, fallback=None)}. {why}")


def call_engines(
    run: Run, method: Callable[P, T], asleep: bool, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call a method of the rollout engines. An engine that dies is started again, gets the weights,
    and repeats its part of the call.

    Args:
        asleep: whether the engines sleep after the call.
    """
    answer = functools.partial(method, *args, **kwargs)
    call = None
    while True:
        try:
            result = answer()
            if call is not None and asleep:  # the sync has woken all engines
                run.rollout.sleep()
            return result
        except RankDied as died:
            replace_engines(run, died)
            call = call or died.call
            call.send_missing()
            answer = functools.partial(call.result)


def replace_engines(run: Run, died: RankDied) -> None:
    """Start new engines in place of dead ones, and give all of them the weights.

    While the weights of a step wait to be published (`stages.groups.sync_running_engines`), the
    actor has them already, and the publication gives them to all.

    Raises:
        StepAborted, WorkerError: see `restart_engines`.
    """
    restart_engines(run, died)
    if run.groups is not None and run.groups.publication_is_due:
        return
    give_weights(run, run.version)
    run.tell(Machine.weights_given)


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


def _probe_limit(run: Run) -> float | None:
    """Return the limit of this sync's log-prob probe; None if it has none."""
    if not _is_probed(run):
        return None
    return probe_limit(gap_limit(run), run.plan.train_dtype, run.plan.rollout_dtype)


def _is_probed(run: Run) -> bool:
    """Whether this sync has a log-prob probe. The probe changes no random number and no weight, so
    the run's results do not depend on it."""
    setting = run.config.actor_rollout_ref.rollout.weight_probe
    if setting != "auto":
        return setting == "always"
    before = run.previous.metrics
    if "perf/time_per_step" not in before:
        return True  # the first syncs of the process
    if "perf/weight_probe_seconds" not in before:
        return False
    seconds, step_seconds = before["perf/weight_probe_seconds"], before["perf/time_per_step"]
    is_cheap = seconds < _PROBE_SHARE * step_seconds
    if not is_cheap:
        run.display.info(
            f"weight syncs go on without the log-prob probe: it took {seconds:.2f} s of a step of "
            f"{step_seconds:.2f} s. actor_rollout_ref.rollout.weight_probe=always keeps it"
        )
    return is_cheap
