"""Build the search recipe's files: made-up facts to search, and a tiny random model. No downloads.

    python recipes/search/make.py [--folder recipes/search/build] [--seed 0]

Writes corpus.jsonl (one made-up fact per passage), nothing.jsonl (a corpus without any match),
warm_up.parquet (prompt and response columns for main_sft), train.parquet and test.parquet
(questions as rows in verl's format), and model/ (a random Qwen2). The names in test.parquet's
questions are in neither of the other two files.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recipes import demo
from verlite.data.preprocess import write_parquet
from verlite.envs.search import passages_text

FOLDER = "recipes/search/build"
FIRST = "Bri Dal Fen Gor Hul Jas Kel Lom Mir Nax Orv Pel Qua Ral Sut Tor Ulm Vek Wes Zan".split()
LAST = "bek dor fin gul ham jin kor las mok nur pag rin sol tev vax wim yon zet lod dra".split()
VALUES = {
    "metal": "tin gold iron zinc lead copper silver nickel cobalt chrome".split(),
    "tree": "oak elm ash fir pine palm birch cedar maple willow".split(),
    "bird": "owl crow wren dove hawk robin heron eagle swan finch".split(),
}
HELD_OUT = 60
PASSAGES = 2
TAGS = ["<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>"]
PHRASES = [
    "Which ",
    " is ",
    " of ",
    "The ",
    "'s?\n",
    "Doc ",
    '(Title: "',
    '") ',
    ".\n",
    "\n\n",
    "No results found.",
]

Facts = dict[str, dict[str, str]]
"""Name -> kind (metal, tree, bird) -> value."""


def make_facts(seed: int) -> Facts:
    """Return a random metal, tree and bird for every name. The names are in random order."""
    rng = random.Random(seed)
    names = [first + last for first in FIRST for last in LAST]
    rng.shuffle(names)
    return {name: {kind: rng.choice(values) for kind, values in VALUES.items()} for name in names}


def question(name: str, kind: str) -> str:
    return f"Which {kind} is {name}'s?\n"


def passage(name: str, kind: str, value: str) -> str:
    """Return one fact as a passage. The first line is its title."""
    return f'"{name}"\nThe {kind} of {name} is {value}.'


def demonstration(facts: Facts, name: str, kind: str, rng: random.Random) -> str:
    """Return an imperfect demonstration.

    It often guesses, searches for something else, or copies from the wrong passage.
    """
    if rng.random() < 0.65:
        return f"<answer>{rng.choice(VALUES[kind])}</answer>"
    query_name = name if rng.random() < 0.6 else rng.choice(list(facts))
    query_kind = kind if rng.random() < 0.7 else rng.choice(list(VALUES))
    other = rng.choice([k for k in VALUES if k != query_kind])
    results = [(query_name, query_kind), (query_name, other)]
    rng.shuffle(results)
    observation = passages_text([passage(n, k, facts[n][k]) for n, k in results])
    copied = rng.choice(results) if rng.random() < 0.5 else (query_name, query_kind)
    answer = facts[copied[0]][copied[1]]
    return (
        f"<search>{query_kind} of {query_name}</search>\n\n"
        f"<information>{observation}</information>\n\n"
        f"<answer>{answer}</answer>"
    )


def rl_row(split: str, index: int, name: str, kind: str, value: str) -> dict[str, Any]:
    """Return one question as a row in verl's format."""
    return {
        "data_source": "verlite/facts",
        "prompt": [{"role": "user", "content": question(name, kind)}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": [value]}},
        "extra_info": {"split": split, "index": index, "name": name, "kind": kind},
    }


def make_data(folder: Path, seed: int) -> None:
    """Write the corpora and parquet files, and print three demonstrations."""
    facts = make_facts(seed)
    rng = random.Random(seed + 1)
    names = list(facts)
    folder.mkdir(parents=True, exist_ok=True)
    passages = [passage(name, kind, facts[name][kind]) for name in names for kind in VALUES]
    rng.shuffle(passages)
    write_corpus(folder / "corpus.jsonl", passages)
    write_corpus(folder / "nothing.jsonl", ['"Nothing"\nThis corpus is void.'])
    splits = {"test": names[:HELD_OUT], "train": names[HELD_OUT:]}
    for split, chosen in splits.items():
        asked = [(name, kind) for name in chosen for kind in VALUES]
        rng.shuffle(asked)
        rows = [
            rl_row(split, i, name, kind, facts[name][kind]) for i, (name, kind) in enumerate(asked)
        ]
        write_parquet(rows, folder / f"{split}.parquet")
    shown = [(name, rng.choice(list(VALUES))) for name in splits["train"] for _ in range(12)]
    train_facts = {name: facts[name] for name in splits["train"]}
    demonstrations = [
        {"prompt": question(name, kind), "response": demonstration(train_facts, name, kind, rng)}
        for name, kind in shown
    ]
    write_parquet(demonstrations, folder / "warm_up.parquet")
    right = sum(
        f"<answer>{facts[name][kind]}</answer>" in row["response"]
        for (name, kind), row in zip(shown, demonstrations, strict=True)
    )
    print(f"{folder}: {len(passages)} facts")
    print(f"{3 * len(splits['train'])} training questions, {3 * HELD_OUT} held out")
    print(f"{right / len(shown):.0%} of {len(shown)} demonstrations are right, for example:")
    for row in demonstrations[:3]:
        print(f"  {row['prompt'].strip()} {row['response']!r}")


def write_corpus(file: Path, passages: Iterable[str]) -> None:
    lines = [json.dumps({"id": str(i), "contents": text}) for i, text in enumerate(passages)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_model(folder: Path, seed: int) -> None:
    """Write a random Qwen2. Its tokenizer has a token per word of the facts and per character."""
    values = [value for kind in VALUES.values() for value in kind]
    words = [*TAGS, *FIRST, *LAST, *VALUES, *values, *PHRASES]
    demo.random_qwen2(folder, seed, layers=3, positions=512, words=words)


if __name__ == "__main__":
    demo.make(__doc__, FOLDER, make_data, make_model)
