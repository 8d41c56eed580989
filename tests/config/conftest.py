"""Fixtures for command lines: parquet files, a model folder, and a machine without GPUs."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.models import tiny_tokenizer
from verlite.config import Loaded, compose

FAR = "is far from published values"
"""Part of each note on a value that is probably a mistake."""


@dataclass(frozen=True)
class Material:
    """Files on disk and a valid command line."""

    folder: Path

    @property
    def good(self) -> list[str]:
        """Return the smallest valid command line."""
        return [
            f"data.train_files={self.folder}/train.parquet",
            f"actor_rollout_ref.model.path={self.folder}/model",
            f"trainer.default_local_dir={self.folder}/run",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.rollout.name=hf",
            "trainer.n_gpus_per_node=8",
        ]

    def notes(self, *overrides: str, **options) -> list[str]:
        """Return the notes on a command line as sentences."""
        return texts(self.load(*overrides, **options))

    def load(self, *overrides: str, **options) -> Loaded:
        return compose(options.pop("config_name", None), [*self.good, *overrides], **options)


def texts(loaded: Loaded) -> list[str]:
    """Return the notes as sentences."""
    return [str(note) for note in loaded.notes]


def write_prompts(path: Path, rows: int, **change) -> Path:
    """Write a parquet file with the columns of data_preprocess.

    `change` sets the value of a column. None removes it.
    """
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    row = {name: value for name, value in {**row, **change}.items() if value is not None}
    table = pa.table({name: pa.array([value] * max(rows, 1)) for name, value in row.items()})
    pq.write_table(table.slice(0, rows), path)
    return path


@pytest.fixture(scope="session", autouse=True)
def user_module(tmp_path_factory):
    """Make the user's own function `mine:f` importable."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text("def f(inputs): ...\n")
    sys.path.append(str(folder))
    yield
    sys.path.remove(str(folder))


NO_WEIGHTS = b"\x08" + bytes(7) + b"{}      "
"""A file of safetensors without a tensor."""


def write_material(folder: Path, heads: int) -> None:
    """Write prompts, and a model folder whose attention has this many heads."""
    write_prompts(folder / "train.parquet", 2048)
    write_prompts(folder / "test.parquet", 300)
    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors").write_bytes(NO_WEIGHTS)
    tiny_tokenizer().save_pretrained(folder / "model")
    described = {
        "model_type": "qwen2",
        "num_attention_heads": heads,
        "max_position_embeddings": 8192,
    }
    (folder / "model" / "config.json").write_text(json.dumps(described))


@pytest.fixture(scope="session")
def material(tmp_path_factory) -> Material:
    folder = tmp_path_factory.mktemp("material")
    write_material(folder, heads=4)
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").touch()
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(NO_WEIGHTS)
    write_prompts(folder / "empty.parquet", 0)
    write_prompts(folder / "unlabelled.parquet", 9, data_source=None)
    (folder / "reward.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n    return 0.0\n"
    )
    odd = folder / "odd"
    odd.mkdir()
    write_prompts(odd / "unscored.parquet", 9, data_source="my/sums")
    write_prompts(odd / "unanswered.parquet", 9, reward_model={"style": "rule"})
    for name, files in {
        "broken": {"config.json": "{"},
        "bare": {"config.json": "{}"},
        "seeing": {"config.json": '{"model_type": "qwen2_5_vl", "vision_config": {}}'},
        "pointer": {
            "config.json": "{}",
            "tokenizer.json": "{}",
            "a.safetensors": "version https://git-lfs.github.com/spec/v1\n",
        },
        "mute": {"config.json": "{}", "a.safetensors": NO_WEIGHTS.decode()},
        "left": {  # transformers has saved it again, in one file
            "config.json": '{"model_type": "qwen2"}',
            "tokenizer.json": "{}",
            "model.safetensors": NO_WEIGHTS.decode(),
            "model.safetensors.index.json": '{"weight_map": {"w": "gone"}}',
        },
        "bins": {
            "config.json": '{"model_type": "qwen2"}',
            "tokenizer.json": "{}",
            "a.bin": "",
            "pytorch_model.bin.index.json": '{"weight_map": {"w": "gone.bin"}}',
        },
        "cut": {"config.json": "{}", "tokenizer.json": "{}", "a.safetensors": ""},
        "halved": {
            "config.json": "{}",
            "tokenizer.json": "{}",
            "a.safetensors": NO_WEIGHTS.decode(),
            "model.safetensors.index.json": '{"weight_map": {"w": "a.safetensors", "v": "b"}}',
        },
    }.items():
        (odd / name).mkdir()
        for file, text in files.items():
            (odd / name / file).write_text(text)
    (odd / "reward.py").write_text("def compute_score(:\n")
    return Material(folder)


def hide_gpus(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("CUDA_VISIBLE_DEVICES", "")
    patch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    hide_gpus(monkeypatch)
