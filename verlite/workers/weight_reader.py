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
        role: "rollout" or "inference".
        rank: in that role.
        folder: where the transport `files` writes.
        device: of this reader's worker.
    """

    def __init__(self, role: str, rank: int, folder: Path, device: torch.device) -> None:
        self._role, self._rank = role, rank
        self._folder, self._device = folder, device
        self._receiver: WeightReceiver | None = None
        self._received: MemoryFiles | None = None

    def _number(self, routes: WeightRoutes) -> int:
        return routes.reader(self._role, self._rank)

    def streams(self, routes: WeightRoutes) -> list[int]:
        """Return the actor rank of each device that this reader streams from; [] without ipc."""
        number = self._number(routes)
        if routes.transport[number] != "ipc":
            return []
        return [routes.publishers[device] for device in routes.devices[number]]

    def receive(self, offers: list[Offer]) -> Export:
        """Receive this node's copy, if this reader does so for its node. Called while the actor
        publishes.

        Args:
            offers: of the actor's ranks.
        """
        routes, rendezvous = offers[0].routes, offers[0].rendezvous
        number = self._number(routes)
        if number not in routes.receivers:
            return Export(routes.nodes[number], (), 0)
        self._receiver = self._receiver or WeightReceiver(self._device)
        assert rendezvous is not None  # of actor rank 0, which sends
        group_rank = 1 + routes.receivers.index(number)
        self._received = self._receiver.receive(rendezvous, group_rank)
        return Export(routes.nodes[number], tuple(self._received.paths), 0)

    def published(self, offer: Offer, exports: list[Export], trained: bool = False) -> BucketFiles:
        """Return the weights of the offer's version.

        Args:
            offer: of the version.
            exports: of all processes; one has the copy of this node.
            trained: see BucketFiles.
        """
        number = self._number(offer.routes)
        if offer.routes.transport[number] == "files":
            found = read_folder(self._folder, offer.version, offer.fingerprint)
            return replace(found, trained=trained)
        node = offer.routes.nodes[number]
        (paths,) = (export.paths for export in exports if export.node == node and export.paths)
        return BucketFiles(paths, trained)

    def release(self) -> None:
        """Free this node's copy, after all its readers have loaded it."""
        if self._received is not None:
            self._received.close()
            self._received = None
