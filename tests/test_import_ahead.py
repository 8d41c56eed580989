"""Imports before they are needed."""

import gc
import subprocess
import sys

import pytest

from verlite.importing import import_ahead
from verlite.trainer.launch import preloads
from verlite.workers.roles import ROLES


@pytest.mark.parametrize("was_enabled", [True, False])
def test_import_ahead_ignores_errors_and_leaves_later_collections_little(was_enabled):
    if was_enabled:
        gc.enable()
    else:
        gc.disable()
    try:
        import_ahead("verlite.nowhere", "json")
        assert gc.isenabled() == was_enabled
        assert not gc.get_objects(2), "later collections look at what exists now"
    finally:
        gc.unfreeze()
        gc.enable()


def test_nothing_is_left_frozen_when_a_program_ends():
    """nanobind's libraries, such as triton, print 30 lines about objects that are left then."""
    code = (
        "import atexit, gc\nfrom verlite.importing import import_ahead\n"
        "atexit.register(lambda: print(gc.get_freeze_count()))\n"
        "import_ahead('json')\nprint(gc.get_freeze_count() > 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["True", "0"], done.stderr


@pytest.mark.slow
def test_workers_import_no_engine_tracker_or_web_server_ahead():
    """vLLM belongs to the rollout workers that use it."""
    modules = sorted({module for role in ROLES for module in preloads(role)})
    code = (
        f"import sys\nfrom verlite.importing import import_ahead\nimport_ahead(*{modules!r})\n"
        "heavy = {'vllm', 'wandb', 'fastapi', 'uvicorn', 'hydra', 'omegaconf', 'verlite.config'}\n"
        f"print({modules!r} == [m for m in {modules!r} if m in sys.modules])\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["True", "[]"], done.stderr
