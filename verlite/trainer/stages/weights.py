"""Weight sync from the trainer to the rollout engines."""

from verlite.controller.worker_group import submit
from verlite.trainer.run import Run, stage


@stage("update_weights")
def sync_weights(run: Run) -> None:
    """Give every rollout engine the trainer's weights under the next version.

    Engines that take weights from the trainer's GPU or from another host do so while it
    publishes. For the others, all ranks of the trainer write their weights and free their device
    memory before any engine allocates its own. Each engine compares fingerprints before it accepts
    the version. If any part fails, this raises and `run.version` does not change; engines refuse
    to generate with weights that were loaded in part. Copies in memory are then freed when their
    process exits.
    """
    offers = run.actor.offer_weights(run.version + 1)
    if run.plan.weights.is_streaming:
        publishing = submit(run.actor.publish_weights, offers[0])
        fetched = run.rollout.fetch_weights(offers)
        exports = publishing.result() + fetched
    else:
        exports = run.actor.publish_weights(offers[0])
    run.rollout.load_weights(offers[0], exports)
    run.actor.release_weights()
    if run.plan.weights.receivers:
        run.rollout.release_weights()
    run.version += 1
    run.metrics["perf/weight_sync_bytes"] = float(max(export.bytes for export in exports))
