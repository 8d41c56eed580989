"""verl's published keys and defaults.

`verl_defaults.json` has every key of verl's generated trainer configuration (FSDP), from version
0.5 on, with its defaults; `verl_sft_defaults.json` those of supervised fine-tuning, from 0.3 on.
`python -m tests.config.verl_keys` writes both from a checkout of verl.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("verl_defaults.json")
SFT_TABLE = Path(__file__).with_name("verl_sft_defaults.json")

TRAINERS = {
    "ppo_trainer": "",
    "ppo_megatron_trainer": "is verl's trainer with Megatron; verlite trains with FSDP2",
    "ppo_veomni_trainer": "is verl's trainer with VeOmni; verlite trains with FSDP2",
    "ppo_torchtitan_trainer": "is verl's trainer with torchtitan; verlite trains with FSDP2",
}
"""verl's own YAML files -> why a run cannot follow one, "" if verlite's ppo_trainer is the same."""


SFT_TRAINERS = {"sft_trainer": "", "sft_trainer_engine": ""}
"""The same for verl's supervised fine-tuning."""


@functools.cache
def defaults(table: Path = TABLE) -> dict[str, list[Any]]:
    """Return {dotted key: its defaults in the versions of verl, the newest last}."""
    found: dict[str, list[Any]] = json.loads(table.read_text(encoding="utf-8"))
    return found


def is_default(key: str, value: Any, known: Mapping[str, list[Any]] | None = None) -> bool:
    """Return whether verl has the key, and without the key has this value.

    Args:
        known: verl's keys and defaults. None: those of its RL trainer.
    """
    found = (defaults() if known is None else known).get(key, [])
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in found
    )
