"""Makes everything that the quickstart needs: a tiny random model with its tokenizer, and the sums. Nothing is downloaded.

    python recipes/quickstart/make.py [--folder recipes/quickstart/build] [--seed 0]

Writes model/ (a random Qwen2), warm_up.parquet (prompt and response columns, for main_sft), train.parquet and test.parquet (verl's
rows, for main_ppo). No problem of test.parquet is in the other two.
"""

import argparse
import random
import string
from pathlib import Path

from verlite.data.preprocess import write_parquet

FOLDER = "recipes/quickstart/build"
CARELESSNESS = 0.7
TEST_PROBLEMS = 512


def work(a: int, b: int, forgets: float = 0.0, rng: random.Random | None = None) -> str:
    """Column addition of two-digit numbers as on paper: from the right, each column's digit and then what is carried.

    47+48 is "5190": 7+8 writes 5 and carries 1, 4+4+1 writes 9 and carries 0; read back, 095. With `forgets`, a carry that is due
    is forgotten with this probability, and the columns after it go on without it.
    """
    written, carry = "", 0
    for place in (1, 10):
        column = a // place % 10 + b // place % 10 + carry
        carry = column // 10
        if carry and rng is not None and rng.random() < forgets:
            carry = 0
        written += f"{column % 10}{carry}"
    return written


def problems(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All 8,100 sums of two two-digit numbers, shuffled and cut into (training, test)."""
    every = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(every)
    return every[TEST_PROBLEMS:], every[:TEST_PROBLEMS]


def rl_row(split: str, index: int, a: int, b: int) -> dict:
    """One problem as a row of verl's."""
    return {
        "data_source": "verlite/arithmetic",
        "prompt": [{"role": "user", "content": f"{a}+{b}="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": work(a, b)},
        "extra_info": {"split": split, "index": index, "sum": a + b},
    }


def make_data(folder: Path, seed: int) -> None:
    train, test = problems(seed)
    rng = random.Random(seed + 1)
    for split, sums in (("train", train), ("test", test)):
        write_parquet(
            [rl_row(split, i, a, b) for i, (a, b) in enumerate(sums)], folder / f"{split}.parquet"
        )
    demonstrations = [
        {"prompt": f"{a}+{b}=", "response": work(a, b, CARELESSNESS, rng)} for a, b in train
    ]
    write_parquet(demonstrations, folder / "warm_up.parquet")
    right = sum(
        work(a, b) == row["response"] for (a, b), row in zip(train, demonstrations, strict=True)
    )
    print(
        f"{folder}: {len(train)} sums to learn from, {len(test)} held out; {right / len(train):.0%} of the demonstrations are right"
    )
    for (a, b), row in list(zip(train, demonstrations, strict=True))[:4]:
        note = (
            "" if row["response"] == work(a, b) else f"  (forgot to carry, right is {work(a, b)})"
        )
        print(f"  {row['prompt']}{row['response']}{note}")


def make_model(folder: Path, seed: int) -> None:
    """A random Qwen2 of 0.3 million parameters, and a tokenizer with one id per printable character."""
    import torch
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
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    # The usual initializer_range of 0.02 is meant for wide models: in one this narrow the signal all but dies, and learning
    # starts several times later. Heads of 32 are the smallest that vLLM runs on a CPU.
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        num_hidden_layers=2,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.07,
        max_position_embeddings=64,
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
