"""Write a chat data set of OpenRLHF or RLinf as a parquet file in verl's format.

python data_preprocess/chat_json.py --dataset FILE --input_key message --output train.parquet

FILE is .json, .jsonl or .parquet; several with commas between them, or a folder with such files.
The column --input_key has a list of messages {role, content}, the same list as JSON text, chatml
text (<|im_start|>user ...), or plain text, which becomes a user's message. Messages after the last
one of the user are left out. The ground truth is the column --label_key, or if there is none, the
first assistant message after the prompt.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verlite.data.dataset import DataError
from verlite.data.preprocess import (
    Message,
    make_rows,
    messages,
    print_written,
    read_file,
    write_parquet,
)
from verlite.rewards.math import last_boxed

LABEL = "answer"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, write the file, print a summary. Exit code 1 for invalid data."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    output = Path(options.output).expanduser()
    try:
        files = find(options.dataset)
        if output in files:
            raise DataError(f"--output={output} is one of the files that are read")
        examples = (example for file in files for example in read_file(file))
        rows = make_rows(examples, "train", Converter(options).row, files[0].parent)
        print_written(output, rows, write_parquet(rows, output))
    except (DataError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", required=True, help="files or folders, with commas between")
    parser.add_argument("--output", required=True, help="the parquet file")
    parser.add_argument("--input_key", default="message", help="column of the messages")
    parser.add_argument("--label_key", help=f"column of the ground truth (default {LABEL})")
    parser.add_argument(
        "--input_template", help="format of plain text, with {} for the text, as in OpenRLHF"
    )
    parser.add_argument(
        "--data_source",
        default="chat_json",
        help="selects the built-in reward function, such as math; not used with reward.remote.url "
        "or a function of your own",
    )
    return parser


def find(names: str) -> list[Path]:
    """Return the files of --dataset. Raises DataError."""
    found: list[Path] = []
    for name in filter(None, names.split(",")):
        path = Path(name).expanduser()
        if path.is_dir():
            patterns = ("**/*.jsonl", "**/*.json", "**/*.parquet")
            inside = next((files for p in patterns if (files := sorted(path.glob(p)))), [])
            if not inside:
                raise DataError(f"{path} has no .jsonl, .json or .parquet file")
            found += inside
        elif not path.is_file():
            raise DataError(f"--dataset={path} does not exist")
        else:
            found.append(path)
    if not found:
        raise DataError("--dataset names no file")
    return found


class Converter:
    """Turns examples into rows, with the options of the command line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def row(self, example: dict[str, Any], split: str, index: int) -> dict[str, Any]:
        """Return the row of an example. Raises ValueError or KeyError."""
        text = example[self.options.input_key]
        prompt, answer = split_messages(messages(text, self.options.input_template))
        return {
            "data_source": self.options.data_source,
            "prompt": prompt,
            "ability": "",
            "reward_model": {"style": "rule", "ground_truth": self.truth(example, answer)},
            "extra_info": {
                "split": split,
                "index": index,
                "raw_prompt": text if isinstance(text, str) else json.dumps(text),
            },
        }

    def truth(self, example: dict[str, Any], answer: str | None) -> str:
        """Return the ground truth: the label's column, else the answer in the messages."""
        name = self.options.label_key or LABEL
        if name not in example:
            if self.options.label_key is None and answer is not None:
                return answer
            raise KeyError(name)
        label = example[name]
        if isinstance(label, list) and len(label) == 1:
            label = label[0]
        if not isinstance(label, str | int | float) or isinstance(label, bool):
            raise ValueError(f"{name} must be text or a number, not {type(label).__name__}")
        text = str(label).strip()
        boxed = last_boxed(text)
        return boxed if boxed is not None and text == f"\\boxed{{{boxed}}}" else text


def split_messages(conversation: list[Message]) -> tuple[list[Message], str | None]:
    """Return the messages up to the user's last one, and the answer to it, if there is one."""
    places = [i for i, message in enumerate(conversation) if message["role"] == "user"]
    if not places:
        raise ValueError("no message has the role user")
    prompt, rest = conversation[: places[-1] + 1], conversation[places[-1] + 1 :]
    answers = [message["content"] for message in rest if message["role"] == "assistant"]
    return prompt, answers[0] if answers else None


if __name__ == "__main__":
    main()
