"""Build the files of self-distillation with a hint: a random model with its tokenizer, and sums.

    python recipes/distillation/hints.py [--folder recipes/distillation/build] [--seed 0]

Writes model/, warm_up.parquet, train.parquet and test.parquet as the quickstart does. Half of the
demonstrations have the answer before the question ("5190 47+48=") and copy it; the other half have
the question alone and forget to carry. The rows of train.parquet have both prompts: `prompt` is the
question, `hinted_prompt` has the answer before it.
"""

import random
from pathlib import Path

from recipes import demo
from recipes.quickstart.make import FORGET_PROBABILITY, make_model, problems, rl_row, work
from verlite.data.preprocess import write_parquet

FOLDER = "recipes/distillation/build"


def hinted(a: int, b: int) -> str:
    """Return the question with its answer before it."""
    return f"{work(a, b)} {a}+{b}="


def make_data(folder: Path, seed: int) -> None:
    """Write the three parquet files."""
    train, test = problems(seed)
    rows = []
    for index, (a, b) in enumerate(train):
        messages = [{"role": "user", "content": hinted(a, b)}]
        rows.append({**rl_row("train", index, a, b), "hinted_prompt": messages})
    write_parquet(rows, folder / "train.parquet")
    rows = [rl_row("test", index, a, b) for index, (a, b) in enumerate(test)]
    write_parquet(rows, folder / "test.parquet")
    rng = random.Random(seed + 1)
    demonstrations = [
        {"prompt": f"{a}+{b}=", "response": work(a, b, FORGET_PROBABILITY, rng)} for a, b in train
    ]
    demonstrations += [{"prompt": hinted(a, b), "response": work(a, b)} for a, b in train]
    rng.shuffle(demonstrations)
    write_parquet(demonstrations, folder / "warm_up.parquet")
    print(f"{folder}: {len(train)} training sums, {len(test)} held out")


if __name__ == "__main__":
    demo.make(__doc__, FOLDER, make_data, make_model)
