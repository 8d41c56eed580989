"""What the fault driver calls wrong: planted differences, leftovers, and lost steps are found."""

import json
import os
import signal
import subprocess
import sys
from random import Random
from types import SimpleNamespace

import pytest

from tests.chaos import faults, hosts
from tests.chaos.disturb import Outcome, note_resumed
from tests.chaos.faults import FAULTS, STARTING, STEPPING
from tests.chaos.report import Report
from tests.chaos.run import Run, differences
from tests.chaos.workloads import SECOND_NODE, WORKLOADS, Workload
from verlite.control import limits
from verlite.control.restarts import Attempt, Restarts
from verlite.controller import placement
from verlite.launch.supervise import CommandSupervisor

STEPS = 3


class Ended:
    """The process of a run that has ended."""

    def __init__(self, run: Run, text: str):
        self._run, self.text = run, lambda: text

    def metrics(self):
        return [json.loads(line) for line in metrics_file(self._run).read_text().splitlines()]


def metrics_file(run):
    return run.run_dir / "metrics.jsonl"


def ended(folder, text="") -> Run:
    """Return a run that has ended with three steps and weights."""
    run = Run(Workload("sums", STEPS, 1, [], ("rollout/slowest",)), folder)
    (run.run_dir / "huggingface").mkdir(parents=True)
    lines = [
        {
            "step": step,
            "loss": 0.1 * step,
            "timing_s/gen": os.urandom(1)[0],
            "rollout/slowest": id(run),
        }
        for step in range(1, STEPS + 1)
    ]
    metrics_file(run).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run.run_dir / "huggingface" / "model.safetensors").write_bytes(bytes(100))
    run.launches.append(Ended(run, text))
    return run


@pytest.fixture
def two(tmp_path):
    return ended(tmp_path / "disturbed"), ended(tmp_path / "undisturbed")


def test_equal_runs_have_no_difference_whatever_their_times(two):
    assert differences(*two) == []


@pytest.mark.parametrize("key", ["val-core/x/mean@1", "actor/new"])
def test_a_validation_that_a_stop_gave_up_may_be_missing(two, key):
    run, undisturbed = two
    file = metrics_file(undisturbed)
    file.write_text(file.read_text().replace('{"step": 2, ', f'{{"step": 2, "{key}": 1, '))
    assert differences(run, undisturbed)
    (run.run_dir / "logs").mkdir()
    log = "2026-11-23 SIGTERM: the validation of step 2 was given up\n"
    (run.run_dir / "logs" / "driver.log").write_text(log)
    assert bool(differences(run, undisturbed)) == (key == "actor/new")


@pytest.mark.parametrize(
    "change", ["gap", "no end", "twice", "number", "new metric", "weights", "no export"]
)
def test_every_difference_is_found(two, change):
    run, undisturbed = two
    lines = metrics_file(run).read_text().splitlines()
    model = run.run_dir / "huggingface" / "model.safetensors"
    if change == "gap":
        del lines[1]
    elif change == "no end":
        del lines[-1]
    elif change == "twice":
        lines.insert(1, lines[1])
    elif change == "number":
        lines[2] = lines[2].replace("0.30000000000000004", "0.3")
    elif change == "new metric":
        lines[0] = lines[0].replace("{", '{"actor/new": 1, ')
    elif change == "weights":
        model.write_bytes(bytes(99) + b"\1")
    else:
        model.unlink()
    metrics_file(run).write_text("\n".join(lines) + "\n")
    assert differences(run, undisturbed)


@pytest.mark.parametrize(
    "resumed_at, name, lost",
    [(4, "actor SIGKILL", False), (3, "actor SIGKILL", True), (3, "shard flipped", False)],
)
def test_finished_steps_that_are_computed_again_are_a_problem(tmp_path, resumed_at, name, lost):
    run = ended(tmp_path, f"resumed from /run/global_step_{resumed_at} (step {resumed_at} of 9)\n")
    run.code = lambda: None
    outcome = Outcome(name, "gen", step=4)
    note_resumed(run, outcome)
    assert outcome.resumed_at == resumed_at
    assert bool(outcome.problem) == lost


