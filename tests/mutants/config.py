"""Mutants of verlite.config: wrong settings that pass, and right ones that do something else."""

import dataclasses
import re

from tests.mutants import Mutant
from tests.mutants.patches import (
    argument,
    attribute,
    calls,
    constant,
    does_nothing,
    result,
    returns,
)
from verlite.spec.catalog import load

RULES = "verlite.config.rules."
PLAN = "verlite.config.plan:"
PLACEMENT = "verlite.config.placement:"
LINES = "tests/config/test_rules.py"
PLANS = "tests/config/test_plan.py"
CRITICAL = "tests/config/test_critical.py"
NOTES = "verlite.config.rules.notes:"
FAR = "tests/config/test_notes.py"


def _nothing_wrong(original, context):
    return iter(())


def _one_bound_is_enough(original, value, bound):
    return any(original(value, part) for part in bound.split(" and "))


def _samples_as_prompts(original, config, *args, **kwargs):
    plan = original(config, *args, **kwargs)
    mini = plan.actor.mini_rows // plan.samples_per_prompt
    return dataclasses.replace(plan, actor=dataclasses.replace(plan.actor, mini_rows=mini))


def _exclusive_ranges(original, text, segment):
    first, last = original(text, segment)
    return first, last - 1


MUTANTS = [
    Mutant(
        "escape sequences of outside text reach the terminal",
        "verlite.terminal:CONTROL",
        constant(re.compile("(?!)")),
        ("tests/test_terminal.py",),
    ),
    Mutant(
        "a key is refused although it has verl's default",
        "verlite.config.translation:is_default",
        result(lambda found: False),
        ("tests/config/test_aliases.py",),
    ),
    Mutant(
        "trainer.total_training_steps replaces the epochs",
        PLAN + "run_length",
        calls(
            lambda original, rows, batch, epochs, steps: (
                rows // batch,
                steps or epochs * (rows // batch),
            )
        ),
        (PLANS, "tests/sft/test_train.py"),
    ),
    Mutant(
        "a default of verl's in a file is lost if it is the only name of its key",
        "verlite.config.load:_Builder._assign_verls_own",
        does_nothing,
        ("tests/config/test_verl_files.py",),
    ),
    Mutant(
        "mini-batches need not divide the batch",
        RULES + "algorithm:mini_batches",
        calls(_nothing_wrong),
        (LINES,),
    ),
    Mutant(
        "rules between keys are not checked",
        RULES + "errors:between_keys",
        calls(_nothing_wrong),
        (LINES,),
    ),
    Mutant(
        "one of two bounds is enough",
        RULES + "declared:within",
        calls(_one_bound_is_enough),
        (LINES,),
    ),
    Mutant(
        "a user's own function is not looked for",
        RULES + "code:own_functions",
        calls(_nothing_wrong),
        (LINES,),
    ),
    Mutant(
        "keys without effect pass silently",
        RULES + "declared:keys_without_effect",
        result(lambda found: {}),
        ("tests/config/test_ineffective.py",),
    ),
    Mutant(
        "secrets are shown",
        "verlite.masking:is_secret",
        calls(lambda original, key, value: False),
        ("tests/config/test_load.py",),
    ),
    Mutant("mini-batches count samples", PLAN + "make_plan", calls(_samples_as_prompts), (PLANS,)),
    Mutant(
        "a KL term needs no reference",
        PLAN + "needs_reference",
        calls(lambda original, config: False),
        (PLANS,),
    ),
    Mutant(
        "the teacher is a copy of the policy",
        "verlite.config.compile:teacher_model_spec",
        calls(
            lambda original, config: load("verlite.config.compile:model_spec")(
                config.actor_rollout_ref.model
            )
        ),
        (PLANS,),
    ),
    Mutant(
        "old log-probs are skipped although several updates need them",
        PLAN + "_needs_old_log_probs",
        calls(lambda original, *args: False),
        (PLANS,),
    ),
    Mutant(
        "hidden GPUs count",
        "verlite.machine:visible_gpus",
        calls(lambda original, *args: 8),
        ("tests/config/test_machine.py",),
    ),
    Mutant(
        "device ranges exclude their end",
        PLACEMENT + "_range",
        calls(_exclusive_ranges),
        ("tests/config/test_placement.py",),
    ),
    Mutant(
        "a preset of rollout correction has no effect",
        "verlite.spec.correction:settings",
        argument("config", attribute("preset", lambda preset: None)),
        ("tests/config", "tests/algorithms/test_rollout_correction.py"),
    ),
    Mutant(
        "a run resumes with other contents of its training files",
        "verlite.config.critical:contents",
        result(lambda digests: [""] * len(digests)),
        (CRITICAL,),
    ),
    Mutant(
        "variables that a shell did not expand go unnoticed",
        NOTES + "SHELL_VARIABLE",
        constant(re.compile("never^")),
        (FAR,),
    ),
    Mutant("empty ground truths are not counted", NOTES + "is_empty", returns(False), (FAR,)),
]
