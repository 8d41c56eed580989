"""Mutants of verlite.trainer: steps, checkpoints and resumes that go wrong."""

from tests.mutants import Mutant
from tests.mutants.patches import argument, calls, constant, does_nothing, result

ROLLOUT = "verlite.trainer.stages.rollout:"
ADVANTAGE = "verlite.trainer.stages.advantage:"
UPDATE = "verlite.trainer.stages.update:"
WEIGHTS = "verlite.trainer.stages.weights:"
BATCH = "verlite.trainer.batch:"
AGENT = "verlite.trainer.agent:"
OUTAGE = "verlite.trainer.outage:"
METRICS = "verlite.trainer.metrics:"
EVALUATION = "verlite.trainer.evaluation:"
REFERENCE = "verlite.trainer.reference:"
SERVICE = "tests/trainer/test_reference_service.py"
CHECKPOINTS = "verlite.trainer.checkpoints:"
TRACKING = "verlite.trainer.tracking:"
FINISH = "verlite.trainer.finish:"
RUN = "verlite.trainer.run:Run."
FILES = "tests/test_files.py"
LAUNCH = "tests/trainer/test_launch.py"
STAGES = "tests/trainer/test_stages.py"
AGENTS = "tests/trainer/test_agent.py"
SAVED = "tests/trainer/test_checkpoints.py"


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


def _forgets_shown_failures(original, run, batch):
    run.shown_failures.clear()
    return original(run, batch)


def _valid_anyway(original, batch, greedy):
    joined = original(batch, greedy)
    return joined.with_batch(valid=batch.batch["valid"])


def _groups_always_differ(original, run, batch, samples):
    run.plan.filters_groups = False
    return original(run, batch, samples)


def _restarts_forgotten(original, run, died):
    run.current.engine_restarts = 0
    original(run, died)


def _keeps_truncated(original, run, batch):
    enabled = run.config.algorithm.mask_truncated
    run.config.algorithm.mask_truncated = False
    try:
        return original(run, batch)
    finally:
        run.config.algorithm.mask_truncated = enabled


def _truncated_rows_lose_their_score(original, run, batch):
    masked = original(run, batch)
    return masked.with_batch(valid=masked.batch["valid"] & (masked.batch["trained_tokens"] > 0))


def _all_in_one_update(original, uids, updates, seed):
    return original(uids, updates, seed) * 0


def _by_position(original, uids, updates, seed):
    rows = [f"row {i}" for i in range(len(uids))]
    return original(rows, updates, seed)


def _never_saves(original, run, frequency):
    return False


def _first_rank_only(original, numbers, lengths, n_ranks, balance):
    ranks = original(numbers, lengths, n_ranks, balance)
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


def _without_kl_controller(original, self):
    state = original(self)
    return {**state, "kl_controller": {}, "version": 0}


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
        "a kind of failed reward is shown at each step",
        "verlite.trainer.failed_rewards:warn_of_new_kinds",
        calls(_forgets_shown_failures),
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
        "the length penalty counts the wrong way",
        ROLLOUT + "overlong_penalty",
        result(lambda penalty: -penalty),
        (STAGES,),
    ),
    Mutant(
        "an outage of the tools is not waited for",
        OUTAGE + "wait_for_services",
        calls(lambda original, run, batch: False),
        (AGENTS,),
    ),
    Mutant(
        "every failed sample is an outage of the tools",
        OUTAGE + "tool_failures",
        calls(lambda original, batch: [e for e in batch.non_tensor_batch["error"] if e]),
        (AGENTS,),
    ),
    # log-probs, masks, advantages
    Mutant(
        "a mixture of experts may differ no more than a dense model",
        ADVANTAGE + "gap_limit",
        calls(lambda original, run: 0.05),
        (STAGES,),
    ),
    Mutant(
        "the start-up log-prob check accepts any gap",
        ADVANTAGE + "check_log_prob_gap",
        does_nothing,
        (STAGES,),
    ),
    Mutant(
        "truncated responses stay in the loss",
        ADVANTAGE + "loss_mask",
        calls(_keeps_truncated),
        (STAGES,),
    ),
    Mutant(
        "truncated responses do not count in their group",
        ADVANTAGE + "loss_mask",
        calls(_truncated_rows_lose_their_score),
        (STAGES,),
    ),
    # updates
    Mutant(
        "all rows are in one update",
        BATCH + "mini_batch_indices",
        calls(_all_in_one_update),
        ("tests/trainer/test_batch.py",),
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
    Mutant(
        "an expensive log-prob probe goes on",
        WEIGHTS + "_PROBE_SHARE",
        constant(1.0),
        ("tests/trainer/test_sync.py",),
    ),
    # metrics and validation
    Mutant(
        "failed samples count as 0 in validation",
        EVALUATION + "validation_metrics",
        calls(_failed_count_as_zero),
        ("tests/trainer/test_evaluation.py",),
    ),
    Mutant(
        "the group statistics are by position",
        METRICS + "group_metrics",
        result(lambda metrics: {name: 1 - value for name, value in metrics.items()}),
        ("tests/trainer/test_metrics.py",),
    ),
    # checkpoints and resume
    Mutant(
        "a damaged checkpoint is loaded",
        CHECKPOINTS + "defect",
        calls(lambda original, folder: None),
        (SAVED,),
    ),
    Mutant(
        "pruning keeps one checkpoint more",
        CHECKPOINTS + "prune",
        argument("keep", lambda keep: keep + 1 if keep else keep),
        (SAVED,),
    ),
    Mutant(
        "pruning counts folders of later steps, which the run passed over",
        CHECKPOINTS + "prune",
        argument("step", lambda step: 10**9),
        (SAVED,),
    ),
    Mutant(
        "files of a checkpoint are not compared with the manifest",
        CHECKPOINTS + "check_files",
        does_nothing,
        (SAVED,),
    ),
    Mutant(
        "the export of another run is deleted",
        TRACKING + "set_aside",
        does_nothing,
        (LAUNCH,),
    ),
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
        "a file of any size is read",
        "verlite.files:read_bytes",
        argument("limit", lambda limit: 1 << 60),
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
        "every restart of an engine renews the limit of restarts",
        "verlite.trainer.recovery:restart_engines",
        calls(_restarts_forgotten),
        ("tests/trainer/test_sync.py",),
    ),
    Mutant(
        "an undone step has consumed its prompts",
        RUN + "undo_step",
        calls(_sampler_not_restored),
        ("tests/trainer/test_finish.py",),
    ),
    Mutant(
        "nothing is validated or saved between steps",
        FINISH + "due",
        calls(_never_saves),
        ("tests/trainer/test_finish.py",),
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
]
