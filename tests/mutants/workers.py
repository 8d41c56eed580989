"""Mutants of verlite.workers: roles that train on something else than they should."""

from dataclasses import replace

from tests.mutants import Mutant
from tests.mutants.patches import argument, attribute, calls, constant, does_nothing, result

ACTOR = "verlite.workers.actor:"
CRITIC = "verlite.workers.critic:"
ADVANTAGE = "verlite.workers.advantage:"
ROLLOUT = "verlite.workers.rollout:"
ROWS = "verlite.workers.training:StepRows."
TRAINING = "verlite.workers.training:"
OBJECTIVES = "tests/workers/test_objectives.py"
STAGES = "tests/trainer/test_stages.py"
UPDATE = "tests/engine/test_update.py"
SAMPLES = "tests/workers/test_weights_and_samples.py"


def _rows_changed(change):
    """Patch a function that builds a loss so that the loss sees changed rows."""

    def broken(original, spec):
        objective = original(spec)
        return lambda rows, outputs, counts: objective(change(rows), outputs, counts)

    return calls(broken)


def _without(*names):
    return _rows_changed(lambda rows: rows.exclude(*names))


def _distilled(**values):
    """Patch the actor's loss so that settings of distillation are others."""

    def change(settings):
        return settings and replace(settings, **values)

    return argument("spec", attribute("distillation", change))


def _counts_of_the_micro_batch(original, spec):
    objective = original(spec)

    def broken(rows, outputs, counts):
        mask = rows["response_mask"]
        own = type(counts)(max(1, int(mask.sum())), max(1, int(mask.any(-1).sum())))
        return objective(rows, outputs, own)

    return broken


def _trained_on_response_mask(original, self, role, batch, updates, loss, **options):
    rows = batch.with_batch(loss_mask=batch.batch["response_mask"])
    return original(self, role, rows, updates, loss, **options)


def _base_model_once(original, self):
    had = self._engines_have_base
    original(self)
    self._engines_have_base = had


def _stale_rows(original, self, batch):
    if self._columns:
        batch = batch.with_meta(step=self._step)
    return original(self, batch)


MUTANTS = [
    Mutant(
        "KL per token does not reach the advantages",
        ADVANTAGE + "to_go",
        constant(lambda x, mask: x * 0),
        ("tests/workers/test_advantage.py",),
    ),
    Mutant(
        "the base model is not sent again after a failed sync",
        "verlite.workers.actor:SyncedParts.start",
        calls(_base_model_once),
        (SAMPLES,),
    ),
    Mutant(
        "inference computes with stale weights",
        "verlite.workers.inference:InferenceWorker.check_version",
        does_nothing,
        (SAMPLES,),
    ),
    Mutant(
        "the actor's loss counts the tokens of its micro-batch",
        ACTOR + "policy_objective",
        calls(_counts_of_the_micro_batch),
        (OBJECTIVES, UPDATE),
    ),
    Mutant(
        "the ratio is taken against the current policy",
        ACTOR + "policy_objective",
        _without("old_log_probs"),
        (OBJECTIVES,),
    ),
    Mutant(
        "the distillation term has no weight of its own",
        ACTOR + "policy_objective",
        _distilled(distillation_loss_coef=1.0),
        (OBJECTIVES,),
    ),
    Mutant(
        "importance weights do not reach the loss",
        ACTOR + "policy_objective",
        _without("rollout_is_weights"),
        (OBJECTIVES,),
    ),
    Mutant(
        "the KL loss has the wrong sign",
        ACTOR + "kl_loss",
        result(lambda loss: -loss),
        (OBJECTIVES,),
    ),
    Mutant(
        "the critic learns the old values",
        CRITIC + "value_objective",
        _rows_changed(lambda rows: rows.copy().update({"returns": rows["values"]})),
        (OBJECTIVES,),
    ),
    Mutant(
        "the losses train on tokens that loss_mask excludes",
        TRAINING + "TrainingWorker.update_in_mini_batches",
        calls(_trained_on_response_mask),
        (STAGES, "tests/workers/test_training.py"),
    ),
    Mutant(
        "metrics of updates without tokens count as 0",
        TRAINING + "mean_metrics",
        calls(
            lambda original, steps: {
                name: sum(step.get(name, 0.0) for step in steps) / len(steps)
                for name in {name for step in steps for name in step}
            }
        ),
        ("tests/workers/test_training.py",),
    ),
    Mutant(
        "every estimator works with one number per row",
        ADVANTAGE + "by_row",
        calls(lambda original, config: True),
        (STAGES, "tests/trainer/test_agent.py"),
    ),
    Mutant(
        "a step computes with the rows of the step before",
        ROWS + "padded",
        calls(_stale_rows),
        ("tests/workers",),
    ),
    Mutant(
        "samples share one environment row",
        ROLLOUT + "RolloutWorker._env",
        argument("extra_info", lambda extra_info: {}),
        (SAMPLES,),
    ),
    Mutant(
        "a sample's failure is not recorded",
        ROLLOUT + "Status",
        constant(type("Status", (), {"ERROR": "never"})),
        (SAMPLES,),
    ),
    Mutant(
        "the exported copy is never freed",
        ACTOR + "ActorWorker.release_weights",
        does_nothing,
        (SAMPLES,),
    ),
    Mutant(
        "accumulated gradients are divided by the tokens of a step whatever the aggregation",
        ACTOR + "unit_factor",
        calls(lambda original, spec, counts: 1 / counts.tokens),
        ("tests/engine/test_accumulate.py",),
    ),
]
