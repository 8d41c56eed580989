"""A run directory that a simulation wrote: its costs are found again, and other modes follow."""

import functools
import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tests.sizing.conftest import config_folder
from verlite.cli import app
from verlite.config.load import compose, dump
from verlite.sizing import recorded as recorded_run
from verlite.sizing.recorded import measured_costs, read_recorded
from verlite.sizing.simulation import Costs, Sample, Settings, Turn, Work, Workload, simulate

COSTS = Costs(0.02, 0.003, 0.001, 0.004, 0.0, 0.7, 0.3, 0.2)
SYNC = Settings("sync", prompts=8, engines=1, trainer_devices=2, devices=3, max_num_seqs=20)
PLAN = SimpleNamespace(prompts=8, samples_per_prompt=4, batch_size=32)
STEPS = 12


@functools.cache
def with_tools(number: int) -> list[Sample]:
    draw = random.Random(number)

    def sample() -> Sample:
        calls = draw.choice([0, 1, 1, 2])
        each = draw.lognormvariate(0.0, 1.0)
        turns = [Turn(draw.randrange(1, 60), each, 7) for _ in range(calls)]
        return Sample(20, (*turns, Turn(draw.randrange(1, 90))))

    return [sample() for _ in range(4)]


@functools.cache
def single_turn(number: int) -> list[Sample]:
    draw = random.Random(number)
    return [Sample(20, (Turn(draw.randrange(1, 200)),)) for _ in range(4)]


def write_run(folder: Path, workload: Workload, settings: Settings, kept: int = 32) -> None:
    """Write what a run with these costs would have written."""
    (folder / "rollouts").mkdir(parents=True)
    found = simulate(workload, COSTS, settings, STEPS, is_whole=True)
    seconds = {id(sample): work.seconds(COSTS) for sample, work in found.work}
    lines, now = [], 1000.0
    for number, step in enumerate(found.steps):
        now += step.period_s
        samples = [s for place in range(8) for s in workload(number * 8 + place)]
        responses = [sample.tokens - sample.prompt for sample in samples]
        slowest = max(samples, key=lambda s: seconds[id(s)] + sum(t.tool_s for t in s.turns))
        line = {
            "step": number + 1,
            "time": now,
            "timing_s/step": step.step_s,
            "timing_s/gen": step.gen_s,
            "timing_s/update_weights": COSTS.sync_s,
            "timing_s/reward": COSTS.reward_s,
            "perf/total_num_tokens": step.tokens,
            "prompt_length/mean": 20,
            "response_length/mean": sum(responses) / len(responses),
            "response_length/max": max(responses),
        }
        is_agent = workload is with_tools
        if is_agent:
            line["rollout/slowest/tokens"] = slowest.tokens - slowest.prompt
            line["rollout/slowest/tool_s"] = sum(turn.tool_s for turn in slowest.turns)
            line["rollout/slowest/gen_s"] = seconds[id(slowest)]
        lines.append(line)
        chosen = "all" if kept == 32 else "random"
        rows = [record(s, number, i, seconds[id(s)], is_agent) for i, s in enumerate(samples)]
        if kept < 32:
            rows = random.Random(number).sample(rows, kept)
        rows = [row | {"chosen": chosen} for row in rows]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "rollouts" / f"step_{number + 1}.jsonl").write_text(text)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def record(sample: Sample, step: int, row: int, seconds: float, is_agent: bool) -> dict:
    marks = "".join("1" * turn.tokens + "0" * turn.observation for turn in sample.turns)
    found = {
        "uid": f"{step + 1}-{row // 4}",
        "score": 1.0,
        "response_tokens": len(marks),
        "trained_tokens": 0,
        "tokens": {"sampled": marks},
    }
    if is_agent:
        authors = [author for _ in sample.turns for author in ("model", "tool")][:-1]
        found["transcript"] = [[author, "text"] for author in authors]
        found["gen_seconds"] = seconds
        found["tool_seconds"] = sum(turn.tool_s for turn in sample.turns)
    return found


def mean_step_s(workload: Workload, costs: Costs, settings: Settings) -> float:
    steps = simulate(workload, costs, settings, STEPS, is_whole=True).steps
    return sum(step.step_s for step in steps) / len(steps)


def test_samples_and_costs_of_a_run_with_tools_are_found_again(tmp_path):
    write_run(tmp_path, with_tools, SYNC)
    recorded = read_recorded(tmp_path, PLAN)
    assert recorded.share == 1.0 and recorded.steps == STEPS
    for number in (0, 3, 8 * STEPS - 1):
        for mine, true in zip(recorded.workload()(number), with_tools(number), strict=True):
            assert [t.tokens for t in mine.turns] == [t.tokens for t in true.turns]
            waited = [sum(turn.tool_s for turn in one.turns) for one in (mine, true)]
            assert waited[0] == pytest.approx(waited[1])
            assert mine.tokens == true.tokens
    found = measured_costs(recorded, SYNC)
    assert asdict(found) == pytest.approx(asdict(COSTS), rel=5e-3)


