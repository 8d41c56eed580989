"""Weight sync from the trainer to the rollout engines: one function, one order, proven each time."""

from verlite.trainer.run import Run, stage


@stage("update_weights")
def sync_weights(run: Run) -> None:
    """Give every rollout engine the trainer's weights under the next version.

    Order: the trainer exports in buckets and frees its device memory on every rank, before any engine takes back its own; engines wake
    their weights, load, reset their caches, compare fingerprints before they accept the version, and wake their KV caches. A sync that
    fails anywhere raises, leaves `run.version` as it was, and the engines refuse to generate with half-loaded weights. The exported
    copy needs no cleaning up then: it ends with the process that holds it.
    """
    exported = run.actor.export_weights()
    run.rollout.load_weights(exported, run.version + 1)
    run.actor.release_export()
    run.version += 1
    run.metrics["perf/weight_sync_bytes"] = float(exported[0].bytes)
