"""Commands before a run: check, plan, explain, doctor."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verlite.cli.common import TrainingArguments, fail, failing, load_config

if TYPE_CHECKING:
    from verlite.config.load import Loaded
    from verlite.config.plan import Plan
    from verlite.config.schema import Config
    from verlite.sizing.devices import Devices
    from verlite.sizing.facts import ModelFacts
    from verlite.sizing.tables import RunModels
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
    loaded = load_config(arguments, "verlite check")
    from verlite.config.plan import make_plan
    from verlite.config.problems import notes_text
    from verlite.terminal import console
    from verlite.trainer.opening import try_rl  # numpy and Arrow: not for a refused key

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
    from verlite.config import commands
    from verlite.config.load import main_argv
    from verlite.config.problems import notes_text
    from verlite.terminal import console

    command = commands.DPO if name in DPO else commands.SFT
    program = f"verlite check {'main_dpo' if name in DPO else 'main_sft'}"
    loaded: Any = main_argv(arguments, program, elsewhere=True, command=command)
    out = console()
    if loaded.notes:
        out.print(notes_text(loaded.notes, command.explain), soft_wrap=True)
    missing = [str(problem) for problem in loaded.lacking if problem.is_file]
    if missing and not pasted:
        fail("\n".join(missing))
    for problem in loaded.lacking:
        note = f"note: for one process here: {problem.brief()}"
        out.print(note, soft_wrap=True, highlight=False)
    from verlite.importing import import_ahead

    import_ahead("verlite.sft.dpo")
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
    from verlite.terminal import console
    from verlite.trainer.trackers import login_notes

    for line in (*found.seen, *(f"note: {text}" for text in (*found.warnings, *found.missing))):
        console().print(line, soft_wrap=True, highlight=False)
    if found.errors:
        fail("\n".join(f"error: {error}" for error in found.errors))
    notes = list(login_notes(loggers, variables))
    for note in notes:
        console().print(f"note: {note}", soft_wrap=True, highlight=False)
    console().print(found.verdict(has_notes=bool(notes or printed)))


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
    from verlite.config.problems import Note, notes_text
    from verlite.sizing.devices import DevicesError, choose_devices
    from verlite.terminal import console

    made = make_plan(loaded.config)
    with failing(DevicesError):
        chosen = choose_devices(devices, made)
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
    from verlite.sizing.memory import sync_bytes
    from verlite.sizing.tables import model_table, placement_table, run_models
    from verlite.terminal import facts_table

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
    if loaded.config.trainer.mode == "async":
        _show_split(loaded.config, made, chosen, models)
    if memory:
        _show_memory(loaded.config, made, chosen, models.policy, cache)


def _show_split(config: "Config", made: "Plan", devices: "Devices", models: "RunModels") -> None:
    """Print how long a step takes with the engines' and the trainer's devices, by simulation."""
    from verlite.sizing.assumed import ASSUMED, assumed_samples, roofline_costs
    from verlite.sizing.devices import KNOWN
    from verlite.sizing.modes import settings_of, split_sentence
    from verlite.terminal import console

    if devices.name not in KNOWN:
        return
    drawn = assumed_samples(config, made)
    costs = roofline_costs(config, made, devices, models, drawn)
    split = split_sentence(drawn.workload(), costs, made, settings_of(config, made))
    text = f"{split} It is simulated, by {ASSUMED}; {drawn}. verlite simulate shows more.\n"
    console().print(text, soft_wrap=True, highlight=False)


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


def explain(
    key: Annotated[
        str, typer.Argument(help="A key, a section, an old name, or the last part of one: optim.lr")
    ] = "",
    sft: Annotated[bool, typer.Option("--sft", help="A key of main_sft.")] = False,
    dpo: Annotated[bool, typer.Option("--dpo", help="A key of main_dpo.")] = False,
) -> None:
    """Print the meaning, type, default and legal values of a configuration key."""
    from verlite.config.commands import DPO, PPO, SFT
    from verlite.config.explain import explain as explain_key

    try:
        print(explain_key(key, DPO if dpo else SFT if sft else PPO))
    except KeyError as error:
        fail(error.args[0])


def doctor(
    folder: Annotated[
        str, typer.Argument(help="Where runs are written, for the free disk space.")
    ] = ".",
) -> None:
    """Print versions, devices, memory and limits of this machine, and what mends a problem.

    Exit code 1: a run would not start here.
    """
    from verlite.report.doctor import examine, healthy, table

    findings = examine(Path(folder))
    print(table(findings))
    if not healthy(findings):
        print("A run would not start or would fail here: see the lines that begin with problem.")
        raise typer.Exit(1)
    print("Nothing prevents a run on this machine.")
