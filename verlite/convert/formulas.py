"""What the formulas of several frameworks share: names of values, data sets, trackers."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from verlite.config.problems import ConfigError, Problem
from verlite.convert.engine import Draft
from verlite.convert.rows import ACTOR, MODEL
from verlite.spec.catalog import TRACKERS

CORRECTION = "algorithm.rollout_correction."
KL_NAMES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
"""Schulman's names of KL estimators -> verl's."""
SCHEDULES = {
    "cosine_with_min_lr": "cosine",
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
"""transformers' schedules -> verlite's."""
NO_DUAL_CLIP = 1e6
"""A value of actor.clip_ratio_c that no ratio reaches, for frameworks without dual clip."""
VERBATIM = "{% for m in messages %}{{ m.content }}{% endfor %}"
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


def rows_file(draft: Draft, name: str, split: str) -> list[str] | str:
    """Return the files of rows, and add the commands that download those of the hub."""
    files = []
    for entry in filter(None, map(str.strip, str(name).split(","))):
        path = Path(entry)
        if path.suffix in (*SUFFIXES, ".csv") or entry.startswith(("/", "./", "../", "~")):
            files.append(entry)
            continue
        repository, _, inside = entry.partition("@")  # NAME@FOLDER, as in OpenRLHF
        title = "-".join(filter(None, (Path(repository).name, inside.replace("/", "-"), split)))
        files.append(f"data/{title}.parquet")
        options = f"{entry!r}, " if not inside else f"{repository!r}, data_dir={inside!r}, "
        code = f"from datasets import load_dataset; load_dataset({options}split={split!r})"
        draft.before.append(shlex.join(["python", "-c", f"{code}.to_parquet({files[-1]!r})"]))
    return files if len(files) != 1 else files[0]


def verbatim(draft: Draft) -> None:
    """Send prompts as they are."""
    note = "prompts are sent as they are, without chat markers. If they are plain questions, or "
    draft.set(MODEL + "custom_chat_template", VERBATIM, note + "messages, leave this key out")


def dual_clip(draft: Draft, bound: float | None, framework: str) -> None:
    """Set the bound of ratios with negative advantages. 0 or None: there is none."""
    note = f"turns dual clip off, as in {framework}: no ratio reaches this bound"
    draft.set(ACTOR + "clip_ratio_c", bound or NO_DUAL_CLIP, "" if bound else note)


def same_reference(draft: Draft, name: str, model: str) -> None:
    """Refuse a reference of DPO that is not the model at the start."""
    if draft[name] not in (None, "", draft[model]):
        rule = "verlite's reference is the model at the start of the run"
        draft.refuse(name, rule, "Leave it out if it is the same model.")


def trackers(draft: Draft, name: str, backends: Sequence[str]) -> None:
    """Set the trackers, and warn of those that verlite does not have."""
    known = [backend for backend in backends if backend in TRACKERS]
    draft.set("trainer.logger", ["console", *known], explicit=False)
    if "all" in backends:
        draft.warn(
            name, f"name the trackers that you want in trainer.logger: {', '.join(TRACKERS)}"
        )
    for backend in backends:
        if backend not in (*known, "none", "all"):
            draft.warn(
                name,
                f"verlite has no tracker {backend}, but {', '.join(TRACKERS)}. A class of your own "
                "can send metrics anywhere (docs/trackers.md)",
            )
