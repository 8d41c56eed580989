"""The end of a step: metrics, samples, validation, checkpoint. Also validation before step 1."""

import dataclasses
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from verlite.algorithms.gap import age_metrics
from verlite.control.commands import Command, Do
from verlite.control.machine import Machine
from verlite.controller.worker_group import group
from verlite.files import LINES_MAX_BYTES, RetryingWriter, one_line, parse_json, read_bytes
from verlite.protocol.data import DataProto
from verlite.protocol.metrics import Metrics
from verlite.trainer import checkpoints, saved_groups, saving
from verlite.trainer.detectors import WARNINGS
from verlite.trainer.errors import StepAborted
from verlite.trainer.groups import Groups
from verlite.trainer.metrics import agent_metrics, batch_metrics, speed_metrics
from verlite.trainer.run import Run
from verlite.trainer.samples import keep_samples
from verlite.trainer.tracking import set_aside
from verlite.trainer.validate import validate
from verlite.workers.roles import ROLES

SAMPLES_SHOWN = 3


def validate_first(run: Run) -> None:
    """Validate before the first step if the configuration asks for it."""
    if run.tell(Machine.started) is Do.VALIDATE:
        run.metrics.update(validate(run))
        run.tracking.log(run.step, run.metrics)
        run.display.step(run.step, run.metrics)


def finish_step(run: Run, batch: DataProto) -> None:
    """Compute and log the step's metrics, keep samples, then validate and save if they are due."""
    run.tell(Machine.step_finished)
    add_metrics(run, batch)
    records = keep_samples(run, batch)
    following = run.tell(Machine.step_measured)
    if following is Do.VALIDATE:
        if run.groups is not None:  # at a stop during the validation the engines cannot say it
            run.groups.look(run.rollout)
        with suppress(StepAborted):  # the step is saved without its result
            run.metrics.update(validate(run))
        following = run.tell(Machine.validated)
    # A checkpoint keeps its step's metrics, so the timings so far are added before it is written.
    run.metrics.update(run.stopwatch.metrics())
    if following is Do.SAVE:
        save(run)
    run.metrics.update(run.stopwatch.metrics())
    seconds = run.stopwatch.seconds
    run.tell(Machine.step_ends, seconds["step"], seconds.get("save_checkpoint", 0.0))
    run.tracking.log(run.step, run.metrics)
    run.tracking.samples(run.step, "train", records)
    run.display.step(run.step, run.metrics)
    warn_of_trouble(run, records)


def warn_of_trouble(run: Run, records: list[dict[str, Any]]) -> None:
    """Print what the detectors saw, with three samples, and add it to warnings.jsonl."""
    if run.detectors is None:
        return
    findings = run.detectors.check(run.step, run.metrics, last=run.step == run.total_steps)
    patience = run.config.trainer.detect.patience
    when = f"in the last {patience} steps" if run.step >= patience else "since the first step"
    for finding in findings:
        run.display.warn(f"{when} {finding.text}")
        line = json.dumps(dataclasses.asdict(finding), ensure_ascii=False) + "\n"
        run.writer.append(run.run_dir / WARNINGS, line.encode())
    if findings:
        for record in records[:SAMPLES_SHOWN]:
            run.display.info(f"  {one_sample(record)}")
        run.display.info(f"  more: verlite show {run.run_dir}, verlite report {run.run_dir}")


def forget_warnings(path: Path, step: int, writer: RetryingWriter) -> None:
    """Remove the warnings of steps after `step`, which a resumed run makes again, and lines that
    cannot be read. A run that starts from the beginning renames the file, like metrics.jsonl.

    Raises:
        OSError: the file can be neither read nor renamed.
    """
    if not step:
        set_aside(path)
        return
    try:
        content = read_bytes(path, LINES_MAX_BYTES)
    except FileNotFoundError:
        return
    except ValueError:
        set_aside(path)
        return
    kept = b"".join(line + b"\n" for line in content.split(b"\n") if _is_until(line, step))
    if kept != content:
        writer.replace(path, kept)


def _is_until(line: bytes, step: int) -> bool:
    try:
        return bool(int(parse_json(line)["step"]) <= step)
    except (ValueError, TypeError, KeyError, OverflowError):
        return False


