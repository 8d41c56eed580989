"""The state of main_sft or main_dpo on each rank, how it is opened, and how it ends.

Every rank opens a `Run`. Rank 0 locks the run directory, writes and prints; what it finds on disk
is sent to the others.
"""

import copy
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from verlite.algorithms.kl import KLController
from verlite.config import commands
from verlite.config.compile import model_spec, take
from verlite.config.critical import tuning_settings
from verlite.config.load import LoadedConfig, dump
from verlite.config.sft import TuningConfig
from verlite.control.commands import BeginStep, Command, Do
from verlite.control.machine import Machine
from verlite.control.policy import Policy
from verlite.data.sampler import PromptSampler
from verlite.engine.fsdp import LossFn, TrainEngine
from verlite.engine.process_group import process_group
from verlite.files import RetryingWriter, free_text
from verlite.sft.data import Example
from verlite.spec.roles import FSDPSpec, OptimSpec
from verlite.terminal import console
from verlite.trainer import checkpoints, opening, run_record, saving
from verlite.trainer.checkpoints import CheckpointError, ResumeRefused
from verlite.trainer.common_checks import reading
from verlite.trainer.display import Display
from verlite.trainer.metrics import Stopwatch
from verlite.trainer.preflight import FILES, LIBRARIES, Preflight, walk
from verlite.trainer.stop import Event, P, Stop
from verlite.trainer.tracking import Tracking

MAX_FAILED_SAVES = 3
"""The run ends after so many failed saves in a row."""
ROLE = "actor"
"""Folder of the model in a checkpoint, as in RL training."""
Loaded = LoadedConfig[TuningConfig]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Task:
    """What a command trains for."""

    kind: str
    """SFT or DPO of the preflight."""
    command: commands.Command
    columns: Callable[..., list[str]]
    """(file, its columns, section data) -> the columns to read."""
    examples_of: Callable[..., list[Example]]
    """(row, tokenizer, section data) -> its examples."""
    sources: tuple[str, ...]
    """Names of a row's examples."""
    loss: Callable[[Any], LossFn]
    """The loss for a configuration. Rows come to it with all of their examples."""
    judge: Callable[
        [Any, list[Example], list[float], list[float]], tuple[dict[str, float], list[float]]
    ]
    """(configuration, examples, their sums of log-probs, those at the start of the run) -> metrics,
    and a score for each example."""
    reference: Callable[[TrainEngine, Any, list[Example]], list[float]] | None = None
    """(engine, configuration, examples) -> the sums of log-probs at the start of the run. None: the
    loss needs none."""

    @property
    def size(self) -> int:
        """Examples of a row."""
        return len(self.sources)


