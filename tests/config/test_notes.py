"""Values that are probably mistakes get a note; no recipe does. `test_verl_commands` judges the
published commands."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.config.conftest import FAR, write_prompts
from verlite.config import compose
from verlite.config.keys import get
from verlite.config.rules import notes
from verlite.config.rules.context import Context
from verlite.config.sources import conf_dir, our_names

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "override, key, seen",
    [
        (f"{ACTOR}optim.lr=1e6", f"{ACTOR}optim.lr=1e+06", "2e-7 to 3e-5"),
        (f"{ACTOR}optim.lr=0.01", f"{ACTOR}optim.lr=0.01", "Try 1e-6 for all weights"),
        (f"{ROLLOUT}temperature=1e-9", f"{ROLLOUT}temperature=1e-09", "0.6 to 1.5"),
        (f"{ROLLOUT}n=100000", f"{ROLLOUT}n=100000", "1 to 64"),
        ("algorithm.gamma=0.1", "algorithm.gamma=0.1", "0.99 to 1"),
        ("algorithm.lam=0.01", "algorithm.lam=0.01", "0.95 to 1"),
        (f"{ACTOR}clip_ratio=1e-7", f"{ACTOR}clip_ratio=1e-07", "GSPO"),
        (f"{ACTOR}ppo_epochs=100", f"{ACTOR}ppo_epochs=100", "1 to 4"),
        ("trainer.total_epochs=1000000", "trainer.total_epochs=1e+06", "1 to 100"),
    ],
)
def test_far_value_has_one_note_with_range_and_remedy(material, override, key, seen):
    found = [note for note in material.notes(override) if FAR in note]
    assert len(found) == 1
    assert found[0].startswith(f"{key} {FAR}, which are ")
    assert seen in found[0]
    assert "Try " in found[0]


def test_value_of_a_key_without_effect_is_not_judged(material):
    overrides = ["algorithm.use_kl_in_reward=false", "algorithm.kl_ctrl.kl_coef=50"]
    assert not [note for note in material.notes(*overrides) if FAR in note]
    overrides = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=50"]
    assert [note for note in material.notes(*overrides) if FAR in note]


def test_bounds_are_wider_than_the_defaults_and_what_was_seen(material):
    config = material.load().config
    for known in notes.USUAL:
        value = get(config, known.key)
        assert value is None or known.low <= value <= known.high, known.key
        for number in re.findall(r"\d[\d.]*(?:e-?\d+)?", known.seen):
            assert known.low <= float(number) <= known.high, known.key


@pytest.mark.parametrize("name", our_names())
def test_no_configuration_of_verlite_is_far(name):
    required = ["data.train_files=a.parquet", "actor_rollout_ref.model.path=model"]
    config = compose(name, required, check=False).config
    assert list(notes.far_values(Context(config))) == []


def test_no_recipe_is_far():
    """Numbers in the YAML files, scripts and pages of recipes, and in the pages of docs."""
    by_key = {known.key: known for known in notes.USUAL}
    seen = 0
    for file in [*ROOT.glob("recipes/**/*"), *ROOT.glob("docs/*.md"), *conf_dir().glob("*.yaml")]:
        if file.suffix not in (".md", ".sh", ".py", ".yaml", ".yml") or "rules" in file.name:
            continue
        text = file.read_text(encoding="utf-8")
        for key, value in re.findall(r"([\w.]+\.[\w.]+)=([\d.]+(?:e-?\d+)?)\b", text):
            known = by_key.get(key)
            if known and file.name != "errors.md":
                seen += 1
                assert known.low <= float(value) <= known.high, f"{file}: {key}={value}"
        if file.suffix == ".yaml":
            for key, value in _leaves(yaml.safe_load(text) or {}):
                if key in by_key and isinstance(value, int | float):
                    seen += 1
                    assert by_key[key].low <= value <= by_key[key].high, f"{file}: {key}"
    assert seen > 30


def _leaves(node, prefix=""):
    for name, value in node.items() if isinstance(node, dict) else ():
        yield f"{prefix}{name}", value
        yield from _leaves(value, f"{prefix}{name}.")


@pytest.mark.parametrize(
    "override, words",
    [
        ("trainer.project_name=\"'sums'\"", "the quotes are part of the value"),
        ("trainer.experiment_name=$NAME_OF_RUN", "contains $NAME_OF_RUN, which was not expanded"),
        ("trainer.experiment_name=run-$SLURM_JOB_ID", "${oc.env:SLURM_JOB_ID}"),
    ],
)
def test_text_as_a_shell_leaves_it(material, override, words):
    (found,) = [note for note in material.notes(override) if words in note]
    assert found.startswith(override.partition("=")[0] + "=")


@pytest.mark.parametrize(
    "override",
    ["trainer.experiment_name=costs_5$", "trainer.project_name=don't", "trainer.project_name=a"],
)
def test_other_text_has_no_note(material, override):
    assert material.notes(override) == material.notes()


def test_a_file_that_is_named_twice(material):
    file = f"{material.folder}/train.parquet"
    (found,) = [n for n in material.notes(f"data.train_files=[{file},{file}]") if "rows count" in n]
    assert found == f"data.train_files names {file} 2 times, so its rows count as often."


def test_empty_ground_truths_are_counted(material, tmp_path):
    file = write_prompts(tmp_path / "sums.parquet", 512)
    rows = pq.read_table(file).to_pylist()
    for row, truth in ((3, ""), (200, "  "), (201, None)):
        rows[row]["reward_model"] = {"style": "rule", "ground_truth": truth}
    pq.write_table(pa.Table.from_pylist(rows), file)
    overrides = (f"data.train_files={file}", "data.train_batch_size=256")
    (found,) = [note for note in material.notes(*overrides) if "ground truth" in note]
    assert "3 of 512 rows have an empty ground truth, the first is row 3." in found
    own = f"custom_reward_function.path={material.folder}/reward.py"
    scored = material.notes(*overrides, own, "custom_reward_function.name=score")
    assert not [note for note in scored if "ground truth" in note]


@pytest.mark.parametrize(
    "truth, empty",
    [("4", False), ("", True), ([], True), (["", "a"], False), ({"target": []}, True), (0, False)],
)
def test_empty(truth, empty):
    assert notes.is_empty(truth) is empty


BYPASS = "algorithm.rollout_correction.bypass_mode=true"
APART = "cluster.component_placement={rollout:0-3,actor:4-7}"
ON_GPUS = ["trainer.device=cuda", "ray_kwargs.ray_init.address=auto", APART]
FREES = f"{ROLLOUT}free_cache_engine"


ON_CPUS = ["trainer.device=cpu"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["async_training.depth=0", "async_training.max_age=0", *ON_CPUS],
        ["async_training.depth=1", *ON_CPUS],
        ["async_training.kv_cache=salted", *ON_CPUS],
        [f"{FREES}=false", *ON_GPUS],
        ON_GPUS,  # the default is not named
    ],
)
def test_settings_with_an_effect_in_asynchronous_training_have_no_note(material, overrides):
    assert not material.notes("trainer.mode=async", BYPASS, *overrides)


def test_weights_on_gpus_stay_while_training_and_rollout_overlap(material):
    notes = material.notes("trainer.mode=async", BYPASS, f"{FREES}=true", *ON_GPUS)
    assert FREES in "".join(notes)
