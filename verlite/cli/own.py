"""Commands about what a user brings: a table of prompts (data); a verifiers environment (tasks); a
reward, environment, advantage estimator, policy loss or gateway (contract).
"""

import contextlib
import json
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verlite.cli.common import TrainingArguments, fail, failing

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
    gateway = "gateway"


DESCRIPTIONS = {
    Kind.reward: "a reward function",
    Kind.env: "an environment",
    Kind.estimator: "an advantage estimator",
    Kind.loss: "a policy loss",
    Kind.gateway: "a gateway",
}


def contract(
    kind: Annotated[Kind, typer.Argument(help="The kind of function.")],
    function: Annotated[
        str,
        typer.Argument(
            help="package.module:function. A reward may also be FILE.py or FILE.py:function, an "
            "environment FILE.py:Factory, or with --python a taskset of verifiers. "
            "A gateway is a URL up to /v1, its key OPENAI_API_KEY."
        ),
    ],
    whitens: Annotated[
        bool, typer.Option("--whitens", help="The estimator normalizes over the whole batch.")
    ] = False,
    kwargs: Annotated[
        str,
        typer.Option(
            help="Its settings as JSON: adv_kwargs, policy_loss.kwargs, reward_kwargs, env.kwargs, "
            "agent.kwargs."
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
    python: Annotated[
        str | None, typer.Option(help="The Python that has verifiers and the taskset.")
    ] = None,
) -> None:
    """Test your reward, environment, advantage estimator or policy loss on small known inputs, or
    whether a gateway returns the exact tokens of conversations.

    Exit code 1 if there are problems.
    """
    with failing(ValueError):
        settings = _settings(kwargs)
        if kind is Kind.env:
            problems = _env_problems(function, settings, action or [], data, python)
        elif kind is Kind.gateway:
            problems = _gateway_problems(function)
        else:
            problems = _problems(kind, function, settings, whitens, data)
    for problem in problems:
        print(f"- {problem}")
    if problems:
        raise typer.Exit(1)
    print(f"{function} keeps the contract of {DESCRIPTIONS[kind]}.")


def _settings(kwargs: str) -> dict[str, Any]:
    """Return the JSON object of --kwargs."""
    with contextlib.suppress(json.JSONDecodeError):
        settings = json.loads(kwargs)
        if isinstance(settings, dict):
            return settings
    raise ValueError(f"--kwargs {kwargs}: expected a JSON object, such as '{{\"alpha\": 0.5}}'")


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
    name: str, settings: dict[str, Any], script: list[str], data: str | None, python: str | None
) -> list[str]:
    """Return the problems of an environment, and print the time of its steps."""
    if python is not None:
        from verlite.contracts.verifiers import check_verifiers

        seen, broken = check_verifiers(name, python, settings, script)
        print("\n".join(seen))
        return broken
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


def _gateway_problems(url: str) -> list[str]:
    """Return the rules that a gateway breaks, and print the others."""
    from verlite.contracts.gateway import check_gateway

    findings = check_gateway(url, os.environ.get("OPENAI_API_KEY", ""))
    lines: dict[str, list[str]] = {state: [] for state in ("kept", "unseen", "broken")}
    for finding in findings:
        line = f"{finding.dialect}, {finding.rule}: {finding.detail}"
        lines[finding.state].append(line)
    for state in ("kept", "unseen"):
        for line in lines[state]:
            print(f"{state}: {line}")
    return lines["broken"]


def _first_row(file: str) -> "RewardItem":
    from verlite.rewards.result import RewardItem

    (answer,) = _rows(file, 1)
    return RewardItem(answer.data_source, "", answer.ground_truth, answer.extra_info)


def _rows(file: str, count: int) -> "list[Answer]":
    from verlite.data.dataset import RowFiles
    from verlite.spec.roles import DataSpec

    return RowFiles(file, DataSpec(), "train").answers(count)


def tasks(
    arguments: TrainingArguments = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Take the first tasks only. Default: all.")
    ] = None,
    hold_out: Annotated[
        int, typer.Option(min=0, help="Write this many random tasks to data.val_files instead.")
    ] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Write the tasks of a verifiers taskset to the files that a training command reads.

    Takes the arguments of main_ppo, of which it uses agent.verifiers, agent.python, agent.kwargs,
    data.train_files and, with --hold-out, data.val_files.
    """
    from verlite.config.compile import take
    from verlite.config.load import compose, parse_argv
    from verlite.config.plan import files_of
    from verlite.config.problems import ConfigError
    from verlite.data.dataset import DataError
    from verlite.data.preprocess import hold_out as split
    from verlite.data.preprocess import print_written, write_parquet
    from verlite.gateway.program import ProgramError
    from verlite.gateway.verifiers import tasks as read_tasks
    from verlite.spec.roles import AgentSpec

    with failing(ConfigError, DataError, ProgramError, OSError):
        name, folder, overrides, _ = parse_argv(arguments or [])
        anything = {"actor_rollout_ref.model.path": "any"}  # rows do not depend on the model
        config = compose(name, [anything, *overrides], folder, check=False).config
        agent = config.agent
        if agent.verifiers is None or agent.python is None:
            raise DataError("give agent.verifiers=TASKSET agent.python=PYTHON")
        wanted = {"data.train_files": config.data.train_files}
        if hold_out:
            wanted["data.val_files"] = config.data.val_files
        targets = []
        for key, value in wanted.items():
            files = files_of(value)
            if len(files) != 1 or not files[0].endswith(".parquet"):
                raise DataError(f"{key}={value}: give one file that ends with .parquet")
            targets.append(Path(files[0]).expanduser())
            if targets[-1].exists() and not force:
                raise DataError(f"{targets[-1]} exists. Replace it with --force")
        rows = read_tasks(take(AgentSpec, agent), count)
        parts = split(rows, hold_out) if hold_out else (rows,)
        for target, part in zip(targets, parts, strict=True):
            print_written(target, part, write_parquet(part, target))


def data(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help=".csv, .jsonl, .json or .parquet files, also on the hub: "
            "hf://datasets/OWNER/NAME/FILE.",
        ),
    ],
    prompt: Annotated[
        str, typer.Option(help="Column of the prompt: text or chat messages {role, content}.")
    ],
    answer: Annotated[str, typer.Option(help="Column of the ground truth: text or a number.")],
    output: Annotated[str, typer.Option("-o", "--output", help="The parquet file to write.")],
    system: Annotated[
        str | None, typer.Option(help="Text of a system message in front of every prompt.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="Format of the prompt, with {} for the column's text.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            help="Name of the data source. It selects a built-in reward function, such as "
            "openai/gsm8k or math. Default: the first file's name."
        ),
    ] = None,
    hold_out: Annotated[
        int, typer.Option(min=0, help="Write this many random rows to NAME_test.parquet instead.")
    ] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Write a data file for training, and print its first row and statistics.

    The columns that are not named go to extra_info, where a reward function can use them.
    """
    from verlite.data.dataset import DataError, find_file
    from verlite.data.preprocess import Columns, print_written, read_rows, statistics, write_parquet
    from verlite.data.preprocess import hold_out as split
    from verlite.spec import catalog

    if template is not None and "{}" not in template:
        fail(f"--template={template!r} must contain {{}} for the prompt's text.")
    target = Path(output).expanduser()
    if target.parent.exists() and not target.parent.is_dir():
        fail(f"--output={output}: {target.parent} is a file, not a folder.")
    if target.suffix != ".parquet":
        fail(f"--output={output} must end with .parquet.")
    test_file = target.with_stem(f"{target.stem}_test")
    name = source or Path(files[0]).stem
    with failing(DataError, OSError):
        paths = [find_file(file) for file in files]
        if {target.resolve(), test_file.resolve()} & {path.resolve() for path in paths}:
            raise DataError(f"--output={output} is one of the files that are read")
        for file in (target, test_file) if hold_out else (target,):
            if file.exists() and not force:
                raise DataError(f"{file} exists. Replace it with --force, or choose another -o")
        rows = read_rows(paths, Columns(prompt, answer, system, template, name))
        test: list[dict[str, object]] = []
        if hold_out:
            rows, test = split(rows, hold_out)
            print_written(test_file, test, write_parquet(test, test_file))
        print_written(target, rows, write_parquet(rows, target))
    for line in statistics([*rows, *test]):
        print(f"  {line}")
    print("the first row:")
    print(json.dumps(rows[0], indent=2, ensure_ascii=False))
    command = f"data.train_files={target}" + (f" data.val_files={test_file}" if test else "")
    if catalog.scorer_for(name) is None:
        print(
            f"No built-in reward function is for data source {name!r}: give your own with "
            "custom_reward_function.path=FILE.py, or choose one with --source."
        )
        command += " custom_reward_function.path=FILE.py"
    else:
        print(f"Rewards come from the built-in function of data source {name!r} (--source).")
    print(f"next: verlite check {command} actor_rollout_ref.model.path=MODEL ...")
