"""The GPU's code paths on a simulated CUDA, where an environment for them exists."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_dry.branches import places, read_page

ROOT = Path(__file__).parent.parent
PYTHON = Path(os.environ.get("GPU_DRY", ROOT / "build/gpu-dry"), "bin/python")
FILES = sorted(path.stem.removeprefix("test_") for path in ROOT.glob("tests/gpu_dry/test_*.py"))


def missing() -> str | None:
    """Return why these tests cannot run here."""
    if sys.platform != "linux" or not shutil.which("cc"):
        return "needs Linux and cc"
    return None if PYTHON.exists() else "no build of torch for CUDA; `make gpu-dry` runs it"


@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("file", FILES)
def test_gpu_dry(file: str) -> None:
    command = [PYTHON, "-m", "tests.gpu_dry", f"tests/gpu_dry/test_{file}.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_the_page_lists_each_place_that_depends_on_a_gpu() -> None:
    rows = read_page()
    assert list(rows) == list(places()), "run python -m tests.gpu_dry.branches"
    assert "never" not in rows.values()
