"""The notebook of the documentation runs: training twice in one process, inside an event loop."""

import asyncio
import logging
import os
import signal
import threading
import time
from contextlib import chdir
from pathlib import Path

import pytest
import ray

import verlite
from tests.api.notebook import execute
from verlite.trainer.tracking import read_lines

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def process_state():
    """Return what a library must leave alone."""
    root = logging.getLogger()
    handlers = [signal.getsignal(number) for number in NUMBERS]
    return handlers, root.level, list(root.handlers), asyncio.get_event_loop_policy(), os.getcwd()


@pytest.fixture(scope="module")
def notebook():
    """The variables of the notebook after all its cells."""
    before = process_state()
    with chdir(ROOT):
        variables = execute(ROOT / "docs" / "notebook.ipynb")
    assert process_state() == before
    assert not ray.is_initialized()
    return variables


def test_notebook_trains_evaluates_and_exports(notebook):
    result, scores = notebook["result"], notebook["scores"]
    assert (result.state, result.exit_code, result.step) == ("finished", 0, 8)
    assert [step for step, _ in scores] == list(range(1, 9))
    assert scores[-1][1] > scores[0][1] + 0.1
    assert result.checkpoint == result.run_dir / "global_step_8"
    assert (notebook["model_folder"] / "model.safetensors").is_file()
    metrics = notebook["metrics"]
    (name,) = (key for key in metrics if key.startswith("val-core/") and "mean@1" in key)
    # Greedy answers of the trained policy, scored by the function of the notebook.
    assert metrics[name] > 0.5
    assert result.step == 8


def test_interrupt_raises_and_restores_the_handlers(notebook, tmp_path):
    """Ctrl-C in step 2 or later: an ordinary KeyboardInterrupt, and no Ray is left."""
    before = process_state()
    config = notebook["config"].override(
        {
            "trainer.total_training_steps": 1000,
            "trainer.save_freq": -1,
            "trainer.default_local_dir": tmp_path / "run",
        }
    )

    def interrupt():
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            if metrics.is_file() and read_lines(metrics)[-1:] and read_lines(metrics)[-1]["step"]:
                break
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        verlite.train(config, reward=notebook["digits"])
    assert process_state() == before
    assert not ray.is_initialized()
