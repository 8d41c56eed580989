"""Throughput of sessions through the gateway as a share of the engine's own, CPU time per request,
and memory per session.

python recipes/benchmark/gateway.py [--engine vllm] [--sessions 64] [--turns 8] [--rounds 5]

Both sides generate the same numbers of tokens after the same numbers of tokens, with the same
number of turns at a time, on the same cores, in turns. The engine alone goes on with what it has
sampled itself. Prefix caches are empty at the start of each. The client runs in a process of its
own.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import statistics
import threading
import time
import tracemalloc
from collections.abc import Awaitable

import httpx
import torch
from report import keep
from workload import model_of

from verlite.gateway.server import Gateway, OpenSession
from verlite.rollout.batched import BatchedEngine, build_engine
from verlite.rollout.types import Sampling
from verlite.spec.roles import GenerationSpec, ModelSpec

TOKENS = 32
SAMPLING = Sampling(max_tokens=TOKENS, ignore_eos=True)


def talk(sessions: list[tuple[str, str]], turns: int) -> None:
    """Play all sessions at once, each with a client of its own, as programs have."""

    async def one(url: str, token: str) -> None:
        history = [{"role": "user", "content": "hello there"}]
        headers = {"Authorization": f"Bearer {token}"}
        options = {"timeout": 600, "trust_env": False, "verify": False}
        async with httpx.AsyncClient(headers=headers, **options) as http:
            for _ in range(turns):
                answer = await http.post(f"{url}/chat/completions", json={"messages": history})
                message = answer.raise_for_status().json()["choices"][0]["message"]
                history += [message, {"role": "user", "content": " go on"}]

    async def everyone() -> None:
        await asyncio.gather(*(one(*session) for session in sessions))

    asyncio.run(everyone())


async def measured(work: Awaitable[None], gateway: Gateway) -> dict[str, float]:
    """Return the seconds of some work, and CPU seconds: of this process, and of the gateway's
    threads in it, which are the event loop and the encoder."""

    def used() -> list[float]:
        idents = [threading.get_ident(), *(one.ident for one in gateway._encoder._threads)]
        own = [time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents if ident]
        return [time.monotonic(), time.process_time(), sum(own)]

    before = used()
    await work
    names = ("seconds", "cpu", "gateway")
    return {name: b - a for name, a, b in zip(names, before, used(), strict=True)}


async def through(gateway: Gateway, count: int, turns: int) -> tuple[list[OpenSession], dict]:
    """Play sessions. Return them and what they took from their first request on."""
    sessions = [gateway.open(SAMPLING) for _ in range(count)]
    places = [(session.base_url, session.token) for session in sessions]
    client = multiprocessing.get_context("spawn").Process(target=talk, args=(places, turns))
    client.start()
    while not any(session.record.nodes for session in sessions):
        await asyncio.sleep(0.001)
    found = await measured(asyncio.to_thread(client.join), gateway)
    nodes = [session.record.nodes for session in sessions]
    assert sum(map(len, nodes)) == count * turns, client.exitcode
    assert {len(node.sampled) for one in nodes for node in one} == {TOKENS}
    return sessions, found


async def alone(
    engine: BatchedEngine, gateway: Gateway, given: list[list[list[int]]]
) -> dict[str, float]:
    """Generate the answers of sessions, given the tokens in front of each answer."""

    async def one(own: list[list[int]]) -> None:
        context: list[int] = []
        for ids in own:
            context = context + ids
            context = context + (await engine.generate(context, SAMPLING)).ids

    async def everyone() -> None:
        await asyncio.gather(*map(one, given))

    return await measured(everyone(), gateway)


async def measure(args: argparse.Namespace) -> dict:
    longest = args.turns * (TOKENS + 16) + 64
    engine = build_engine(
        args.engine,
        ModelSpec(path=str(model_of(args.workload))),
        GenerationSpec(enforce_eager=True),
        longest,
        torch.device("cpu"),
        0,
        pretrained=True,
    )
    own: list[dict[str, float]] = []
    ours: list[dict[str, float]] = []
    async with Gateway(engine, longest) as gateway:
        sessions, _ = await through(gateway, args.sessions, args.turns)
        for number in range(args.rounds):
            given = [[node.given for node in session.record.nodes] for session in sessions]
            for session in sessions:
                gateway.close(session)
            engine._call(lambda core: core.reset_caches())
            own.append(await alone(engine, gateway, given))
            engine._call(lambda core: core.reset_caches())
            sessions, found = await through(gateway, args.sessions, args.turns)
            ours.append(found)
            print(f"round {number}: {own[-1]}, {ours[-1]}", flush=True)
        memory = await memory_of_sessions(gateway, args.turns)
    engine.close()
    requests = args.sessions * args.turns
    pairs = list(zip(own, ours, strict=True))
    return {
        "engine": args.engine,
        "workload": args.workload,
        "sessions": args.sessions,
        "turns": args.turns,
        "tokens_per_answer": TOKENS,
        "rounds": args.rounds,
        "cores": os.cpu_count(),
        "tokens_per_s": {
            name: requests * TOKENS / statistics.median(one["seconds"] for one in side)
            for name, side in (("engine", own), ("gateway", ours))
        },
        "vs_engine": statistics.median(a["seconds"] / b["seconds"] for a, b in pairs),
        "ratios": [a["seconds"] / b["seconds"] for a, b in pairs],
        "vs_engine_cpu": statistics.median(a["cpu"] / b["cpu"] for a, b in pairs),
        "cpu_ms_per_request": statistics.median(
            1000 * (b["gateway"] - a["gateway"]) for a, b in pairs
        )
        / requests,
        "bytes_per_session": memory,
    }


async def memory_of_sessions(gateway: Gateway, turns: int) -> dict[str, float]:
    """Return the bytes that a session keeps, before its first request and after its last."""
    tracemalloc.start()
    found = {}
    for name, count, turns_of_it in (("idle", 1000, 0), ("full", 16, turns)):
        if turns_of_it:
            sessions, _ = await through(gateway, count, turns_of_it)
        else:
            sessions = [gateway.open(SAMPLING) for _ in range(count)]
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for session in sessions:
            gateway.close(session)
        del session, sessions
        gc.collect()
        found[name] = (before - tracemalloc.get_traced_memory()[0]) / count
    tracemalloc.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("vllm", "hf"), default="vllm")
    parser.add_argument("--workload", choices=("w25", "wtiny"), default="w25")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    keep(f"gateway_{args.engine}", found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
