"""The benchmark page and charts show the latest results. The scripts compute correct figures."""

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.process

BENCHMARK = Path(__file__).resolve().parents[2] / "recipes" / "benchmark"


@pytest.fixture
def script(monkeypatch):
    """Return a function that imports one of the scripts from their folder."""
    monkeypatch.syspath_prepend(str(BENCHMARK))
    return importlib.import_module


def test_page_shows_the_latest_results(script):
    module = script("report")
    page = module.PAGE.read_text(encoding="utf-8")
    assert module.renew(page, module.read()) == page


def test_page_has_a_table_for_every_part(script):
    module = script("report")
    marks = [mark[2] for mark in module.MARKED.finditer(module.PAGE.read_text(encoding="utf-8"))]
    assert set(script("tables").tables(module.read())) <= set(marks) and len(marks) == len(
        set(marks)
    )


def test_charts_show_the_latest_results(script):
    module, results = script("picture"), script("report").read()
    for name, picture in module.PICTURES.items():
        assert (module.PAGE.parent / name).read_text(encoding="utf-8") == picture(results), (
            f"python recipes/benchmark/picture.py ({name})"
        )
        assert f"]({name})" in module.PAGE.read_text(encoding="utf-8")


def test_summary_follows_from_the_step_times(script):
    results = json.loads((BENCHMARK / "results.json").read_text(encoding="utf-8"))
    assert {key: figure for key, figure in results.items() if key != "parts"} == script(
        "report"
    ).summary(results["parts"])
    for workload, key in (("w25", "grpo_step_vs_trl"), ("wtiny", "tiny_step_vs_trl")):
        runs = results["parts"][f"step_{workload}"]["all"]
        ours, theirs = (
            statistics.median(second for run in runs[side] for second in run[1:])
            for side in ("verlite", "trl")
        )
        assert results[key] == pytest.approx(ours / theirs)


def test_bar_lengths_match_the_seconds(script):
    module = script("picture")
    stages = {"gen": 1.0, "reward": 0.0, "adv": 0.0, "update_actor": 2.0, "update_weights": 0.5}
    results = {
        "parts": {
            "step_w25": {"seconds": 4.0, "trl_seconds": 5.0, "floor_seconds": 1.0, "stages": stages}
        }
    }

    def widths(text):
        drawn = [
            line.split('width="')[1].split('"')[0]
            for line in text.splitlines()
            if "<title>" in line and 'width="12.0"' not in line
        ]
        return [float(width) / module.PIXELS for width in drawn]

    assert widths(module.step_picture(results)) == pytest.approx(
        [1 / 4, 0, 0, 2 / 4, 0.5 / 4, 0.5 / 4], abs=1e-3
    )
    assert [
        width for width in widths(module.comparison_picture(results)) if width
    ] == pytest.approx([4 / 5, 1, 1 / 5], abs=1e-3)


def test_speed_ratios(script):
    # The first round is a warm-up. In the others the baseline takes 2, 3 and 1 times as long.
    assert script("generation").ratio([9, 2, 6, 5], [1, 1, 2, 5]) == 2


def test_startup_phases_add_up(script):
    module = script("startup")
    for imported, parts in ((9.5, [3.0, 5.0, 1.5, 8.5, 2.0]), (4.5, [3.0, 5.0, 0.0, 10.0, 2.0])):
        milestones = dict(zip(module.MILESTONES, (3.0, imported, 7.0, 8.0, 20.0), strict=True))
        assert (
            list(
                module.parts(
                    {"milestones": milestones, "steps": [2.0], "first_step": 20.0}
                ).values()
            )
            == parts
        )


def test_sample_lengths(script):
    lengths = script("controller").lengths(8192, 8192)
    assert lengths.min() >= 1 and lengths.max() == 8192
    assert abs((lengths < 1024).mean() - 0.5) < 0.02


def test_flops_equal_torch_counts(script):
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen2Config, Qwen2ForCausalLM

    module = script("gpu")
    shape = module.SHAPES["tiny"]
    model = Qwen2ForCausalLM(
        Qwen2Config(tie_word_embeddings=True, attn_implementation="eager", **shape)
    )
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, 96, dtype=torch.long), use_cache=False)
    counted = counter.get_flop_counts()["Global"]
    whole_square = sum(flops for operation, flops in counted.items() if "bmm" in str(operation))
    expected = sum(counted.values()) - whole_square / 2  # torch also counts masked pairs
    batch = module.DataProto.from_dict(
        {"attention_mask": torch.ones(1, 96), "response_mask": torch.ones(1, 96)}
    )
    found = module.forward_flops(shape, sum(p.numel() for p in model.parameters()), batch)
    # forward_flops counts norms and biases (0.7% of the weights) as matrices. torch omits them.
    assert whole_square > 0.05 * expected and found == pytest.approx(expected, rel=0.01)
    half = batch.with_batch(response_mask=torch.ones(1, 96) * (torch.arange(96) < 48))
    assert (
        found - module.forward_flops(shape, sum(p.numel() for p in model.parameters()), half)
        == 2 * 128 * 64 * 48
    )


def test_gpu_script_runs_on_a_cpu(tmp_path):
    command = [
        sys.executable,
        BENCHMARK / "gpu.py",
        "--shapes",
        "tiny",
        "--device",
        "cpu",
        "--engines",
        "hf",
        "--out",
        tmp_path,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())["tiny"]
    assert list(parts) == [
        "machine",
        "load",
        "update, 256 tokens a pass",
        "log-probs, 256 tokens a pass",
        "update, 1024 tokens a pass",
        "log-probs, 1024 tokens a pass",
        "offload and onload",
        "engine hf",
    ]
    assert not [name for name, part in parts.items() if "error" in part or "skipped" in part], parts
    update, engine = parts["update, 256 tokens a pass"], parts["engine hf"]
    assert update["tokens_per_s"] == pytest.approx(update["tokens"] / update["seconds"])
    assert engine["sync"]["bytes"] > 4 * parts["load"]["parameters"] and engine["tokens_per_s"] > 0


def test_failed_part_does_not_stop_the_others(script, tmp_path):
    path = tmp_path / "gpu.json"
    part = script("gpu").Parts(path, "tiny", torch.device("cpu"), time.time() + 50)
    part("first", 1, lambda: {"seconds": 2})
    part("long", 60, lambda: pytest.fail("there is no time for it"))
    part("broken", 1, lambda: {}["missing"])
    part("last", 1, lambda: {"seconds": 3})
    found = json.loads(path.read_text())["tiny"]
    assert found["first"]["seconds"] == 2 and found["last"]["seconds"] == 3
    assert (
        found["long"]["skipped"].startswith("takes about 60 s")
        and found["broken"]["error"] == "KeyError: 'missing'"
    )