@pytest.mark.parametrize("code, is_problem", [(None, True), (1, False)])
def test_an_attempt_that_ends_by_itself_is_a_problem(tmp_path, code, is_problem):
    report = Report(tmp_path / "report.json", {})
    run = ended(tmp_path / "run")
    run.code = lambda: 1
    outcome = Outcome("actor paused", "gen", step=4, code=code)
    report.add(outcome)
    report.ended(run, outcome)
    report.compare(run, [])
    written = json.loads((tmp_path / "report.json").read_text())
    assert bool(written["problems"]) == is_problem
    assert written["faults"][0]["fault"] == "actor paused"


def test_what_supervise_prints_about_attempts_is_understood(tmp_path, monkeypatch):
    """An attempt that did not find a lost node does not count as an end of the run."""
    monkeypatch.setattr(placement, "_nodes", list)
    monkeypatch.setattr(placement.ray_internals, "free_resources", dict)
    for name in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(limits, name, 0.0)
    missing = placement._table("cpu", 2, 2).partition("\n")[0]
    left = [
        Attempt(76, "run", "a node is lost"),
        Attempt(2, "run", missing, error_type=placement.ResourcesMissing.__name__),
        Attempt(137, "run", signal="SIGKILL"),
        Attempt(1, "run"),
        Attempt(0, "run"),
    ]
    lines = []
    supervisor = CommandSupervisor(
        [], Restarts(50, 10), lambda text: lines.append(f"supervise: {text}")
    )
    monkeypatch.setattr(supervisor, "_attempt", lambda report, count: left.pop(0))
    assert supervisor._run(tmp_path / "report.json") == 0 and len(lines) == 4

    run = Run(Workload("hosts", STEPS, 1, []), tmp_path, supervised=True)
    run.launches.append(Ended(run, ""))
    run.launch.process = SimpleNamespace(poll=lambda: None)
    codes = []
    for count in range(len(lines) + 1):
        run.launch.text = lambda count=count: "\n".join(lines[:count])
        codes.append(run.code())
        if codes[-1] is not None:
            run.start()
    assert codes == [None, 76, None, -9, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_nodes_that_do_not_start_leave_nothing(tmp_path, monkeypatch, rank):
    """One of both nodes ends while it starts."""
    nodes = []

    class Node:
        def __init__(self, command, stdout, **options):
            self.code, self.signals = None, []
            nodes.append(self)
            if len(nodes) > rank:
                self.interrupt = True
            else:
                stdout.write("Ray started")

        def poll(self):
            if hasattr(self, "interrupt"):
                del self.interrupt
                raise KeyboardInterrupt
            return self.code

        def send_signal(self, number):
            self.code = -number

        def wait(self, timeout=None):
            return self.code

    ray_dirs = []
    monkeypatch.setattr(hosts.subprocess, "Popen", Node)
    monkeypatch.setattr(hosts.shutil, "rmtree", lambda folder, **options: ray_dirs.append(folder))
    with pytest.raises(KeyboardInterrupt):
        hosts.Hosts(tmp_path)
    assert [node.code for node in nodes] == [-signal.SIGTERM] * (rank + 1) and ray_dirs


def test_the_table_names_phases_and_workloads_that_exist():
    for name, fault in FAULTS.items():
        assert {*fault.phases} & {*STARTING, *STEPPING}, name
        assert {*fault.needs} <= {*WORKLOADS}, name
        assert fault.ends, name
    assert {*SECOND_NODE} == {name for name in FAULTS if FAULTS[name].needs == ("hosts",)}


@pytest.mark.parametrize("seed", range(10))
def test_spoiled_metrics_lose_no_step_but_the_last(two, seed):
    """Other lines are not in any checkpoint, so a fault that removed them could not be survived."""
    run, undisturbed = two
    before = metrics_file(undisturbed).read_bytes()
    metrics_file(run).write_bytes(before)
    faults.spoil_metrics(run, Random(seed))
    after = metrics_file(run).read_bytes()
    assert after != before
    assert {*before.splitlines()[:-1]} <= {*after.splitlines()}


@pytest.mark.process
def test_a_process_that_stays_is_found(tmp_path):
    run = Run(Workload("sums", STEPS, 1, []), tmp_path)
    code = "import time; time.sleep(60)"
    mark = {**os.environ, "VERLITE_TEST_RUN": str(run.run_dir)}
    run.start()
    stays = subprocess.Popen([sys.executable, "-c", code], env=mark)
    try:
        run.launch.process.kill()
        run.launch.process.wait()
        assert any(str(stays.pid) in left for left in run.leftovers())
    finally:
        stays.kill()
        stays.wait()
    assert run.wait_until_clean() == []
