"""The page of a run: what it contains, and what a browser shows of it."""

import base64
import fcntl
import gzip
import json
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.report.test_samples import PROGRAM
from verlite.cli import app
from verlite.files import RetryingWriter
from verlite.report.page import MAX_STEPS, collect, drop_tokens, page, thin, thin_steps, write_page
from verlite.trainer import run_record
from verlite.trainer.run_record import write_config

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"


def make_run(run_dir: Path, steps: int = 5, lr: float = 1e-3, **sample) -> Path:
    (run_dir / "rollouts").mkdir(parents=True)
    lines = [
        {"step": step, "critic/score/mean": step / 10, "timing_s/gen": 2.0, "timing_s/step": 3.0}
        for step in range(1, steps + 1)
    ]
    lines[2]["actor/kl_loss"] = None
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "config.yaml").write_text(f"optim:\n  lr: {lr}\ntrainer:\n  logger: [console]\n")
    record = {
        "uid": "1-0",
        "index": 3,
        "data_source": "sums",
        "prompt": "1+1=",
        "response": "2!",
        "ground_truth": {"target": ["2", "two"]},
        "score": 0.5,
        "reward_parts": {"acc": 1.0},
        "status": "done",
        "error": None,
        "response_tokens": 2,
        "trained_tokens": 2,
        "weight_version": 1,
        "chosen": "best",
        "tokens": {
            "id": [4, 5],
            "text": ["2", "!"],
            "sampled": "11",
            "trained": "10",
            "rollout_log_prob": [-0.25, -1.5],
            "log_prob": [-0.5, -1.25],
            "advantage": 0.75,
        },
    }
    for step in range(1, steps + 1):
        path = run_dir / "rollouts" / f"step_{step}.jsonl"
        path.write_text(json.dumps(record | sample) + "\n")
    (run_dir / "rollouts" / "val_step_2.jsonl").write_text(json.dumps(record | sample) + "\n")
    return run_dir


def unpacked(text: str, name: str):
    found = re.search(f'<script id="{name}-data"[^>]*>([^<]*)</script>', text)
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def test_every_number_and_setting_is_in_the_page(tmp_path):
    run_dir = make_run(tmp_path / "run")
    write_page([run_dir], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    (run,) = unpacked(text, "overview")["runs"]
    assert run["steps"] == [1, 2, 3, 4, 5]
    assert run["metrics"]["critic/score/mean"] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert run["metrics"]["actor/kl_loss"] == [None] * 5
    assert run["config"] == {"optim.lr": 1e-3, "trainer.logger": ["console"]}
    (samples,) = unpacked(text, "samples")
    assert [(s["step"], "validation" in s) for s in samples] == [
        (1, False),
        (2, False),
        (2, True),
        (3, False),
        (4, False),
        (5, False),
    ]
    assert samples[0]["tokens"]["log_prob"] == [-0.5, -1.25]


def test_the_page_loads_nothing_and_runs_no_text_of_a_model(tmp_path):
    run_dir = make_run(tmp_path / "run", prompt=HOSTILE, response=HOSTILE)
    text = page(collect([run_dir]))
    assert "taken" not in text and "{{" not in text
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)=[\"']?(https?:|//)", text)
    assert "innerHTML" not in text and "eval(" not in text


def test_values_that_json_does_not_have(tmp_path):
    run_dir = make_run(tmp_path / "run", reward_parts={"ratio": float("inf")}, response="\ud800")
    (run_dir / "config.yaml").write_text("a: .nan\n")
    text = page(collect([run_dir]))
    assert unpacked(text, "overview")["runs"][0]["config"] == {"a": "nan"}
    sample = unpacked(text, "samples")[0][0]
    assert sample["reward_parts"] == {"ratio": "inf"} and sample["response"] == "\ud800"


def test_damaged_and_missing_files_are_named(tmp_path):
    run_dir = make_run(tmp_path / "run")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("{broken\n")
    (run_dir / "config.yaml").unlink()
    (run_dir / "rollouts" / "step_1.jsonl").write_text("{broken\n")
    with (run_dir / "rollouts" / "step_2.jsonl").open("a") as file:
        file.write("{broken\n")
    (run_dir / "error.json").write_text(json.dumps({"message": "out of memory"}))
    (run,) = collect([run_dir])
    notes = "\n".join(run.notes)
    assert "lines of metrics.jsonl that cannot be read: 1" in notes
    assert "config.yaml cannot be read" in notes
    assert f"{run_dir}/rollouts/step_1.jsonl is damaged" in notes
    assert "samples that cannot be read: 1" in notes
    assert run.error == "out of memory" and len(run.samples) == 5


