"""What the formulas of several frameworks share: names of values, data sets, trackers; and for
main_sft and main_dpo, their keys, which lack the sections of main_ppo, and their start.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from verlite.config.commands import DPO, SFT, Command
from verlite.config.problems import ConfigError, Problem
from verlite.convert.engine import Draft
from verlite.convert.rows import ACTOR, MODEL, ROLLOUT
from verlite.files import check_yaml, one_line, read_text
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


COMMANDS: dict[str, Command] = {"sft": SFT, "dpo": DPO}
"""What is trained -> the command."""
NODES = ("num_machines", "nnodes", "num_nodes")
"""Options of accelerate, torchrun and deepspeed with the number of hosts."""
OWN = {
    ACTOR + "ppo_micro_batch_size_per_gpu": "data.micro_batch_size_per_gpu",
    ACTOR + "ppo_mini_batch_size": "data.train_batch_size",
    ACTOR + "data_loader_seed": "",
    "data.seed": "trainer.seed",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "trainer.val_before_train": "",
    "trainer.export_hf": "",
    "trainer.nnodes": "",
    "trainer.n_gpus_per_node": "",
}
"""Keys of main_ppo -> those of main_sft and main_dpo. "": they need none."""


def own_key(key: str) -> str:
    """Return main_sft's name of a key of main_ppo; "" if it has none."""
    if key in OWN:
        return OWN[key]
    if key.startswith(ROLLOUT):
        return ""
    for section, own in ((MODEL, "model."), (ACTOR, "")):
        if key.startswith(section):
            return own + key.removeprefix(section)
    return key


@dataclass(frozen=True)
class Processes:
    """The processes that a launcher starts.

    per_node: None: not said.
    note: which file could not be read.
    """

    nodes: int = 1
    per_node: int | None = None
    note: str = ""


def processes(words: Sequence[str]) -> Processes:
    """Return what accelerate, torchrun or deepspeed start, from the words before the script.

    Accelerate's --num_processes are those of all machines. Files of accelerate (--config_file) and
    of deepspeed (--hostfile) are read.
    """
    options: dict[str, Any] = {}
    note = file = ""
    for word, after in pairwise([*words, ""]):
        name, equals, attached = word.lstrip("-").partition("=")
        if word.startswith("--"):
            options[name.replace("-", "_")] = attached if equals else after
    try:
        for option, parse in (("config_file", _accelerate), ("hostfile", _hostfile)):
            file = options.get(option, "")
            if file:
                options = parse(read_text(Path(file))) | options
    except (OSError, ValueError, yaml.YAMLError) as error:
        note = f"{file} is not read ({one_line(error, 80)}): check the number of processes."
    numbers = {name: int(text) for name, text in options.items() if str(text).isdecimal()}
    nodes = next((numbers[name] for name in NODES if numbers.get(name)), 1)
    per_node = numbers.get("nproc_per_node") or numbers.get("num_gpus")
    if not per_node and "num_processes" in numbers:
        per_node = -(-numbers["num_processes"] // nodes) or None
    return Processes(nodes, per_node, note)


def _accelerate(text: str) -> dict[str, Any]:
    check_yaml(text)
    content = yaml.safe_load(text)
    return content if isinstance(content, dict) else {}


def _hostfile(text: str) -> dict[str, Any]:
    """Lines are HOST slots=N."""
    hosts = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    slots = [int(found[1]) for found in map(re.compile(r"slots=(\d+)").search, hosts) if found]
    if not hosts or len(slots) < len(hosts) or len(set(slots)) > 1:
        raise ValueError("its hosts do not all have the same slots=N")
    return {"num_nodes": len(hosts), "num_gpus": slots[0]}


def launch(per_node: int | None, nodes: int = 1) -> str:
    """Return how to start a command on this number of devices, without the module.

    per_node: None: all devices of a host.
    """
    if (per_node, nodes) == (1, 1):
        return "python -m"
    where = f"--nnodes {nodes} --rdzv_backend c10d --rdzv_endpoint FIRST_HOST:29500 "
    each = f"--nproc_per_node {per_node or 'gpu'} -m"
    return f"torchrun {where if nodes > 1 else ''}{each}"


def start_text(found: Processes, nodes: int) -> str:
    """Return sentences about the start of a command on so many hosts."""
    text = found.note
    if nodes > 1:
        text += f" Start it on each of the {nodes} hosts: FIRST_HOST is the address of the first."
    return f" {text.strip()}" if text else ""
