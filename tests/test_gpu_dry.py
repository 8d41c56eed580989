"""The GPU's code paths on a CUDA that is not there, where an environment for them exists."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHON = Path(os.environ.get("GPU_DRY", ROOT / "build/gpu-dry"), "bin/python")

pytestmark = pytest.mark.process


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="needs Linux and cc")
@pytest.mark.skipif(
    not PYTHON.exists(), reason="no build of torch for CUDA; `make gpu-dry` runs it"
)
@pytest.mark.parametrize("tests", ["not test_runs", "test_runs"])
def test_gpu_dry(tests: str) -> None:
    command = [PYTHON, "-m", "tests.gpu_dry", "-k", tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
