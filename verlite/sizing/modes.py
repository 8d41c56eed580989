"""The simulated modes of a run, beside each other, and the split of its devices between engines and
trainer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from verlite.config.plan import Plan, steps_ahead
from verlite.config.schema import Config
from verlite.sizing.simulation import Costs, Settings, Simulated, Workload, simulate
from verlite.terminal import counted, grid

if TYPE_CHECKING:
    from rich.table import Table

ASYNC = ((1, 1), (2, 2), (4, 2), (8, 4))
"""max_age and depth that are compared, beside those of the configuration."""
SPLITS = 8
"""Engines get eighths of the devices."""
SPLIT_STEPS = 6
"""Steps that are simulated for each split."""
PART = 16
"""Prompts and engines of the part of a large run that is enough to compare splits."""

UNMODELED = (
    "Not modeled: failures, validation, checkpoints, dynamic sampling, a full KV cache, prompts "
    "that share their prefix, the driver's own latency, processes that compete for cores, and with "
    "pipelined what waits for the whole step, such as a critic."
)


def settings_of(config: Config, plan: Plan) -> Settings:
    """Return the settings of a run as it is configured."""
    settings = config.async_training
    return Settings(
        mode=config.trainer.mode,
        prompts=plan.prompts,
        engines=plan.engines,
        trainer_devices=len(plan.placement["actor"]),
        devices=plan.n_devices,
        max_num_seqs=config.actor_rollout_ref.rollout.max_num_seqs,
        updates=plan.actor.epochs * plan.actor.per_epoch,
        max_age=settings.max_age,
        depth=steps_ahead(config),
        partial_rollout=settings.partial_rollout,
        kv_cache=settings.kv_cache,
    )


def has_own_engines(plan: Plan) -> bool:
    """Return whether the engines share no device with another role, as trainer.mode=async needs."""
    engines = set(plan.placement["rollout"])
    return not any(engines & set(plan.placement[r]) for r in plan.device_roles if r != "rollout")


def compared(
    workload: Workload, costs: Costs, plan: Plan, own: Settings, steps: int, is_whole: bool = False
) -> list[Simulated]:
    """Simulate a run with trainer.mode=sync, pipelined, and async with several max_age and depth.
    The configured one is among them.

    If the engines share the trainer's devices, the modes that need them apart get the fastest
    split of async.
    """
    found = [simulate(workload, costs, replace(own, mode="sync"), steps, is_whole=is_whole)]
    apart = replace(own, mode="async")
    if not has_own_engines(plan):
        if plan.n_devices < 2 * plan.tensor_parallel:
            return found
        apart = fastest_split(workload, costs, plan, replace(apart, max_age=1, depth=1))
    pipelined = replace(apart, mode="pipelined")
    found.append(simulate(workload, costs, pipelined, steps, is_whole=is_whole))
    pairs = list(ASYNC)
    if own.mode == "async" and (own.max_age, own.depth) not in pairs:
        pairs.insert(0, (own.max_age, own.depth))
    for max_age, depth in pairs:
        settings = replace(apart, max_age=max_age, depth=depth)
        found.append(simulate(workload, costs, settings, steps, is_whole=is_whole))
    return found


def fastest_split(workload: Workload, costs: Costs, plan: Plan, settings: Settings) -> Settings:
    """Return the settings with the numbers of engines and of the trainer's devices whose steps are
    the shortest, of those that give engines eighths of the devices. Of a large run a part is
    simulated, with as many prompts for each device."""
    each, total = plan.tensor_parallel, plan.n_devices
    part = max(1, min(settings.prompts // PART, total // (PART * each)))
    found: dict[int, float] = {}
    for eighths in range(1, SPLITS):
        engines = max(1, total // part * eighths // SPLITS // each)
        trainer = total // part - engines * each
        if trainer > 0 and engines not in found:
            one = replace(settings, prompts=settings.prompts // part, engines=engines,
                          trainer_devices=trainer)  # fmt: skip
            numbers = simulate(workload, costs, one, SPLIT_STEPS).metrics()
            found[engines] = numbers["timing_s/step"]
    fastest = min(found, key=lambda engines: found[engines]) * part
    return replace(settings, engines=fastest, trainer_devices=total - fastest * each)


def split_sentence(workload: Workload, costs: Costs, plan: Plan, own: Settings) -> str:
    """Return the step time as the devices are split, and with the fastest split."""
    found = [
        (simulate(workload, costs, settings, SPLIT_STEPS).metrics()["timing_s/step"], settings)
        for settings in (own, fastest_split(workload, costs, plan, own))
    ]
    ways = [
        f"{seconds(step_s)} with {counted(settings.engines, 'engine')} and "
        f"{counted(settings.trainer_devices, 'device')} that train"
        for step_s, settings in found
    ]
    text = f"A step of {own.name} takes {ways[0]}"
    if found[1][0] < found[0][0]:
        return f"{text}; {ways[1]}, the fastest split."
    return f"{text}, the fastest split."


HEAD = ("mode", "engines", "trainer devices", "step", "speed", "waits", "tokens/s/device",
        "engines busy", "trainer busy", "running", "age", "max age")  # fmt: skip


def table_rows(
    found: Sequence[Simulated], measured: tuple[Settings, dict[str, float]] | None = None
) -> list[tuple[str, ...]]:
    """Return a row for each simulated run, of the columns of HEAD. speed: against the first one.

    measured: settings and metrics of the real run, for a row in front of them.
    """
    rows = [(one.settings, one.settings.name, one.metrics()) for one in found]
    first = rows[0][2]["timing_s/step"]
    if measured is not None:
        own, metrics = measured
        rows.insert(0, (own, f"measured: {own.name}", metrics))
    return [
        (
            name,
            str(settings.engines),
            str(settings.trainer_devices),
            seconds(numbers["timing_s/step"]),
            f"{first / numbers['timing_s/step']:.2f}",
            f"{numbers['timing_s/gen'] / numbers['timing_s/step']:.0%}",
            f"{numbers['perf/throughput']:,.0f}",
            *(
                f"{numbers[key]:.0%}" if key in numbers else "-"
                for key in ("utilization/engines", "utilization/trainer")
            ),
            f"{numbers['running']:,.1f}" if "running" in numbers else "-",
            f"{numbers.get('async/age/mean', 0.0):.2f}",
            f"{numbers.get('async/age/max', 0.0):.0f}",
        )
        for settings, name, numbers in rows
    ]


def modes_table(
    found: Sequence[Simulated], measured: tuple[Settings, dict[str, float]] | None = None
) -> "Table":
    """Return the table."""
    return grid("simulated steps", HEAD, table_rows(found, measured), 1)


def seconds(number: float) -> str:
    """Return a time in words: 0.25 s, 5.7 s, 123 s."""
    return f"{number:.{0 if number >= 100 else 1 if number >= 10 else 2}f} s"


def costs_sentence(costs: Costs, settings: Settings, source: str) -> str:
    """Return the costs in words."""
    first, many = costs.tokens_per_s(1), costs.tokens_per_s(min(64, settings.max_num_seqs))
    trained = settings.trainer_devices / costs.update_token_s if costs.update_token_s else 0.0
    return (
        f"costs, {source}: an engine generates {first:,.0f} tokens/s of one sample and {many:,.0f} "
        f"of {min(64, settings.max_num_seqs)}; the trainer takes {trained:,.0f} tokens/s on "
        f"{counted(settings.trainer_devices, 'device')}; a weight sync takes "
        f"{seconds(costs.sync_s)}."
    )
