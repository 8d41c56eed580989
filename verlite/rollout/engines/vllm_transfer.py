"""verlite's weight transfer engine for vLLM's workers; `vllm_plugin` registers it.

One POST /update_weights carries a whole version. It is loaded, or the layers are left in a state in
which the next version can be loaded: so a trainer that dies during an update leaves nothing behind.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from verlite.rollout.engines.vllm_worker import load_base
from verlite.weights import TransportError
from verlite.weights.buckets import BucketFiles
from verlite.weights.collective import Rendezvous, WeightReceiver


@dataclass
class NoInit(WeightTransferInitInfo):
    """Each update says where its weights are."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """Where one version is: in files, or with a sender.

    sizes: {absolute path: bytes} of bucket files, in the order in which they are loaded.
    rendezvous: fields of `Rendezvous`; the server is rank 1 of the group.
    """

    sizes: dict[str, int] | None = None
    rendezvous: dict[str, Any] | None = None


class TransferEngine(WeightTransferEngine[NoInit, Update]):
    """Reads bucket files that trainer and server both see, or receives buckets by gloo."""

    init_info_cls = NoInit
    update_info_cls = Update
    supports_draft_weight_update = False
    _receiver: WeightReceiver | None = None

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing: see NoInit."""

    def start_weight_update(self) -> None:
        """Nothing: `receive_weights` begins and ends the reload."""

    def finish_weight_update(self) -> None:
        """Nothing: see `start_weight_update`."""

    def receive_weights(self, update_info: Update) -> None:
        """Load one version.

        Raises:
            TransportError: a file is missing or has another size, or the sender failed.
        """
        if update_info.sizes is not None:
            check_files(update_info.sizes)
            self._load(BucketFiles(tuple(update_info.sizes)))
        elif update_info.rendezvous is not None:
            with self._received(Rendezvous(**update_info.rendezvous)) as files:
                self._load(files)
        else:
            raise TransportError("an update needs sizes or rendezvous")

    @contextmanager
    def _received(self, rendezvous: Rendezvous) -> Iterator[BucketFiles]:
        """Receive one copy of the weights for all workers of the server, into memory."""
        from vllm.distributed.parallel_state import get_world_group

        group = get_world_group()
        outcome: list[Any] = [(), ""]
        files = None
        if group.rank_in_group == 0:
            self._receiver = self._receiver or WeightReceiver(torch.device("cpu"))
            try:
                files = self._receiver.receive(rendezvous, 1)
                outcome = [tuple(files.paths), ""]
            except Exception as error:  # the other workers wait for the outcome
                outcome = [(), f"{type(error).__name__}: {error}"]
        if group.world_size > 1:
            outcome = group.broadcast_object(outcome, src=0)
        paths, problem = outcome
        if problem:
            raise TransportError(problem)
        try:
            yield BucketFiles(paths)
        finally:
            if group.world_size > 1:
                group.barrier()  # the others map the files too
            if files is not None:
                files.close()

    def _load(self, named: BucketFiles) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        def reload() -> None:
            initialize_layerwise_reload(self.model)
            self.model.load_weights(named)  # type: ignore[operator]
            finalize_layerwise_reload(self.model, self.model_config)

        load_base(self.model, self.model_config, self.parallel_config.rank, reload)

    def shutdown(self) -> None:
        """Leave the sender's group."""
        if self._receiver is not None:
            self._receiver.close()


def check_files(sizes: dict[str, int]) -> None:
    """Check that this machine sees the files.

    Raises:
        TransportError: it does not.
    """
    for path, size in sizes.items():
        try:
            found = Path(path).stat().st_size
        except OSError as error:
            raise TransportError(
                f"the server cannot read {path}: {error.strerror}. trainer.default_local_dir must "
                "be a folder that it shares with the trainer, or use "
                "actor_rollout_ref.rollout.weight_transport=collective"
            ) from error
        if found != size:
            raise TransportError(f"{path} has {found} bytes, and not {size}")
