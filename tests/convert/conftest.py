"""Fixtures for converters: files that a converted command may name."""

import json
from pathlib import Path

import pytest
from packaging.version import Version

from tests.config.conftest import (
    NO_WEIGHTS,
    no_gpu,  # noqa: F401  (a fixture for all tests)
    write_prompts,
)
from tests.models import tiny_tokenizer
from verlite.config.commands import PPO
from verlite.config.load import main_argv
from verlite.convert.rows import Table
from verlite.convert.text import Conversion

SAMPLES = Path(__file__).parents[1] / "samples"
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
)
"""YAML with aliases of aliases: 10**30 values."""


def check_changes(table: Table) -> None:
    """Each changed default is the one that the next newer change, or the table, begins with."""
    defaults = {row.name: row.default for row in table.rows}
    for (name, _), change in table.changes.items():
        assert defaults[name] == change.now, (name, change)
        defaults[name] = change.was
    versions = [Version(version) for _, version in table.changes]
    assert versions == sorted(versions, reverse=True)


class Files:
    """A model and prompts on disk, in place of those of a conversion."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("train", "val"):
            write_prompts(folder / f"{name}.parquet", 2048)
        row = {"prompt": "1+1", "completion": "2", "chosen": "2", "rejected": "3", "response": "2"}
        row |= {"input": "1+1", "output": "2"}
        (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 128)
        (folder / "model").mkdir()
        (folder / "model" / "model.safetensors").write_bytes(NO_WEIGHTS)
        tiny_tokenizer().save_pretrained(folder / "model")
        described = {
            "model_type": "qwen2",
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 32,
            "max_position_embeddings": 65536,
        }
        (folder / "model" / "config.json").write_text(json.dumps(described))
        (folder / "reward.py").write_text(
            "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
            "    return 0.0\n\n\n"
            "def reward_func(queries, prompts, labels):\n"
            "    return {'rewards': [0.0]}\n"
        )

    def arguments(self, conversion: Conversion) -> list[str]:
        """Return the converted command with paths of this machine."""
        assert conversion.problems == []
        paths = {
            "data.train_files": "train.parquet",
            "data.val_files": "val.parquet",
            "actor_rollout_ref.model.path": "model",
            "actor_rollout_ref.model.tokenizer_path": "model",
            "critic.model.path": "model",
            "custom_reward_function.path": "reward.py",
            "trainer.default_local_dir": "run",
        }
        if conversion.command is not PPO:
            paths |= {"data.train_files": "rows.jsonl", "data.val_files": "rows.jsonl"}
            paths["model.path"] = "model"
        changed = []
        for text in conversion.overrides:
            key = text.partition("=")[0]
            changed.append(f"{key}={self.folder / paths[key]}" if key in paths else text)
        return [*changed, f"trainer.default_local_dir={self.folder}/run"]

    def paths(self, arguments: list[str]) -> list[str]:
        """Return overrides that name files of this machine, for the end of a command line."""
        found = [
            f"data.train_files={self.folder}/train.parquet",
            f"actor_rollout_ref.model.path={self.folder}/model",
            f"trainer.default_local_dir={self.folder}/run",
        ]
        is_yaml = "--config-path" in arguments
        text = Path("run.yaml").read_text() if is_yaml else " ".join(arguments)
        if "val_files" in text:
            found.append(f"data.val_files={self.folder}/val.parquet")
        if "custom_reward_function" in text:
            found.append(f"custom_reward_function.path={self.folder}/reward.py")
        return found

    def check(self, conversion: Conversion) -> None:
        """Compose a converted command as `verlite check` does; it exits if a rule is broken.

        The pages' commands are tried with all checks of a start.
        """
        main_argv(self.arguments(conversion), elsewhere=True, command=conversion.command)


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))
