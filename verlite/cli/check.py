"""`verlite check`: validate a training command."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verlite.cli.common import TrainingArguments, fail, load_config

if TYPE_CHECKING:
    from verlite.trainer.preflight import Findings

RL = ("main_ppo", "verlite.main_ppo", "verl.trainer.main_ppo")
SFT = (
    "main_sft",
    "verlite.main_sft",
    "verl.trainer.sft_trainer",
    "verl.trainer.sft_trainer_ray",
    "verl.trainer.fsdp_sft_trainer",
)
DPO = ("main_dpo", "verlite.main_dpo")


def check(arguments: TrainingArguments = None) -> None:
    """Validate a training command in seconds, without starting it. Exit code 2 if it is invalid.

    Then it tries in this process what the run meets first: reward function, tools, tokenizer, the
    first prompts, disk space.

    Takes the arguments of main_ppo: overrides, --config-name NAME, --config-path FOLDER. After
    "main_sft" it takes those of main_sft, after "main_dpo" those of main_dpo. A whole command may
    be pasted, such as "torchrun --nproc_per_node 8 -m verl.trainer.sft_trainer key=value ...".
    """
    name, rest = _named(arguments or [])
    if name in RL:
        _check_rl(rest)
    else:
        _check_tuning(name, rest, pasted=len(arguments or []) > len(rest) + 1)


def _named(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the training command that a command line names, and what follows the name."""
    for position, argument in enumerate(arguments):
        if argument in (*RL, *SFT, *DPO):
            return argument, arguments[position + 1 :]
    return RL[0], arguments


def _check_rl(arguments: list[str]) -> None:
    from verlite.config.plan import make_plan
    from verlite.config.show import notes_text
    from verlite.terminal import console
    from verlite.trainer.opening import try_rl

    loaded = load_config(arguments, "verlite check")
    out = console()
    if loaded.notes:
        out.print(notes_text(loaded.notes), soft_wrap=True)
    plan = make_plan(loaded.config)
    out.print(plan.table())
    variables = loaded.config.ray_kwargs.ray_init.runtime_env.env_vars
    _report(try_rl(loaded.config), loaded.config.trainer.logger, variables, loaded.notes)


def _check_tuning(name: str, arguments: list[str], pasted: bool) -> None:
    """Check a command of main_sft or main_dpo. What this machine lacks for a pasted one is a
    note."""
    from verlite.config import dpo, sft
    from verlite.config.load import main_argv
    from verlite.config.show import notes_text
    from verlite.terminal import console

    command = dpo.DPO if name in DPO else sft.SFT
    program = f"verlite check {'main_dpo' if name in DPO else 'main_sft'}"
    loaded: Any = main_argv(arguments, program, elsewhere=True, command=command)
    out = console()
    if loaded.notes:
        out.print(notes_text(loaded.notes, command), soft_wrap=True)
    missing = [str(problem) for problem in loaded.lacking if problem.is_file]
    if missing and not pasted:
        fail("\n".join(missing))
    for problem in loaded.lacking:
        note = f"note: for one process here: {problem.brief()}"
        out.print(note, soft_wrap=True, highlight=False)
    from verlite.sft.dpo import TASK as PAIRS
    from verlite.sft.run import tuning_preflight
    from verlite.sft.train import TASK as EXAMPLES
    from verlite.trainer.preflight import DATA, PHASES, ROWS, walk

    found = tuning_preflight(loaded.config, PAIRS if name in DPO else EXAMPLES, ROWS)
    walk(found, *PHASES, without=DATA if missing else "")
    _report(found.findings, loaded.config.trainer.logger, {}, [*loaded.notes, *loaded.lacking])


def _report(
    found: "Findings", loggers: list[str], variables: dict[str, str], printed: Sequence[Any]
) -> None:
    """Print what was found, and exit if a run would be refused.

    Args:
        printed: the notes that stand above already.
    """
    from verlite.config import logins
    from verlite.terminal import console

    for line in (*found.seen, *(f"note: {text}" for text in (*found.warnings, *found.missing))):
        console().print(line, soft_wrap=True, highlight=False)
    if found.errors:
        fail("\n".join(f"error: {error}" for error in found.errors))
    notes = list(logins.notes(loggers, variables))
    for note in notes:
        console().print(f"note: {note}", soft_wrap=True, highlight=False)
    console().print(found.verdict(has_notes=bool(notes or printed)))
