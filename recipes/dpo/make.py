"""Write preferences for the quickstart's task: column addition with all carries, or without them.

    python recipes/quickstart/make.py
    python -m recipes.dpo.make [--folder recipes/quickstart/build]

Writes preferences.parquet and preferences_test.parquet with the columns prompt, chosen and
rejected. Sums without a carry are left out: they have one answer. The second file has the problems
of the quickstart's test.parquet.
"""

import argparse
import random
from pathlib import Path

from recipes.quickstart.make import FOLDER, problems, work
from verlite.data.preprocess import write_parquet


def preferences(sums: list[tuple[int, int]]) -> list[dict[str, str]]:
    """Return a row for each sum that has a carry."""
    forgetful = random.Random(0)
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": work(a, b), "rejected": work(a, b, 1.0, forgetful)}
        for a, b in sums
    ]
    return [row for row in rows if row["chosen"] != row["rejected"]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default=FOLDER)
    folder = Path(parser.parse_args().folder)
    for sums, name in zip(problems(0), ("preferences", "preferences_test"), strict=True):
        rows = preferences(sums)
        write_parquet(rows, folder / f"{name}.parquet")
        print(f"{folder}/{name}.parquet: {len(rows)} rows")


if __name__ == "__main__":
    main()
