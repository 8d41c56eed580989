"""Write preferences for the quickstart's task: the right column addition, or one with a wrong
carry.

    python recipes/quickstart/make.py
    python -m recipes.dpo.make [--folder recipes/quickstart/build]

Writes preferences.parquet and preferences_test.parquet with the columns prompt, chosen and
rejected. The rejected answer forgets a carry or, where there is none, writes one: pairs of one kind
alone would teach the model to carry always. The second file has the problems of the quickstart's
test.parquet.
"""

import argparse
import random
from pathlib import Path

from recipes.quickstart.make import FOLDER, FORGET_PROBABILITY, problems, work
from verlite.data.preprocess import write_parquet


def preferences(sums: list[tuple[int, int]]) -> list[dict[str, str]]:
    """Return a row for each sum, without those whose carries happen to be remembered."""
    rng = random.Random(0)
    rows = []
    for a, b in sums:
        right = work(a, b)
        wrong = work(a, b, FORGET_PROBABILITY, rng)
        if "1" not in right[1::2]:
            wrong = with_carry(right, rng.choice((1, 3)))
        if wrong != right:
            rows.append({"prompt": f"{a}+{b}=", "chosen": right, "rejected": wrong})
    return rows


def with_carry(written: str, position: int) -> str:
    """Return the work of a sum without carries, with a carry at position 1 or 3. The next column
    counts it."""
    digits = [int(digit) for digit in written]
    digits[position] = 1
    if position == 1:
        digits[3], digits[2] = divmod(digits[2] + 1, 10)
    return "".join(map(str, digits))


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
