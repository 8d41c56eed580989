"""Each recipe of conf/ is valid and configures its method; docs/algorithms.md names everything."""

import re
from pathlib import Path

import pytest

from recipes.asynchronous.curves import AGES
from recipes.gdpo.reward import compute_score
from recipes.methods.curves import METHODS, task_settings
from tests.models import tiny_model
from tests.trainer.runs import write_sums
from verlite.config import compose, make_plan
from verlite.config.commands import PPO
from verlite.spec import catalog, correction

pytestmark = pytest.mark.process

TOP = Path(__file__).parents[2]
PAGE = (TOP / "docs" / "algorithms.md").read_text()


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("recipe")
    model = tiny_model(folder / "model", "qwen2")
    return [
        f"data.train_files={write_sums(folder / 'train.parquet', 100)}",
        "data.val_files=null",
        f"actor_rollout_ref.model.path={model}",
    ]


PARTS = {"gdpo": ["algorithm.gdpo_reward_keys=[accuracy,format]"]}
"""What a method needs of the user's reward function."""


@pytest.mark.parametrize("method", METHODS)
def test_recipe_is_valid_alone_and_on_the_quickstart_task(method, given, monkeypatch):
    alone = [
        "trainer.total_training_steps=9",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "trainer.n_gpus_per_node=1",
        "data.train_batch_size=64",
        "actor_rollout_ref.rollout.name=hf",
    ]
    alone += [
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "data.max_prompt_length=64",
        "data.max_response_length=64",
    ]
    assert compose(method, [*given, *alone, *PARTS.get(method, [])]).notes == []
    on_task = [
        setting
        for setting in task_settings()
        if not setting.startswith(("data.train_files", "data.val_files", "trainer.test_freq"))
    ]
    monkeypatch.chdir(TOP)
    loaded = compose(method, [*on_task, *given, "trainer.test_freq=-1", *METHODS[method]])
    assert loaded.config.actor_rollout_ref.rollout.n == 8
    assert make_plan(loaded.config).batch_size == 512


def test_the_asynchronous_quickstart_is_valid(given, monkeypatch):
    monkeypatch.chdir(TOP)
    for age in AGES:
        ages = [f"async_training.max_age={age}", f"async_training.depth={age}"]
        loaded = compose("quickstart_async", [*given, *ages, "trainer.test_freq=-1"])
        plan = make_plan(loaded.config)
        assert loaded.config.trainer.mode == "async" and plan.engines == 1
        assert set(plan.placement["rollout"]).isdisjoint(plan.placement["actor"])


EXPECTED = {
    "ppo": {"needs_reference": True},
    "grpo": {"needs_reference": True},
    "gdpo": {"needs_reference": True, "samples_per_prompt": 5},
    "dr_grpo": {"needs_reference": False},
    "dapo": {
        "filters_groups": True,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "overlong_buffer": 102,
        "needs_reference": False,
    },
    "gspo": {"loss_mode": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    "rloo": {"needs_reference": True, "needs_old_log_probs": True},
    "reinforce_plus_plus": {"needs_reference": True},
    "remax": {"needs_greedy_baseline": True},
}


@pytest.mark.parametrize("method", METHODS)
def test_recipe_configures_its_method(method, given):
    config = compose(method, given, check=False).config
    plan = make_plan(config, device="cpu", count_rows=False)
    assert {name: getattr(plan, name) for name in EXPECTED[method]} == EXPECTED[method]
    assert ("critic" in plan.placement) == (method == "ppo")
    if method == "dr_grpo":
        assert (config.algorithm.norm_adv_by_std_in_grpo, plan.actor.loss_agg_mode) == (
            False,
            "seq-mean-token-sum-norm",
        )


@pytest.mark.parametrize(
    ("written", "accuracy", "right_digits"),
    [("5190", 1, 1), ("5180", 0, 0.75), ("519", 0, 0.75), ("51901", 0, 1), ("", 0, 0)],
)
def test_the_parts_of_gdpos_reward(written, accuracy, right_digits):
    """47+48 is 95: the columns write 5, carry 1, 9, carry 0."""
    assert compute_score("verlite/arithmetic", written, "5190", {}) == {
        "score": accuracy,
        "accuracy": accuracy,
        "right_digits": right_digits,
    }


def test_page_names_every_algorithm_recipe_and_key():
    table_names = {
        name
        for row in re.findall(r"^\| (`.+?) \|", PAGE, re.MULTILINE)
        for name in re.findall(r"`(.+?)`", row)
    }
    assert {
        *catalog.ESTIMATORS,
        *catalog.POLICY_LOSSES,
        *METHODS,
        *catalog.AGGREGATION_MODES,
        *catalog.KL_BASE_KINDS,
    } <= table_names
    assert {*re.findall(r"`(\w+)`", PAGE.split("Presets:")[1].split("Metrics")[0])} == set(
        correction.PRESETS
    )
    wanted = [
        key
        for key in PPO.leaves
        if key.startswith(
            ("algorithm.rollout_correction.", "algorithm.filter_groups.", "reward.overlong")
        )
    ]
    assert [
        key for key in wanted if f"`{key.rsplit('.', 1)[1]}`" not in PAGE and key not in PAGE
    ] == []
