"""Write verlite/config/verl_defaults.json and verl_sft_defaults.json from verl's configurations.

    python -m tests.config.verl_keys FOLDER

FOLDER is a git checkout of verl with its tags.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from verlite.config.translation import SFT_TABLE, TABLE

CONFIG = "verl/trainer/config/"
RL = [
    (revision, "_generated_ppo_trainer.yaml")
    for revision in ("v0.5.0", "v0.6.1", "v0.7.1", "v0.8.0", "v0.9.0", "HEAD")
]
SFT = [
    *((revision, "sft_trainer.yaml") for revision in ("v0.3.0.post1", "v0.5.0", "v0.6.1")),
    *((revision, "sft_trainer_engine.yaml") for revision in ("v0.6.1", "v0.7.1", "v0.9.0", "HEAD")),
]


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every value below a mapping. An empty mapping is a value."""
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from leaves(below, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def read(folder: str, revision: str, file: str) -> dict[str, Any]:
    """Return a YAML file with the files of its defaults list in their sections."""
    command = ["git", "-C", folder, "show", f"{revision}:{CONFIG}{file}"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    content: dict[str, Any] = yaml.safe_load(text)
    for entry in content.pop("defaults", []):
        if entry != "_self_":
            ((group, name),) = entry.items()
            group, _, section = group.partition("@")
            below = read(folder, revision, f"{group}/{name}.yaml")
            content[section or group] = below | (content.get(section or group) or {})
    return content


def table(folder: str, files: Iterable[tuple[str, str]]) -> dict[str, list[Any]]:
    """Return the defaults of every key, the newest last."""
    found: dict[str, list[Any]] = {}
    for revision, file in files:
        for key, value in leaves(read(folder, revision, file)):
            values = [old for old in found.get(key, []) if repr(old) != repr(value)]
            found[key] = [*values, value]
    return dict(sorted(found.items()))


def write(path: Path, found: dict[str, list[Any]]) -> None:
    rows = [f" {json.dumps(key)}: {json.dumps(values)}" for key, values in found.items()]
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    print(f"{len(rows)} keys in {path}")


def main() -> None:
    write(TABLE, table(sys.argv[1], RL))
    write(SFT_TABLE, table(sys.argv[1], SFT))


if __name__ == "__main__":
    main()
