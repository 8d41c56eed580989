"""Generation through `verlite serve generation` and by the same vLLM engine in the process.

python recipes/benchmark/server.py [--workloads w25 wtiny] [--rounds 5]

Both sides do what a rollout worker does, with equal prompts, seeds and numbers of tokens, in turns
on the same cores. The server gets its weights as in a run. CPU seconds show what each process of
the server and its client costs; they depend less on other work of the machine than seconds do.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
from generation import LONGEST, ratio, sampled, serve
from machine import seconds
from report import keep
from workload import WORKLOADS, model_of, prompts


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@contextmanager
def serving(model: str) -> Iterator[tuple[str, int]]:
    """Start a server with the settings of the engine in the process; yield address and pid."""
    from verlite.spec.roles import GenerationSpec

    ours, port = GenerationSpec(), free_port()
    command = [sys.executable, "-m", "verlite", "serve", "generation", "--model_path", model]
    command += [f"--port={port}", f"--max_model_len={LONGEST}"]
    command += [f"--max_num_seqs={ours.max_num_seqs}", f"--kv_cache_gb={ours.kv_cache_gb}"]
    command += [f"--max-num-batched-tokens={ours.max_num_batched_tokens}"]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while not healthy(url):
                assert process.poll() is None, "the server has ended"
                time.sleep(0.5)
            yield url, process.pid
        finally:
            process.terminate()


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@contextmanager
def client(model: str, url: str) -> Iterator[Any]:
    """Yield the engine that a rollout worker has, after a weight sync."""
    import torch
    from safetensors.torch import load_file

    from verlite.rollout.batched import build_engine
    from verlite.spec.roles import GenerationSpec, ModelSpec
    from verlite.weights.files import FolderWriter, read_folder
    from verlite.weights.fingerprint import fingerprint

    rollout = GenerationSpec(servers=[url])
    engine = build_engine("server", ModelSpec(path=model), rollout, LONGEST, torch.device("cpu"), 0)
    with closing(engine), tempfile.TemporaryDirectory() as folder:
        weights = list(load_file(Path(model) / "model.safetensors").items())
        value = fingerprint(weights)
        writer = FolderWriter(Path(folder), 1, value)
        writer.add(weights)
        writer.finish()
        engine.load_weights(read_folder(Path(folder), 1, value), 1, value)
        yield engine


def cpu_seconds(pid: int) -> dict[str, float]:
    """Return the CPU seconds of a server's processes so far, by their titles."""
    found: dict[str, float] = {}
    server = psutil.Process(pid)
    for process in (server, *server.children(recursive=True)):
        times = process.cpu_times()
        title = process.cmdline()[0].rpartition("::")
        name = title[2] if title[1] else "resource tracker"
        name = "API server" if process == server else name
        found[name] = found.get(name, 0.0) + times.user + times.system
    return found


def compare(name: str, rounds: int) -> dict:
    """Run both sides alternately, without counting the first round."""
    from transformers import AutoTokenizer

    workload, model = WORKLOADS[name], str(model_of(name))
    tokenizer = AutoTokenizer.from_pretrained(model)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    context.Process(target=serve, args=("verlite with vllm", name, theirs)).start()
    theirs.close()
    (side,) = pipe.recv()
    found: dict[str, list[float]] = {side: [], "verlite_server": []}
    used: list[dict[str, float]] = []
    with serving(model) as (url, pid), client(model, url) as engine:
        for number in range(rounds + 1):
            ids = [tokenizer.encode(text) for text in prompts(workload.prompts, seed=number)]
            time.sleep(0.5)
            pipe.send((side, ids))
            found[side].append(pipe.recv())
            time.sleep(0.5)
            before, own = cpu_seconds(pid), time.process_time()
            call = lambda ids=ids: sampled(engine, ids, workload.samples, workload.new_tokens)  # noqa: E731
            found["verlite_server"].append(seconds(call))
            after = {"client": time.process_time() - own, **cpu_seconds(pid)}
            used.append({key: value - before.get(key, 0.0) for key, value in after.items()})
            print(f"{name} round {number}: {found[side][-1]:.2f} s in the process", end=", ")
            print(f"{found['verlite_server'][-1]:.2f} s by the server", used[-1], flush=True)
    pipe.send(None)
    tokens = workload.rows * workload.new_tokens
    return {
        "rounds": rounds,
        "tokens": tokens,
        "cores": os.cpu_count(),
        "tokens_per_s": {key: tokens / statistics.median(s[1:]) for key, s in found.items()},
        "server_vs_engine": ratio(found[side], found["verlite_server"]),
        "cpu_seconds": {
            key: statistics.median(one.get(key, 0.0) for one in used[1:]) for key in used[-1]
        },
        "seconds": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["w25"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for name in args.workloads:
        found = compare(name, args.rounds)
        keep(f"server_{name}", found)
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
