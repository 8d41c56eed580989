"""`verlite contract`: test a user's reward, environment, advantage estimator or policy loss."""

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verlite.cli.common import fail

if TYPE_CHECKING:
    from verlite.data.dataset import Answer
    from verlite.rewards.result import RewardItem

ROWS = 64
"""Rows of the data that an environment is tried on."""


class Kind(StrEnum):
    """The functions that a user can provide."""

    reward = "reward"
    env = "env"
    estimator = "estimator"
    loss = "loss"


DESCRIPTIONS = {
    Kind.reward: "a reward function",
    Kind.env: "an environment",
    Kind.estimator: "an advantage estimator",
    Kind.loss: "a policy loss",
}


def contract(
    kind: Annotated[Kind, typer.Argument(help="The kind of function.")],
    function: Annotated[
        str,
        typer.Argument(
            help="package.module:function. A reward may also be FILE.py or FILE.py:function, an "
            "environment FILE.py:Factory."
        ),
    ],
    whitens: Annotated[
        bool,
        typer.Option("--whitens", help="The estimator normalizes over the whole batch."),
    ] = False,
    kwargs: Annotated[
        str,
        typer.Option(
            help="Its settings as JSON: adv_kwargs, policy_loss.kwargs, reward_kwargs, env.kwargs."
        ),
    ] = "{}",
    data: Annotated[
        str | None,
        typer.Option(
            help="Try a reward on the data source, ground truth and extra_info of this file's "
            f"first row, an environment on the extra_info of its first {ROWS} rows."
        ),
    ] = None,
    action: Annotated[
        list[str] | None,
        typer.Option(help="A turn of the model for an environment (repeat for several turns)."),
    ] = None,
) -> None:
    """Test your reward, environment, advantage estimator or policy loss on small known inputs.

    Exit code 1 if the function has problems.
    """
    try:
        settings = json.loads(kwargs)
        if not isinstance(settings, dict):
            raise ValueError(
                f"--kwargs {kwargs}: expected a JSON object, such as '{{\"alpha\": 0.5}}'"
            )
        if kind is Kind.env:
            problems = _env_problems(function, settings, action or [], data)
        else:
            problems = _problems(kind, function, settings, whitens, data)
    except ValueError as error:
        fail(error)
    for problem in problems:
        print(f"- {problem}")
    if problems:
        raise typer.Exit(1)
    print(f"{function} keeps the contract of {DESCRIPTIONS[kind]}.")


def _problems(
    kind: Kind, name: str, settings: dict[str, Any], whitens: bool, data: str | None
) -> list[str]:
    if kind is Kind.reward:
        from verlite.contracts.rewards import check_reward

        return check_reward(name, settings, _first_row(data) if data else None)

    from verlite.contracts.algorithms import check_estimator, check_policy_loss
    from verlite.spec.catalog import ESTIMATORS, POLICY_LOSSES, resolve

    if kind is Kind.estimator:
        estimator = resolve(name, ESTIMATORS, "advantage estimator")
        return check_estimator(estimator, whitens, settings)

    return check_policy_loss(resolve(name, POLICY_LOSSES, "policy loss"), settings)


def _env_problems(
    name: str, settings: dict[str, Any], script: list[str], data: str | None
) -> list[str]:
    """Return the problems of an environment, and print the time of its steps."""
    from verlite.contracts.envs import check_env

    rows = [answer.extra_info for answer in _rows(data, ROWS)] if data else []
    report = check_env(name, settings, script, rows)
    for answer in report.answers:
        print(answer)
    if report.seconds:
        mean = 1000 * sum(report.seconds) / len(report.seconds)
        tried = f"{len(report.seconds)} steps"
        tried += f", {report.rows} row{'s' * (report.rows != 1)}" if data else ""
        print(f"{tried}: {mean:.1f} ms per step, at most {1000 * max(report.seconds):.1f} ms")
    return report.lines()


def _first_row(file: str) -> "RewardItem":
    from verlite.rewards.result import RewardItem

    (answer,) = _rows(file, 1)
    return RewardItem(answer.data_source, "", answer.ground_truth, answer.extra_info)


def _rows(file: str, count: int) -> "list[Answer]":
    from verlite.data.dataset import RowFiles
    from verlite.spec.data import DataSpec

    return RowFiles(file, DataSpec(), "train").answers(count)
