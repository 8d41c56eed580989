"""What a worker's process does before its worker is built."""

import gc

import pytest

from verlite.controller.host import import_ahead


@pytest.mark.parametrize("collects", [True, False])
def test_imports_ahead_say_nothing_and_leave_the_collector_as_it_was(collects):
    (gc.enable if collects else gc.disable)()
    try:
        import_ahead("verlite.nowhere", "json")
        assert gc.isenabled() == collects
    finally:
        gc.enable()
