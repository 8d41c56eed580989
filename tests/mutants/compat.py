"""Mutants of verlite.compat and of the keys that lead to it."""

from tests.mutants import Mutant
from tests.mutants.patches import argument, calls

MANAGERS = "verlite.compat.managers:"

MUTANTS = [
    Mutant(
        "settings of a user's data set do not reach it",
        "verlite.config.verl_code:_own_setting",
        calls(lambda original, one, command, remarks: one),
        ("tests/compat/test_datasets.py",),
    ),
    Mutant(
        "the penalty on long responses begins one token late",
        MANAGERS + "DAPORewardManager.reward",
        argument("length", lambda length: length - 1),
        ("tests/compat/test_managers.py",),
    ),
    Mutant(
        "arguments of the reward function go to the manager",
        "verlite.config.verl_code:KWARGS",
        lambda original: "no_such_key.",
        ("tests/compat/test_keys.py",),
    ),
]
