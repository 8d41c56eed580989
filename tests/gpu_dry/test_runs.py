"""Whole runs under Ray on simulated GPUs, beside the same runs on the CPU."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import Launch, digits, one_thread, quiet, samples_of, words

FLOAT32 = (
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
)
SUMS = {"rel": 1e-6, "abs": 1e-6}
"""Float32 sums of numbers up to 10 in other orders (eps is 1.2e-7): attention on a GPU is another
function than on a CPU. Losses are sums of terms that cancel, so what is absolute decides."""


def run(folder: Path, name: str, *options: str) -> Launch:
    started = Launch(folder / name, [*options], folder / f"{name}.log")
    assert started.wait(1000) == 0, started.text()
    return started


def assert_same(run: Launch, expected: Launch) -> None:
    """Every metric without clocks and memory, and every sample's text, score and advantage."""
    assert len(run.metrics()) == len(expected.metrics())
    for line, other in zip(run.metrics(), expected.metrics(), strict=True):
        assert quiet(line) == pytest.approx(quiet(other), **SUMS)
    samples, others = samples_of(run), samples_of(expected)
    assert samples.keys() == others.keys()
    for step in samples:
        for row, other in zip(samples[step], others[step], strict=True):
            for key in ("uid", "response", "score", "status", "weight_version"):
                assert row[key] == other[key], (step, key)
            assert row["tokens"]["advantage"] == pytest.approx(other["tokens"]["advantage"])


@pytest.fixture(autouse=True)
def strict(monkeypatch: Any) -> None:
    """A fault or a kernel that was not computed ends its process, and thereby the run."""
    monkeypatch.setenv("DRY_STRICT", "1")
    one_thread(monkeypatch)


def test_two_gpus_equal_the_cpu(tiny_qwen2: str, tmp_path: Path, monkeypatch: Any) -> None:
    """FSDP2 and two engines of hf: their trial of ipc fails, weights go by shared memory. A
    checkpoint; resumed, by ipc."""
    base = [
        *digits(tmp_path, tiny_qwen2),
        *FLOAT32,
        "actor_rollout_ref.rollout.weight_probe=always",
        "trainer.n_gpus_per_node=2",
        "trainer.save_freq=1",
        "trainer.test_freq=-1",
        "ray_kwargs.ray_init.address=local",
    ]
    two = "trainer.total_training_steps=2"
    cpu = run(tmp_path, "cpu", *base, "trainer.device=cpu", two)
    base.append("trainer.device=cuda")
    with monkeypatch.context() as refused:
        refused.setenv("DRY_IPC", "0")
        one = run(tmp_path, "cuda", *base, "trainer.total_training_steps=1")
    said = words(one)
    assert "ipc. If its trial fails: shared_memory" in said, "the plan"
    assert said.count("weight sync: shared_memory. The trial of ipc failed: Accelerator") == 1, said
    assert "The trial of ipc succeeded" not in said
    gpus = run(tmp_path, "cuda", *base, two)
    assert "resumed from" in gpus.text()
    assert words(gpus).count("weight sync: ipc. The trial of ipc succeeded") == 1
    assert_same(gpus, cpu)


MEETS_ALONE = """
import torch
import torch.distributed as dist

def loss(inputs):
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1, device=inputs.advantages.device))
    return inputs.total(-inputs.advantages * inputs.log_ratio.exp()), {}
"""


def test_engines_on_gpus_of_their_own(tiny_qwen2: str, tmp_path: Path) -> None:
    """Each process has the GPU that Ray gave it: NCCL refuses two ranks on one. Weights travel by
    collective. A rank that skips a collective ends the run within trainer.phase_timeout_s."""
    base = [
        *digits(tmp_path, tiny_qwen2),
        *FLOAT32,
        "trainer.n_gpus_per_node=4",
        "cluster.component_placement={rollout: 0-1, actor: 2-3}",
        "actor_rollout_ref.rollout.weight_transport=collective",
        "trainer.total_training_steps=2",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "ray_kwargs.ray_init.address=local",
    ]
    cpu = run(tmp_path, "cpu", *base, "trainer.device=cpu")
    base.append("trainer.device=cuda")
    gpus = run(tmp_path, "cuda", *base)
    assert_same(gpus, cpu)
    (tmp_path / "meets_alone.py").write_text(MEETS_ALONE)
    base += [
        "actor_rollout_ref.actor.policy_loss.loss_mode=meets_alone:loss",
        "trainer.phase_timeout_s=30",
        "trainer.heartbeat_timeout_s=5",
    ]
    path = {"PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"}
    stuck = Launch(tmp_path / "stuck", base, tmp_path / "stuck.log", environment=path)
    assert stuck.wait(1000) == 76, stuck.text()
    assert "actor.update made no progress for 30 s" in words(stuck), stuck.text()
    assert "meets_alone.py" in stuck.text(), "the stack of the rank that waits"
    stuck.assert_nothing_left()
