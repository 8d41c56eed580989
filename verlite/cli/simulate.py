"""The command `simulate`."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verlite.cli.common import TrainingArguments, fail, failing, from_data_classes, load_config

if TYPE_CHECKING:
    from verlite.config.load import Loaded
    from verlite.config.plan import Plan
    from verlite.sizing.assumed import Drawn
    from verlite.sizing.simulation import Costs, Settings, Simulated

Seconds = float | None
STEPS = 20


@dataclass(frozen=True)
class GivenCosts:
    """Costs that replace those of the run or of the roofline."""

    # fmt: off
    decode_step_s: Annotated[Seconds, typer.Option(metavar="S",
        help="Seconds of an engine's decode step.")] = None
    decode_sample_s: Annotated[Seconds, typer.Option(metavar="S",
        help="Seconds more for each running sample.")] = None
    prefill_token_s: Annotated[Seconds, typer.Option(metavar="S",
        help="Seconds of an engine for each token of a prompt.")] = None
    update_token_s: Annotated[Seconds, typer.Option(metavar="S",
        help="Device-seconds of training passes for each token.")] = None
    update_s: Annotated[Seconds, typer.Option(metavar="S",
        help="Seconds of training in each step, beside its tokens.")] = None
    sync_s: Annotated[Seconds, typer.Option(metavar="S", help="Seconds of a weight sync.")] = None
    reward_s: Annotated[Seconds, typer.Option(metavar="S",
        help="Seconds from a prompt's last sample to its scores.")] = None
    # fmt: on


@dataclass(frozen=True)
class GivenSamples:
    """Samples of a run that does not exist yet."""

    # fmt: off
    response_length: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help='Length of the responses: "1500", "p50=1500 p99=12000" (lognormal), or more '
            "quantiles. Default: lognormal, a quarter of data.max_response_length and all of it.",
        ),
    ] = None
    prompt_length: Annotated[int | None, typer.Option(metavar="TOKENS", min=1,
        help="Default: half of data.max_prompt_length.")] = None
    tool_latency: Annotated[str | None, typer.Option(metavar="S",
        help='Seconds of a tool call, as --response-length: "p50=0.5 p98=1 p100=60".')] = None
    tool_calls: Annotated[int | None, typer.Option(min=0,
        help="Of each sample. Default: 1 with --tool-latency, else 0.")] = None
    # fmt: on


@from_data_classes
def simulate(
    costs: GivenCosts,
    samples: GivenSamples,
    arguments: TrainingArguments = None,
    devices: Annotated[
        str | None,
        typer.Option(metavar="NxNAME", help="GPUs of a node, for costs by roofline: 8xH100-80GB."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=3, help=f"Steps to simulate, without a run: {STEPS}.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Predict step time, utilization and age of tokens of trainer.mode=sync, pipelined and async.

    Takes the arguments of main_ppo. With a run directory in front of them it predicts what that run
    would have been in other modes: lengths, tool latencies and costs are those of the run.
    """
    run_dir, rest = _run_dir(arguments or [])
    if run_dir is not None:
        for option, value in (("--devices", devices), ("--steps", steps)):
            if value is not None:
                fail(f"{option}={value}: costs and steps are those of the run {run_dir}. Leave out "
                     "the option, or the run")  # fmt: skip
    if devices is not None and not any("trainer.device=" in text for text in rest):
        rest = ["trainer.device=cuda", *rest]
    with failing(OSError, ValueError):
        if run_dir is None:
            loaded = load_config(rest, "verlite simulate", True)
            _planned(loaded, costs, samples, devices, steps or STEPS, as_json)
        else:
            _recorded(run_dir, rest, costs, samples, as_json)


