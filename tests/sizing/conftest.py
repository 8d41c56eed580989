"""Model folders that have only a config.json, and plans of runs with them."""

import json
from pathlib import Path

import pytest

from verlite.config.load import compose
from verlite.config.plan import Plan, make_plan
from verlite.config.schema import Config

SHAPES = {
    "qwen2.5-0.5b": (151936, 896, 4864, 24, 14, 2, True),
    "qwen2.5-7b": (152064, 3584, 18944, 28, 28, 4, False),
    "tiny": (512, 64, 96, 8, 4, 2, False),
}
"""vocabulary, hidden size, MLP size, layers, heads, key-value heads, tied embeddings."""


def config_folder(folder: Path, name: str, **changes: object) -> Path:
    """Write the config.json of a Qwen2 model."""
    vocabulary, hidden, mlp, layers, heads, kv_heads, tied = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    described = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
    }
    (folder / "config.json").write_text(json.dumps(described | changes))
    return folder


@pytest.fixture
def planned(tmp_path):
    """Return a function that composes a run of a shape, from a folder without weights."""

    def make(name: str, *overrides: str, device: str = "cuda") -> tuple[Config, Plan]:
        folder = config_folder(tmp_path / name, name)
        line = [
            f"actor_rollout_ref.model.path={folder}",
            "data.train_files=absent.parquet",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.rollout.name=vllm",
            "trainer.n_gpus_per_node=8",
            f"trainer.device={device}",
            *overrides,
        ]
        config = compose(None, line, elsewhere=True).config
        return config, make_plan(config, device)

    return make
