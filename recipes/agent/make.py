"""Build the agent recipe's files: products to work out, and a tiny random model. No downloads.

    python recipes/agent/make.py [--folder recipes/agent/build] [--seed 0]

Writes warm_up.jsonl (conversations for main_sft), train.parquet and test.parquet (rows in verl's
format), and model/ (a random Qwen2). The products of test.parquet are in neither of the others.
"""

import json
import random
from pathlib import Path
from typing import Any

from recipes import demo
from verlite.data.preprocess import write_parquet

FOLDER = "recipes/agent/build"
HELD_OUT = 128
TRAINING = 2048
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
"""Text of a call before and after its expression."""
_BASH = '<tool_call>{"name": "bash", "arguments": {"command": "echo '
WRITE = f"{_BASH}VALUE=$((", ')) > product.py"}}</tool_call>'
"""Text of a command before and after its expression, for mini-swe-agent."""
SUBMIT = f'{_BASH}COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}}}</tool_call>'
"""The command that ends mini-swe-agent."""
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ m.content }}<eos>"
    "{% elif m.role == 'tool' %}[{{ m.content }}]"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)

Pair = tuple[int, int]


def pairs(seed: int) -> dict[str, list[Pair]]:
    """Return pairs of two-digit numbers, no pair in two of the lists."""
    every = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(every)
    end = HELD_OUT + TRAINING
    return {"test": every[:HELD_OUT], "train": every[HELD_OUT:end], "warm_up": every[end:]}


def demonstration(a: int, b: int, rng: random.Random) -> list[dict[str, str]]:
    """Return an imperfect conversation.

    It mostly guesses. Where it asks the calculator, it often asks for another product, and often
    says something else than the calculator did.
    """
    messages = [{"role": "user", "content": f"{a}*{b}"}]
    guess = f"={rng.randrange(100, 9802)}"
    if rng.random() < 0.65:
        return [*messages, {"role": "assistant", "content": guess}]
    x, y = (a, b) if rng.random() < 0.6 else (rng.randrange(10, 100), rng.randrange(10, 100))
    result = x * y
    return [
        *messages,
        {"role": "assistant", "content": f"{CALL[0]}{x}*{y}{CALL[1]}"},
        {"role": "tool", "content": str(result)},
        {"role": "assistant", "content": f"={result}" if rng.random() < 0.6 else guess},
    ]


def repository_demonstration(a: int, b: int, rng: random.Random) -> list[dict[str, str]]:
    """Return an imperfect session of mini-swe-agent: it mostly writes another product, or submits
    without a change."""
    messages = [{"role": "user", "content": f"{a}*{b} in product.py:"}]
    if rng.random() < 0.75:
        x, y = (a, b) if rng.random() < 0.4 else (rng.randrange(10, 100), rng.randrange(10, 100))
        write = {"role": "assistant", "content": f"{WRITE[0]}{x}*{y}{WRITE[1]}"}
        messages += [write, {"role": "tool", "content": ""}]
    return [*messages, {"role": "assistant", "content": SUBMIT}]


def rl_row(split: str, index: int, a: int, b: int) -> dict[str, Any]:
    """Return one product as a row in verl's format."""
    return {
        "data_source": "products",
        "prompt": [{"role": "user", "content": f"{a}*{b}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a * b)},
        "extra_info": {"split": split, "index": index},
    }


def make_data(folder: Path, seed: int) -> None:
    """Write the files of rows, and print three demonstrations."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = pairs(seed)
    for split in ("train", "test"):
        rows = [rl_row(split, index, a, b) for index, (a, b) in enumerate(chosen[split])]
        write_parquet(rows, folder / f"{split}.parquet")
    rng = random.Random(seed + 1)
    conversations = [demonstration(a, b, rng) for a, b in chosen["warm_up"]]
    others = [repository_demonstration(a, b, rng) for a, b in chosen["warm_up"]]
    with (folder / "warm_up.jsonl").open("w") as file:
        for messages in conversations + others:
            file.write(json.dumps({"messages": messages}) + "\n")
    right = sum(
        messages[-1]["content"] == f"={a * b}"
        for messages, (a, b) in zip(conversations, chosen["warm_up"], strict=True)
    )
    print(f"{folder}: {TRAINING} products to train on, {HELD_OUT} held out")
    print(f"{right / len(conversations):.0%} of {len(conversations)} demonstrations are right:")
    for messages in conversations[:3]:
        print(f"  {' '.join(message['content'] for message in messages)}")


def make_model(folder: Path, seed: int) -> None:
    """Write a random Qwen2. Its tokenizer has a token per character and per piece of a call."""
    words = (*CALL, *WRITE, SUBMIT)
    demo.random_qwen2(folder, seed, layers=3, positions=128, words=words, template=TEMPLATE)


if __name__ == "__main__":
    demo.make(__doc__, FOLDER, make_data, make_model)
