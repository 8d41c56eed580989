"""Python imports this at every start while its folder is on PYTHONPATH: see
tests/mutants/plant.py."""

import os

if "VERLITE_MUTANT" in os.environ:
    from tests.mutants.plant import install

    install()
