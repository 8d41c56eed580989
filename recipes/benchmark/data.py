"""Preprocessing and loading of a large prompt set: GSM8K's training split, repeated a hundred
times.

python recipes/benchmark/data.py [--folder FOLDER_WITH_TRAIN_JSONL] [--rows 747300]

Without a folder, the tests' sample is repeated. Preprocessing is that of data_preprocess/gsm8k.py:
read examples, convert them into verl's rows, write parquet. Loading is that of a run's start: read,
check, apply the chat template, tokenize (by character), measure.
"""

import argparse
import importlib.util
import itertools
import json
import resource
import tempfile
from pathlib import Path

from machine import seconds
from report import keep
from workload import model_of

from verlite.data.dataset import PromptDataset
from verlite.data.preprocess import make_rows, read_file, write_parquet
from verlite.engine.folder import load_tokenizer
from verlite.spec.roles import DataSpec, ModelSpec

TOP = Path(__file__).resolve().parents[2]


def repeated(source: Path, rows: int, target: Path) -> None:
    """Write the lines of `source` repeatedly."""
    lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
    with target.open("w", encoding="utf-8") as file:
        file.writelines(itertools.islice(itertools.cycle(lines), rows))


def preprocess(source: Path, target: Path) -> None:
    """Preprocess like data_preprocess/gsm8k.py."""
    spec = importlib.util.spec_from_file_location("gsm8k", TOP / "data_preprocess" / "gsm8k.py")
    assert spec and spec.loader
    gsm8k = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gsm8k)
    write_parquet(make_rows(read_file(source), "train", gsm8k.make_row, source.parent), target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=TOP / "tests" / "samples" / "gsm8k")
    parser.add_argument("--rows", type=int, default=747_300)
    args = parser.parse_args()
    tokenizer = load_tokenizer(ModelSpec(path=str(model_of("w25"))))
    with tempfile.TemporaryDirectory() as folder:
        examples, parquet = Path(folder) / "train.jsonl", Path(folder) / "train.parquet"
        repeated(args.folder / "train.jsonl", args.rows, examples)
        preprocessing = seconds(lambda: preprocess(examples, parquet))
        loading = seconds(
            lambda: PromptDataset(
                str(parquet), tokenizer, DataSpec(max_prompt_length=4096), "train"
            )
        )
        size = examples.stat().st_size
    found = {
        "rows": args.rows,
        "bytes": size,
        "repeated": f"{args.folder.parent.name}/{args.folder.name}",
        "preprocess_rows_per_s": args.rows / preprocessing,
        "load_rows_per_s": args.rows / loading,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }
    keep("data", found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
