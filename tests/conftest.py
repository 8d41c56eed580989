"""Fixtures and settings shared by all tests."""

import re
import signal
import sys
from pathlib import Path

import pytest

from verlite import threads

# Tensors are tiny, and several test processes share the cores. Workers of runs that tests start
# have what they have in any run.
threads.use(1)  # before torch is loaded


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a random 2-layer Qwen2 model with untied embeddings."""
    from tests.models import tiny_model  # here: pytest-xdist's own process needs no torch

    return tiny_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a random 2-layer Llama model with tied embeddings."""
    from tests.models import tiny_model

    return tiny_model(
        tmp_path_factory.mktemp("models") / "llama", "llama", tie_word_embeddings=True
    )


def pytest_configure() -> None:
    """Restore the SIGINT handler, because some tests send Ctrl-C to the processes they start.

    Background jobs of a shell ignore SIGINT, and child processes inherit this.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


WHOLE_FILE = re.compile(r"^pytestmark = .*\bmark\.(process|slow)\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of tests that `make check` leaves out, above all those that load vLLM."""
    if config.option.markexpr != "not process and not slow" or collection_path.suffix != ".py":
        return None
    return bool(WHOLE_FILE.search(collection_path.read_text(encoding="utf-8"))) or None


def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """End the runs that a failed test has left in its folder, with their Ray."""
    runs = sys.modules.get("tests.trainer.runs")
    folder = getattr(node, "funcargs", {}).get("tmp_path")
    if runs and folder:
        for process in runs.processes_of(folder):
            process.kill()
