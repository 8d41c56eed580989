"""Start whole runs as a user does: the command line in its own process, on a tiny model."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import metrics_page
from tests.trainer.forks import Forked
from verlite import threads

# Metrics that differ between equal runs: clocks, memory, and what the passes had in common.
NOISY = (
    "actor/tokens_computed",
    "critic/tokens_computed",
    "time",
    "timing_",
    "perf/time",
    "perf/throughput",
    "perf/driver",
    "perf/engine_restarts",
    "perf/weight_probe",
    "perf/straggler",
    "actor/perf",
    "critic/perf",
)

MARK = "VERLITE_TEST_RUN"
"""Environment variable with the run directory, of all processes of a run."""
RAY_STARTED = """
from verlite.controller import cluster
start = cluster._start_local
def started(*args):
    start(*args)
    print("Ray has started")
cluster._start_local = started
"""
"""Code for the driver: print "Ray has started" once a local Ray has."""


def driver_state(step: int, **values: object) -> dict[str, object]:
    """Return the smallest state of a driver that a checkpoint may have."""
    dicts = {"sampler": {}, "metrics": {}, "critical": {}, "model": {}}
    return {"step": step, "version": step, "kl_controller": {"value": 0.0}, **dicts, **values}


def write_sums(path: Path, rows: int, start: int = 0) -> str:
    """Write a parquet file of sums of two digits in verl's row format. Return its path."""
    table = pa.Table.from_pylist(
        [
            {
                "data_source": "verlite/arithmetic",
                "prompt": [{"role": "user", "content": f"{i % 10}+{i // 10 % 10}="}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(i % 10 + i // 10 % 10)},
                "extra_info": {"split": "train", "index": i},
            }
            for i in range(start, start + rows)
        ]
    )
    pq.write_table(table, path)
    return str(path)


def write_reward(path: Path, body: str) -> str:
    """Write a file with a reward function that has this body. Return its path."""
    signature = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):"
    path.write_text(f"{signature}\n    {body}\n")
    return str(path)


def digits(folder: Path, model: object) -> list[str]:
    """Return the options of a run that learns to write digits, with its data in `folder`.

    Any text gets some of this score, so that advantages are not all 0.
    """
    reward = write_reward(folder / "reward.py", "return sum(c.isdigit() for c in solution_str) / 4")
    return [
        f"data.train_files={write_sums(folder / 'train.parquet', 64)}",
        f"data.val_files={write_sums(folder / 'val.parquet', 8, 64)}",
        f"custom_reward_function.path={reward}",
        f"actor_rollout_ref.model.path={model}",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.adv_estimator=grpo",
        "trainer.rollouts_per_step=-1",
    ]


APART = (
    "trainer.n_gpus_per_node=3",
    "cluster.component_placement={rollout: 0-1, actor: 2}",
    "trainer.save_freq=-1",
)
"""Options of a run with two engines and the actor on devices of their own."""


class Launch:
    """A running `python -m verlite.main_ppo`."""

    def __init__(
        self,
        run_dir: Path,
        overrides: list[str],
        log: Path,
        before: str = "",
        program: Sequence[str] = ("-m", "verlite.main_ppo"),
        environment: Mapping[str, str] | None = None,
        forked: bool = False,
    ):
        """Start the process.

        Args:
            overrides: the command line's key=value arguments.
            log: file for stdout and stderr.
            before: Python code that the driver runs first, to inject a fault.
            program: what Python runs instead of verlite.main_ppo, without `before`.
            environment: further variables.
            forked: start the process as a fork, which saves its imports; see `forks`.
        """
        self.run_dir, self.log = run_dir, log
        code = f"{before}\nfrom verlite.main_ppo import main\ncode = main()"
        code += "\nfrom verlite.trainer.stop import leave\nleave(code)"
        program = ["-c", code] if before else program
        arguments = [*program, f"trainer.default_local_dir={run_dir}", *overrides]
        own = {MARK: str(run_dir), "PYTHONUNBUFFERED": "1"}
        env = {**os.environ, **own, **(environment or {})}
        self.process: subprocess.Popen[bytes] | Forked
        with log.open("w") as out:
            if forked:
                self.process = Forked(arguments, out, env)
            else:
                self.process = subprocess.Popen(
                    [sys.executable, *arguments], stdout=out, stderr=subprocess.STDOUT, env=env
                )

    def wait(self, seconds: float = 240) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running after {seconds} s:\n{self.text()}") from None

    def text(self) -> str:
        return self.log.read_text()

    def metrics(self) -> list[dict]:
        """Return the lines of metrics.jsonl, whose keys docs/metrics.md must have."""
        path = self.run_dir / "metrics.jsonl"
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return [metrics_page.documented(line) for line in lines]

    def until_step(self, step: int, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not any(line["step"] >= step for line in self.metrics()):
            assert self.process.poll() is None, f"ended before step {step}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no step {step} within {seconds} s:\n{self.text()}"
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        """Return all live processes of this launch."""
        return processes_of(self.run_dir)

    def assert_nothing_left(self, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not [(p.pid, p.name()) for p in self.processes()]


def launch(folder: Path, name: str, base: Sequence[str], *more: str, before: str = "") -> Launch:
    """Start a run whose directory and log are in `folder`; see `Launch`."""
    return Launch(folder / name, [*base, *more], folder / f"{name}.log", before, forked=True)


def words(run: Launch) -> str:
    """Return the output of the run, without line breaks."""
    return " ".join(run.text().split())


def wait_for(condition: Callable[[], object], run: Launch, seconds: float = 120) -> None:
    """Wait until a condition holds, while the run goes on."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert run.process.poll() is None, run.text()
        assert time.monotonic() < deadline, run.text()
        time.sleep(0.05)


def samples_of(run: Launch) -> dict[int, list[dict]]:
    """Return the records of each step's samples."""
    found = {}
    for path in run.run_dir.glob("rollouts/step_*.jsonl"):
        step = int(path.stem.removeprefix("step_"))
        found[step] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


def one_thread(patch: pytest.MonkeyPatch) -> None:
    """Choose one thread for each process of a run, as its user would."""
    patch.setenv(threads.COUNT, "1")
    patch.delenv(threads.OURS)  # the tests' own choice, which a run divides again


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return all live processes of the runs in a folder, which may be the directory of one run.

    An environment variable identifies them.
    """
    found = []
    for process in psutil.process_iter():
        try:
            run_dir = process.environ().get(MARK)
            if (
                run_dir is not None
                and Path(run_dir).is_relative_to(folder)
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def quiet(line: dict) -> dict:
    """Return a step's metrics without those that differ between equal runs."""
    return {key: value for key, value in line.items() if not key.startswith(NOISY)}
