"""Rollout engines that die are started again within the run, and change no number."""

import pytest
from safetensors.torch import load_file

from tests.trainer.runs import APART, digits, launch, one_thread, quiet

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

KILLED_IN_UPDATE = """
import os, signal
from verlite.controller.worker_group import group
from verlite.trainer import ppo
inner = ppo.update_actor
def faulty(run, batch):
    inner(run, batch)
    if run.step == 3:
        os.kill(int(group(run.rollout).workers[0].pid), signal.SIGKILL)
ppo.update_actor = faulty
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_qwen2):
    return [*digits(tmp_path_factory.mktemp("sums"), tiny_qwen2), *APART]


def numbers(run):
    return [
        {key: value for key, value in quiet(line).items() if key != "perf/engine_restarts"}
        for line in run.metrics()
    ]


def samples(run):
    return {path.name: path.read_text() for path in sorted(run.run_dir.glob("rollouts/*"))}


def test_engines_that_die_change_no_number(tmp_path, base, monkeypatch):
    """Deaths in validation, in the sync that follows it, in generation, when going to sleep, and in
    the update. The weights travel by a broadcast, whose group is formed again, to one engine, and
    by its files to the other.
    """
    one_thread(monkeypatch)
    monkeypatch.setenv("MORTAL", str(tmp_path / "deaths"))
    (tmp_path / "deaths").mkdir()
    base = [*base, "trainer.total_training_steps=4", "trainer.test_freq=2"]
    whole = launch(tmp_path, "whole", [*base, "actor_rollout_ref.rollout.name=hf"])
    assert whole.wait() == 0, whole.text()
    assert all(line.get("perf/engine_restarts", 0) == 0 for line in whole.metrics())

    for death in ("step-4", "load-2", "sleep-3", "step-30"):
        (tmp_path / "deaths" / death).touch()
    options = [
        "actor_rollout_ref.rollout.name=tests.trainer.mortal:Mortal",
        "actor_rollout_ref.rollout.weight_transport=collective",
    ]
    run = launch(tmp_path, "disturbed", base, *options, before=KILLED_IN_UPDATE)
    assert run.wait(400) == 0, run.text()
    assert not list((tmp_path / "deaths").iterdir()), run.text()
    text = " ".join(run.text().split())
    assert text.count("killed by SIGKILL") == text.count("Started again in") == 5, run.text()
    assert sum(line["perf/engine_restarts"] for line in run.metrics()) == 5
    assert numbers(run) == numbers(whole)
    expected, found = (samples(one) for one in (whole, run))
    assert found.keys() == expected.keys()
    # The object store may or may not have freed the dead engine's texts when they are written.
    lost = found["step_3.jsonl"].count("the response is lost")
    changed = [name for name in found if found[name] != expected[name]]
    assert (changed, lost) in (([], 0), (["step_3.jsonl"], 16))
    assert '"prompt": ""' not in found["step_3.jsonl"]
    before, after = (
        load_file(one.run_dir / "huggingface" / "model.safetensors") for one in (whole, run)
    )
    assert all(before[name].equal(after[name]) for name in before)
    run.assert_nothing_left()
