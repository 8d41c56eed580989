"""Whole runs: the memory of a GPU in each phase, beside what `verlite plan` says."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.gpu_dry import phases
from tests.models import tiny_model
from tests.trainer.runs import Launch, digits, one_thread, write_reward


@pytest.fixture(autouse=True)
def recorded(tmp_path: Path, monkeypatch: Any) -> None:
    one_thread(monkeypatch)
    monkeypatch.setenv("DRY_STRICT", "1")
    monkeypatch.setenv("DRY_MEMORY", str(tmp_path / "gpu"))
    monkeypatch.setenv("DRY_PHASES", str(tmp_path / "phases"))


@pytest.mark.parametrize("shape", phases.SHAPES)
def test_a_plan_says_what_each_phase_needs(shape: str, tmp_path: Path) -> None:
    tiny_model(tmp_path / "model", **phases.MODEL)
    row = {
        "data_source": "verlite/arithmetic",
        "prompt": [{"role": "user", "content": "1+2=" * 40}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
    }
    pq.write_table(pa.Table.from_pylist([row] * 32), tmp_path / "long.parquet")
    reward = write_reward(tmp_path / "reward.py", "return float(len(set(solution_str)))")
    arguments = [*phases.options(tmp_path, shape), f"custom_reward_function.path={reward}"]
    run = Launch(tmp_path / "run", arguments, tmp_path / "log")
    assert run.wait(1500) == 0, run.text()
    calls = phases.calls(tmp_path / "phases")
    wrong = []
    for phase, planned in phases.planned(tmp_path, shape).items():
        count = phases.counted(calls, phase, 0)
        if "DRY_FOUND" in os.environ:
            with open(os.environ["DRY_FOUND"], "a", encoding="utf-8") as found:
                found.write(json.dumps([shape, phase, planned, *count]) + "\n")
        if problem := phases.problem(phase, planned, count, len({call.role for call in calls})):
            wrong.append(problem)
    assert not wrong


def test_nobody_takes_or_frees_memory_beside_an_engine_that_starts_or_sleeps(
    tiny_qwen2: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """vLLM asserts that. An engine is killed in a generation, in a sync and when it went to sleep,
    and started again beside an actor that offloads."""
    monkeypatch.setenv("MORTAL", str(tmp_path / "deaths"))
    (tmp_path / "deaths").mkdir()
    for death in ("step-4", "load-2", "sleep-3"):
        (tmp_path / "deaths" / death).touch()
    arguments = [
        *digits(tmp_path, tiny_qwen2),
        "actor_rollout_ref.rollout.name=tests.trainer.mortal:Mortal",
        "actor_rollout_ref.actor.fsdp_config.param_offload=true",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=3",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.device=cuda",
        "ray_kwargs.ray_init.address=local",
    ]
    run = Launch(tmp_path / "run", arguments, tmp_path / "log")
    assert run.wait(1500) == 0, run.text()
    assert not list((tmp_path / "deaths").iterdir()), run.text()
    calls = [call for call in phases.calls(tmp_path / "phases") if call.role == "rollout"]
    starts = [call for call in calls if call.method == "build"]
    assert len(starts) == 4 and all(call.held for call in starts)
    ordered = [call for call in calls if call.method in ("build", "generate", "sleep")]
    assert [call for call in ordered if call.others[0] != call.others[1]] == []
