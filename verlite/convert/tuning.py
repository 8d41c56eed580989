"""Conversions to main_sft and main_dpo, whose keys lack the sections of main_ppo."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from verlite.config.command import Command
from verlite.config.sft import DPO, SFT
from verlite.convert.rows import ACTOR, MODEL, ROLLOUT
from verlite.files import check_yaml, one_line, read_text

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
