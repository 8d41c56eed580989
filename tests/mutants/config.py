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


def _short_pattern_first(original, name, patterns):
    return min(patterns, key=len, default=None)


def _everywhere_generic(original, name, known, count=3):
    with_the_last_part = [key for key in known if key.endswith("enable")]
    return original(name, known, count) or with_the_last_part


MUTANTS = [
    Mutant(
        "escape sequences of outside text reach the terminal",
        "verlite.terminal:CONTROL",
        constant(re.compile("(?!)")),
        ("tests/test_terminal.py",),
    ),
    Mutant(
        "a short pattern of other names goes before a full name",
        "verlite.config.translation:_best",
        calls(_short_pattern_first),
        ("tests/config/test_aliases.py", "tests/config/test_sft.py"),
    ),
    Mutant(
        "unknown keys suggest keys of other sections",
        "verlite.config.problems:nearest",
        calls(_everywhere_generic),
        ("tests/config/test_load.py",),
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
        "commands of verl's SFT get verlite's schedule",
        "verlite.config.translation:Tables.style",
        returns((None, "")),
        ("tests/config/test_sft.py",),
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
        "a token budget may be smaller than the longest sequence",
        RULES + "algorithm:micro_batches",
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
        "an engine may reach over machines",
        RULES + "devices:engines",
        calls(_nothing_wrong),
        (LINES,),
    ),
    Mutant(
        "data files are not looked at", RULES + "data:data_files", calls(_nothing_wrong), (LINES,)
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
        "distillation has no teacher's role",
        PLAN + "computes_teacher",
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
        "every estimator needs a critic",
        PLAN + "needs_critic",
        calls(lambda original, config: True),
        (PLANS,),
    ),
    Mutant(
        "old log-probs are skipped although several updates need them",
        PLAN + "_needs_old_log_probs",
        calls(lambda original, *args: False),
        (PLANS,),
    ),
    Mutant(
        "the actor with adapters is not the reference",
        PLAN + "reference_is_actor",
        calls(lambda original, config: False),
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
        "an unknown key has no suggestion",
        "verlite.config.problems:nearest",
        result(lambda names: []),
        ("tests/config/test_load.py",),
    ),
    Mutant(
        "a preset of rollout correction has no effect",
        "verlite.spec.correction:settings",
        argument("config", attribute("preset", lambda preset: None)),
        ("tests/config", "tests/algorithms/test_rollout_correction.py"),
    ),
    Mutant(
        "SFT accepts a broken configuration",
        RULES + "models:model_settings",
        does_nothing,
        ("tests/config/test_sft.py", LINES),
    ),
    Mutant(
        "a run resumes with other contents of its training files",
        "verlite.config.critical:contents",
        result(lambda digests: [""] * len(digests)),
        (CRITICAL,),
    ),
    Mutant(
        "changed files of the user's own go unnoticed",
        "verlite.config.critical:code_contents",
        returns({}),
        (CRITICAL,),
    ),
    Mutant(
        "functions that verlite.train stores count as changed files",
        "verlite.config.critical:CODE",
        constant("elsewhere"),
        (CRITICAL,),
    ),
    Mutant(
        "changed secrets are reported with their values",
        "verlite.masking:is_secret",
        returns(False),
        (CRITICAL,),
    ),
    Mutant("no value is far from what anyone uses", NOTES + "USUAL", constant(()), (FAR,)),
    Mutant("values of keys without effect are judged", NOTES + "why_unused", returns(None), (FAR,)),
    Mutant(
        "variables that a shell did not expand go unnoticed",
        NOTES + "SHELL_VARIABLE",
        constant(re.compile("never^")),
        (FAR,),
    ),
    Mutant(
        "any quote in a value counts as a mistake",
        NOTES + "QUOTED",
        constant(re.compile(".*'.*")),
        (FAR,),
    ),
    Mutant("empty ground truths are not counted", NOTES + "is_empty", returns(False), (FAR,)),
    Mutant(
        "only the first ground truths are looked at", NOTES + "TRUTH_ROWS", constant(100), (FAR,)
    ),
]
