"""A worker's side of a weight sync: it gets what the actor publishes, by the worker's route."""

from dataclasses import replace
from pathlib import Path

import torch

from verlite.spec.weight_routes import WeightRoutes
from verlite.weights.buckets import BucketFiles
from verlite.weights.collective import WeightReceiver
from verlite.weights.files import read_folder
from verlite.weights.shared_memory import MemoryFiles
from verlite.weights.transport import Export, Offer


class WeightReader:
    """Gets the weights for one reader: a rollout engine, or a rank of `inference`.

    Args:
        routes: of the run.
        number: of this reader.
        folder: where the transport `files` writes.
        device: of this reader's worker.

    Attributes:
        transport: of this reader.
        node: of this reader.
    """

    def __init__(
        self, routes: WeightRoutes, number: int, folder: Path, device: torch.device
    ) -> None:
        self.transport = routes.transport[number]
        self.node = routes.nodes[number]
        self._folder = folder
        self._group_rank = 0
        self._receiver: WeightReceiver | None = None
        self._received: MemoryFiles | None = None
        if number in routes.receivers:
            self._group_rank = 1 + routes.receivers.index(number)
            self._receiver = WeightReceiver(device)

    def receive(self, offers: list[Offer]) -> Export:
        """Receive this node's copy, if this reader does so for its node. Called while the actor
        publishes.

        Args:
            offers: of the actor's ranks.
        """
        if self._receiver is None:
            return Export(self.node, (), 0)
        rendezvous = offers[0].rendezvous
        assert rendezvous is not None  # of actor rank 0, which sends
        self._received = self._receiver.receive(rendezvous, self._group_rank)
        return Export(self.node, tuple(self._received.paths), 0)

    def published(self, offer: Offer, exports: list[Export], trained: bool = False) -> BucketFiles:
        """Return the weights of the offer's version.

        Args:
            offer: of the version.
            exports: of all processes; one has the copy of this node.
            trained: see BucketFiles.
        """
        if self.transport == "files":
            found = read_folder(self._folder, offer.version, offer.fingerprint)
            return replace(found, trained=trained)
        (paths,) = (export.paths for export in exports if export.node == self.node and export.paths)
        return BucketFiles(paths, trained)

    def release(self) -> None:
        """Free this node's copy, after all its readers have loaded it."""
        if self._received is not None:
            self._received.close()
            self._received = None
