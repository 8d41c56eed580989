"""Mutants of verlite.trainer: steps, checkpoints and resumes that go wrong."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

from tests.mutants import Mutant
from tests.mutants.patches import (
    argument,
    calls,
    constant,
    does_nothing,
    result,
    returns,
)
from verlite.spec.catalog import load

ROLLOUT = "verlite.trainer.stages.rollout:"
ADVANTAGE = "verlite.trainer.stages.advantage:"
GAP = "verlite.trainer.log_prob_gap:"
UPDATE = "verlite.trainer.stages.update:"
WEIGHTS = "verlite.trainer.stages.weights:"
BATCH = "verlite.trainer.batch:"
OUTAGE = "verlite.trainer.outage:"
METRICS = "verlite.trainer.metrics:"
EVALUATION = "verlite.trainer.validate:"
REFERENCE = "verlite.trainer.reference:"
OVERLAP = "verlite.trainer.stages.overlap:"
OVERLAPS = "tests/trainer/test_overlap.py"
SERVICE = "tests/trainer/test_reference_service.py"
CHECKPOINTS = "verlite.trainer.checkpoints:"
TRACKING = "verlite.trainer.tracking:"
RUN = "verlite.trainer.run:Run."
LIMIT = "verlite.trainer.time_limit:"
TIME = ("tests/trainer/test_time_limit.py",)
ENDING = "tests/trainer/test_stop.py"
STOP = "verlite.trainer.stop:"
SEGMENTS = "verlite.trainer.run_record:"
STARTS = "tests/trainer/test_run_record.py"
TRACKERS = "tests/trainer/test_trackers.py"
LS = "tests/report/test_ls.py"
FILES = "tests/test_files.py"
LAUNCH = "tests/trainer/test_launch.py"
STAGES = "tests/trainer/test_stages.py"
AGENTS = "tests/trainer/test_agent.py"
SAVED = "tests/trainer/test_checkpoints.py"
FLOW = "tests/trainer/test_flow_metrics.py"


def _forgets_what_waits(original, self):
    original(self)
    self._waiting.clear()


def _leaves_half(original, path, content):
    try:
        original(path, content)
    except OSError:
        with open(path, "ab", buffering=0) as file:
            file.write(content[:1])
        raise


def _valid_anyway(original, batch, greedy):
    joined = original(batch, greedy)
    return joined.with_batch(valid=batch.batch["valid"])


def _keeps_truncated(original, run, batch):
    enabled = run.config.algorithm.mask_truncated
    run.config.algorithm.mask_truncated = False
    try:
        return original(run, batch)
    finally:
        run.config.algorithm.mask_truncated = enabled


def _by_position(original, uids, updates, seed):
    rows = [f"row {i}" for i in range(len(uids))]
    return original(rows, updates, seed)


def _first_rank_only(original, numbers, costs, n_ranks, *rest):
    ranks = original(numbers, costs, n_ranks, *rest)
    return [[row for rank in ranks for row in rank]] + [[]] * (n_ranks - 1)


def _same_seeds(original, seed, step, drawn, count):
    return original(seed, 0, 0, count)


def _failed_count_as_zero(original, sources, uids, variables, *rest):
    zeros = {
        name: [0.0 if value is None else value for value in values]
        for name, values in variables.items()
    }
    return original(sources, uids, zeros, *rest)


def _truncated_lines_kept(original, self, path, writer, resumed_step=0):
    return original(self, path, writer, 10**9)


def _sampler_not_restored(original, self):
    sampler = self.sampler
    state = sampler.state_dict()
    original(self)
    sampler.load_state_dict(state)


def without_masking(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mock.patch("verlite.trainer.stop.mask_urls", str):
        return original(*args, **kwargs)


MUTANTS = [
    Mutant(
        "devices are grouped for the driver's machine, not the cluster",
        "verlite.trainer.launch:plan_on",
        calls(lambda original, cluster, config, plan: plan),
        ("tests/controller/test_gpus.py",),
    ),
    # rollout
    Mutant(
        "too many failed rewards do not stop the run",
        ROLLOUT + "failed_rows",
        result(lambda rows: rows[:1]),
        (STAGES,),
    ),
    Mutant(
        "a failed greedy response is a baseline of 0",
        ROLLOUT + "with_baselines",
        calls(_valid_anyway),
        (STAGES,),
    ),
    Mutant(
        "dynamic sampling keeps prompts whose samples agree",
        ROLLOUT + "rows_with_signal",
        calls(lambda original, metric, uid, valid=None: metric == metric),
        (STAGES,),
    ),
    Mutant(
        "all steps sample with the same seeds",
        BATCH + "seeds",
        calls(_same_seeds),
        (STAGES, "tests/trainer/test_batch.py"),
    ),
    Mutant(
        "scores are not shaped",
        ROLLOUT + "shape_scores",
        calls(lambda original, scores, *args: scores),
        (STAGES,),
    ),
    Mutant(
        "an outage of the tools is not waited for",
        OUTAGE + "wait_for_services",
        calls(lambda original, run, batch: False),
        (AGENTS,),
    ),
    # log-probs, masks, advantages
    Mutant(
        "the start-up log-prob check accepts any gap",
        GAP + "check_log_prob_gap",
        does_nothing,
        (STAGES,),
    ),
    Mutant(
        "truncated responses stay in the loss",
        ADVANTAGE + "loss_mask",
        calls(_keeps_truncated),
        (STAGES,),
    ),
    # updates
    Mutant(
        "collections of garbage look at each 700 objects of a step",
        "verlite.trainer.command:_few_collections",
        returns(nullcontext()),
        (LAUNCH,),
    ),
    Mutant(
        "the samples of a prompt are in different updates",
        BATCH + "mini_batch_indices",
        calls(_by_position),
        ("tests/trainer/test_batch.py",),
    ),
    Mutant(
        "one rank gets all rows",
        BATCH + "balance_rows",
        calls(_first_rank_only),
        ("tests/trainer/test_batch.py",),
    ),
    Mutant(
        "the policy learns during the critic's warm-up",
        UPDATE + "update_actor",
        calls(
            lambda original, run, batch: (
                setattr(run.plan, "critic_warmup", 0),
                original(run, batch),
            )[1]
        ),
        (STAGES,),
    ),
    # weights
    Mutant(
        "the engines keep their old weights",
        WEIGHTS + "sync_weights",
        calls(lambda original, run: None),
        ("tests/trainer/test_sync.py",),
    ),
    # metrics and validation
    Mutant(
        "failed samples count as 0 in validation",
        EVALUATION + "validation_metrics",
        calls(_failed_count_as_zero),
        ("tests/trainer/test_validate.py",),
    ),
    Mutant(
        "the group statistics are by position",
        METRICS + "group_metrics",
        result(lambda metrics: {name: 1 - value for name, value in metrics.items()}),
        ("tests/trainer/test_metrics.py",),
    ),
    Mutant(
        "a missing part of the reward counts as 0",
        "verlite.trainer.stages.rollout:reward_number",
        result(lambda number: 0.0 if number is None else number),
        ("tests/trainer/test_stages.py",),
    ),
    # checkpoints and resume
    Mutant(
        "a damaged checkpoint is loaded",
        CHECKPOINTS + "defect",
        calls(lambda original, folder: None),
        (SAVED,),
    ),
    Mutant(
        "pruning counts folders of later steps, which the run passed over",
        CHECKPOINTS + "prune",
        argument("step", lambda step: 10**9),
        (SAVED,),
    ),
    Mutant("the export of another run is deleted", TRACKING + "set_aside", does_nothing, (LAUNCH,)),
    Mutant(
        "what a full disk refuses is lost",
        "verlite.files:RetryingWriter.flush",
        calls(_forgets_what_waits),
        (FILES,),
    ),
    Mutant(
        "an append that fails leaves half a line",
        "verlite.files:append",
        calls(_leaves_half),
        (FILES,),
    ),
    Mutant(
        "a checkpoint is written although the disk is full",
        CHECKPOINTS + "check_space",
        does_nothing,
        (SAVED,),
    ),
    Mutant(
        "resuming keeps the metrics of later steps",
        TRACKING + "MetricsFile.__init__",
        calls(_truncated_lines_kept),
        ("tests/trainer/test_tracking.py",),
    ),
    Mutant(
        "an undone step has consumed its prompts",
        RUN + "undo_step",
        calls(_sampler_not_restored),
        ("tests/trainer/test_finish.py",),
    ),
    Mutant(
        "a teacher with other tokens is accepted",
        "verlite.engine.folder:vocabulary_digest",
        calls(lambda original, tokenizer: ""),
        ("tests/trainer/test_preflight.py",),
    ),
    Mutant(
        "the reference service is asked for the teacher's log-probs",
        "verlite.trainer.stages.advantage:teacher_service_spec",
        calls(
            lambda original, config: load("verlite.config.compile:reference_service_spec")(config)
        ),
        ("tests/trainer/test_stages.py",),
    ),
    Mutant(
        "a resumed run goes on with another reference service",
        REFERENCE + "_compare_with_record",
        does_nothing,
        (SERVICE + "::test_resumed_run_needs_the_reference_of_its_start",),
    ),
    Mutant(
        "a reference service that computes other log-probs is accepted",
        REFERENCE + "_compare_probe",
        does_nothing,
        (SERVICE + "::test_equal_weights_that_compute_other_numbers_are_refused",),
    ),
    Mutant("a stop request is not noticed", STOP + "Stop._handle", does_nothing, (ENDING,)),
    Mutant(
        "a second signal, and a cleanup that hangs, do not end the process",
        STOP + "Stop._end",
        does_nothing,
        (ENDING,),
    ),
    Mutant(
        "signals to forked children count as the driver's",
        STOP + "Stop._forget_in_child",
        does_nothing,
        (ENDING,),
    ),
    Mutant(
        "secrets in URLs are printed at the end of a run",
        STOP + "print_error",
        calls(without_masking),
        (ENDING,),
    ),
    Mutant(
        "a lost node counts as a failure of the run's own",
        "verlite.trainer.errors:exit_code",
        result(lambda code: 1 if code == 76 else code),
        (ENDING,),
    ),
    Mutant(
        "each restart has the whole of max_runtime",
        LIMIT + "STARTED",
        constant("NO_SUCH_VARIABLE"),
        TIME,
    ),
    Mutant(
        "training files are hashed at the first save, when they may have changed",
        "verlite.trainer.opening:critical_settings",
        does_nothing,
        ("tests/config/test_critical.py",),
    ),
    Mutant(
        "a key that is gone counts as equal",
        SEGMENTS + "changes",
        result(lambda rows: [row for row in rows if row[2] != "not there"]),
        (STARTS,),
    ),
    Mutant(
        "run.json does not record the end of a run",
        "verlite.trainer.run_record:end",
        does_nothing,
        (LS,),
    ),
    Mutant(
        "a resumed run starts a new run in the trackers",
        TRACKING + "TrackedRun.kept_id",
        returns(None),
        (TRACKERS,),
    ),
    Mutant(
        "the columns of the trackers' tables are mixed up",
        "verlite.trainer.trackers:SAMPLE_COLUMNS",
        lambda columns: columns[::-1],
        (TRACKERS,),
    ),
    Mutant(
        "functions of a notebook are imported by their names",
        "verlite.api:is_importable",
        returns(True),
        ("tests/api/test_library.py",),
    ),
    Mutant(
        "few effective samples do not end a run", GAP + "check_sample_size", does_nothing, (FLOW,)
    ),
    Mutant(
        "samples that a service failed stay in the pipelined step",
        OVERLAP + "_lost",
        returns(False),
        (OVERLAPS,),
    ),
    Mutant(
        "a pipelined step accumulates rows of later mini-batches",
        OVERLAP + "first_mini_batch",
        result(lambda rows: rows and {group: one | True for group, one in rows.items()}),
        (OVERLAPS,),
    ),
]
