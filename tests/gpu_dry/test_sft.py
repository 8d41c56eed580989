"""Supervised fine-tuning on a GPU, as a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SUMS = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(8) for b in range(2, 6)]


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return what each step computed, without durations and memory."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith(("tim", "perf"))} for row in rows]


def test_a_run_and_its_resumed_twin_equal_the_cpu(tiny_qwen2: str, tmp_path: Path) -> None:
    """Losses, gradient norms and learning rates; the second half continues from a checkpoint, as
    torchrun starts it, on another GPU."""
    pq.write_table(pa.Table.from_pylist(SUMS), tmp_path / "sums.parquet")

    def train(device: str, name: str, steps: int, **variables: str) -> list[dict[str, Any]]:
        command = [
            sys.executable, "-m", "verlite.main_sft", f"data.train_files={tmp_path}/sums.parquet",
            f"model.path={tiny_qwen2}", "data.train_batch_size=8", "data.max_length=32",
            "optim.lr=1e-3", "optim.lr_scheduler_type=constant", "fsdp_config.dtype=float32",
            f"trainer.device={device}",
            "trainer.save_freq=2", f"trainer.default_local_dir={tmp_path / name}",
            f"trainer.total_training_steps={steps}", "trainer.logger=[file]",
        ]  # fmt: skip
        done = subprocess.run(
            command,
            env=os.environ | {"DRY_STRICT": "1"} | variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return lines(tmp_path / name)

    expected = train("cpu", "cpu", 4)
    assert len(expected) == 4 and expected[0] != expected[3]
    train("cuda", "gpu", 2)
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1"}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    assert train("auto", "gpu", 4, **ranks, **rendezvous) == expected