@pytest.mark.parametrize(
    "settings", [SYNC, replace(SYNC, mode="async", max_age=3, depth=2, max_num_seqs=99)]
)
def test_a_run_predicts_the_steps_of_other_modes(tmp_path, settings):
    """From an asynchronous run the engine's costs are found less well: which samples ran together
    depends on all of them."""
    write_run(tmp_path, with_tools, settings)
    recorded = read_recorded(tmp_path, PLAN)
    found = measured_costs(recorded, settings)
    error = 0.005 if settings.mode == "sync" else 0.04
    for max_age, depth in ((0, 0), (1, 1), (4, 2)):
        other = replace(settings, mode="async", max_age=max_age, depth=depth)
        mine = mean_step_s(recorded.workload(), found, other)
        true = mean_step_s(with_tools, COSTS, other)
        assert mine == pytest.approx(true, rel=error)


def test_costs_of_a_run_without_tools_are_found_from_its_steps(tmp_path):
    wide = replace(SYNC, max_num_seqs=1024)
    write_run(tmp_path, single_turn, wide)
    found = measured_costs(read_recorded(tmp_path, PLAN), wide)
    assert found.decode_step_s == pytest.approx(COSTS.decode_step_s, rel=5e-3)
    assert found.decode_sample_s == pytest.approx(COSTS.decode_sample_s, rel=5e-3)
    assert found.prefill_token_s == pytest.approx(COSTS.prefill_token_s, rel=5e-3)
    write_run(tmp_path / "b", single_turn, replace(wide, mode="async"))
    with pytest.raises(ValueError, match="do not tell how fast the engines are. Give a run of"):
        measured_costs(read_recorded(tmp_path / "b", PLAN), replace(wide, mode="async"))
    with pytest.raises(
        ValueError, match="run of trainer.mode=pipelined, whose timings do not tell"
    ):
        measured_costs(read_recorded(tmp_path, PLAN), replace(wide, mode="pipelined"))


@pytest.mark.slow
def test_samples_that_were_not_saved_are_drawn_from_the_others_and_the_slowest(tmp_path):
    """Of 32 samples a step 4 are saved, which stand for 31, and the metrics have the slowest."""
    write_run(tmp_path, with_tools, SYNC, kept=4)
    recorded = read_recorded(tmp_path, PLAN)
    assert recorded.share == 0 and not recorded.groups
    weights = [weight for _, weight in recorded.pool]
    assert weights == [31 / 4, 31 / 4, 31 / 4, 31 / 4, 1.0] * STEPS
    drawn = [sample for number in range(400) for sample in recorded.workload()(number)]
    known = {sample for sample, _ in recorded.pool}
    assert len(drawn) == 1600 and set(drawn) <= known
    slowest = [sample for sample, weight in recorded.pool if weight == 1.0]
    share = sum(sample in slowest for sample in drawn) / len(drawn)
    assert share == pytest.approx(1 / 32, rel=0.4)
    found = measured_costs(recorded, SYNC)
    times = [
        simulate(recorded.workload(), costs, SYNC, 60).metrics()["timing_s/step"]
        for costs in (COSTS, found)
    ]
    assert times[1] == pytest.approx(times[0], rel=0.08)


def test_a_run_without_enough_steps_or_samples_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has 0 steps with timing_s/step. .* give the directory"):
        read_recorded(tmp_path, PLAN)
    write_run(tmp_path, with_tools, SYNC, kept=0)
    with pytest.raises(ValueError, match="trainer.rollouts_per_step=-1, which keeps all of them"):
        read_recorded(tmp_path, PLAN)


