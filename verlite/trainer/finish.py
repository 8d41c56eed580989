"""What follows the updates of a step: metrics, kept samples, validation, checkpoint; and how a run begins."""

from pathlib import Path

from verlite.protocol.data import DataProto
from verlite.trainer import checkpoints
from verlite.trainer.agent import agent_metrics
from verlite.trainer.metrics import batch_metrics, speed_metrics
from verlite.trainer.run import Run
from verlite.trainer.samples import keep_samples
from verlite.trainer.validate import validate


def start_with_validation(run: Run) -> bool:
    """Validate before the first step where the configuration says so. False: that was all there was to do (val_only)."""
    trainer = run.config.trainer
    if (
        run.val_data is not None
        and run.plan.validates_first
        and (run.resumed_step == 0 or trainer.val_only)
    ):
        run.metrics = validate(run)
        run.tracking.log(run.step, run.metrics)
        run.display.step(run.step, run.metrics)
    return not trainer.val_only


def finish_step(run: Run, batch: DataProto) -> None:
    """Compute and log the step's metrics, keep samples, then validate and save where they are due."""
    trainer = run.config.trainer
    run.metrics.update(batch_metrics(batch, run.plan.longest_prompt, run.plan.longest_response))
    run.metrics.update(agent_metrics(batch))
    run.metrics.update(
        {
            "training/global_step": run.step,
            "training/epoch": run.sampler.epoch,
            "training/weight_version": run.version,
        }
    )
    run.stopwatch.end_step()
    tokens, response_tokens = (
        run.metrics["perf/total_num_tokens"],
        float(batch.batch["trained_tokens"].sum()),
    )
    run.metrics.update(speed_metrics(run.stopwatch, tokens, response_tokens, run.plan.n_devices))
    keep_samples(run, batch)
    if (
        run.val_data is not None
        and trainer.test_freq > 0
        and (run.last_step or run.step % trainer.test_freq == 0)
    ):
        run.metrics.update(validate(run))
    run.metrics.update(run.stopwatch.metrics())  # what a checkpoint keeps of its step
    if (
        trainer.save_freq > 0
        and (run.last_step or run.step % trainer.save_freq == 0)
        or run.stop.requested
    ):
        save(run)
    run.metrics.update(run.stopwatch.metrics())
    run.tracking.log(run.step, run.metrics)
    run.display.step(run.step, run.metrics)


def save(run: Run) -> None:
    """Write a checkpoint; a failed save is told and the run goes on, until `trainer.max_failed_saves` in a row.

    Raises:
        CheckpointError: too many failed saves in a row.
    """
    keep = run.config.trainer.max_actor_ckpt_to_keep

    def save_parts(folder: Path) -> None:
        for name, role in {"actor": run.actor, "critic": run.critic}.items():
            if role is None:
                continue
            if refused := next(filter(None, role.save(str(folder / name))), None):
                raise OSError(refused)
            if (seen := len(list(folder.glob(f"{name}/rng_rank_*.json")))) != (
                ranks := len(run.plan.placement[name])
            ):
                raise OSError(
                    f"{ranks} ranks of the {name} wrote to trainer.default_local_dir, but the driver sees the files of {seen}: "
                    "it must be one folder that all nodes share"
                )

    with run.stopwatch("save_checkpoint"), run.display.phase("save_checkpoint"):
        try:
            checkpoints.write(run.run_dir, run.step, run.state(), save_parts)
        except checkpoints.CheckpointError as error:
            run.failed_saves += 1
            if run.failed_saves >= run.config.trainer.max_failed_saves:
                raise
            run.display.warn(str(error))
            return
    run.failed_saves, run.saved_step = 0, run.step
    checkpoints.prune(run.run_dir, keep, run.display.warn)
