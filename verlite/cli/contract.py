"""`verlite contract`: test a user's reward, advantage estimator or policy loss."""

import json
from enum import StrEnum
from typing import Annotated, Any

import typer

from verlite.cli.common import fail


class Kind(StrEnum):
    """The functions that a user can provide."""

    reward = "reward"
    estimator = "estimator"
    loss = "loss"


DESCRIPTIONS = {
    Kind.reward: "a reward function",
    Kind.estimator: "an advantage estimator",
    Kind.loss: "a policy loss",
}


def contract(
    kind: Annotated[Kind, typer.Argument(help="The kind of function.")],
    function: Annotated[
        str,
        typer.Argument(
            help="package.module:function. A reward may also be FILE.py or FILE.py:function."
        ),
    ],
    whitens: Annotated[
        bool,
        typer.Option("--whitens", help="The estimator normalizes over the whole batch."),
    ] = False,
    kwargs: Annotated[
        str,
        typer.Option(help="Its settings as JSON: adv_kwargs, policy_loss.kwargs or reward_kwargs."),
    ] = "{}",
) -> None:
    """Test your reward, advantage estimator or policy loss on small known inputs.

    Exit code 1 if the function has problems.
    """
    try:
        settings = json.loads(kwargs)
        if not isinstance(settings, dict):
            raise ValueError(
                f"--kwargs {kwargs}: expected a JSON object, such as '{{\"alpha\": 0.5}}'"
            )
        problems = _problems(kind, function, settings, whitens)
    except ValueError as error:
        fail(error)
    for problem in problems:
        print(f"- {problem}")
    if problems:
        raise typer.Exit(1)
    print(f"{function} keeps the contract of {DESCRIPTIONS[kind]}.")


def _problems(kind: Kind, name: str, settings: dict[str, Any], whitens: bool) -> list[str]:
    if kind is Kind.reward:
        from verlite.rewards.contract import check_reward

        return check_reward(name, settings)

    from verlite.algorithms.contract import check_estimator, check_policy_loss
    from verlite.config.catalog import ESTIMATORS, POLICY_LOSSES, resolve

    if kind is Kind.estimator:
        estimator = resolve(name, ESTIMATORS, "advantage estimator")
        return check_estimator(estimator, whitens, settings)

    return check_policy_loss(resolve(name, POLICY_LOSSES, "policy loss"), settings)
