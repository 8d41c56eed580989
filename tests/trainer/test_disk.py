"""A whole run whose disk is full for some steps, and then becomes read-only.

Metrics and samples are kept and written later. Failed saves stop the run only after
trainer.max_failed_saves in a row. Mounting needs root.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.runs import Launch, write_reward, write_sums

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

AFTER_STEP = """
import os, subprocess
from verlite.trainer.tracking import Tracking
log = Tracking.log
def fill():
    with open(DISK + "/filler", "wb", buffering=0) as filler:
        for size in (1 << 20, 4096):
            try:
                while True:
                    filler.write(bytes(size))
            except OSError:
                pass
def free():
    os.unlink(DISK + "/filler")
def protect():
    subprocess.run(["mount", "--bind", RUN, RUN], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", RUN], check=True)
def then(self, step, metrics):
    if step in BEFORE:
        BEFORE[step]()
    log(self, step, metrics)
    if step in AFTER:
        AFTER[step]()
Tracking.log = then
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "verlite-test", str(folder)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if made.returncode:
        pytest.skip(f"this process may not mount a disk: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        for mounted in (folder / "run", folder):
            subprocess.run(["umount", "-l", str(mounted)], capture_output=True, check=False)


def test_a_full_and_a_read_only_disk_cost_checkpoints_alone(
    tmp_path: Path, disk: Path, tiny_qwen2: str
) -> None:
    run_dir = disk / "run"
    reward = write_reward(tmp_path / "reward.py", "return sum(c.isdigit() for c in solution_str)")
    options = [
        f"data.train_files={write_sums(tmp_path / 'train.parquet', 64)}",
        f"custom_reward_function.path={reward}",
        f"actor_rollout_ref.model.path={tiny_qwen2}",
        "data.train_batch_size=4",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=1",
        "trainer.save_freq=1",
        "trainer.max_failed_saves=3",
    ]
    names = f"DISK, RUN = {str(disk)!r}, {str(run_dir)!r}\n"

    full = names + AFTER_STEP + "AFTER, BEFORE = {1: fill}, {3: free}\n"
    short = [*options, "trainer.total_training_steps=4"]
    first = Launch(run_dir, short, tmp_path / "first.log", full, forked=True)
    assert first.wait() == 0, first.text()
    text = first.text()
    assert [line["step"] for line in first.metrics()] == [1, 2, 3, 4]
    samples = sorted(path.name for path in (run_dir / "rollouts").iterdir())
    assert samples == [f"step_{step}.jsonl" for step in (1, 2, 3, 4)]
    assert all((run_dir / "rollouts" / name).stat().st_size for name in samples)
    assert sorted(path.name for path in run_dir.glob("global_step_*")) == [
        "global_step_1",
        "global_step_4",
    ]
    assert text.count("kept in memory and written once it is possible") == 1, text
    assert text.count("that were kept in memory are written") == 1, text
    assert "checkpoint of step 2 was not written" in text and "Failed saves in a row: 2" in text
    assert "0 bytes free" in text and "It needs about" in text
    assert "Older checkpoints are unchanged" in text and "Traceback" not in text
    assert (run_dir / "huggingface" / "config.json").is_file()

    read_only = names + AFTER_STEP + "AFTER, BEFORE = {5: protect}, {}\n"
    read_only += "from verlite.trainer import checkpoints\ncheckpoints.FAILED_SAVES_S = 0\n"
    long = [*options, "trainer.total_training_steps=9"]
    second = Launch(run_dir, long, tmp_path / "second.log", read_only, forked=True)
    assert second.wait() == 1, second.text()
    text = second.text()
    assert text.count("kept in memory and written once it is possible") == 1, text
    assert "checkpoint of step 7 was not written" in text and "Failed saves in a row: 2" in text
    assert "checkpoint of step 8 was not written" in text, "the error that stopped the run"
    assert "Read-only file system" in text and "not written, and lost: " in text
    assert [line["step"] for line in first.metrics()] == [1, 2, 3, 4, 5]
    assert (run_dir / "global_step_5" / "manifest.json").is_file()
    second.assert_nothing_left()
