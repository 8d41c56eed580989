"""The compatibility package is switched on for a test, and leaves no trace in the next one."""

import sys
from collections.abc import Iterator

import pytest

from verlite.importing import VERL_VARIABLE


def forget() -> None:
    sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != "verlite.compat"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]


@pytest.fixture
def compat(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget()
    path = list(sys.path)
    monkeypatch.setenv(VERL_VARIABLE, "1")
    yield
    sys.path[:] = path
    forget()
