"""Try the tokenizer and the first rows of main_sft or main_dpo, as `verlite check` does."""

from collections.abc import Callable
from functools import partial
from typing import Any

from verlite import hub
from verlite.config.plan import files_of
from verlite.data.dataset import DataError, Lengths
from verlite.sft.data import Example, check_columns, endless_warning
from verlite.trainer.trial import ROWS, Trial


def try_out(
    config: Any, read: Callable[..., list[Example]], columns: Callable[..., list[str]]
) -> Trial:
    """Try what a run reads first. Of each split only the first ROWS rows are tokenized.

    Args:
        config: the whole configuration of the command.
        read: `read_examples` or `read_pairs`.
        columns: the columns of a file that it reads.
    """
    from verlite.engine.folder import HubUnreachable, ModelError, load_tokenizer

    trial = Trial()
    data, model = config.data, config.model
    splits = {"train": files_of(data.train_files), "val": files_of(data.val_files)}
    try:
        check_columns([*splits["train"], *splits["val"]], partial(columns, data=data))
        tokenizer = load_tokenizer(model)
        for split, files in splits.items():
            if files:
                examples = read(files, tokenizer, data, ROWS)
                trial.seen.append(f"{split}: {_text(examples, data.max_length)}")
                endless = endless_warning(examples, tokenizer, data.max_length)
                trial.warnings += [endless] if endless and split == "train" else []
    except HubUnreachable as error:
        if hub.neighbors(model.tokenizer_path or model.path):
            trial.errors.append(str(error))
        else:
            trial.warnings.append(f"{error}. So the tokenizer and the examples were not tried")
    except (DataError, ModelError) as error:
        trial.errors.append(str(error))
    return trial


def _text(examples: list[Example], limit: int) -> str:
    lengths = Lengths.of([len(example.prompt) + len(example.response) for example in examples])
    trained = Lengths.of([example.trained_tokens for example in examples])
    return (
        f"the first {len(examples)} examples have tokens {lengths}, limit {limit}, of which "
        f"{trained} are trained"
    )
