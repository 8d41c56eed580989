"""The benchmark page and charts show the latest results. The scripts compute correct figures."""

import importlib
import json
import os
import statistics
import threading
import time
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

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


def test_shares_of_watchers(script):
    """The first step only begins the count."""
    keys = ("timing_s/step", "cpu_s", "watchers_s")
    lines = [dict(zip(keys, v, strict=True)) for v in [(9, 10, 0.5), (2, 14, 0.6), (4, 22, 0.9)]]
    found = script("watchers").shares(lines)
    assert found["seconds"] == 3 and found["cpu_seconds"] == 6
    assert found["of_seconds"] == pytest.approx(0.2 / 3) and found["of_cpu"] == pytest.approx(
        0.2 / 6
    )


def test_cpu_time_of_calls_and_threads(script, tmp_path, monkeypatch):
    """A thread counts as a whole, and other threads by their calls."""
    meter = script("meter")
    monkeypatch.setenv(meter.COST, str(tmp_path))

    class Busy:
        def work(self):
            began = time.thread_time_ns()
            while time.thread_time_ns() - began < 2e7:
                pass

        def look(self):
            self.work()

    meter.note(Busy, "work", "busy")
    meter.note(Busy, "look")
    thread = threading.Thread(target=lambda: (Busy().look(), Busy().work()), name="busy")
    thread.start()
    thread.join()
    # Calls of one noted function by another count twice.
    files = {path.name.split("-")[1]: int(path.read_text()) for path in tmp_path.iterdir()}
    assert 4e7 <= files["busy"] < 5e7 and 2e7 <= files["look"] < 3e7
    Busy().work()
    Busy().work()
    assert 4e7 <= int((tmp_path / f"{os.getpid()}-work").read_text()) < 5e7
    assert meter.noted(tmp_path) >= 1e8


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


def test_the_drivers_costs_are_projected_on_a_line(script):
    names = ["start_driver_cpu", *(f"{call}_driver_cpu_ms" for call in ("nothing", "make", "take"))]
    workers = {
        number: dict.fromkeys(names, 1.0 + 2 * int(number))
        | {"driver_bytes_now": (100 + int(number)) * 2**20}
        for number in ("2", "32", "8")
    }
    lines = script("tables")._projection(workers).splitlines()
    assert "between 2 and 32" in lines[0]
    assert lines[2] == "| CPU time for the start | 2 s | 2,001 s |"
    assert lines[5] == "| CPU time for a call that takes samples | 2 ms | 2,001 ms |"
    assert lines[6] == "| memory | 1 MiB | 1,100 MiB |"


def test_sample_lengths(script):
    lengths = script("controller").lengths(8192, 8192)
    assert lengths.min() >= 1 and lengths.max() == 8192
    assert abs((lengths < 1024).mean() - 0.5) < 0.02


def test_operators_take_the_time_of_their_work(script):
    """A product of 4 x 8 and 8 x 16: 1,024 FLOP. A sum of two such results, 384 bytes in
    bfloat16. A view takes nothing, as does a tensor of another mode."""
    operators = script("operators")
    mode, other = FakeTensorMode(), FakeTensorMode()
    card = {"products": 512.0, "attention": 1.0, "bytes": 384.0}
    recorder = operators.Recorder(mode, card, (), 0.0)
    with other:
        of_other = torch.empty(4)
    with recorder, mode:
        a, b = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((4, 8), (8, 16)))
        recorder.count = count = operators.Count()
        product = a @ b
        assert (count.kernels, count.flops, count.seconds) == (1, 1024, 2)
        product + product.view(4, 16)
        assert (count.kernels, count.moved, count.seconds) == (2, 384, 3)
    with recorder, other:
        of_other + of_other
    assert count.kernels == 2 and count.host == 2 * operators.HOST
    more = operators.Count(3, 0, 1024, 400, 3.5)
    of_five = count.line(more, 5)  # two more than SHORT
    assert (of_five.kernels, of_five.flops, of_five.moved) == (4, 1024, 416)
    assert of_five.seconds == 4
