"""The configurations of recipes/math are valid, and place the roles as the page says."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.models import tiny_model
from verlite.config.load import compose
from verlite.config.placement import Shape, parse
from verlite.config.plan import make_plan
from verlite.data.preprocess import write_parquet

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "math"
ALL = list(range(32))


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    """A tiny model with room for 28,672 tokens, and data."""
    folder = tmp_path_factory.mktemp("math")
    tiny_model(folder / "model", max_position_embeddings=32768)
    row = {
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [{"role": "user", "content": "1+1="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0},
    }
    write_parquet([row] * 512, folder / "data.parquet")
    return [
        f"actor_rollout_ref.model.path={folder}/model",
        f"data.train_files={folder}/data.parquet",
        f"data.val_files={folder}/data.parquet",
        "actor_rollout_ref.rollout.name=hf",
    ]


@pytest.mark.parametrize(
    "name, placement",
    [
        ("qwen2.5-1.5b-grpo", {"actor": ALL, "rollout": ALL}),
        (
            "qwen2.5-1.5b-grpo-pipeline",
            {"actor": ALL[24:], "rollout": ALL[:20], "inference": ALL[20:24]},
        ),
    ],
)
def test_configurations_are_valid_on_four_nodes(name, placement, overrides):
    loaded = compose(name, overrides, RECIPE / "config")
    plan = make_plan(loaded.config)
    assert (plan.nnodes, plan.devices_per_node) == (4, 8)
    config = loaded.config
    placed = parse(config.cluster.component_placement, Shape(4, 8))
    assert {role: placed[role] for role in placement} == placement
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 8192
    assert config.data.max_prompt_length + config.data.max_response_length == 28672


@pytest.mark.parametrize(
    "script, arguments, expected",
    [
        ("run_main_math_grpo.sh", [], "--config-name qwen2.5-1.5b-grpo"),
        ("run_main_math_grpo.sh", ["mine", "a=1"], "--config-name mine a=1"),
        ("run_main_math_grpo.sh", ["a=1"], "--config-name qwen2.5-1.5b-grpo a=1"),
        ("run_main_math_pipeline_grpo.sh", [], "--config-name qwen2.5-1.5b-grpo-pipeline"),
        ("run_main_math_pipeline_grpo.sh", ["mine"], "--config-name mine"),
    ],
)
def test_scripts_take_a_name_and_overrides(script, arguments, expected, tmp_path):
    result = subprocess.run(
        ["bash", str(RECIPE / script), *arguments],
        env={**os.environ, "PYTHON": "echo"},
        cwd=tmp_path,
        text=True,
        capture_output=True,
    )
    folder = f"--config-path {RECIPE}/config"
    assert result.stdout.strip() == f"-m verlite.main_ppo {folder} {expected}", result.stderr
