"""gpu_checks.py: its checks pass on a CPU, and fail if what they check is wrong."""

import importlib
import time
from pathlib import Path

import pytest
import torch

import verlite.algorithms.attention as attention
import verlite.engine.attention as attention_of_rows
import verlite.engine.checkpoint as checkpoint
import verlite.engine.family as family
import verlite.engine.lora as lora
from verlite.rollout.batched import BatchedEngine

pytestmark = pytest.mark.slow

BENCHMARK = Path(__file__).resolve().parents[2] / "recipes" / "benchmark"


@pytest.fixture
def smoke(monkeypatch, tmp_path):
    """Return a function that runs one group in this process and returns its rows by name."""
    monkeypatch.syspath_prepend(str(BENCHMARK))
    module = importlib.import_module("gpu_checks")
    parts = importlib.import_module("parts")

    def run(group, **options):
        path = tmp_path / f"{group}.json"
        results = parts.Results(path, group, time.time() + 500)
        module.run_group(results, group, "cpu", "tiny")
        return parts.read(path)[group]

    run.module = module
    return run


def named(rows, status):
    return [name for name, row in rows.items() if row["status"] == status]


# Group, checks that pass on a CPU, checks that only a GPU has.
GROUPS = [
    ("attention", 18, 1),
    ("fingerprints", 20, 0),
    ("training", 21, 0),
    ("trees", 7, 1),
    ("compiled", 0, 2),
    ("memory", 5, 4),
    ("plan", 0, 2),
    ("checkpoint", 6, 0),
    ("adapters", 5, 0),
    ("hf", 14, 6),
    pytest.param("ipc", 6, 2, marks=pytest.mark.process),
]


@pytest.mark.parametrize(("group", "passed", "skipped"), GROUPS)
def test_checks_pass_on_a_cpu(smoke, group, passed, skipped):
    rows = smoke(group)
    assert not [(name, rows[name]) for name in named(rows, "failed")]
    assert len(named(rows, "passed")) == passed and len(named(rows, "skipped")) == skipped
    assert all("figure" in rows[name] for name in named(rows, "passed"))
    assert all(rows[name]["reason"] for name in named(rows, "skipped"))


def test_vllm_group_is_skipped_without_vllm(smoke, monkeypatch):
    monkeypatch.setattr(smoke.module.importlib.util, "find_spec", lambda name: None)
    assert smoke("vllm")["all"]["reason"] == "vllm is not installed"


def test_wrong_attention_mask_fails(smoke, monkeypatch):
    right = attention.scaled_dot_product_attention

    def bidirectional(*args, is_causal, **options):
        return right(*args, is_causal=False, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", bidirectional)
    failed = named(smoke("attention"), "failed")
    assert len(failed) == 18


def test_shifted_window_fails(smoke, monkeypatch):
    right = attention._mask
    monkeypatch.setattr(
        attention,
        "_mask",
        lambda queries, keys, window, device: right(queries, keys, window and window + 1, device),
    )
    failed = named(smoke("attention"), "failed")
    assert len(failed) == 6 and all("window" in name for name in failed)


def test_trees_that_the_start_finds_wrong_fail(smoke, monkeypatch):
    """The engine computes samples alone then, so it computes too many tokens."""
    right = attention_of_rows.Paths.gather
    family._PROVEN.clear()
    monkeypatch.setattr(attention_of_rows.Paths, "gather", lambda self, x: -right(self, x))
    failed = named(smoke("trees"), "failed")
    assert failed == ["tokens too many, float32", "tokens too many, bfloat16"]


def test_checkpoint_that_is_not_bit_equal_fails(smoke, monkeypatch):
    right = checkpoint.load

    def rounded(folder, model, optimizer):
        schedule = right(folder, model, optimizer)
        parameter = next(iter(optimizer.state))
        moment = optimizer.state[parameter]["exp_avg_sq"]
        moment.copy_(moment.bfloat16())
        return schedule

    monkeypatch.setattr(checkpoint, "load", rounded)
    assert "save and load, differing elements" in named(smoke("checkpoint"), "failed")


def test_engine_that_keeps_old_weights_fails(smoke, monkeypatch):
    right = BatchedEngine._load

    def first_only(self, core, named, version, expected):
        if self.version < 0:
            right(self, core, named, version, expected)
        self.version = version

    monkeypatch.setattr(BatchedEngine, "_load", first_only)
    failed = named(smoke("hf"), "failed")
    for dtype in ("float32", "bfloat16"):
        assert f"hf {dtype}, gap to the trainer after updates" in failed
        assert f"hf {dtype}, wrong weights accepted" in failed


def test_export_without_the_adapters_fails(smoke, monkeypatch):
    monkeypatch.setattr(
        lora, "merged", lambda layer, dtype, device: layer.base_layer.weight.detach()
    )
    assert "LoRA, log-probs of the merged export" in named(smoke("adapters"), "failed")


def test_gradient_of_one_wrong_parameter_fails(smoke):
    gap = smoke.module.gradient_gap
    right = {"large": torch.ones(100) * 10, "small": torch.ones(4)}
    assert gap(right, right) == 0
    # Small parameters count relative to their own norm, or to a tenth of the mean norm.
    assert gap(right | {"small": torch.ones(4) * 1.5}, right) > 0.1
    assert gap(right | {"large": torch.zeros(100)}, right) == pytest.approx(1)


def test_figure_that_is_not_a_number_fails(smoke, tmp_path):
    module, parts = smoke.module, importlib.import_module("parts")
    path = tmp_path / "found.json"
    results = parts.Results(path, "group", time.time() + 10)
    check = module.Checks(results, torch.device("cpu"), "tiny", tmp_path)
    check("nan", 1.0, lambda: float("nan"))
    check("limit", 1.0, lambda: 1.0)
    check("raises", 1.0, lambda: 1 / 0)
    rows = parts.read(path)["group"]
    assert [row["status"] for row in rows.values()] == ["failed", "passed", "failed"]
    assert rows["raises"]["reason"] == "ZeroDivisionError: division by zero"
