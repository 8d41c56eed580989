"""Data sets of other frameworks: what to run once, and the file that it writes."""

import shlex
from collections.abc import Sequence
from pathlib import Path

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
        names: files or data sets of the hub, with commas between them.
        options: of data_preprocess/chat_json.py.
        split: of a data set of the hub. None: all its files.
    """
    written = []
    for name in [name for name in names.split(",") if name]:
        source = name
        if Path(name).suffix in SUFFIXES:
            output = Path(name).with_suffix(".parquet")
            if output == Path(name):
                output = output.with_suffix(".chat.parquet")
        else:
            source = "data/" + "-".join(filter(None, (name.rsplit("/", 1)[-1], split)))
            output = Path(source + ".parquet")
            chosen = ["--include", f"*{split}*"] if split else []
            hub = ["hf", "download", "--repo-type", "dataset", name, *chosen]
            hub += ["--local-dir", source]
            draft.before.append(shlex.join(hub))
        script = ["python", "data_preprocess/chat_json.py", "--dataset", source, *options]
        draft.before.append(shlex.join([*script, "--output", str(output)]))
        written.append(str(output))
    return written if len(written) > 1 else written[0]
