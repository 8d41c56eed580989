"""recipes/benchmark/gpu.py, as a person with one GPU types it, on a simulated GPU.

Its models are tiny; which calls it makes, and what it says of them, is what a GPU will see.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(560)
SCRIPT = Path(__file__).parents[2] / "recipes/benchmark/gpu.py"
CHECKS = [
    *("attention", "ipc", "training", "trees", "memory", "fingerprints", "checkpoint", "adapters"),
    *("plan", "compiled"),
]
MEASUREMENTS = ["machine", "1.5b", "cumem", "1.5b-hf"]
SKIPPED = {"kernels": "torch's profiler sees no kernels here: CUPTI did not start"}
if find_spec("vllm") is None:
    SKIPPED["sleep and wake"] = "no cumem_allocator*.so was carried"


def rows_of(parts: list[str], folder: Path) -> list[dict[str, Any]]:
    """Run parts to their end. Return each row that they wrote."""
    command = [sys.executable, SCRIPT, "--size", "tiny", "--out", folder, "--parts", *parts]
    done = subprocess.run(
        command,
        env=os.environ | {"DRY_STRICT": "1", "DRY_GPUS": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=550,
    )
    rows = [json.loads(line) for line in (folder / "gpu.jsonl").read_text().splitlines()]
    bad = [row for row in rows if "error" in row or row.get("status") == "failed"]
    assert done.returncode == 0, bad or done.stderr[-3000:]
    assert list(dict.fromkeys(row["part"] for row in rows)) == parts
    assert all(row["row"] in done.stdout for row in rows)
    return [row for row in rows if row["row"] != "process"]


def test_every_check_passes(tmp_path: Path) -> None:
    """Those that need a GPU, too: the CPU's runs of these checks skip them."""
    rows = rows_of(CHECKS, tmp_path)
    assert {row["status"] for row in rows} == {"passed"}


def test_engine_and_measurements(tmp_path: Path) -> None:
    rows = rows_of(["hf", *MEASUREMENTS], tmp_path)
    hf = [row for row in rows if row["part"] == "hf"]
    assert len(hf) == 20 and {row["status"] for row in hf} == {"passed"}
    assert {row["row"]: row["skipped"] for row in rows if "skipped" in row} == SKIPPED
    found = {(row["part"], row["row"]): row for row in rows}
    assert found["1.5b", "load"]["device"] == "NVIDIA H100 80GB HBM3"
    assert found["1.5b", "update"]["peak_gib"] > found["1.5b", "update"]["held_gib"] > 0
