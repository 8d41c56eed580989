"""`verlite serve reward`: answers per second, against the same function in local processes.

python recipes/benchmark/reward.py

Answers are those of mathematics: half of them equal the ground truth as text, half are another form
of it (a fraction, a decimal) that math-verify has to compare. All are different, so nothing can be
cached. Local scoring and the service have the same number of processes and are measured in turns.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import httpx
from report import keep

from verlite.rewards.result import RewardItem
from verlite.rewards.scorer import Scorer
from verlite.spec.roles import RewardServiceSpec, ScorerSpec

ANSWERS = 1000
CLIENTS = 64
PER_CLIENT = 16
"""Answers in one request of one of the clients."""
ROUNDS = 5
PROMPT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


def make(count: int, start: int = 0) -> list[RewardItem]:
    """Return answers that are all right."""
    items = []
    for number in range(start, start + count):
        truth = f"{number}.5" if number % 2 else str(number)
        answer = f"\\frac{{{2 * number + 1}}}{{2}}" if number % 2 else truth
        text = f"<think>{'so ' * 100}</think><answer>\\boxed{{{answer}}}</answer>"
        items.append(RewardItem("math", text, truth, {}, PROMPT, f"{PROMPT}{text}<|im_end|>"))
    return items


def body(items: list[RewardItem]) -> dict[str, Any]:
    return {
        "query": [item.sequence for item in items],
        "prompts": [item.prompt for item in items],
        "labels": [item.ground_truth for item in items],
    }


@contextmanager
def served() -> Iterator[str]:
    line = [sys.executable, "-m", "verlite.cli", "serve", "reward", "--port", "0"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip().split(" at ")[1]
    finally:
        process.terminate()
        process.wait()


def rate(score: Callable[[list[RewardItem]], list[float | None]], items: list[RewardItem]) -> float:
    """Return answers per second. All of them are right."""
    start = time.perf_counter()
    rewards = score(items)
    seconds = time.perf_counter() - start
    assert rewards == [1.5] * len(items), "a right answer has no reward, or a wrong one"
    return len(items) / seconds


def with_scorer(scorer: Scorer) -> Callable[[list[RewardItem]], list[float | None]]:
    return lambda items: [result.score for result in scorer.score(items)]


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    local = Scorer(ScorerSpec(path="verlite.rewards.tagged_math"))
    with served() as url, closing(local), httpx.Client(timeout=300) as client:
        remote = Scorer(ScorerSpec(remote=RewardServiceSpec(url=(url,))))

        def one_request(items: list[RewardItem]) -> list[float | None]:
            answer = client.post(url, json=body(items)).raise_for_status()
            rewards: list[float | None] = answer.json()["rewards"]
            return rewards

        def many_clients(items: list[RewardItem]) -> list[float | None]:
            shares = [items[i : i + PER_CLIENT] for i in range(0, len(items), PER_CLIENT)]
            with ThreadPoolExecutor(CLIENTS) as pool:
                return [reward for part in pool.map(one_request, shares) for reward in part]

        measured: dict[str, Callable[[list[RewardItem]], list[float | None]]] = {
            "local": with_scorer(local),
            "one_request": one_request,
            "clients": many_clients,
            "training": with_scorer(remote),
        }
        with closing(remote):
            found: dict[str, list[float]] = {name: [] for name in measured}
            for number in range(ROUNDS + 1):
                for name, score in measured.items():
                    count = CLIENTS * PER_CLIENT if name == "clients" else ANSWERS
                    answers = rate(score, make(count, number * 2000))
                    if number:  # the first round starts processes
                        found[name].append(answers)
    rates = {f"{name}_per_s": statistics.median(values) for name, values in found.items()}
    ratios = {
        f"{name}_vs_local": statistics.median(
            value / base for value, base in zip(values, found["local"], strict=True)
        )
        for name, values in found.items()
        if name != "local"
    }
    for name, value in {**rates, **ratios}.items():
        print(f"{name}: {value:,.2f}")
    keep("reward", {**rates, **ratios})


if __name__ == "__main__":
    main()
