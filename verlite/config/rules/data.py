"""Files of prompts."""

import glob
import re
from collections.abc import Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verlite import tables
from verlite.config import plan
from verlite.config.problems import Problem
from verlite.config.rules.context import Context
from verlite.config.schema import Config
from verlite.hub import SCHEME, HubError, local_file
from verlite.spec import catalog

if TYPE_CHECKING:
    import pyarrow

TRAIN = "data.train_files"
VAL = "data.val_files"
HUB_DATA_SET = re.compile(r"[\w-]+/[\w.-]+(?<!\.parquet)(?<!\.jsonl)(?<!\.json)(?<!\.csv)")
WRITE_AGAIN = "Write the file again with data_preprocess/."
WRITERS = "data_preprocess/ and `verlite data` write data files."


def files_are_named(context: Context) -> Iterator[Problem]:
    """There are training files, and no file name is empty."""
    data = context.config.data
    yield from named(data.train_files, data.val_files)


def named(train_files: Any, val_files: Any) -> Iterator[Problem]:
    """Report missing training files and empty file names."""
    for key, value in ((TRAIN, train_files), (VAL, val_files)):
        files = plan.files_of(value)
        if not any(files) and (files or key == TRAIN):
            yield Problem(key, value, "must name at least one file", WRITERS)
        elif not all(files):
            yield Problem(key, value, "one of the names is empty", "Leave it out.")


def missing(key: str, files: Any) -> Iterator[Problem]:
    """Report names that are not files on this machine."""
    for file in plan.files_of(files):
        if file.startswith(SCHEME):
            yield from _on_hub(key, file)
        elif file and not Path(file).is_file():
            yield Problem(key, file, *_why_not_a_file(Path(file)), is_local=True, is_file=True)


def _on_hub(key: str, file: str) -> Iterator[Problem]:
    """Report a file of the hub that cannot be downloaded."""
    try:
        local_file(file)
    except HubError as error:
        yield Problem(key, file, str(error), is_local=True, is_file=True)


def data_files(context: Context) -> Iterator[Problem]:
    """Files can be read, have the columns that training needs, rows, and reward functions."""
    data = context.config.data
    if data.custom_cls.path is not None:
        return  # it reads the files
    scorers: set[str] = set()
    train_rows: list[int] = []
    train_files = plan.files_of(data.train_files)
    for file in train_files:
        rows = yield from _data_file(context.config, TRAIN, file, scorers)
        if rows is not None:
            train_rows.append(rows)
    if train_files and len(train_rows) == len(train_files):
        yield from _enough_rows(context, sum(train_rows))
    for file in plan.files_of(data.val_files):
        yield from _data_file(context.config, VAL, file, scorers)
    for scorer in sorted(scorers):
        yield from _unknown_settings(context.config, scorer)


def _data_file(
    config: Config, key: str, file: str, scorers: set[str]
) -> Generator[Problem, None, int | None]:
    """Check one file, and add the reward functions of its data sources to `scorers`.

    Returns its number of rows, or None if it cannot be used.
    """
    problems = list(missing(key, file))
    if problems:
        yield from problems
        return None
    path = local_file(file)
    remote = plan.scores_remotely(config.reward)
    builtin = config.custom_reward_function.path is None and not remote
    builtin = builtin and not plan.scores_itself(config)
    try:
        schema, rows = tables.outline(path)
        sources = _sources(path, schema, config.data.reward_fn_key) if builtin else []
    except tables.TableError as error:
        yield Problem(key, file, str(error), WRITERS)
        return None
    if rows == 0:
        yield Problem(key, file, "has no rows", WRITE_AGAIN)
        return None
    yield from _columns(config, key, file, schema)
    unknown = (source for source in sources if catalog.scorer_for(source) is None)
    without = list(islice(unknown, 5))
    if without:
        yield Problem(
            key,
            file,
            f"no built-in reward function for data source {', '.join(map(repr, without))}",
            "Give your own function with custom_reward_function.path=FILE.py, or use a known "
            f"source: {', '.join(catalog.SCORERS)}.",
        )
    else:
        scorers.update(filter(None, map(catalog.scorer_for, sources)))
    return rows


