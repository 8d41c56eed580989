"""Reward curves: read metrics.jsonl, draw an image and terminal characters."""

import json

import pytest
from typer.testing import CliRunner

from verlite.cli import app
from verlite.report.curve import Curve, draw, plot, read_curve

pytestmark = pytest.mark.process


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_read_curve_by_step_and_source(tmp_path):
    file = write(
        tmp_path / "metrics.jsonl",
        [
            {
                "step": 0,
                "val-core/openai/gsm8k/reward/mean@1": 0.1,
                "val-core/toy/acc/mean@4": 0.2,
                "val-core/toy/acc/best@4/mean": 0.9,
            },
            {"step": 1, "critic/score/mean": 0.3},
            {"step": 2, "critic/score/mean": None},
            {"step": 3, "critic/score/mean": 0.5, "val-core/openai/gsm8k/reward/mean@1": 0.4},
        ],
    )
    curve = read_curve(file)
    assert curve.training == [(1, 0.3), (3, 0.5)]
    assert curve.validation == {"openai/gsm8k": [(0, 0.1), (3, 0.4)], "toy": [(0, 0.2)]}


def test_missing_file_and_file_without_scores_are_errors(tmp_path):
    with pytest.raises(ValueError, match="gone.jsonl does not exist"):
        read_curve(tmp_path / "gone.jsonl")
    with pytest.raises(ValueError, match="has no scores"):
        read_curve(write(tmp_path / "metrics.jsonl", [{"step": 1, "actor/pg_loss": 2.0}]))


def test_losses_of_supervised_runs(tmp_path):
    steps = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 1.5, "val/loss": 1.75}]
    curve = read_curve(write(tmp_path / "metrics.jsonl", steps))
    assert curve.value == "loss" and curve.training == [(1, 2.0), (2, 1.5)]
    assert list(curve.validation.values()) == [[(2, 1.75)]]


def test_plot_draws_eighths_between_axes():
    rising = [(0, 0.0), (2, 0.5), (4, 1.0)]
    assert plot(rising, height=2).splitlines() == [
        "1 │     ▂▄▆█",
        "0 │ ▂▄▆█████",
        "  └─────────",
        "   0       4 step",
    ]
    # More points than columns: each column is a mean. Means outside [0, 1] set the axis range.
    many = [(step, 10.0 * (step % 2) - 10.0 * (step >= 4)) for step in range(8)]
    assert plot(many, width=2, height=2).splitlines() == [
        " 5 │█",
        "-5 │█",
        "   └──",
        "    0 7 step",
    ]
    assert plot([(3, 0.75)], height=2).splitlines() == ["1 │▄", "0 │█", "  └─", "   3 step"]
    assert plot([(0, 7.0), (1, 7.0)], height=2).splitlines()[:2] == ["7.5 │", "6.5 │███"]


def test_draw_writes_png(tmp_path):
    draw(
        Curve([(1, 0.3), (2, 0.5)], {"toy": [(0, 0.2), (2, 0.6)]}), tmp_path / "curve.png", "a run"
    )
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_names_of_data_sources_are_no_formulas_and_limited(tmp_path):
    odd = {f"val-core/${'x' * (i == 0)}_{{{i}/reward/mean@1": 0.5 for i in range(1000)}
    run_dir = tmp_path / "$a_{$"
    run_dir.mkdir()
    write(run_dir / "metrics.jsonl", [{"step": 1, "val-core/$a_{$/reward/mean@1": 0.5, **odd}])
    result = CliRunner().invoke(app, ["curve", str(run_dir)])
    assert result.exit_code == 0, result.output
    assert result.output.count("on held-out prompts of") == 40
    assert "data sources without a curve, because there are many: 961" in result.output
    assert (run_dir / "reward_curve.png").read_bytes().startswith(b"\x89PNG")


def test_curve_command_prints_and_writes_image(tmp_path):
    write(
        tmp_path / "metrics.jsonl",
        [{"step": 1, "critic/score/mean": 0.25}, {"step": 2, "critic/score/mean": 0.75}],
    )
    shown = CliRunner().invoke(app, ["curve", str(tmp_path)])
    assert shown.exit_code == 0 and "0.250 at step 1, 0.750 at step 2" in shown.output
    assert (
        f"wrote {tmp_path / 'reward_curve.png'}" in shown.output
        and (tmp_path / "reward_curve.png").exists()
    )
    for arguments, message in [
        ([str(tmp_path / "gone")], "gone/metrics.jsonl does not exist"),
        ([str(tmp_path / "metrics.jsonl")], "metrics.jsonl is a file. Give a run directory"),
        ([str(tmp_path), "--picture", "x.paint"], "paint"),
    ]:
        refused = CliRunner().invoke(app, ["curve", *arguments])
        assert refused.exit_code == 2 and message in refused.output
