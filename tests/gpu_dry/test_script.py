"""recipes/benchmark/gpu.py, as a person with one GPU types it, on a simulated GPU.

Its models are tiny; which calls it makes, and what it says of them, is what a GPU will see.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "recipes/benchmark/gpu.py"
CHECKS = [
    *("attention", "ipc", "training", "trees", "memory", "fingerprints", "checkpoint", "adapters"),
    *("plan", "compiled"),
]
MEASUREMENTS = ["machine", "1.5b", "cumem", "1.5b-hf"]
SKIPPED = {"kernels": "torch's profiler sees no kernels here: CUPTI did not start"}
if find_spec("vllm") is None:
    SKIPPED["sleep and wake"] = "no cumem_allocator*.so was carried"


def rows_of(
    parts: list[str], folder: Path, failed: Sequence[str] = (), **variables: str
) -> list[dict[str, Any]]:
    """Run parts to their end, in which only the rows `failed` fail. Return each row."""
    strict = {"DRY_STRICT": "1", "DRY_GPUS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--size", "tiny", "--out", folder, "--parts", *parts],
        env=os.environ | strict | variables,
        capture_output=True,
        text=True,
    )
    rows = [json.loads(line) for line in (folder / "gpu.jsonl").read_text().splitlines()]
    bad = [row for row in rows if "error" in row or row.get("status") == "failed"]
    assert [row["row"] for row in bad] == list(failed), bad
    assert done.returncode == bool(failed), done.stderr[-3000:]
    assert list(dict.fromkeys(row["part"] for row in rows)) == parts
    assert all(row["row"] in done.stdout for row in rows)
    return [row for row in rows if row["row"] != "process"]


def test_every_check_passes(tmp_path: Path) -> None:
    """Those that need a GPU, too: the CPU's runs of these checks skip them."""
    rows = rows_of(CHECKS, tmp_path)
    assert {row["status"] for row in rows} == {"passed"}


def test_a_bug_that_changes_no_value_fails_its_check(tmp_path: Path) -> None:
    bug = "gpu_dry/offloaded tensors stay in pageable memory"
    failed = "offload, share of host memory that is not pinned"
    rows = rows_of(["memory"], tmp_path, [failed], VERLITE_MUTANT=bug)
    assert {row["status"] for row in rows if row["row"] != failed} == {"passed"}


def test_a_refused_handle_fails_the_trial_at_once(tmp_path: Path) -> None:
    """On a machine where processes cannot share memory, the script says why and goes on."""
    trial = "trial before the first sync, failures"
    (row,) = rows_of(["ipc"], tmp_path, [trial], DRY_IPC="0")
    assert row["row"] == trial
    assert "reads on the same device: AcceleratorError: CUDA error" in row["reason"]


def test_engine_and_measurements(tmp_path: Path) -> None:
    rows = rows_of(["hf", *MEASUREMENTS], tmp_path)
    hf = [row for row in rows if row["part"] == "hf"]
    assert len(hf) == 20 and {row["status"] for row in hf} == {"passed"}
    assert {row["row"]: row["skipped"] for row in rows if "skipped" in row} == SKIPPED
    found = {(row["part"], row["row"]): row for row in rows}
    assert found["1.5b", "load"]["device"] == "NVIDIA H100 80GB HBM3"
    assert found["1.5b", "update"]["head_fused"] and found["1.5b", "log-probs"]["head_fused"]
    assert found["1.5b", "update"]["peak_gib"] > found["1.5b", "update"]["held_gib"] > 0
