"""Which modes and which split of the devices are compared."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tests.sizing import clusters
from tests.sizing.conftest import config_folder
from verlite.cli import app
from verlite.sizing.modes import (
    compared,
    fastest_split,
    has_own_engines,
    settings_of,
    split_sentence,
    table_rows,
)
from verlite.sizing.simulation import Costs, Sample, Turn

GRPO = (
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=24",
    "actor_rollout_ref.actor.ppo_mini_batch_size=24",
    "actor_rollout_ref.rollout.n=2",
)
APART = (
    "trainer.mode=async",
    "async_training.max_age=3",
    "algorithm.rollout_correction.bypass_mode=true",
    "cluster.component_placement={rollout: 0-5, actor: 6-7}",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.max_num_seqs=48",
)
COSTS = Costs(0.0, 0.05, update_token_s=10 / 480)
"""A step of 24 samples of 20 tokens: 24 engine-seconds of sampling, 10 device-seconds of training
passes."""


def twenty(number):
    return [Sample(0, (Turn(20),))]


def test_settings_are_those_of_the_configuration(planned):
    config, plan = planned("tiny", *GRPO, *APART)
    own = settings_of(config, plan)
    assert (own.mode, own.max_age, own.depth, own.prompts) == ("async", 3, 1, 24)
    assert (own.engines, own.trainer_devices, own.devices, own.max_num_seqs) == (3, 2, 8, 48)
    assert own.partial_rollout and own.kv_cache == "fresh" and has_own_engines(plan)
    found = compared(twenty, COSTS, plan, own, 4)
    names = [one.settings.name for one in found]
    assert names[:3] == ["sync", "pipelined", "async, max_age 3, depth 1"]
    assert {one.settings.engines for one in found} == {3}
    metrics = {"timing_s/step": 16.0, "timing_s/gen": 4.0, "perf/throughput": 3.0}
    rows = table_rows(found, (replace(own, mode="sync", engines=7, trainer_devices=9), metrics))
    assert rows[0][:7] == ("measured: sync", "7", "9", "16.0 s", "0.81", "25%", "3")
    # 24 samples on 3 engines: 8 x 20 x 0.05 s; the passes take 10 / 2 s.
    assert rows[1][0] == "sync" and rows[1][3:6] == ("13.0 s", "1.00", "62%")


@pytest.mark.parametrize("nodes", [1, 16])
def test_the_fastest_split_balances_engines_and_trainer(planned, nodes):
    """With 6 engines of 8 devices sampling takes 24 / 6 = 4 s, and 8 device-seconds of passes take
    8 / 2 = 4 s. 5 engines need more for sampling, and 7 leave 8 s for the passes. With 72
    device-seconds, 2 engines and 6 devices take 12 s each."""
    config, plan = planned("tiny", *GRPO, f"trainer.nnodes={nodes}")
    assert not has_own_engines(plan)
    own = replace(settings_of(config, plan), mode="async", prompts=24 * nodes)
    best = fastest_split(twenty, replace(COSTS, update_token_s=8 / 480), plan, own)
    assert (best.engines, best.trainer_devices) == (6 * nodes, 2 * nodes)
    trained = fastest_split(twenty, replace(COSTS, update_token_s=72 / 480), plan, own)
    assert (trained.engines, trained.trainer_devices) == (2 * nodes, 6 * nodes)
    rows = compared(twenty, COSTS, plan, own, 4)
    assert (rows[0].settings.engines, rows[0].settings.trainer_devices) == (8 * nodes, 8 * nodes)


def test_plan_says_which_split_is_fastest(planned):
    config, plan = planned("tiny", *GRPO, *APART)
    own = replace(settings_of(config, plan), partial_rollout=False)
    # 24 / 3 engines of two devices = 8 s, 10 / 2 = 5 s; with 2 engines 12 s.
    text = split_sentence(twenty, COSTS, plan, own)
    assert text == (
        "A step of async, max_age 3, depth 1 takes 8.00 s with 3 engines and 2 devices that train, "
        "the fastest split."
    )
    worse = replace(own, engines=1, trainer_devices=6)
    assert split_sentence(twenty, COSTS, plan, worse) == (
        "A step of async, max_age 3, depth 1 takes 24.0 s with 1 engine and 6 devices that train; "
        "8.00 s with 3 engines and 2 devices that train, the fastest split."
    )


def test_no_split_is_called_the_fastest_that_is_slower_than_the_configured_one(planned):
    """Eighths of 20 devices give 12 engines 2 of 13 prompts, and 15 engines leave 5 devices that
    train for 1.08 s; 13 engines take 1 s for a prompt each, and 7 devices train for 0.77 s."""
    config, plan = planned("tiny", *GRPO, *APART)
    own = replace(settings_of(config, plan), prompts=13, engines=13, trainer_devices=7, devices=20)
    wide = SimpleNamespace(tensor_parallel=1, n_devices=20)
    assert split_sentence(twenty, COSTS, wide, own) == (
        "A step of async, max_age 3, depth 1 takes 1.00 s with 13 engines and 7 devices that "
        "train, the fastest split."
    )


def test_plan_prints_it_for_asynchronous_training(tmp_path):
    line = [
        *("plan", "--no-memory", "--devices", "8xH100-80GB"),
        f"actor_rollout_ref.model.path={config_folder(tmp_path / 'model', 'tiny')}",
        "data.train_files=absent.parquet",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.rollout.name=vllm",
        "trainer.n_gpus_per_node=8",
        *GRPO,
    ]
    sync = CliRunner().invoke(app, line)
    assert sync.exit_code == 0 and "devices that train" not in sync.output, sync.output
    text = CliRunner().invoke(app, [*line, *APART]).output
    assert "A step of async, max_age 3, depth 1 takes " in text
    assert "It is simulated, by roofline: training passes reach 35% of the peak FLOP/s" in text
    assert "responses of p50=128 p99=512 tokens. verlite simulate shows more." in text


@pytest.mark.parametrize("gpus", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_the_page_of_clusters_is_current(gpus):
    """To update it: python -m tests.sizing.clusters. The larger ones follow from the same code."""
    page = clusters.PAGE.read_text(encoding="utf-8")
    for line in clusters.lines(gpus):
        assert f"{line}\n" in page
    assert all(page.count(f"\n| {size:,} | ") == len(clusters.SHOWN) for size in clusters.PROMPTS)
