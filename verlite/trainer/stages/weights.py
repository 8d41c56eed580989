"""Weight sync from the trainer to the rollout engines."""

from verlite.trainer.run import Run, stage


@stage("update_weights")
def sync_weights(run: Run) -> None:
    """Give every rollout engine the trainer's weights under the next version.

    All ranks of the trainer write their weights and free their device memory before any engine
    allocates its own. Each engine compares fingerprints before it accepts the version. If any part
    fails, this raises and `run.version` does not change; engines refuse to generate with weights
    that were loaded in part. If a call fails, the shared-memory copy is freed when the actor
    process exits.
    """
    exported = run.actor.export_weights()
    run.rollout.load_weights(exported, run.version + 1)
    run.actor.release_export()
    run.version += 1
    run.metrics["perf/weight_sync_bytes"] = float(exported[0].bytes)
