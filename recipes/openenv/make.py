"""Build the recipe's files: a tiny random model, demonstrations, and episodes. No downloads.

    python recipes/openenv/make.py [--folder recipes/openenv/build] [--seed 0]

Writes model/ and warm_up.parquet as the quickstart's with a ? in front, and train.parquet and
test.parquet: the seeds of episodes. Each row is one, and all its samples play the same.
"""

import random
from pathlib import Path
from typing import Any

from recipes import demo
from recipes.quickstart.make import FORGET_PROBABILITY, make_model, problems, work
from verlite.data.preprocess import write_parquet

FOLDER = "recipes/openenv/build"
EPISODES = {"train": 4096, "test": 256}


def row(split: str, seed: int) -> dict[str, Any]:
    """Return an episode as a row in verl's format."""
    return {
        "data_source": "openenv/addition",
        "prompt": [{"role": "user", "content": "?"}],
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"split": split, "index": seed, "reset": {"seed": seed}},
    }


def make_data(folder: Path, seed: int) -> None:
    """Write the three parquet files."""
    first = 0
    for split, count in EPISODES.items():
        write_parquet([row(split, first + i) for i in range(count)], folder / f"{split}.parquet")
        first += count
    rng = random.Random(seed)
    sums, _ = problems(seed)
    demonstrations = [
        {"prompt": f"?{a}+{b}=", "response": work(a, b, FORGET_PROBABILITY, rng)} for a, b in sums
    ]
    write_parquet(demonstrations, folder / "warm_up.parquet")


if __name__ == "__main__":
    demo.make(__doc__, FOLDER, make_data, make_model)