@dataclass
class Run:
    """A run on one rank. `tracking` is None on all ranks but the first."""

    task: Task
    config: TuningConfig
    run_dir: Path
    tokenizer: Any
    examples: list[Example]
    held_out: list[Example]
    references: list[float]
    """The sum of each example's log-probs at the start of the run. Empty if the task needs none."""
    held_out_references: list[float]
    sampler: PromptSampler
    total_steps: int
    engine: TrainEngine
    display: Display
    writer: RetryingWriter
    tracking: Tracking | None
    stop: Stop
    """The process, whose machine decides what happens next. Each rank has one."""
    step: int = 0
    """The current step, from 1, or the last one."""
    last_line: float = 0.0
    """When the last line of a step was printed, in time.monotonic()."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the current step."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def ranks(self) -> int:
        return dist.get_world_size()

    def places(self, rows: Sequence[int]) -> list[int]:
        """Return where the examples of these rows are."""
        size = self.task.size
        return [row * size + place for row in rows for place in range(size)]

    def begin(self, saved: int) -> None:
        """Tell the machine what the run wants, and where it begins. The first rank watches the
        time.

        Args:
            saved: step of the newest checkpoint in the run directory, 0 without one.
        """
        trainer = self.config.trainer
        max_runtime = trainer.max_runtime if self.rank == 0 else None
        policy = Policy(
            total_steps=self.total_steps,
            test_freq=self._steps(trainer.test_freq) if self.held_out else 0,
            save_freq=self._steps(trainer.save_freq),
            validates_last=bool(self.held_out),
            gives_up=False,
            max_failed_saves=MAX_FAILED_SAVES,
            stop_grace_s=trainer.stop_grace_s,
            max_runtime=max_runtime,
        )
        saving.begin(self, policy, saved)

    def _steps(self, frequency: int | str) -> int:
        """Return a frequency in steps. A string is EACH_EPOCH."""
        return self.sampler.steps_per_epoch if isinstance(frequency, str) else frequency

    def tell(self, event: Event[P], *values: P.args, **named: P.kwargs) -> Command | None:
        """Tell the machine what happened. Return what the loop does next."""
        commands = self.stop.tell(event, *values, **named)
        return commands[-1] if commands else None

    def steps(self) -> Iterator[int]:
        """Yield the number of each step that is left. End early if any rank was asked to stop, or
        if there is no time for another step.

        A signal during a step is only noted: the step ends, and the run saves.
        """
        while self.step < self.total_steps:
            following = self.tell(Machine.step_wanted)
            stops = torch.tensor(int(following is Do.END_LOOP), device=self.engine.device)
            if self.ranks > 1:
                dist.all_reduce(stops, dist.ReduceOp.MAX)
            if stops and isinstance(following, BeginStep):
                self.tell(Machine.stopped_elsewhere)
            if stops:
                return
            self.step += 1
            self.metrics = {}
            self.stopwatch = Stopwatch()
            yield self.step

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has besides the engine's files, as JSON values.

        The entries are those of RL training, so that the same commands read it: no KL penalty, and
        no version, because no weights were synced.
        """
        return {
            "step": self.step,
            "version": 0,
            "sampler": self.sampler.state_dict(),
            "kl_controller": KLController(0.0).state_dict(),
            "metrics": self.metrics,
            "critical": tuning_settings(self.config),
            "model": dataclasses.asdict(self.config.model),
        }


def tuning_preflight(config: TuningConfig, task: Task, first: int | None = None) -> Preflight:
    """Return what the checks of main_sft or main_dpo are given. first: as in `Preflight`."""
    config = copy.deepcopy(config)
    config.trainer.default_local_dir = opening.absolute(config.trainer.default_local_dir)
    return Preflight(
        task.kind,
        config,
        Path(config.trainer.default_local_dir),
        model=config.model,
        section="",
        settings=partial(tuning_settings, config),
        first=first,
        task=task,
        is_first=os.environ.get("RANK", "0") == "0",
        on_first_rank=on_first_rank if first is None else lambda call: call(),
    )


@contextmanager
def open_run(loaded: Loaded, task: Task, stop: Stop) -> Iterator[Run]:
    """Do all checks, then build everything.

    Raises:
        REFUSED, AlreadyComplete, CheckpointError: see `preflight.walk`.
    """
    found = tuning_preflight(loaded.config, task)
    config, run_dir, data = found.config, found.run_dir, found.config.data
    device = config.trainer.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    out = console()
    out.quiet = not found.is_first
    display = Display(out, log=stop.log)
    stop.where, found.warn = display.where, display.warn
    with opening.in_run_directory(found, stop), ExitStack() as stack:
        transformers_logging.disable_progress_bar()
        stack.enter_context(process_group(device))
        if found.is_first:
            stack.enter_context(stop.reported_first())
        stack.callback(display.close)
        with display.phase("reading examples"):
            walk(found, FILES, LIBRARIES)
        found.rows.clear()  # they are tokenized
        assert found.total_steps is not None
        total = found.total_steps
        examples, held_out = found.data["train"], found.data.get("val", [])
        if found.is_first:
            run_record.plan(run_dir, total)
        display.begin(total, found.state["step"], groups=False)
        display.info(_data_text(examples, held_out, task.size, total, data.train_batch_size))
        for line in found.findings.seen:
            display.info(line)
        model = model_spec(config.model)
        with display.phase("loading the model"), reading(model, ""):
            engine = TrainEngine(
                model,
                take(FSDPSpec, config.fsdp_config),
                take(OptimSpec, config.optim),
                total_training_steps=config.trainer.total_training_steps or total,
                grad_clip=config.grad_clip,
                device=device if device == "cpu" else f"cuda:{torch.cuda.current_device()}",
                seed=config.trainer.seed,
                sequence_parallel=config.ulysses_sequence_parallel_size,
            )
        references: list[float] = []
        held_out_references: list[float] = []
        if task.reference:  # before the checkpoint's weights replace those of the start
            with display.phase("computing reference log-probs"):
                references = task.reference(engine, config, examples)
                held_out_references = task.reference(engine, config, held_out)
        if found.checkpoint:
            try:
                engine.load(found.checkpoint.path / ROLE, found.checkpoint.files(ROLE))
            except ValueError as error:
                raise ResumeRefused(str(error)) from error
            display.info(opening.resumed_text(found))
        writer = RetryingWriter(display.warn)
        stack.callback(writer.close)
        tracking = on_first_rank_only(
            partial(_open_outputs, found, dump(loaded), writer, display.info)
        )
        if tracking:
            stack.callback(tracking.finish)
        run = Run(
            task,
            config,
            run_dir,
            found.tokenizer,
            examples,
            held_out,
            references,
            held_out_references,
            found.sampler,
            total,
            engine,
            display,
            writer,
            tracking,
            stop,
            step=found.state["step"],
        )
        run.begin(opening.newest_saved(found))
        stop.where = lambda: display.where(run.step)
        yield run


