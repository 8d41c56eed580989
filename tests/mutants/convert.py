"""Mutants of verlite.convert: commands that train something else without a word."""

from tests.mutants import Mutant
from tests.mutants.patches import calls, does_nothing, returns

CONVERT = "verlite.convert."
OPENRLHF = ("tests/convert/test_openrlhf.py",)
TRL = ("tests/convert/test_trl.py",)


def _responses_as_prompts(original, draft):
    original(draft)
    size = draft["train_batch_size"]
    draft.values["actor_rollout_ref.actor.ppo_mini_batch_size"] = size


def _defaults_as_verlites(original, draft, row, value):
    if row.name in draft.given:
        original(draft, row, value)


def _updates_as_steps(original, draft, key, value, count, note):
    original(draft, key, value, 1, note)


MUTANTS = [
    Mutant(
        "OpenRLHF's responses per update are taken for prompts",
        CONVERT + "openrlhf:FORMULAS",
        lambda formulas: tuple(
            calls(_responses_as_prompts)(f) if f.__name__ == "batches" else f for f in formulas
        ),
        OPENRLHF,
    ),
    Mutant(
        "another framework's defaults are left to verlite",
        CONVERT + "engine:_copy",
        calls(_defaults_as_verlites),
        OPENRLHF,
    ),
    Mutant(
        "settings that change training are dropped",
        CONVERT + "engine:Draft.refuse",
        does_nothing,
        OPENRLHF,
    ),
    Mutant(
        "TRL's updates are taken for training steps",
        CONVERT + "trl:_every",
        calls(_updates_as_steps),
        TRL,
    ),
    Mutant(
        "a variable that changes is taken for a literal",
        CONVERT + "trl_read:_constants",
        returns({"n": 4}),
        TRL,
    ),
]
