"""`verlite check`: validate a training command."""

from typing import TYPE_CHECKING

from verlite.cli.common import TrainingArguments, fail, load_config

if TYPE_CHECKING:
    from verlite.config.schema import Config


def check(arguments: TrainingArguments = None) -> None:
    """Validate a training command in seconds, without starting it. Exit code 2 if it is invalid.

    Takes the arguments of main_ppo: overrides, --config-name NAME, --config-path FOLDER.
    """
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
