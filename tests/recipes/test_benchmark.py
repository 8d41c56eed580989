"""The benchmarks' page shows what was measured last."""

import importlib.util
import json
import statistics
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "recipes" / "benchmark"


def report():
    spec = importlib.util.spec_from_file_location("benchmark_report", BENCHMARK / "report.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_results_of_the_last_run():
    module = report()
    page = module.PAGE.read_text(encoding="utf-8")
    assert module.renew(page, module.read()) == page


def test_the_summary_follows_from_the_seconds_of_the_steps():
    results = json.loads((BENCHMARK / "results.json").read_text(encoding="utf-8"))
    assert results["summary"] == report().summary(results["parts"])
    for workload, key in (("w25", "grpo_step_vs_trl"), ("wtiny", "tiny_step_vs_trl")):
        runs = results["parts"][f"step_{workload}"]["all"]
        ours, theirs = (statistics.median(second for run in runs[side] for second in run[1:]) for side in ("verlite", "trl"))
        assert results["summary"][key] == pytest.approx(ours / theirs)