def one_sample(record: dict[str, Any]) -> str:
    """Return a sample in one line: score, end of the prompt, and both ends of the response."""
    prompt, response = one_line(record["prompt"][-80:]), " ".join(record["response"].split())
    if len(response) > 160:
        response = f"{response[:80]} [...] {response[-80:]}"
    score = "no score" if record["score"] is None else f"score {record['score']:g}"
    expected = one_line(record["ground_truth"], 60)
    return f"{score}: {prompt} -> {one_line(response)} (expected {expected})"


def add_metrics(run: Run, batch: DataProto) -> None:
    """Add the metrics of the batch, of the tools and of speed. The step's time ends here."""
    plan = run.plan
    parts = run.config.algorithm.gdpo_reward_keys or ()
    run.metrics.update(batch_metrics(batch, plan.longest_prompt, plan.longest_response, parts))
    run.metrics.update(agent_metrics(batch))
    run.metrics["training/global_step"] = run.step
    run.metrics["training/epoch"] = run.sampler.epoch
    run.metrics["training/weight_version"] = run.version
    run.metrics.setdefault("perf/engine_restarts", 0.0)
    run.stopwatch.end_step()
    run.metrics.update(straggler_metrics(run))
    if run.groups is not None and run.config.trainer.mode == "async":
        run.metrics.update(async_metrics(run, run.groups, batch))
    tokens = run.metrics["perf/total_num_tokens"]
    response_tokens = float(batch.batch["trained_tokens"].sum())
    run.metrics.update(speed_metrics(run.stopwatch, tokens, response_tokens, run.plan.n_devices))


def async_metrics(run: Run, groups: Groups, batch: DataProto) -> Metrics:
    """Return how old the samples are, whether they are a fair choice, and who waits for whom."""
    ages = age_metrics(run.step, batch.non_tensor_batch["version_spans"])
    rollout, seconds = run.config.actor_rollout_ref.rollout, run.stopwatch.seconds
    rows = run.plan.samples_per_prompt + run.plan.needs_greedy_baseline  # of a prompt
    most = (1 + groups.flow.depth) * run.plan.prompts * rows / run.plan.engines
    return {
        **{f"async/{name}": value for name, value in ages.items()},
        **groups.metrics(run.plan.actor.epochs, min(rollout.max_num_seqs, most)),
        "fully_async/trainer/idle_ratio": seconds["gen"] / seconds["step"],
    }


def straggler_metrics(run: Run) -> Metrics:
    """Return how many seconds the slowest rank of each role worked longer than the median of the
    others in its slowest call of the step; 0 if no rank was slow (`control.watch`)."""
    return {
        f"perf/straggler/{role}": group(workers).supervisor.ranks.stragglers.take(role)
        for role, workers in run.workers.items()
    }


def save(run: Run) -> Command | None:
    """Write a checkpoint. Return what the control says then. Raises CheckpointError (`saving`)."""

    def write() -> None:
        if run.groups is not None:
            run.groups.look(run.rollout)
        checkpoints.write(
            run.run_dir, run.step, run.state(), lambda folder: save_parts(run, folder)
        )

    return saving.save(run, write, run.config.trainer.max_actor_ckpt_to_keep)


def save_parts(run: Run, folder: Path) -> None:
    """Write what a checkpoint has beside the driver's state. Raises OSError: it is not written."""
    save_workers(run, folder)
    if run.groups is not None:
        parts = {
            saved_groups.FINISHED: run.groups.answers,
            saved_groups.RUNNING: run.groups.running,
        }
        for name, samples in parts.items():
            saved_groups.write(folder / name, samples, run.groups.requests, run.display.warn)


def save_workers(run: Run, folder: Path) -> None:
    """Let the workers write their parts of a checkpoint, each role in a folder of its name.

    Raises:
        OSError: a worker could not write, or the driver does not see the files of every rank.
    """
    for role, workers in run.workers.items():
        if not ROLES[role].saves:
            continue
        errors = [error for error in workers.save(str(folder / role)) if error]
        if errors:
            raise OSError(errors[0])
        saving.check_ranks(folder / role, len(run.plan.placement[role]), "the driver")
