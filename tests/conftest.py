"""Fixtures that several packages share."""

import signal

import pytest

from tests.models import tiny_model


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random 2-layer Qwen2 with untied embeddings."""
    return tiny_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random 2-layer Llama with tied embeddings."""
    return tiny_model(
        tmp_path_factory.mktemp("models") / "llama", "llama", tie_word_embeddings=True
    )


def pytest_configure() -> None:
    """Restore Ctrl-C: a shell's background jobs ignore it, and so would every process they start.

    Some tests send it.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `pytest -n`: keep a file's tests in one process, because they share engines and clusters.

    Whole runs share nothing, so each of them may go to any process.
    """
    for item in items:
        if item.path.name not in ("test_runs.py", "test_golden.py"):
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
