"""The benchmarks' page shows what was measured last."""

import importlib.util
import json
from pathlib import Path

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


def test_the_summary_is_taken_from_the_parts():
    module = report()
    results = json.loads((BENCHMARK / "results.json").read_text(encoding="utf-8"))
    assert results["summary"] == module.summary(results["parts"])
    assert results["summary"]["grpo_step_vs_trl"] == results["parts"]["step_w25"]["vs_trl"]
