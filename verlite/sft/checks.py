"""Checks of main_sft and main_dpo alone (rows of `preflight.CHECKS`)."""

import math
from functools import partial
from typing import Any

from verlite.config.plan import files_of, which_ends
from verlite.data.dataset import DataError, Lengths, foreign_token
from verlite.data.sampler import PromptSampler
from verlite.sft.data import Example, read_files, tokenized
from verlite.spec.rope import position_limit
from verlite.trainer.preflight import Preflight


def rows(found: Preflight, split: str) -> None:
    """Read the files of a split, and check that they have the columns that training needs."""
    data = found.config.data
    files = files_of(data.train_files if split == "train" else data.val_files)
    limit = data.train_max_samples if split == "train" else data.val_max_samples
    if split == "train" or files:
        columns = partial(found.task.columns, data=data)
        found.rows[split] = read_files(files, columns, limit, found.first)


def order(found: Preflight) -> None:
    """Make the order of the training rows. Refuse fewer of them than one batch."""
    data, trainer = found.config.data, found.config.trainer
    used, batch = sum(file.used for file in found.rows["train"]), data.train_batch_size
    if used < batch:
        raise DataError(
            f"data.train_batch_size={batch} is more than the {used} training rows: not one "
            f"full batch. Use at most {used}"
        )
    found.sampler = PromptSampler(used, batch, trainer.seed, data.shuffle)
    per_epoch = found.sampler.steps_per_epoch
    end = which_ends(per_epoch, trainer.epochs(), trainer.total_training_steps)
    found.findings.seen += [end] if end else []


def examples(found: Preflight, split: str) -> None:
    """Tokenize the rows of a split. Say how long they are, and warn about those without an end."""
    if split not in found.rows:
        return
    data = found.config.data
    of_row = partial(found.task.examples_of, tokenizer=found.tokenizer, data=data)
    made = tokenized(found.rows[split], of_row)
    found.data[split] = made
    if not found.is_run:
        lengths = Lengths.of(lengths_of(made))
        trained = Lengths.of([example.trained_tokens for example in made])
        found.findings.seen.append(
            f"{split}: the first {len(made)} examples have tokens {lengths}, limit "
            f"{data.max_length}, of which {trained} are trained"
        )
    endless = endless_examples(made, found.tokenizer, data.max_length)
    if endless and split == "train":
        found.findings.warnings.append(
            f"{endless} of {len(made)} examples do not end with a special token: the chat template "
            "writes none after the assistant's last turn, or has it outside of its generation "
            "marks. A model that learns them does not learn to end its answers"
        )


def lengths_of(made: list[Example]) -> list[int]:
    """Return the number of tokens of each example."""
    return [len(example.prompt) + len(example.response) for example in made]


def endless_examples(made: list[Example], tokenizer: Any, max_length: int) -> int:
    """Return how many examples end without a special token, other than by data.truncation."""
    special = set(tokenizer.all_special_ids)
    return sum(
        example.response[-1] not in special
        for example, length in zip(made, lengths_of(made), strict=True)
        if length < max_length
    )


def room(found: Preflight, split: str) -> None:
    """Refuse a row that is longer than a pass. In training, a row's examples stay together."""
    data, sharing = found.config.data, found.config.ulysses_sequence_parallel_size
    lengths = lengths_of(found.data.get(split, []))
    if data.by_examples() or not lengths:
        return
    size = found.task.size if split == "train" else 1
    longest = max(sum(lengths[i : i + size]) for i in range(0, len(lengths), size))
    if longest > data.max_token_len_per_gpu * sharing:
        raise DataError(
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu} has no room for the longest "
            f"row of data.{split}_files, which has {longest} tokens. Use at least "
            f"{math.ceil(longest / sharing)}"
        )


def positions(found: Preflight, split: str) -> None:
    """Refuse an example that is longer than the model's rotary embedding allows."""
    limit = position_limit(found.described.get_text_config().to_dict())
    longest = max(lengths_of(found.data.get(split, [])), default=0)
    if limit and longest > limit[1]:
        raise DataError(
            f"data.{split}_files has a sequence of {longest} tokens. The model has "
            f"rope_type={limit[0]}, whose embedding changes with the longest sequence of a pass "
            f"beyond {limit[1]} tokens. Use data.max_length={limit[1]}"
        )


def tokens(found: Preflight, split: str) -> None:
    """Refuse an example with tokens that the model does not have."""
    from verlite.engine import folder

    count = folder.vocab_size(found.described)
    if count is None:
        return
    for number, example in enumerate(found.data.get(split, [])):
        token = max(max(example.prompt), max(example.response))
        if token >= count:
            where = f"row {number // found.task.size} of data.{split}_files: the example"
            raise foreign_token(where, token, count, "model.")
