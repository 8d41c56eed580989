"""Publish the trainer's weights through one or several transports in one pass.

A transport has a side for the trainer, a `Sink` that takes buckets, and a side for readers, an
iterable of (name, tensor). Readers are the rollout engines and the ranks of the role `inference`.

| transport | trainer | reader |
|---|---|---|
| shared_memory | `shared_memory.MemoryFiles` | `buckets.BucketFiles` |
| ipc | `ipc.Publisher` | `ipc.BucketStream` |
| collective | `collective.WeightSender` | `collective.WeightReceiver` |
| files | `files.FolderWriter` | `files.read_folder` |

The files of a WeightReceiver are `buckets.BucketFiles`.

`spec.weight_routes` chooses the transport of each reader.
"""

import logging
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from verlite import progress
from verlite.spec.weight_routes import WeightRoutes
from verlite.weights.buckets import Bucket, in_buckets
from verlite.weights.collective import Rendezvous
from verlite.weights.probe import Probe

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the buckets of one version."""

    def add(self, bucket: Bucket) -> None:
        """Take a bucket. Its tensors may change after this returns."""
        ...

    def finish(self) -> None:
        """Complete the version."""
        ...

    def abort(self, reason: str) -> None:
        """Give the version up, and make waiting readers fail with the reason."""
        ...


@dataclass(frozen=True)
class Offer:
    """What one trainer rank announces before it publishes a version.

    Attributes:
        routes: by which each reader gets it.
        fingerprint: of all weights in the engines' dtype, equal on all ranks.
        own_fingerprint: of all weights as the trainer computes with them, in its compute dtype,
            with LoRA not merged; for the role `inference`. None without that role.
        rendezvous: of the transport `collective`, on rank 0.
        stream: address of the rank's ipc publisher, on ranks that share a device with an
            engine.
        lack: why the rank's device has too little memory for ipc, if `routes` has a fallback.
        probe: the log-prob probe of these weights, if engines are to check it.
    """

    version: int
    routes: WeightRoutes
    fingerprint: int
    own_fingerprint: int | None = None
    rendezvous: Rendezvous | None = None
    stream: str | None = None
    lack: str = ""
    probe: Probe | None = None


@dataclass(frozen=True)
class Export:
    """What one process has of a version.

    Attributes:
        node: number of its host in the plan.
        paths: memory files for the engines of that host. Empty if it wrote none.
        bytes: size of the weights that it published.
    """

    node: int
    paths: tuple[str, ...]
    bytes: int


def publish(named: Iterable[tuple[str, Tensor]], sinks: Sequence[Sink], bucket_bytes: int) -> int:
    """Give all weights to every sink, and return their number of bytes.

    If a sink fails, every sink is aborted. The rest of `named` is consumed all the same: the other
    ranks take part in gathering it, and the next sync must not meet their collectives. The first
    error is raised, whatever fails then.
    """
    total = 0
    weights = iter(named)
    try:
        for bucket in in_buckets(weights, bucket_bytes):
            total += sum(tensor.nbytes for _, tensor in bucket)
            progress.tick("publishing weights")
            for sink in sinks:
                sink.add(bucket)
            del bucket  # before the next one is gathered
        for sink in sinks:
            sink.finish()
    except BaseException as error:
        # The log has the cause even if the run ends before the others have been waited for.
        _log.error("the weights could not be published:\n%s", traceback.format_exc())
        for sink in sinks:
            with cleanup_after_failure("a transport could not be given up"):
                sink.abort(f"{type(error).__name__}: {error}")
        if isinstance(error, Exception):
            with cleanup_after_failure("the rest of the weights could not be gathered"):
                for _ in weights:
                    pass
        raise
    return total


@contextmanager
def cleanup_after_failure(what: str) -> Iterator[None]:
    """Log an exception of the block: another error is being raised, and is the one to report.

    Args:
        what: what the exception means, for the log.
    """
    try:
        yield
    except Exception:
        _log.error("%s:\n%s", what, traceback.format_exc())
