"""`verlite check`: validate a training command."""

from typing import TYPE_CHECKING

from verlite.cli.common import TrainingArguments, fail, load_config

if TYPE_CHECKING:
    from verlite.config.schema import Config

RL = ("main_ppo", "verlite.main_ppo", "verl.trainer.main_ppo")
SFT = (
    "main_sft",
    "verlite.main_sft",
    "verl.trainer.sft_trainer",
    "verl.trainer.sft_trainer_ray",
    "verl.trainer.fsdp_sft_trainer",
)


def check(arguments: TrainingArguments = None) -> None:
    """Validate a training command in seconds, without starting it. Exit code 2 if it is invalid.

    Takes the arguments of main_ppo: overrides, --config-name NAME, --config-path FOLDER. After
    "main_sft" it takes those of main_sft. A whole command may be pasted, such as
    "torchrun --nproc_per_node 8 -m verl.trainer.sft_trainer key=value ...".
    """
    is_sft, rest = _named(arguments or [])
    if is_sft:
        _check_sft(rest)
    else:
        _check_rl(rest)


def _named(arguments: list[str]) -> tuple[bool, list[str]]:
    """Return whether a command line names supervised fine-tuning, and what follows the name."""
    for position, argument in enumerate(arguments):
        if argument in (*RL, *SFT):
            return argument in SFT, arguments[position + 1 :]
    return False, arguments


def _check_rl(arguments: list[str]) -> None:
    from verlite.config.plan import make_plan
    from verlite.config.show import console, notes_text

    loaded = load_config(arguments, "verlite check")
    out = console()
    if loaded.notes:
        out.print(notes_text(loaded.notes), soft_wrap=True)
    plan = make_plan(loaded.config)
    out.print(plan.table())
    if plan.max_turns:
        problem = _tool_problem(loaded.config)
        if problem:
            out.print(f"note: {problem}", soft_wrap=True, highlight=False)
    out.print("The configuration is fine.")


def _check_sft(arguments: list[str]) -> None:
    from verlite.config import sft
    from verlite.config.load import main_argv
    from verlite.config.show import console, notes_text

    loaded = main_argv(arguments, "verlite check main_sft", elsewhere=True, command=sft.SFT)
    out = console()
    if loaded.notes:
        out.print(notes_text(loaded.notes, sft.SFT), soft_wrap=True)
    for lack in loaded.lacking:
        out.print(f"note: as this command was started, {lack}", soft_wrap=True, highlight=False)
    out.print("The configuration is fine.")


def _tool_problem(config: "Config") -> str | None:
    """Return why the agent's tools cannot be used now, or None if they can."""
    from verlite.envs.factory import build_env_factory, check_env_factory
    from verlite.envs.step import ToolError

    try:
        return check_env_factory(build_env_factory(config))
    except ToolError as error:
        return f"{error}. A run refuses to start until then."
    except ValueError as error:
        fail(error)
