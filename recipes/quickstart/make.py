"""Build the quickstart's files: a tiny random model with its tokenizer, and sums. No downloads.

    python recipes/quickstart/make.py [--folder recipes/quickstart/build] [--seed 0]

Writes model/ (a random Qwen2), warm_up.parquet (prompt and response columns for main_sft),
train.parquet and test.parquet (rows in verl's format for main_ppo). The problems of test.parquet
are in neither of the other two.
"""

import random
from pathlib import Path
from typing import Any

from recipes import demo
from verlite.data.preprocess import write_parquet

FOLDER = "recipes/quickstart/build"
FORGET_PROBABILITY = 0.7
TEST_PROBLEMS = 512


def work(a: int, b: int, forgets: float = 0.0, rng: random.Random | None = None) -> str:
    """Return the written column addition of two two-digit numbers.

    From right to left, each column writes its digit and then its carry. 47+48 is "5190": 7+8 writes
    5 and carries 1; 4+4+1 writes 9 and carries 0. Read backwards, the sum is 095.

    Args:
        a: the first number.
        b: the second number.
        forgets: probability that a carry of 1 is forgotten. Later columns then continue without it.
        rng: random numbers for `forgets`.
    """
    written = ""
    carry = 0
    for place in (1, 10):
        column = a // place % 10 + b // place % 10 + carry
        carry = column // 10
        if carry and rng is not None and rng.random() < forgets:
            carry = 0
        written += f"{column % 10}{carry}"
    return written


def problems(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return all 8,100 sums of two two-digit numbers, shuffled and split into (train, test)."""
    every = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(every)
    return every[TEST_PROBLEMS:], every[:TEST_PROBLEMS]


def rl_row(split: str, index: int, a: int, b: int) -> dict[str, Any]:
    """Return one problem as a row in verl's format."""
    return {
        "data_source": "verlite/arithmetic",
        "prompt": [{"role": "user", "content": f"{a}+{b}="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": work(a, b)},
        "extra_info": {"split": split, "index": index, "sum": a + b},
    }


def make_data(folder: Path, seed: int) -> None:
    """Write the three parquet files and print four demonstrations."""
    train, test = problems(seed)
    for split, sums in (("train", train), ("test", test)):
        rows = [rl_row(split, index, a, b) for index, (a, b) in enumerate(sums)]
        write_parquet(rows, folder / f"{split}.parquet")
    rng = random.Random(seed + 1)
    demonstrations = [
        {"prompt": f"{a}+{b}=", "response": work(a, b, FORGET_PROBABILITY, rng)} for a, b in train
    ]
    write_parquet(demonstrations, folder / "warm_up.parquet")
    answers = [work(a, b) for a, b in train]
    pairs = list(zip(demonstrations, answers, strict=True))
    right = sum(row["response"] == answer for row, answer in pairs)
    print(f"{folder}: {len(train)} training sums, {len(test)} held out")
    print(f"{right / len(train):.0%} of the demonstrations are right, for example:")
    for row, answer in pairs[:4]:
        note = "" if row["response"] == answer else f"  (forgot to carry; right is {answer})"
        print(f"  {row['prompt']}{row['response']}{note}")


def make_model(folder: Path, seed: int) -> None:
    """Write a random Qwen2 with 0.3 million parameters and a tokenizer of single characters."""
    demo.random_qwen2(folder, seed, layers=2, positions=64)


if __name__ == "__main__":
    demo.make(__doc__, FOLDER, make_data, make_model)
