"""Packages that are imported when a test uses them.

Each process of pytest-xdist reads all files of tests and runs some of them. A client of a service
takes a second or two to import.
"""

import importlib
from typing import Any


class Later:
    """A package whose first use imports it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks what in a file is a test
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
