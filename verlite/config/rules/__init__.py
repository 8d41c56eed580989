"""Everything a run needs beyond key names and types. `check` finds every violation and starts
nothing.

The schema's fields declare what is legal for a single key (`values`). Rules between keys are rows
of one table (`errors`). Rules that compute their message, or read files, are one small function
each, in a module per subject.
"""

from collections.abc import Collection
from dataclasses import replace

from verlite.config.problems import Problem
from verlite.config.rules import algorithm, code, data, declared, devices, errors, models, trainer
from verlite.config.rules.context import KEYS, Context
from verlite.config.schema import Config

RULES = (
    data.files_are_named,
    errors.between_keys,
    algorithm.mini_batches,
    algorithm.micro_batches,
    algorithm.dynamic_sampling,
    models.settings,
    models.optimizers,
    algorithm.gdpo,
    algorithm.score_scale,
    algorithm.rollout_correction,
    devices.groups,
    devices.placement,
    devices.engines,
    devices.weight_transport,
    devices.sharding,
    devices.sequence_parallel,
    devices.idle_devices,
    devices.servers,
    devices.engine_kwargs,
    devices.visible_devices,  # after all rules that a broken placement silences
    trainer.length_and_resume,
    trainer.addresses,
    trainer.environment,
    devices.engine_is_installed,
    trainer.debugger_is_installed,
    trainer.trackers_are_installed,
)
FILE_RULES = (
    data.data_files,
    models.model_folders,
    models.model_fits,
    models.adapters,
    models.tokenizer,
    code.reward_function,
    code.agent_program,
    code.own_functions,
    code.own_engine,
    code.own_data,
    trainer.run_directory,
)
LOCAL_RULES = (
    *(rule for rule in FILE_RULES if rule is not models.model_fits),
    devices.visible_devices,
    devices.engine_is_installed,
    trainer.debugger_is_installed,
    trainer.trackers_are_installed,
)
"""Rules about this machine's files, packages and devices."""


def check(config: Config, user_keys: Collection[str] = (), files: bool = True) -> list[Problem]:
    """Return every violation. Those of LOCAL_RULES are marked as local.

    Args:
        config: the whole configuration.
        user_keys: keys that the user set.
        files: also check files and folders.
    """
    problems = [*declared.names(config, KEYS), *declared.numbers(config, KEYS)]
    context = Context(config, user_keys, {problem.key for problem in problems})
    rules = (*RULES, *FILE_RULES) if files else RULES
    for rule in rules:
        found = [problem for problem in rule(context) if problem.key not in context.broken]
        context.broken.update(problem.key for problem in found)
        problems += [replace(problem, is_local=rule in LOCAL_RULES) for problem in found]
    return problems
