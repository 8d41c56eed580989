"""What a stock `vllm serve` loads from verlite, through vLLM's own extension points.

- `register`, the entry point NAME of the group GROUP. vLLM calls it in each of its processes.
  It adds the transfer engine BACKEND to vLLM's factory; a server selects it by
  `--weight-transfer-config '{"backend": "verlite"}'`.
- `vllm_worker.WorkerExtension` by `--worker-extension-cls`: the fingerprint of the loaded weights.

vLLM calls a transfer engine in every worker, between POST /start_weight_update and POST
/finish_weight_update. Sources: vllm/distributed/weight_transfer/base.py and
vllm/entrypoints/rl/online/api_router.py of vLLM 0.32.
"""

import multiprocessing
import os
import threading

GROUP = "vllm.general_plugins"
NAME = "verlite"
BACKEND = "verlite"
"""Name of the transfer engine."""
_ENGINE = "verlite.rollout.engines.vllm_transfer", "TransferEngine"


def register() -> None:
    """Add the transfer engine to vLLM's factory, and end this process if vLLM's process that
    started it ends. May be called several times in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, *_ENGINE)
        threading.Thread(target=_end_with_parent, name="verlite-parent", daemon=True).start()


def _end_with_parent() -> None:
    """Wait for the end of the process that started this one.

    If a server is killed by SIGKILL, vLLM's engine would go on, and keep the GPU's memory that the
    restarted server needs.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:  # None in the process that the user started
        parent.join()
        os._exit(1)
