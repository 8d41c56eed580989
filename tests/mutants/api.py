"""Mutants of verlite.api: runs from Python that differ from those of the commands."""

import sys
from contextlib import contextmanager
from dataclasses import replace

from tests.mutants import Mutant
from tests.mutants.patches import calls, does_nothing

API = "verlite.api:"
LIBRARY = ("tests/api/test_library.py",)


def _first_wins(original, self, overrides):
    changed = original(self, overrides)
    added = changed.overrides[len(self.overrides) :]
    return replace(changed, overrides=(*added, *self.overrides))


@contextmanager
def _leaves_the_folder(original, config, reward, env, folder):
    with original(config, reward, env, folder) as whole:
        yield whole
    sys.path.insert(0, str(folder))


MUTANTS = [
    Mutant(
        "overrides do not replace earlier ones",
        API + "RunConfig.override",
        calls(_first_wins),
        LIBRARY,
    ),
    Mutant(
        "mistakes in a configuration are found by train only",
        API + "RunConfig.__post_init__",
        does_nothing,
        LIBRARY,
    ),
    Mutant(
        "functions leave a folder on the Python path",
        "verlite.api:with_own_code",
        calls(_leaves_the_folder),
        LIBRARY,
    ),
]
