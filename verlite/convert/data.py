"""Data sets of other frameworks: what to run once, and the file that it writes."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from verlite.config.problems import ConfigError, Problem
from verlite.convert.engine import Draft

VERBATIM = "{% for m in messages %}{{ m.content }}{% endfor %}"
VERBATIM_NOTE = (
    "prompts are sent as they are, without chat markers. If they are plain questions, or messages, "
    "leave this key out"
)
"""A chat template that adds nothing."""

SUFFIXES = (".json", ".jsonl", ".parquet")


def prepare_data(
    draft: Draft, names: str, options: Sequence[str], split: str | None = None
) -> list[str] | str:
    """Return the parquet file for each data set, and add the commands that write it.

    Args:
        names: files, folders or data sets of the hub, with commas between them. `NAME@FOLDER` is a
            folder inside one of the last two, as in OpenRLHF.
        options: of data_preprocess/chat_json.py.
        split: of a data set of the hub. None: all its files.
    """
    written = []
    for entry in filter(None, map(str.strip, str(names).split(","))):
        name, _, inside = entry.partition("@")
        source = name
        if Path(name).suffix in SUFFIXES and not inside:
            output = Path(name).with_suffix(".parquet")
            if output == Path(name):
                output = output.with_suffix(".chat.parquet")
        else:
            title = "-".join(
                filter(None, (Path(name).name, inside.replace("/", "-"), split and str(split)))
            )
            output = Path(f"data/{title}.parquet")
            if not name.startswith(("/", "./", "../", "~")):
                source = f"data/{title}"
                pattern = f"{inside}/*" if inside else f"*{split}*" if split else None
                chosen = ["--include", pattern] if pattern else []
                hub = ["hf", "download", "--repo-type", "dataset", name, *chosen]
                draft.before.append(shlex.join([*hub, "--local-dir", source]))
            source = f"{source}/{inside}" if inside else source
        script = ["python", "data_preprocess/chat_json.py", "--dataset", source, *options]
        draft.before.append(shlex.join([*script, "--output", str(output)]))
        written.append(str(output))
    if not written:
        raise ConfigError([Problem("data set", names, "names no file and no data set")])
    return written if len(written) > 1 else written[0]
