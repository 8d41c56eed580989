"""The order of calls in a weight sync, and the state after a failed one."""

from types import SimpleNamespace

import pytest

from tests.trainer.test_stages import fake_run
from verlite.trainer.stages.weights import sync_weights


class Calls(list):
    """A role that records its calls. The call named by `fails` raises."""

    def __init__(self, book, name, fails=None):
        self.book, self.name, self.fails = book, name, fails

    def __getattr__(self, method):
        def call(*arguments):
            self.book.append((self.name, method, *arguments))
            if method == self.fails:
                raise RuntimeError(method)
            return EXPORTED if method == "export_weights" else None

        return call


EXPORTED = [SimpleNamespace(bytes=7)]
IN_ORDER = [
    ("actor", "export_weights"),
    ("rollout", "load_weights", EXPORTED, 4),
    ("actor", "release_export"),
]


def synced(fails=None):
    book = []
    return book, fake_run(
        actor=Calls(book, "actor"), rollout=Calls(book, "rollout", fails), version=3
    )


def test_weight_sync_exports_loads_and_then_releases_the_copy():
    book, run = synced()
    sync_weights(run)
    assert book == IN_ORDER
    assert run.version == 4 and run.metrics == {"perf/weight_sync_bytes": 7.0}


def test_a_failed_weight_sync_does_not_change_the_version():
    book, run = synced("load_weights")
    with pytest.raises(RuntimeError, match="load_weights"):
        sync_weights(run)
    assert run.version == 3 and book == IN_ORDER[:2]