def _run_dir(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """Return the run directory, if the arguments begin with one, and the others."""
    if not arguments or arguments[0].startswith("-") or "=" in arguments[0]:
        return None, arguments
    folder = Path(arguments[0])
    if not (folder / "metrics.jsonl").is_file():
        fail(f"{folder} is not a run directory: it has no metrics.jsonl.")
    return folder, arguments[1:]


def _changed(costs: "Costs", given: GivenCosts) -> "Costs":
    return replace(costs, **{name: v for name, v in asdict(given).items() if v is not None})


def _planned(
    loaded: "Loaded",
    given: GivenCosts,
    samples: GivenSamples,
    devices: str | None,
    steps: int,
    as_json: bool,
) -> None:
    """Simulate a run that does not exist yet."""
    from verlite.config.plan import make_plan
    from verlite.sizing import modes
    from verlite.sizing.simulation import Costs

    plan = make_plan(loaded.config, count_rows=False)
    drawn = _drawn(loaded, plan, samples)
    named = {name: value for name, value in asdict(given).items() if value is not None}
    if "update_token_s" in named and ("decode_step_s" in named or "decode_sample_s" in named):
        costs, source = Costs(**{"decode_step_s": 0.0, **named}), "given"
    else:
        from verlite.sizing.assumed import ASSUMED, roofline_costs
        from verlite.sizing.devices import choose_devices
        from verlite.sizing.tables import run_models

        chosen = choose_devices(devices, plan)
        models = run_models(loaded.config, plan)
        costs = roofline_costs(loaded.config, plan, chosen, models, drawn)
        costs, source = _changed(costs, given), ASSUMED
    own = modes.settings_of(loaded.config, plan)
    workload = drawn.workload()
    found = modes.compared(workload, costs, plan, own, steps)
    _show(found, costs, source, str(drawn), None, as_json)


def _drawn(loaded: "Loaded", plan: "Plan", given: GivenSamples) -> "Drawn":
    from verlite.sizing.assumed import assumed_samples, parse_quantiles

    drawn = assumed_samples(loaded.config, plan)
    if given.response_length is not None:
        lengths = parse_quantiles(given.response_length, "--response-length")
        drawn = replace(drawn, response=lengths)
    if given.prompt_length is not None:
        drawn = replace(drawn, prompt=given.prompt_length)
    if given.tool_latency is not None:
        latency = parse_quantiles(given.tool_latency, "--tool-latency")
        drawn = replace(drawn, calls=1, tool_s=latency)
    if given.tool_calls is not None:
        drawn = replace(drawn, calls=given.tool_calls)
    return drawn


def _recorded(
    run_dir: Path, rest: list[str], given: GivenCosts, samples: GivenSamples, as_json: bool
) -> None:
    """Simulate a run that exists."""
    from verlite.config.plan import make_plan
    from verlite.sizing import modes
    from verlite.sizing.recorded import measured_costs, read_recorded

    if any(value is not None for value in asdict(samples).values()):
        fail("lengths and latencies are those of the run: leave these options out, or the run")
    saved = ["--config-path", str(run_dir.resolve()), "--config-name", "config"]
    was = load_config(saved, "verlite simulate", elsewhere=True)
    run_plan = make_plan(was.config, count_rows=False)
    recorded = read_recorded(run_dir, run_plan)
    settings = modes.settings_of(was.config, run_plan)
    costs = _changed(measured_costs(recorded, settings), given)
    loaded = load_config([*saved, *rest], "verlite simulate", elsewhere=True)
    plan = make_plan(loaded.config, count_rows=False)
    _check_same(run_dir, run_plan, plan)
    own = modes.settings_of(loaded.config, plan)
    workload = recorded.workload()
    found = modes.compared(workload, costs, plan, own, recorded.steps, is_whole=True)
    names = ("timing_s/step", "timing_s/gen", "perf/throughput", "async/age/mean")
    measured = {name: recorded.mean(name) for name in names}
    measured["async/age/max"] = max(line.get("async/age/max", 0.0) for line in recorded.lines)
    kept = f"{recorded.share:.0%} of the samples of {recorded.steps} steps, those of {run_dir}"
    if recorded.share < 1:
        kept += "; others are drawn from them (trainer.rollouts_per_step=-1 keeps all)"
    _show(found, costs, "measured", kept, (settings, measured), as_json)


def _check_same(run_dir: Path, was: "Plan", plan: "Plan") -> None:
    """Raise ValueError if a setting differs on which the run's samples or costs depend."""
    rollout = "actor_rollout_ref.rollout"
    for key, before, now in (
        (f"{rollout}.n", was.samples_per_prompt, plan.samples_per_prompt),
        (f"{rollout}.tensor_model_parallel_size", was.tensor_parallel, plan.tensor_parallel),
        ("roles", ", ".join(was.device_roles), ", ".join(plan.device_roles)),
    ):
        if now != before:
            raise ValueError(
                f"{key}={now}: samples and costs are those of {run_dir}, which has {before}. Leave "
                "out the setting, or give the directory of a run that has it"
            )


def _show(
    found: "list[Simulated]",
    costs: "Costs",
    source: str,
    samples: str,
    measured: "tuple[Settings, dict[str, float]] | None",
    as_json: bool,
) -> None:
    from verlite.sizing import modes

    if as_json:
        rows = [{"settings": asdict(one.settings), **one.metrics()} for one in found]
        content: dict[str, Any] = {
            "samples": samples,
            "costs": asdict(costs),
            "source": source,
            "rows": rows,
        }
        if measured is not None:
            content["measured"] = {"settings": asdict(measured[0]), **measured[1]}
        print(json.dumps(content))
        return
    from verlite.terminal import console

    out = console()
    out.print(modes.modes_table(found, measured))
    if len(found) == 1:
        out.print(
            "Other modes need devices of their own for the engines: add "
            f"trainer.n_gpus_per_node={2 * found[0].settings.devices}.",
            soft_wrap=True,
            highlight=False,
        )
    settings = found[0].settings
    for line in (
        f"samples: {samples}.",
        modes.costs_sentence(costs, settings, source),
        modes.UNMODELED,
    ):
        out.print(line, soft_wrap=True, highlight=False)
