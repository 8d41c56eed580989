"""The GPU's code paths on a simulated CUDA, where an environment for them exists."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_dry import phases
from tests.gpu_dry.branches import places, read_page
from tests.models import tiny_model

ROOT = Path(__file__).parent.parent
PYTHON = Path(os.environ.get("GPU_DRY", ROOT / "build/gpu-dry"), "bin/python")
FILES = sorted(path.stem.removeprefix("test_") for path in ROOT.glob("tests/gpu_dry/test_*.py"))


def missing() -> str | None:
    """Return why these tests cannot run here."""
    if sys.platform != "linux" or not shutil.which("cc"):
        return "needs Linux and cc"
    return None if PYTHON.exists() else "no build of torch for CUDA; `make gpu-dry` runs it"


@pytest.mark.process
@pytest.mark.timeout(3000)
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("file", FILES)
def test_gpu_dry(file: str) -> None:
    command = [PYTHON, "-m", "tests.gpu_dry", f"tests/gpu_dry/test_{file}.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_the_page_lists_each_place_that_depends_on_a_gpu() -> None:
    rows = read_page()
    assert list(rows) == list(places()), "run python -m tests.gpu_dry.branches"
    assert "never" not in rows.values()


@pytest.mark.slow
@pytest.mark.parametrize("shape", phases.SHAPES)
def test_the_page_has_the_plan_of_today_beside_the_memory_that_was_counted(
    shape: str, tmp_path: Path
) -> None:
    rows = phases.rows(phases.PAGE.read_text(encoding="utf-8"))
    found = {phase: [int(n * 2**20) for n in sizes] for run, phase, *sizes in rows if run == shape}
    tiny_model(tmp_path / "model", **phases.MODEL)
    planned = phases.planned(tmp_path, shape)
    assert list(found) == list(planned), "run python -m tests.gpu_dry.phases"
    for phase, (shown, tensors, held) in found.items():
        assert shown == pytest.approx(planned[phase], abs=0.06 * 2**20), phase
        assert not phases.problem(phase, shown, phases.Count(tensors, held), 3)


def test_a_phase_is_its_fullest_moment_and_what_the_others_had_left() -> None:
    """The builds of actor and critic meet, also if the critic's ends first."""

    def call(
        role: str, method: str, peak: int, after: int, began: int, ended: int, device: int = 0
    ) -> phases.Call:
        sizes = 0, peak, after, 9 * peak
        return phases.Call(role, 0, method, device, *sizes, [0, 0], began, ended)

    first = [
        call("actor", "build", 7, 5, 0, 10),
        call("critic", "build", 3, 1, 5, 12),
        call("ref", "build", 4, 0, 12, 14),
    ]
    later = [
        call("rollout", "build", 90, 0, 20, 30),
        call("actor", "publish_weights", 8, 5, 40, 48),
        call("rollout", "fetch_weights", 6, 4, 42, 50),
        call("actor", "publish_weights", 9, 5, 40, 50, device=1),
        call("rollout", "generate", 10, 0, 60, 70),
        call("actor", "log_probs", 20, 5, 80, 90),
    ]
    expected = {"build": (10, 63), "sync: stream": (15, 72), "generation": (16, 90),
                "old log-probs": (21, 180), "values": (0, 0)}  # fmt: skip
    for calls in ([*first, *later], [first[1]._replace(ended=9), first[0], first[2], *later]):
        assert {name: tuple(phases.counted(calls, name, 0)) for name in expected} == expected
    count = phases.Count(1000, 1000)
    assert not phases.problem("actor update", 1009, count, 1)
    for wrong in (
        phases.problem("actor update", 1011, count, 1),
        phases.problem("actor update", 989, count, 1),
        phases.problem("actor update", 1000, phases.Count(1000, 1001 + 3 * phases.PAGES), 3),
    ):
        assert wrong.startswith("actor update: ")