def _columns(config: Config, key: str, file: str, schema: "pyarrow.Schema") -> Iterator[Problem]:
    """Report missing columns, and a reward_model without ground truth."""
    import pyarrow

    data = config.data
    keys_by_column = {data.prompt_key: "data.prompt_key", data.reward_fn_key: "data.reward_fn_key"}
    if key == TRAIN and config.distillation.enabled and data.teacher_prompt_key:
        keys_by_column[data.teacher_prompt_key] = "data.teacher_prompt_key"
    for column in (*keys_by_column, "reward_model"):
        if column in schema.names:
            continue
        remedy = WRITE_AGAIN
        if Path(file).suffix in tables.TEXT_SUFFIXES:
            remedy = (
                f"Write the columns of training with `verlite data {file} --prompt COLUMN "
                "--answer COLUMN -o FILE.parquet` (docs/data.md)."
            )
        elif column in keys_by_column:
            remedy = (
                f"Set {keys_by_column[column]} to one of them, or write the file again with "
                "data_preprocess/."
            )
        yield Problem(
            key, file, f"has no column {column!r}; it has {', '.join(schema.names)}", remedy
        )
    if "reward_model" not in schema.names:
        return
    kind = schema.field("reward_model").type
    if not pyarrow.types.is_struct(kind) or kind.get_field_index("ground_truth") < 0:
        rule = f"column 'reward_model' has type {kind}, expected {{style, ground_truth}}"
        yield Problem(key, file, rule, WRITE_AGAIN)


def _enough_rows(context: Context, found: int) -> Iterator[Problem]:
    """The training files fill a batch."""
    data = context.config.data
    if not context.ok("data.train_batch_size", "data.train_max_samples"):
        return
    usable = min(found, data.train_max_samples) if data.train_max_samples > 0 else found
    key, drawn = plan.prompts_drawn(context.config)
    if usable < data.train_batch_size:
        # Even several generations of dynamic sampling cannot fill a step.
        key = "data.train_batch_size"
        drawn = data.train_batch_size
    if usable < drawn:
        limit = f" (data.train_max_samples={data.train_max_samples})" if usable < found else ""
        rule = f"the training data have only {usable} rows{limit}: not one full batch"
        yield Problem(key, drawn, rule, f"Use at most {usable}.")


def _sources(path: Path, schema: "pyarrow.Schema", column: str) -> list[str]:
    """Return the distinct texts of a column; [] if it is missing or has no text.

    Of a parquet file it reads only its dictionary, which is fast.
    """
    import pyarrow

    if column not in schema.names:
        return []
    kind = schema.field(column).type
    is_text = pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
    if not is_text and not pyarrow.types.is_dictionary(kind):
        return []
    table = tables.read(path, [column], as_dictionary=True)
    values = table[column].unique().to_pylist()
    return sorted(value for value in values if value and isinstance(value, str))


def _unknown_settings(config: Config, scorer: str) -> Iterator[Problem]:
    """Report entries of reward_kwargs that a built-in reward function does not take."""
    known = catalog.SCORER_SETTINGS[scorer]
    for name, value in config.custom_reward_function.reward_kwargs.items():
        if name not in known:
            rule = f"{scorer} does not take this argument"
            remedy = f"Its arguments: {', '.join(known)}." if known else "It takes none."
            yield Problem(f"custom_reward_function.reward_kwargs.{name}", value, rule, remedy)


def _why_not_a_file(path: Path) -> tuple[str, str]:
    """Return rule and remedy for a path that is not a file."""
    if path.is_dir():
        return "is a folder, not a file", _files_in(path, "Name its files")
    matches = sorted(glob.glob(str(path))) if glob.has_magic(str(path)) else []
    if matches:
        return (
            "is a pattern, and patterns are not expanded",
            f"Name the files: [{','.join(matches[:5])}].",
        )
    if re.match(r"\w+:/", str(path)):
        remedy = "Download it and name the file. Files on the hub: hf://datasets/OWNER/NAME/FILE."
        return "is an address, and data files must be here", remedy
    folder = path.parent
    if folder.is_dir():
        return "does not exist", _files_in(folder, f"Files in {folder.resolve()}")
    while not folder.is_dir():
        folder = folder.parent
    remedy = f"{folder.resolve()} exists, but not the folder below it."
    if HUB_DATA_SET.fullmatch(str(path)):
        remedy += f" If it is a data set on the hub, name its file: hf://datasets/{path}/FILE."
    return "does not exist", remedy


def _files_in(folder: Path, words: str) -> str:
    kinds = (".parquet", *tables.TEXT_SUFFIXES)
    names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in kinds)
    if not names:
        return f"{folder.resolve()} has no data files."
    return f"{words}: {', '.join(names[:5])}."