def damage(file: Path, change: Callable[[dict], object]) -> None:
    lines = [change(json.loads(line)) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("key", ["timing_s/gen", "perf/total_num_tokens", "response_length/max"])
@pytest.mark.parametrize("value", [None, -1.0])
def test_a_step_without_a_metric_is_refused_by_name(tmp_path, key, value):
    write_run(tmp_path, single_turn, SYNC)
    damage(tmp_path / "metrics.jsonl", lambda line: line | {key: value})
    with pytest.raises(ValueError, match=rf"metrics.jsonl: step 1 has no {key}, or a wrong one"):
        read_recorded(tmp_path, PLAN)


def test_steps_without_tokens_are_refused(tmp_path):
    write_run(tmp_path, single_turn, SYNC)
    damage(tmp_path / "metrics.jsonl", lambda line: line | {"perf/total_num_tokens": 0})
    with pytest.raises(ValueError, match="the steps have trained no tokens"):
        measured_costs(read_recorded(tmp_path, PLAN), SYNC)


@pytest.mark.parametrize(
    "change",
    [
        {"uid": "abc"},
        {"tokens": None, "response_tokens": None},
        {"tokens": {}, "response_tokens": "x"},
        {"transcript": 5},
        {"transcript": [1]},
    ],
)
def test_samples_of_another_form_are_refused_by_file(tmp_path, change):
    write_run(tmp_path, with_tools, SYNC)
    damage(tmp_path / "rollouts" / "step_3.jsonl", lambda sample: sample | change)
    with pytest.raises(ValueError, match=r"step_3.jsonl has a line that is not a sample"):
        read_recorded(tmp_path, PLAN)


def test_lines_that_were_cut_or_are_no_samples_are_left_out(tmp_path):
    """The other samples of the step then stand for those of the line, as all of a run do."""
    write_run(tmp_path, single_turn, SYNC)
    file = tmp_path / "rollouts" / "step_3.jsonl"
    file.write_text("5\n[]\n" + file.read_text()[:-40])
    damaged = read_recorded(tmp_path, PLAN)
    assert damaged.share == pytest.approx((STEPS - 1) / STEPS)
    assert 2 * 8 not in damaged.groups and 3 * 8 in damaged.groups


def test_time_without_work_is_no_cost_of_the_engine_and_no_cost_is_negative():
    """A sample that was drawn twice counts with its mean work, and not the syncs that it met."""
    sample = Sample(1, (Turn(1),), 5.0)
    work = [(sample, Work(1.0, 2.0, 3.0, 1.5)), (sample, Work(3.0, 4.0, 5.0, 0.5))]
    assert recorded_run._rows([*work, (Sample(1, (Turn(1),)), Work())]) == [(2.0, 3.0, 4.0, 4.0)]
    rows = [
        (steps, tokens, 0.0, steps - 0.01 * tokens) for steps, tokens in ((1, 9), (5, 7), (2, 1))
    ]
    costs = recorded_run._least_squares(rows)
    assert costs["decode_step_s"] == pytest.approx(1.0, rel=0.05)
    assert costs["decode_sample_s"] == costs["prefill_token_s"] == 0.0
    with pytest.raises(ValueError, match="no time was spent in them"):
        recorded_run._least_squares([(0.0, 0.0, 0.0, 0.0)])


def write_whole_run(folder: Path, *overrides: str) -> None:
    """Write a run with its model and its configuration, in the folder `run`."""
    model = config_folder(folder / "model", "tiny")
    line = [
        f"actor_rollout_ref.model.path={model}",
        "+actor_rollout_ref.model.override_config.head_dim=32",  # vLLM's kernels on CPUs have it
        "data.train_files=absent.parquet",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.rollout.n=4",
        "trainer.device=cpu",
        *overrides,
    ]
    write_run(folder / "run", with_tools, SYNC)
    text = dump(compose(None, line, elsewhere=True))
    (folder / "run" / "config.yaml").write_text(text)


def output(folder: Path, *more: str, code: int = 0) -> str:
    """Return what `verlite simulate` says about the run."""
    done = CliRunner().invoke(app, ["simulate", str(folder / "run"), *more])
    assert done.exit_code == code, (done.output, done.exception)
    return " ".join(done.output.split())


def test_the_command_compares_the_modes_of_a_run(tmp_path):
    """The run's own mode is predicted as it was measured. More devices are settings as all are."""
    write_whole_run(
        tmp_path,
        "actor_rollout_ref.rollout.max_num_seqs=20",
        "trainer.n_gpus_per_node=3",
        "cluster.component_placement={rollout: 0, actor: 1-2}",
    )
    lines = [json.loads(one) for one in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    found = json.loads(output(tmp_path, "--json"))
    measured = sum(one["timing_s/step"] for one in lines[2:]) / (STEPS - 2)
    assert found["measured"]["timing_s/step"] == pytest.approx(measured)
    rows = {(r["settings"]["mode"], r["settings"]["max_age"]): r for r in found["rows"]}
    assert rows["sync", 1]["timing_s/step"] == pytest.approx(measured, rel=0.005)
    assert rows["async", 4]["timing_s/step"] < rows["async", 1]["timing_s/step"] < measured
    wide = ["trainer.n_gpus_per_node=4", "cluster.component_placement={rollout: 0-1, actor: 2-3}"]
    text = output(tmp_path, *wide)
    assert "measured" in text and "100% of the samples of 12 steps" in text
    text = output(tmp_path, "--prompt-length=3", code=2)
    assert "leave these options out, or the run" in text


@pytest.mark.slow
def test_what_would_change_the_samples_or_costs_of_a_run_is_refused(tmp_path):
    write_whole_run(tmp_path, "actor_rollout_ref.rollout.name=vllm", "trainer.n_gpus_per_node=4")
    refused = {
        "--devices=8xH100-80GB": "--devices=8xH100-80GB: costs and steps are those of",
        "--steps=5": "--steps=5: costs and steps are those of",
        "actor_rollout_ref.rollout.n=8": "rollout.n=8: samples and costs are those of",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2": (
            "tensor_model_parallel_size=2: samples and costs are those of"
        ),
        "actor_rollout_ref.actor.use_kl_loss=true": (
            "roles=actor, rollout, ref: samples and costs are those of"
        ),
    }
    for option, words in refused.items():
        text = output(tmp_path, option, code=2)
        assert words in text
    assert "which has actor, rollout." in text
    found = json.loads(output(tmp_path, "--json", "trainer.n_gpus_per_node=8"))
    assert found["measured"]["settings"]["engines"] == 4
    assert found["rows"][0]["settings"]["engines"] == 8
