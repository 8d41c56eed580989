"""The user's own rows (data.custom_cls) and their own order (data.sampler).

    def Rows(data_files, config, split): ...    a sequence of rows as in docs/data.md
    class Sampler:
        def __init__(self, data_source, data_config): ...
        def order(self, epoch): ...             the numbers of the rows, in order

Both must give the same for the same arguments: a resumed run asks again. Classes written for verl
have other parameters and methods, by which they are recognized:

    class Rows(Dataset):
        def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1): ...
    class Sampler:
        def __iter__(self): ...                 the numbers of the rows of the next epoch
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from verlite.data.prompts import build_prompt
from verlite.importing import CODE_ERRORS, OwnCodeError, find, text_of
from verlite.spec.roles import DataSpec

COMPARED_ROWS = 16
"""Rows of a data set for verl whose own token ids are compared with those of their messages."""


def call(path: str, name: str, **arguments: Any) -> Any:
    """Call a class or function of the user's.

    Raises:
        OwnCodeError: it cannot be imported, or has other parameters.
    """
    own = find(path, name)
    try:
        inspect.signature(own).bind(**arguments)
    except TypeError as error:
        raise OwnCodeError(
            f"{path}: {name} must take {', '.join(arguments)} (docs/data.md): {error}"
        ) from error
    return own(**arguments)


def verl_config(spec: DataSpec) -> Any:
    """Return the data section as verl's classes get it: keys as attributes and by `get`.

    Entries of data.extra stand beside the keys.
    """
    given = dataclasses.asdict(spec.section)
    return OmegaConf.create(given["extra"] | given)


def own_rows(
    spec: DataSpec,
    files: Sequence[str],
    split: str,
    first: int | None,
    tokenizer: Callable[[], Any] | None = None,
) -> tuple[list[Any], int]:
    """Create the user's data set; return its first rows (None: all) and how many it has.

    Args:
        tokenizer: loads the tokenizer for a data set that is written for verl.

    Raises:
        OwnCodeError: it cannot be created or read.
    """
    path, name = str(spec.custom_cls.path), str(spec.custom_cls.name)
    key = f"data.custom_cls.name={name} in {path}"
    own = find_own(path, name, "data.custom_cls")
    parameters = _parameters(own)
    is_for_verl = "tokenizer" in parameters and "split" not in parameters
    loaded = tokenizer() if is_for_verl and tokenizer is not None else None
    try:
        if loaded is not None:
            given = {"data_files": list(files), "tokenizer": loaded, "config": verl_config(spec)}
            given |= {"processor": None, "max_samples": -1}
            anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            given = {k: v for k, v in given.items() if anything or k in parameters}
            rows = call(path, name, **given)
        else:
            rows = call(path, name, data_files=list(files), config=spec.section, split=split)
        count = len(rows)
    except OwnCodeError as error:
        raise OwnCodeError(f"data.custom_cls: {error}") from error
    except CODE_ERRORS as error:
        raise OwnCodeError(f"{key} cannot be created for {split}: {text_of(error)}") from error
    found = []
    for number in range(count if first is None else min(count, first)):
        try:
            row = rows[number]
            if loaded is not None and isinstance(row, Mapping):
                row = _of_verl(row, spec, loaded if number < COMPARED_ROWS else None)
            found.append(row)
        except CODE_ERRORS as error:
            raise OwnCodeError(f"{key}: {split} row {number} failed: {text_of(error)}") from error
    return found, count


def _parameters(own: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class or function.

    Of a class with (*args, **kwargs) they include those of the class that it passes them to.
    """
    parameters = dict(inspect.signature(own).parameters)
    for base in inspect.getmro(own)[1:-1] if inspect.isclass(own) else ():
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            break
        if "__init__" in vars(base):
            del parameters[next(n for n, p in parameters.items() if p.kind is p.VAR_KEYWORD)]
            try:
                parameters = dict(inspect.signature(base).parameters) | parameters
            except ValueError:  # a class in C, such as dict
                break
    return parameters


def _of_verl(row: Mapping[str, Any], spec: DataSpec, tokenizer: Any) -> dict[str, Any]:
    """Return a row of a data set for verl, with the messages of `raw_prompt` as its prompt.

    Raises:
        ValueError: its token ids are not those of the messages, which would be trained on here.
    """
    messages = row.get("raw_prompt")
    if not isinstance(messages, list | tuple) or not messages:
        return dict(row)
    ids = row.get("raw_prompt_ids")
    if ids is not None and tokenizer is not None:
        built = build_prompt(tokenizer, messages, template_kwargs=spec.apply_chat_template_kwargs)
        fits = len(built) <= spec.max_prompt_length  # it was not truncated
        # A class that changes the messages of verlite's RLHFDataset leaves its ids behind.
        is_stale = getattr(ids, "made", None) == list(ids)
        if fits and not is_stale and [int(token) for token in ids] != built:
            raise ValueError(
                f"its raw_prompt_ids ({len(ids)} tokens) are not the token ids of its messages "
                f"({len(built)} tokens). verlite trains on the messages: put the whole prompt there"
            )
    return {**row, spec.prompt_key: [dict(message) for message in messages]}


def find_own(path: str, name: str, key: str) -> Any:
    """Return a class or function of the user's. Raises OwnCodeError, which names the key."""
    try:
        return find(path, name)
    except OwnCodeError as error:
        raise OwnCodeError(f"{key}: {error}") from error


class EpochsOfVerl:
    """The epochs of a sampler written for verl, each of which is one iteration over it.

    A sampler may continue its random numbers from epoch to epoch, so earlier epochs are iterated
    again after a resume.
    """

    def __init__(self, create: Callable[[], Any]) -> None:
        self._create = create
        self._sampler = create()
        self._made = 0
        self._last: list[int] = []

    def order(self, epoch: int) -> list[int]:
        """Return the row numbers of an epoch, counted from 0."""
        if epoch < self._made - 1:
            self._sampler, self._made = self._create(), 0
        while self._made <= epoch:
            self._last = list(self._sampler)
            self._made += 1
        return self._last


class RowsOfVerl:
    """The training rows as a sampler for verl reads them: by number, or a column of `dataframe`."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self.dataframe = self

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int | str) -> Any:
        if isinstance(item, str):
            return [self[i][item] for i in range(len(self))]
        row = self._rows[item]
        return {
            "prompt": row.messages,
            "raw_prompt": row.messages,
            "data_source": row.data_source,
            "ability": row.ability,
            "reward_model": {"ground_truth": row.ground_truth},
            "extra_info": row.extra_info,
        }
