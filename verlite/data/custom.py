"""The user's own rows (data.custom_cls) and their own order (data.sampler).

    def Rows(data_files, config, split): ...    a sequence of rows as in docs/data.md
    class Sampler:
        def __init__(self, data_source, data_config): ...
        def order(self, epoch): ...             the numbers of the rows, in order

Both must give the same for the same arguments: a resumed run asks again.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from verlite.config.schema import DataConfig
from verlite.importing import CODE_ERRORS, OwnCodeError, find, text_of


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


def own_rows(
    config: DataConfig, files: Sequence[str], split: str, first: int | None
) -> tuple[list[Any], int]:
    """Create the user's data set; return its first rows (None: all) and how many it has.

    Raises:
        OwnCodeError: it cannot be created or read.
    """
    path, name = str(config.custom_cls.path), str(config.custom_cls.name)
    key = f"data.custom_cls.name={name} in {path}"
    try:
        rows = call(path, name, data_files=list(files), config=config, split=split)
        count = len(rows)
    except OwnCodeError as error:
        raise OwnCodeError(f"data.custom_cls: {error}") from error
    except CODE_ERRORS as error:
        raise OwnCodeError(f"{key} cannot be created for {split}: {text_of(error)}") from error
    found = []
    for number in range(count if first is None else min(count, first)):
        try:
            found.append(rows[number])
        except CODE_ERRORS as error:
            raise OwnCodeError(f"{key}: {split} row {number} failed: {text_of(error)}") from error
    return found, count
