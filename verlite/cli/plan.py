"""`verlite plan`: print what a training command needs, before anything is started."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from verlite.cli.common import TrainingArguments, fail, load_config

if TYPE_CHECKING:
    from verlite.config.load import Loaded
    from verlite.config.plan import Plan
    from verlite.config.schema import Config
    from verlite.sizing.devices import Devices
    from verlite.sizing.facts import ModelFacts


def plan(
    arguments: TrainingArguments = None,
    config: Annotated[
        bool, typer.Option("--config", help="Print every value and its origin as YAML.")
    ] = False,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="NxNAME",
            help="Devices of a node: 8xH100-80GB, or 8x24GB for others. Default: this machine's.",
        ),
    ] = None,
    memory: Annotated[
        bool, typer.Option(help="Measure the training engines on tensors without values.")
    ] = True,
    cache: Annotated[
        bool, typer.Option(help="Keep and reuse measurements in the user's cache folder.")
    ] = True,
) -> None:
    """Print what a training command needs, offline and from the model's config.json alone: batch
    sizes, placement, parameters, weight sync, and memory of each device in each phase."""
    from verlite.config.load import dump

    if devices is not None and not any("trainer.device=" in text for text in arguments or []):
        arguments = ["trainer.device=cuda", *(arguments or [])]
    loaded = load_config(arguments, "verlite plan", elsewhere=True)
    if config:
        print(dump(loaded), end="")
    else:
        _show(loaded, devices, memory, cache)


def _show(loaded: "Loaded", devices: str | None, memory: bool, cache: bool) -> None:
    from verlite.config.plan import make_plan
    from verlite.config.problems import Note
    from verlite.config.show import notes_text
    from verlite.sizing.devices import DevicesError, choose_devices
    from verlite.terminal import console

    made = make_plan(loaded.config)
    try:
        chosen = choose_devices(devices, made)
    except DevicesError as error:
        fail(error)
    terminal = console()
    terminal.print(replace(made, drawing="").table())  # placement_table shows more
    if loaded.lacking:
        notes = [
            Note(f"a run on this machine would be refused: {problem.brief()}")
            for problem in loaded.lacking
        ]
        terminal.print(notes_text(notes), soft_wrap=True)
    # What follows builds models, which takes seconds to import.
    from verlite.engine.folder import ModelError
    from verlite.sizing.sync import sync_bytes
    from verlite.sizing.tables import model_table, placement_table, run_models
    from verlite.sizing.words import facts_table

    terminal.print(placement_table(made))
    terminal.print(f"A node has {chosen}.\n", highlight=False)
    try:
        models = run_models(loaded.config, made)
    except ModelError as error:
        terminal.print(
            f"Parameters, weight sync and memory cannot be shown: {error}", soft_wrap=True
        )
        return
    terminal.print(model_table(loaded.config, made, models))
    terminal.print(facts_table("weight sync", sync_bytes(made, models.policy).lines()))
    if memory:
        _show_memory(loaded.config, made, chosen, models.policy, cache)


def _show_memory(
    config: "Config", made: "Plan", devices: "Devices", policy: "ModelFacts", cache: bool
) -> None:
    from verlite.sizing import tables
    from verlite.sizing.advice import SizedRun, advise
    from verlite.sizing.measure import Measurer
    from verlite.sizing.memory import run_memory
    from verlite.terminal import console

    terminal = console()
    measurer = Measurer(cache)
    began = time.monotonic()
    try:
        with console(stderr=True).status("running the training engines on tensors without values"):
            found = run_memory(config, made, devices, policy, measurer)
            advice = advise(SizedRun(config, made, devices, policy, measurer, found))
    except Exception as error:  # a model's own code may need values, and raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        terminal.print(f"Memory cannot be shown: {reason}", soft_wrap=True, highlight=False)
        return
    terminal.print(tables.engines_table(made, found))
    for group in found.groups:
        terminal.print(tables.group_table(group, devices))
    terminal.print(tables.host_table(found))
    terminal.print(tables.margin_sentence(made), soft_wrap=True, highlight=False)
    terminal.print("\n".join(advice), soft_wrap=True, highlight=False)
    seconds = time.monotonic() - began
    terminal.print(f"{measurer.sentence()}; {seconds:.0f} s", soft_wrap=True, highlight=False)
