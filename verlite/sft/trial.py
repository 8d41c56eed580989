"""Try the run directory, its checkpoint, the tokenizer and the first rows of main_sft or main_dpo,
as `verlite check` does."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from verlite import hub
from verlite.config.compile import model_spec
from verlite.config.critical import begin_run
from verlite.config.plan import files_of, which_ends
from verlite.data.dataset import DataError, Lengths
from verlite.sft.data import (
    Example,
    check_batch,
    check_columns,
    check_positions,
    check_room,
    endless_warning,
    refuse_foreign_tokens,
)
from verlite.trainer.launch import absolute, try_run_dir
from verlite.trainer.trial import ROWS, Trial, noted


def try_out(
    config: Any, read: Callable[..., list[Example]], columns: Callable[..., list[str]], size: int
) -> Trial:
    """Try what a run reads first. Of each split only the first ROWS rows are tokenized.

    Args:
        config: the whole configuration of the command.
        read: `read_examples` or `read_pairs`.
        columns: the columns of a file that it reads.
        size: number of examples of a row.
    """
    from verlite.engine import family
    from verlite.engine.folder import (
        HubUnreachable,
        ModelError,
        load_config,
        load_tokenizer,
        vocab_size,
    )
    from verlite.sft.run import find_checkpoint

    trial = Trial()
    run_dir = Path(absolute(config.trainer.default_local_dir))
    with noted(trial):
        try_run_dir(run_dir)
    with noted(trial):
        begin_run()
        find_checkpoint(config, run_dir, trial.warnings.append, clean=False)
    data, model = config.data, model_spec(config.model)
    splits = {
        "train": (files_of(data.train_files), data.train_max_samples, size),
        "val": (files_of(data.val_files), data.val_max_samples, 1),
    }
    try:
        rows = {
            split: _first(check_columns(files, partial(columns, data=data)), limit)
            for split, (files, limit, _) in splits.items()
        }
        check_batch(data, rows["train"])
        epochs, steps = config.trainer.epochs(), config.trainer.total_training_steps
        end = which_ends(rows["train"] // data.train_batch_size, epochs, steps)
        trial.seen += [end] if end else []
        described = None
        try:
            described = load_config(model)
            tokens = vocab_size(described)
        except HubUnreachable as error:
            if model.tokenizer_path is None or hub.neighbors(model.path):
                raise
            tokens = None
            trial.warnings.append(f"{error}. So token ids were not compared with its vocabulary")
        else:
            unproven = family.check(model, "lm")
            trial.warnings += [unproven] if unproven else []
        tokenizer = load_tokenizer(model)
        for split, (files, _, together) in splits.items():
            if files:
                examples = read(files, tokenizer, data, min(rows[split], ROWS))
                check_room(config, examples, together, split)
                if described is not None:
                    check_positions(described, examples, split)
                refuse_foreign_tokens(examples, size, split, tokens)
                trial.seen.append(f"{split}: {_text(examples, data.max_length)}")
                endless = endless_warning(examples, tokenizer, data.max_length)
                trial.warnings += [endless] if endless and split == "train" else []
    except HubUnreachable as error:
        if hub.neighbors(model.path) or hub.neighbors(model.tokenizer_path or ""):
            trial.errors.append(str(error))
        else:
            trial.warnings.append(f"{error}. So the tokenizer and the examples were not tried")
    except (DataError, ModelError) as error:
        trial.errors.append(str(error))
    return trial


def _first(rows: int, limit: int) -> int:
    """Return how many of the rows a run uses. limit: -1 for all."""
    return rows if limit < 0 else min(rows, limit)


def _text(examples: list[Example], limit: int) -> str:
    lengths = Lengths.of([len(example.prompt) + len(example.response) for example in examples])
    trained = Lengths.of([example.trained_tokens for example in examples])
    return (
        f"the first {len(examples)} examples have tokens {lengths}, limit {limit}, of which "
        f"{trained} are trained"
    )
