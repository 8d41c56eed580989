"""Imports before they are needed."""

import gc

import pytest

from verlite.controller.worker_actor import import_ahead


@pytest.mark.parametrize("was_enabled", [True, False])
def test_import_ahead_ignores_errors_and_restores_garbage_collection(was_enabled):
    if was_enabled:
        gc.enable()
    else:
        gc.disable()
    try:
        import_ahead("verlite.nowhere", "json")
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
