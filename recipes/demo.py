"""What recipes with a tiny model share: the random model, and the commands of a whole recipe."""

import argparse
import os
import string
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from verlite.terminal import console

ROOT = Path(__file__).resolve().parents[1]
PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def random_qwen2(
    folder: Path,
    seed: int,
    layers: int,
    positions: int,
    words: Sequence[str] = (),
    template: str = PLAIN,
) -> None:
    """Write a random Qwen2 and its tokenizer, with a token per character and per word of `words`.

    Args:
        positions: longest sequence.
        template: the chat template.
    """
    import torch
    from tokenizers import AddedToken
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # Byte-level BPE writes space as Ġ and newline as Ċ.
    characters = [*string.printable[:95].replace(" ", "Ġ"), "Ċ"]
    vocabulary = ["<pad>", "<eos>", *characters]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)},
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
    )
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    tokenizer.chat_template = template
    # The usual initializer_range of 0.02 is meant for wide models. In a model this narrow the
    # signal vanishes and learning starts several times later. A head size of 32 is the smallest
    # that vLLM supports on a CPU.
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=layers,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.07,
        max_position_embeddings=positions,
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


def make(
    doc: str | None,
    folder: str,
    make_data: Callable[[Path, int], None],
    make_model: Callable[[Path, int], None],
) -> None:
    """Build a recipe's files, with the options --folder and --seed of the command line."""
    parser = _parser(doc)
    parser.add_argument("--folder", type=Path, default=Path(folder))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    make_data(given.folder, given.seed)
    make_model(given.folder / "model", given.seed)


def warm_up(build: str, file: str, steps: int) -> list[str]:
    """Return the arguments of main_sft on a file of the folder `build`, for its model."""
    return [
        "-m",
        "verlite.main_sft",
        f"data.train_files={build}/{file}",
        "data.train_batch_size=64",
        f"model.path={build}/model",
        "model.enable_gradient_checkpointing=false",
        "optim.lr=1e-3",
        "optim.lr_scheduler_type=constant",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={build}/warm_up",
    ]


def train(config_name: str) -> list[str]:
    """Return the arguments of main_ppo. Without resume_mode, a second run of the recipe would find
    the first one's last checkpoint and stop."""
    return ["-m", "verlite.main_ppo", "--config-name", config_name, "trainer.resume_mode=disable"]


def overrides_of(doc: str | None, argv: list[str]) -> list[str]:
    """Return the overrides of a recipe's command line, and change to the project's folder."""
    parser = _parser(doc)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override of main_ppo")
    overrides: list[str] = parser.parse_args(argv).overrides
    os.chdir(ROOT)
    return overrides


def run(title: str, command: Sequence[str]) -> int:
    """Print and run a Python command. Return its exit code."""
    out = console()
    out.rule(title, align="left")
    out.print("python " + " ".join(command), style="dim", highlight=False, soft_wrap=True)
    return subprocess.run([sys.executable, *command]).returncode


def run_all(commands: Mapping[str, Sequence[str]], results: Callable[[], None]) -> int:
    """Run commands, with their titles, and show the results. Return the first nonzero exit code,
    else 0."""
    start = time.monotonic()
    for number, (title, command) in enumerate(commands.items(), start=1):
        code = run(f"{number}. {title}", command)
        if code:
            return code
    console().rule("Results", align="left")
    results()
    console().print(f"{time.monotonic() - start:.0f} seconds in all", highlight=False)
    return 0


def show(config_name: str, overrides: list[str], title: str, score: str, held_out: str) -> None:
    """Print the curve of a run and its held-out accuracy, and draw the curve in its directory.

    Args:
        title: of the drawing.
        score: what the curve shows, such as "mean score of each step's samples".
        held_out: where answers are right, such as "on held-out products".
    """
    from verlite.config.load import compose
    from verlite.report.curve import draw, plot, read_curve

    run_dir = Path(compose(config_name, overrides, check=False).config.trainer.default_local_dir)
    curve = read_curve(run_dir / "metrics.jsonl")
    out = console()
    out.print(f"{score}\n{plot(curve.training)}\n", highlight=False)
    draw(curve, run_dir / "reward_curve.png", title)
    found = next(iter(curve.validation.values()))
    line = f"right {held_out}: {found[0][1]:.1%} before, {found[-1][1]:.1%} after"
    out.print(line, style="bold", highlight=False)


def _parser(doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
