"""Makes a small world of facts to search in, and a tiny model that has seen how searching looks. Nothing is downloaded.

    python recipes/search/make.py [--folder recipes/search/build] [--seed 0]

Writes corpus.jsonl (one made-up fact a passage), nothing.jsonl (a corpus in which nothing is ever found), warm_up.parquet (prompt and
response columns, for main_sft), train.parquet and test.parquet (questions in verl's rows), and model/ (a random Qwen2). No name that a
question of test.parquet asks for is in the other two.
"""

import argparse
import json
import random
import string
from pathlib import Path

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


def facts(seed: int) -> dict[str, dict[str, str]]:
    """Every name's metal, tree and bird, in an order of the names by chance."""
    rng = random.Random(seed)
    names = [first + last for first in FIRST for last in LAST]
    rng.shuffle(names)
    return {name: {kind: rng.choice(values) for kind, values in VALUES.items()} for name in names}


def question(name: str, kind: str) -> str:
    return f"Which {kind} is {name}'s?\n"


def passage(name: str, kind: str, value: str) -> str:
    """One fact as a passage: the title in its first line."""
    return f'"{name}"\nThe {kind} of {name} is {value}.'


def demonstration(
    world: dict[str, dict[str, str]], name: str, kind: str, rng: random.Random
) -> str:
    """How a careless pupil works: now and then guesses, searches for something else, or copies from the wrong passage."""
    if rng.random() < 0.65:
        return f"<answer>{rng.choice(VALUES[kind])}</answer>"
    asked_name = name if rng.random() < 0.6 else rng.choice(list(world))
    asked_kind = kind if rng.random() < 0.7 else rng.choice(list(VALUES))
    other = rng.choice([k for k in VALUES if k != asked_kind])
    found = [(asked_name, asked_kind), (asked_name, other)]
    rng.shuffle(found)
    observation = passages_text([passage(n, k, world[n][k]) for n, k in found])
    copied = rng.choice(found) if rng.random() < 0.5 else (asked_name, asked_kind)
    answer = world[copied[0]][copied[1]]
    return f"<search>{asked_kind} of {asked_name}</search>\n\n<information>{observation}</information>\n\n<answer>{answer}</answer>"


def rl_row(split: str, index: int, name: str, kind: str, value: str) -> dict:
    """One question as a row of verl's."""
    return {
        "data_source": "verlite/facts",
        "prompt": [{"role": "user", "content": question(name, kind)}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": [value]}},
        "extra_info": {"split": split, "index": index, "name": name, "kind": kind},
    }


def make_data(folder: Path, seed: int) -> None:
    world = facts(seed)
    rng = random.Random(seed + 1)
    names = list(world)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"contents": passage(name, kind, value)}
        for name, values in world.items()
        for kind, value in values.items()
    ]
    rng.shuffle(rows)
    corpora = {
        "corpus.jsonl": rows,
        "nothing.jsonl": [{"contents": '"Nothing"\nThis corpus is void.'}],
    }
    for file, contents in corpora.items():
        (folder / file).write_text(
            "".join(json.dumps({"id": str(i), **row}) + "\n" for i, row in enumerate(contents)),
            encoding="utf-8",
        )
    splits = {"test": names[:HELD_OUT], "train": names[HELD_OUT:]}
    for split, chosen in splits.items():
        asked = [(name, kind) for name in chosen for kind in VALUES]
        rng.shuffle(asked)
        questions = [
            rl_row(split, i, name, kind, world[name][kind]) for i, (name, kind) in enumerate(asked)
        ]
        write_parquet(questions, folder / f"{split}.parquet")
    shown = [(name, rng.choice(list(VALUES))) for name in splits["train"] for _ in range(12)]
    seen = {name: world[name] for name in splits["train"]}
    demonstrations = [
        {"prompt": question(name, kind), "response": demonstration(seen, name, kind, rng)}
        for name, kind in shown
    ]
    write_parquet(demonstrations, folder / "warm_up.parquet")
    right = sum(
        f"<answer>{world[n][k]}</answer>" in row["response"]
        for (n, k), row in zip(shown, demonstrations, strict=True)
    )
    print(
        f"{folder}: {len(rows)} facts; {3 * len(splits['train'])} questions to learn from, {3 * HELD_OUT} held out; ",
        end="",
    )
    print(f"{right / len(shown):.0%} of {len(shown)} demonstrations are right")
    for row in demonstrations[:3]:
        print(f"  {row['prompt'].strip()} {row['response']!r}")


def make_model(folder: Path, seed: int) -> None:
    """A random Qwen2 with one token for each word of the world, and one for each printable character."""
    import torch
    from tokenizers import AddedToken
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    characters = [{" ": "Ġ"}.get(c, c) for c in string.printable[:95]] + [
        "Ċ"
    ]  # space and newline as byte-level BPE spells them
    vocabulary = ["<pad>", "<eos>", *characters]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)},
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
    )
    words = [
        *TAGS,
        *FIRST,
        *LAST,
        *VALUES,
        *(value for values in VALUES.values() for value in values),
    ]
    words += [
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
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    # As the quickstart's, for the same reasons: heads of 32 are the smallest that vLLM runs on a CPU.
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=3,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.07,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: a random Qwen2 with {model.num_parameters():,} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default=FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_data(Path(arguments.folder), arguments.seed)
    make_model(Path(arguments.folder) / "model", arguments.seed)


if __name__ == "__main__":
    main()
