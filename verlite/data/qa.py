"""Convert question-answering data sets to Search-R1's prompts and rows, for the search agent.

Reads FlashRAG's data sets (arXiv 2405.13576), which Search-R1 trains and evaluates on, and the
original files of NQ-open (arXiv 1906.00300) and HotpotQA (arXiv 1809.09600).
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from verlite.data import preprocess
from verlite.data.dataset import DataError

HUB = preprocess.Source(
    "RUC-NLPIR/FlashRAG_datasets", revision="ad1ee41ccf627036706307ab28318c09600f4f42", folder=""
)
# Exactly Search-R1's prompt, so that its checkpoints see the prompt of their training.
PROMPT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first "
    "every time you get new information. After reasoning, if you find you lack some "
    "knowledge, you can call a search engine by <search> query </search> and it will return "
    "the top searched results between <information> and </information>. You can search as "
    "many times as your want. If you find no further external knowledge needed, you can "
    "directly provide the answer inside <answer> and </answer>, without detailed "
    "illustrations. For example, <answer> Beijing </answer>. Question: {question}\n"
)
TAKEN = {"train": ("train",), "test": ("test", "dev", "train")}
"""File -> splits of a data set to use for it. The first that exists is used."""


def main(
    description: str,
    default_dir: str,
    train: Sequence[str],
    test: Sequence[str],
    choose: bool = False,
) -> None:
    """Run a script: write train.parquet and test.parquet.

    Args:
        description: the help text.
        default_dir: default of --local_save_dir.
        train: data sets of train.parquet, in order.
        test: data sets of test.parquet, in order.
        choose: add options to select data sets. A file without data sets is not written.
    """
    files = (
        "folder with NAME/train and NAME/test .jsonl or .json of each data set "
        f"(default {HUB.repo} from the hub)"
    )
    parser = preprocess.make_parser(description, default_dir, files)
    parser.add_argument(
        "--template_type", choices=["base"], default="base", help="Search-R1's prompt"
    )
    parser.set_defaults(data_sources=None, train_sources=None, test_sources=None)
    if choose:
        parser.add_argument("--data_sources", metavar="NAME,...", help="data sets of both files")
        parser.add_argument(
            "--train_sources",
            metavar="NAME,...",
            help=f"of train.parquet (default {','.join(train)}); '' for no file",
        )
        parser.add_argument(
            "--test_sources",
            metavar="NAME,...",
            help=f"of test.parquet (default {','.join(test)}); '' for no file",
        )

    def read(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
        sources = {}
        for split, default in (("train", train), ("test", test)):
            typed = getattr(arguments, f"{split}_sources")
            typed = arguments.data_sources if typed is None else typed
            sources[split] = (
                list(default) if typed is None else _names(f"{split} sources {typed!r}", typed)
            )
        root = (
            Path(arguments.local_dataset_path).expanduser()
            if arguments.local_dataset_path
            else None
        )
        return merge(sources, root)

    preprocess.run(parser, read)


def merge(
    sources: Mapping[str, Sequence[str]], root: Path | None
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each split, data set by data set.

    extra_info.index counts all rows of a split.

    Args:
        sources: split -> names of data sets. A split without data sets is left out.
        root: a folder with a subfolder for each data set; with a single data set it may contain
            the files directly. None: the hub.

    Raises:
        DataError: there is no data set, a file or example is invalid, or the test data would
            contain training data.
    """
    alone = len({name for names in sources.values() for name in names}) == 1
    merged: dict[str, list[dict[str, Any]]] = {}
    for split, names in sources.items():
        for name in names:
            folder, taken, files = _files(root, name, TAKEN[split], alone)
            if split == "test" and taken == "train" and name in sources.get("train", ()):
                raise DataError(
                    f"{folder}: {name} has neither a test nor a dev split, and its train split is "
                    f"in train.parquet already; remove {name} from the train or test sources"
                )
            if taken != split:
                print(f"{name} has no {split} split: its {taken} split is used")
            examples = (example for file in files for example in preprocess.read_file(file))
            rows = merged.setdefault(split, [])
            rows.extend(
                preprocess.make_rows(
                    examples, split, partial(make_row, name), folder, first=len(rows)
                )
            )
    if not merged:
        raise DataError("no train and no test sources: there is nothing to write")
    return merged


def make_row(source: str, example: Mapping[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return Search-R1's row of one example {question, golden_answers or answer, ...}.

    Golden answers are kept as written, but the JSON values true and false of yes-no data sets
    become yes and no. If the data set gives the titles of the articles with the answer, they are
    stored in extra_info.supporting_titles.

    Raises:
        KeyError, ValueError: the example is invalid.
    """
    question = example["question"]
    golds = _golden_answers(example)
    if not question.strip():
        raise ValueError("the question is empty")
    asked = question.strip()
    prompt = PROMPT.format(question=asked if asked.endswith("?") else asked + "?")
    extra_info = {"split": split, "index": index, "question": question, "golden_answers": golds}
    titles = _supporting_titles(example)
    if titles:
        extra_info["supporting_titles"] = titles
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": golds}},
        "extra_info": extra_info,
    }


def _golden_answers(example: Mapping[str, Any]) -> list[str]:
    name = next((name for name in ("golden_answers", "answer") if name in example), None)
    if name is None:
        raise KeyError("golden_answers or answer")
    answers = example[name] if isinstance(example[name], list) else [example[name]]
    golds = [
        {True: "yes", False: "no"}[answer] if isinstance(answer, bool) else answer
        for answer in answers
    ]
    if not all(isinstance(gold, str) for gold in golds) or not any(gold.strip() for gold in golds):
        raise ValueError(
            f"{name}={example[name]!r:.200} has no answer: expected text or a list of texts"
        )
    return golds


def _supporting_titles(example: Mapping[str, Any]) -> list[str]:
    """Return the distinct titles from HotpotQA's [title, sentence] list or FlashRAG's metadata."""
    facts = (
        example.get("supporting_facts")
        or (example.get("metadata") or {}).get("supporting_facts")
        or []
    )
    titles = facts["title"] if isinstance(facts, Mapping) else [title for title, _ in facts]
    return list(dict.fromkeys(titles))


def _files(
    root: Path | None, name: str, splits: Sequence[str], alone: bool
) -> tuple[Path, str, list[Path]]:
    """Return the folder, name and files of the first of `splits` that a data set has."""
    folder = Path(name)
    for split in splits:
        if root is None:
            folder = preprocess.download(HUB, [f"{name}/{split}.jsonl"]) / name
        else:
            folder = root if alone and not (root / name).is_dir() else root / name
        files = preprocess.find_files(folder, split)
        if files:
            return folder, split, files
    if root is None:
        files_text = " or ".join(f"{split}.jsonl" for split in splits)
        raise DataError(f"{HUB.repo} at {HUB.revision[:8]} has no {name} with {files_text}")
    raise preprocess.nothing_found(folder, splits)


def _names(where: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(set(names)) < len(names):
        raise DataError(f"{where}: a data set is listed twice")
    return names