@pytest.mark.slow
def test_hostile_files_do_not_stall_the_page(tmp_path):
    """Aliases of aliases are 10**30 settings; a line may have any number of metrics."""
    run_dir = make_run(tmp_path / "run")
    layers = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    layers += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    names = {f"metric/{number}": 0.5 for number in range(156_000)}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, **names}) + "\n")
    for text, reason in (
        ("\n".join(layers), "100,000 values, aliases included"),
        ("a: " + "[" * 100_000, "nested deeper than 32 levels"),
        ("a: 0x" + "f" * 5000, "a number of more than 400 digits"),
        ("a: b\n" * 300_000, "more than 1,048,576 characters"),
    ):
        (run_dir / "config.yaml").write_text(text)
        (run,) = collect([run_dir])
        assert run.config == {} and len(run.metrics) == 2000
        assert "critic/score/mean" in run.metrics
        notes = "\n".join(run.notes)
        assert "config.yaml cannot be read" in notes and reason in notes
        assert "2000 of 156" in notes


def test_warnings_are_shown_once(tmp_path):
    run_dir = make_run(tmp_path / "run")
    warnings = [
        {"step": 4, "name": "kl", "text": "later"},
        {"step": 2, "name": "gap", "text": "lost with the steps after a checkpoint"},
        {"step": 2, "name": "gap", "text": "first"},
    ]
    lines = "".join(json.dumps(warning) + "\n" for warning in warnings)
    (run_dir / "warnings.jsonl").write_text(lines + "{broken\n[1]\n")
    (run,) = collect([run_dir])
    assert run.warnings == [warnings[2], warnings[0]]
    assert run.notes == ["a line of warnings.jsonl cannot be read"] * 2


def test_what_changed_at_a_resume_and_the_planned_steps(tmp_path):
    run_dir = make_run(tmp_path / "run")
    writer = RetryingWriter(pytest.fail)
    write_config(run_dir, "optim: {lr: 0.5}\n", 0, writer)
    write_config(run_dir, "optim: {lr: 0.1}\n", 3, writer)
    run_record.plan(run_dir, 12)
    (run,) = collect([run_dir])
    assert run.segments == [{"step": 4, "changes": [("optim.lr", "0.5", "0.1")]}]
    assert run.total_steps == 12 and run.notes == []
    (run_dir / "configs" / "from_step_4.yaml").write_text("[")
    (run_dir / "run.json").write_text("[")
    (run,) = collect([run_dir])
    assert run.segments == [] and run.total_steps is None
    (note,) = run.notes
    assert "settings of earlier starts cannot be compared" in note


def test_malformed_token_details_are_left_out(tmp_path):
    run_dir = make_run(tmp_path / "run")
    path = run_dir / "rollouts" / "step_5.jsonl"
    sample = json.loads(path.read_text())
    wrong = [None, [1], {}, {"id": None, "text": []}, {**sample["tokens"], "sampled": "1"}]
    lines = [{**sample, "tokens": tokens} for tokens in wrong]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, sample]))
    (run,) = collect([run_dir])
    assert ["tokens" in sample for sample in run.samples[-6:]] == [False] * 5 + [True]
    assert run.notes == ["samples whose token details are malformed: 5"]


def test_samples_of_an_earlier_run_are_left_out(tmp_path):
    run_dir = make_run(tmp_path / "run")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    (run_dir / "metrics.jsonl").write_text("\n".join(lines[:3]) + "\n")
    (run,) = collect([run_dir])
    assert {sample["step"] for sample in run.samples} == {1, 2, 3}
    assert run.notes == ["samples of steps after 3 are left out: 2 files"]


def test_names_tell_runs_apart(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("a/run", "b/run", "c/other")]
    assert [run.name for run in collect(runs)] == ["a/run", "b/run", "c/other"]
    assert [run.name for run in collect(runs[1:])] == ["run", "other"]
    assert [run.name for run in collect([runs[0], runs[0]])][1].endswith("a/run (2)")


def test_thinning_keeps_every_step():
    samples = [{"step": step, "number": n} for step in range(10) for n in range(step)]
    assert thin(samples, 45) == samples
    kept = thin(samples, 20)
    assert len(kept) == 20 and {sample["step"] for sample in kept} == set(range(1, 10))
    assert kept == sorted(kept, key=lambda sample: (sample["step"], sample["number"]))
    few = thin(samples, 3)
    assert [sample["step"] for sample in few] == [1, 4, 7]


