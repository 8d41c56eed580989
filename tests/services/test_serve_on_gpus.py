"""`verlite serve` where the machine has GPUs."""

import os

import pytest
from typer.testing import CliRunner

from tests.envs.retriever import free_port
from verlite import machine
from verlite.cli import app
from verlite.rollout.servers import command


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch):
    monkeypatch.setattr(machine, "visible_gpus", lambda: 1)


def test_generation_has_a_gpus_dtype_and_share(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(command, "missing_plugin", lambda: None)
    monkeypatch.setattr(os, "execve", lambda path, words, env: started.append(words))
    line = ["serve", "generation", "--model_path", str(tmp_path), "--port", str(free_port())]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    line = " ".join(started[0])
    assert "dtype=bfloat16" in line and "gpu-memory-utilization" in line
    assert "kv-cache-memory-bytes" not in line


def test_a_reference_needs_as_many_gpus_as_it_has_ranks(tmp_path):
    line = ["serve", "reference", "--model_path", str(tmp_path), "--device", "cuda"]
    result = CliRunner().invoke(app, [*line, "--tensor_parallel_size", "2"])
    assert result.exit_code and "this machine has 1 visible GPUs" in " ".join(result.output.split())
