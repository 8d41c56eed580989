"""Mutants of verlite.report: runs and pages that show something else than what happened."""

from tests.mutants import Mutant
from tests.mutants.patches import argument, calls, result, returns
from verlite.spec.roles import ModelSpec

RUNS = "verlite.report.runs:"
LS = ("tests/report/test_ls.py",)
COLLECT = "verlite.report.page:"
PAGE = ("tests/report/test_page.py",)


def _as_recorded(original, checkpoint, base):
    return ModelSpec(**checkpoint.state()["model"])


MUTANTS = [
    Mutant(
        "a checkpoint chooses its model, and whether the model's code is run",
        "verlite.report.export:_model",
        calls(_as_recorded),
        ("tests/report/test_export.py",),
    ),
    Mutant("a run that was killed counts as running", RUNS + "is_locked", returns(True), LS),
    Mutant(
        "the page shows samples of an earlier run in the same folder",
        COLLECT + "_samples",
        argument("last", lambda last: 10**9),
        PAGE,
    ),
    Mutant(
        "a point of a long run's curve has the value of one step",
        COLLECT + "thin_steps",
        result(lambda found: (found[0], found[3], *found[2:])),
        PAGE,
    ),
]