def _open_outputs(
    found: Preflight, text: str, writer: RetryingWriter, say: Callable[[str], None]
) -> Tracking:
    opening.record_config(found, text, writer, say)
    return opening.open_tracking(found, text, writer, say)


def _data_text(
    examples: list[Example], held_out: list[Example], size: int, steps: int, batch: int
) -> str:
    tokens = sum(len(example.prompt) + len(example.response) for example in examples)
    trained = sum(example.trained_tokens for example in examples)
    more = f", {len(held_out)} held-out examples" if held_out else ""
    return (
        f"{len(examples)} examples with {tokens} tokens, {trained} of them trained{more}; "
        f"{steps} steps of {batch * size} examples"
    )


def on_first_rank(function: Callable[[], _T]) -> _T:
    """Return on every rank what a function returns on rank 0, or raise what it raises there."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    result: _T = outcome[0]
    return result


def of_first_rank(value: _T) -> _T:
    """Return rank 0's value on every rank."""
    return on_first_rank(lambda: value)


def on_first_rank_only(function: Callable[[], _T]) -> _T | None:
    """Call a function on rank 0. Return None on the others, but raise on all what it raises."""
    results: list[_T] = []
    on_first_rank(lambda: results.append(function()))
    return results[0] if results else None


def save(run: Run) -> Command | None:
    """Write a checkpoint. Return what the control says then. All ranks must call it. Raises
    CheckpointError (`saving`)."""
    keep = run.config.trainer.max_ckpt_to_keep if run.rank == 0 else None
    return saving.save(run, partial(_write, run), keep, of_first_rank)


def _write(run: Run) -> None:
    """Write a checkpoint, all ranks together. Raises on every rank why it was not written.

    Rank 0 tells the others the folder, or None if it does not come to that.
    """
    failure: CheckpointError | None = None
    told: list[Path] = []

    def save_parts(folder: Path) -> None:
        told.append(folder)
        of_first_rank(folder)
        run.engine.save(folder / ROLE)
        saving.check_ranks(folder / ROLE, run.ranks, "the first one")

    if run.rank == 0:
        try:
            checkpoints.write(run.run_dir, run.step, run.state(), save_parts)
        except CheckpointError as error:
            failure = error
        if not told:
            of_first_rank(None)
    else:
        folder: Path | None = of_first_rank(None)
        if folder is not None:
            try:
                run.engine.save(folder / ROLE)
            except OSError:
                pass  # raised on all ranks; rank 0 says why
    failure = of_first_rank(failure)
    if failure is not None:
        raise failure


def finalize(run: Run) -> int:
    """End a run that did not fail, and return the exit code. Raises CheckpointError."""
    out = sys.stdout if run.rank == 0 else None
    return saving.finalize(run, partial(save, run), partial(_export, run), out)


def _export(run: Run) -> None:
    temporary = run.run_dir / ".tmp_huggingface"
    try:
        run.engine.save_pretrained(temporary, run.tokenizer)
        if run.rank == 0:
            saving.install_export(run, temporary)
    except OSError as error:
        raise CheckpointError(
            f"the model was not written: {error} ({free_text(run.run_dir)} free)."
        ) from error
