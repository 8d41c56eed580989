"""Conversions to main_sft and main_dpo, whose keys lack the sections of main_ppo."""

import shlex
from pathlib import Path

from verlite.config.command import Command
from verlite.config.dpo import DPO
from verlite.config.sft import SFT
from verlite.convert.data import SUFFIXES
from verlite.convert.engine import Draft
from verlite.convert.rows import ACTOR, MODEL, ROLLOUT

COMMANDS: dict[str, Command] = {"sft": SFT, "dpo": DPO}
"""What is trained -> the command."""
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


def launch(gpus: int) -> str:
    """Return how to start a command on this number of devices, without the module."""
    return "python -m" if gpus == 1 else f"torchrun --nproc_per_node {gpus} -m"


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
