"""Throughput of sessions through the gateway as a share of the engine's own, CPU time per request,
and memory per session.

python recipes/benchmark/gateway.py [--sessions 64] [--turns 8] [--rounds 3]

The engine alone gets the same prompts, with the same number of turns at a time. The client runs in
a process of its own. Answers have a fixed length.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
import tracemalloc

import httpx
import torch
from workload import BUILD, VOCABULARY, model_in

from verlite.gateway.server import Gateway
from verlite.rollout.batched import build_engine
from verlite.rollout.types import Sampling
from verlite.spec.roles import GenerationSpec, ModelSpec

TOKENS = 32
SAMPLING = Sampling(max_tokens=TOKENS, ignore_eos=True)


def talk(sessions: list[tuple[str, str]], turns: int) -> None:
    """Play all sessions at once."""

    async def one(http: httpx.AsyncClient, url: str, token: str) -> None:
        history = [{"role": "user", "content": "hello there"}]
        for _ in range(turns):
            answer = await http.post(
                f"{url}/chat/completions",
                json={"messages": history},
                headers={"Authorization": f"Bearer {token}"},
            )
            message = answer.raise_for_status().json()["choices"][0]["message"]
            history += [message, {"role": "user", "content": " go on"}]

    async def everyone() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=600, trust_env=False, limits=limits) as http:
            await asyncio.gather(*(one(http, *session) for session in sessions))

    asyncio.run(everyone())


async def measure(args: argparse.Namespace) -> dict[str, float]:
    shape = {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 1024}
    model = ModelSpec(path=str(model_in(BUILD / "w6", vocab_size=VOCABULARY, **shape)))
    longest = args.turns * (TOKENS + 16) + 64
    cpu = torch.device("cpu")
    engine = build_engine("hf", model, GenerationSpec(), longest, cpu, 0, pretrained=True)
    ratios, seconds = [], []
    async with Gateway(engine, longest) as gateway:
        for number in range(args.rounds):
            sessions = [gateway.open(SAMPLING) for _ in range(args.sessions)]
            places = [(session.base_url, session.token) for session in sessions]
            client = multiprocessing.get_context("spawn").Process(
                target=talk, args=(places, args.turns)
            )
            client.start()
            while not any(session.record.nodes for session in sessions):
                await asyncio.sleep(0.001)
            began, used = time.monotonic(), time.process_time()
            await asyncio.to_thread(client.join)
            through = time.monotonic() - began, time.process_time() - used
            nodes = [session.record.nodes for session in sessions]
            assert sum(map(len, nodes)) == args.sessions * args.turns, client.exitcode

            async def alone(nodes: list) -> None:
                for node in nodes:
                    await engine.generate(node.prompt, SAMPLING)

            began, used = time.monotonic(), time.process_time()
            await asyncio.gather(*map(alone, nodes))
            own = time.monotonic() - began, time.process_time() - used
            ratios.append(own[0] / through[0])
            seconds.append((through[1] - own[1]) / (args.sessions * args.turns))
            print(f"round {number}: {ratios[-1]:.2f} of the engine's throughput", flush=True)
            for session in sessions:
                gateway.close(session)
        tracemalloc.start()
        idle = [gateway.open(SAMPLING) for _ in range(1000)]
        memory = tracemalloc.get_traced_memory()[0] / len(idle)
        tracemalloc.stop()
    engine.close()
    return {
        "sessions": args.sessions,
        "turns": args.turns,
        "share_of_throughput": statistics.median(ratios),
        "cpu_ms_per_request": 1000 * statistics.median(seconds),
        "bytes_of_an_idle_session": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    found = asyncio.run(measure(parser.parse_args()))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