def test_tokens_are_dropped_beyond_the_limit():
    samples = [{"tokens": {"id": [1] * 10}, "step": n} for n in range(20)] + [{"step": 1}]
    assert drop_tokens(samples, 55) == 15
    assert sum("tokens" in sample for sample in samples) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/none"], "does not exist. Give a run directory"),
        (["{tmp}"], "has no metrics.jsonl"),
        (["{tmp}/run/config.yaml"], "is a file. Give a run directory"),
        (["{tmp}/run", "-o", "{tmp}"], "is a folder"),
        (["{tmp}/run", "-o", "{tmp}/none/x.html"], "No such file or directory"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, message):
    make_run(tmp_path / "run")
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    result = CliRunner().invoke(app, ["report", *arguments])
    assert result.exit_code == 2 and message in result.output
    assert "Traceback" not in result.output


def test_the_command_writes_into_the_run(tmp_path):
    run_dir = make_run(tmp_path / "run")
    result = CliRunner().invoke(app, ["report", str(run_dir)])
    assert result.exit_code == 0
    assert "run: step 5, 6 samples" in result.output
    assert f"wrote {run_dir / 'report.html'}" in result.output


def test_a_watched_page_is_written_until_the_run_ends_also_after_errors(tmp_path, monkeypatch):
    run_dir = make_run(tmp_path / "run")
    complete = (run_dir / "metrics.jsonl").read_text()
    (run_dir / "metrics.jsonl").unlink()
    lock = (run_dir / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    naps, here, really_sleep = [], threading.get_ident(), time.sleep

    def sleep(seconds):
        if threading.get_ident() != here:  # a thread that another test left
            return really_sleep(seconds)
        naps.append(seconds)
        if len(naps) == 1:
            (run_dir / "metrics.jsonl").write_text(complete)
        if len(naps) == 3:
            lock.close()

    monkeypatch.setattr("time.sleep", sleep)
    result = CliRunner().invoke(app, ["report", str(run_dir), "--watch", "--interval", "7"])
    assert result.exit_code == 0, result.output
    assert naps == [7, 7, 7]
    assert result.output.count("not written: ") == 1 and result.output.count("wrote ") == 3
    assert "no run goes on in these directories, so this is the last page" in result.output
    assert unpacked((run_dir / "report.html").read_text(), "overview")["reload_s"] is None


def test_long_runs_have_means_and_ranges_in_place_of_steps():
    steps = list(range(1, 10 * MAX_STEPS + 4))
    metrics = {"a": [float(step % 10) for step in steps], "rare": [None] * len(steps)}
    metrics["rare"][4321] = 0.123456789
    numbers, means, low, high = thin_steps(steps, metrics)
    assert len(numbers) <= MAX_STEPS and numbers[0] == 11 and numbers[-1] == steps[-1]
    assert means["a"][0] == round((sum(range(10)) + 1) / 11, 5)  # steps 1 to 11
    assert (low["a"][0], high["a"][0]) == (0, 9)
    (where,) = [i for i, value in enumerate(means["rare"]) if value is not None]
    assert means["rare"][where] == low["rare"][where] == high["rare"][where] == 0.123457
    assert numbers[where - 1] < 4322 <= numbers[where]
    short = {"a": [1.0, None]}
    assert thin_steps([1, 2], short) == ([1, 2], short, {}, {})


def shown_by_browser(file: Path, query: str) -> str:
    """Return what a browser makes of a page, without the scripts."""
    assert CHROMIUM is not None
    shown = subprocess.run(
        [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={file.parent / 'profile'}",
            "--virtual-time-budget=8000",
            "--dump-dom",
            f"file://{file}?{query}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    assert 'data-ready="yes"' in shown
    return re.sub("<script.*?</script>", "", shown, flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")
def test_a_browser_shows_resumes_plans_and_advantages_of_zero(tmp_path):
    run_dir = make_run(tmp_path / "run")
    sample = json.loads((run_dir / "rollouts" / "step_5.jsonl").read_text())
    sample["tokens"]["advantage"] = 0.0
    (run_dir / "rollouts" / "step_5.jsonl").write_text(json.dumps(sample) + "\n")
    writer = RetryingWriter(pytest.fail)
    for lr, step in ((0.5, 0), (0.25, 3)):
        text = f"optim: {{lr: {lr}}}\ntrainer: {{total_epochs: 4, total_training_steps: null}}\n"
        write_config(run_dir, text, step, writer)
    run_record.plan(run_dir, 12)
    write_page([run_dir], tmp_path / "page.html")
    shown = shown_by_browser(tmp_path / "page.html", "coloring=advantage")
    text = re.sub("<[^>]*>", " ", shown)
    text = " ".join(text.split())
    assert "planned steps 12 planned epochs 4 resumed at step 4" in text
    assert "from step key before now 4 optim.lr 0.5 0.25" in text
    assert "advantage: 0 for every sampled token." in text and "e-12" not in text


@pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")
def test_the_colors_of_all_samples_have_one_scale(tmp_path):
    run_dir = make_run(tmp_path / "run")
    file = run_dir / "rollouts" / "step_5.jsonl"
    sample = json.loads(file.read_text())
    lines = [sample | {"tokens": sample["tokens"] | {"advantage": a}} for a in (-0.4, -2.0)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_page([run_dir], tmp_path / "page.html")
    shown = shown_by_browser(tmp_path / "page.html", "coloring=advantage")
    alphas = re.findall(
        r'<span style="background: ?rgb\(var\(--minus\) / ([\d.]+)\)" data-i', shown
    )
    assert list(map(float, alphas)) == [0.15, 0.15, 0.75, 0.75]  # 0.75 x 0.4 / 2
    (scale,) = re.findall('id="samples-scale">(.*?)</div>', shown)
    assert re.sub("<[^>]*>", " ", scale).split()[:2] == ["-2", "+2"]
    # Units stand on the axes.
    chart = shown[shown.index('data-metric="critic/score/mean"') :]
    assert re.findall('class="unit">(.*?)<', chart)[:2] == ["score", "step"]


@pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")
def test_a_browser_shows_the_requests_of_an_agent_program(tmp_path):
    mask = "11011000000011011"  # turns 1 and 2; a context, turn 3; a context, turn 4
    tokens = {
        "id": [7] * len(mask),
        "text": [str(i % 10) for i in range(len(mask))],
        "sampled": mask,
        "advantage": [0.5] * 10 + [0.25] * 4 + [1.0] * 3,
    }
    sample = {name: PROGRAM[name] for name in ("requests", "agent_log", "transcript")}
    run_dir = make_run(tmp_path / "run", tokens=tokens, **sample)
    write_page([run_dir], tmp_path / "page.html")
    shown = shown_by_browser(tmp_path / "page.html", "coloring=advantage")
    (graph, *_) = re.findall(r'<ul class="requests">.*?</ul></li>.*?</ul>', shown)
    assert graph == (
        '<ul class="requests"><li>turn 1, 3 given, 2 sampled, advantage 0.5<ul class="requests">'
        "<li>turn 2, 1 given, 2 sampled, advantage 0.5</li>"
        "<li>turn 3, 2 given, 2 sampled, advantage 0.25</li></ul></li>"
        "<li>turn 4, new conversation, 1 given, 2 sampled, advantage 1</li></ul>"
    )
    starts = re.findall(r'<span class="label branch">(.*?)</span><span[^>]*data-i="(\d+)"', shown)
    assert starts[:2] == [("branch 2, turn 3", "5"), ("branch 3, turn 4", "14")]
    assert re.search(  # beside the graph, and not again below it
        r'</ul></div><div><div class="label">log of the agent</div><p[^>]*>asked \[b\]twice', shown
    )
    assert shown.count("asked [b]twice[/b]") == shown.count('class="beside"')


@pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")
def test_a_browser_shows_it(tmp_path):
    first = make_run(tmp_path / "first", prompt=HOSTILE)
    second = make_run(tmp_path / "second", lr=0.25)
    warning = {"step": 3, "name": "kl", "text": "the policy moves away fast"}
    (second / "warnings.jsonl").write_text(json.dumps(warning) + "\n")
    write_page([first, second], tmp_path / "page.html")
    shown = shown_by_browser(tmp_path / "page.html", "coloring=gap")
    assert "cannot be shown" not in shown
    assert "<title>first and second - verlite report</title>" in shown
    assert shown.count('data-metric="critic/score/mean"') == 1
    # The settings that differ, and none that are equal.
    assert "optim.lr" in shown and "trainer.logger" not in shown
    # One training sample per run at the newest step: 0.25 of gap on each of the two tokens.
    assert shown.count('class="card sample"') == 2
    assert "&lt;/script&gt;" in shown and "+0.25" in shown
    assert "2 of 12 samples" in shown
    assert "second, step 3: the policy moves away fast" in shown and 'class="mark"' in shown
