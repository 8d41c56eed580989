"""Stages of the training step, with fake workers."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from tests.trainer.test_batch import generated_batch, make_requests, rollout_output
from verlite.algorithms.gap import gap_metrics, gap_rows, gap_totals
from verlite.algorithms.kl import KLController
from verlite.config.compile import advantage_spec
from verlite.config.schema import Config, DataConfig, ModelConfig
from verlite.control.machine import Machine
from verlite.control.policy import Policy
from verlite.controller.dispatch import join_rows, split_rows
from verlite.data.dataset import PromptRow
from verlite.files import RetryingWriter
from verlite.protocol.data import DataProto, object_array
from verlite.protocol.ragged import ragged
from verlite.rewards.result import RewardResult
from verlite.rollout.types import Sampling
from verlite.spec.correction import RolloutCorrection
from verlite.trainer import log_prob_gap
from verlite.trainer.batch import fetch_padded, to_ranks
from verlite.trainer.errors import LogProbGap, RewardFailures, RolloutFailures, TooFewGroups
from verlite.trainer.metrics import Stopwatch
from verlite.trainer.run import Run, StepState
from verlite.trainer.stages.advantage import (
    advantages,
    loss_mask,
    old_log_probs,
    reference_log_probs,
    teacher_log_probs,
)
from verlite.trainer.stages.rollout import filter_groups, generate, next_prompts, score
from verlite.trainer.stages.update import update_actor
from verlite.trainer.stop import Stop
from verlite.trainer.validate import validate
from verlite.workers.actor import ActorWorker
from verlite.workers.training import StepRows


class Screen(list):
    """A display that records its messages."""

    info = warn = list.append

    def phase(self, name):
        return Stopwatch()(name)


def local_actor(config, plan) -> ActorWorker:
    """Return an actor without engine and Ray. It estimates advantages in this process."""
    actor = ActorWorker.__new__(ActorWorker)
    actor.spec = LocalSpec(config, plan)
    actor.all_rows = StepRows()
    return actor


class LocalSpec:
    """What the actor reads of its spec, from the configuration as it is then."""

    def __init__(self, config, plan) -> None:
        self.config, self.plan = config, plan

    @property
    def advantage(self):
        return advantage_spec(self.config)

    @property
    def correction(self):
        return self.plan.correction

    @property
    def loss(self):
        return SimpleNamespace(loss_mode=self.plan.loss_mode)

    @property
    def token_selection(self):
        return vars(self.config.actor_rollout_ref.actor.policy_loss)


class FakeRun(SimpleNamespace):
    groups = None
    log_prob_role = Run.log_prob_role
    log_prob_worker = Run.log_prob_worker
    tell, obey = Run.tell, Run.obey

    @property
    def advantage(self):
        return advantage_spec(self.config)


def fake_run(**fields) -> FakeRun:
    """Return the attributes of a run that the stages read. `fields` replace the defaults."""
    config = Config(data=DataConfig(train_files="x"), reward=Config().reward)
    config.actor_rollout_ref.model = ModelConfig(path="x")
    defaults = {
        "writer": RetryingWriter(pytest.fail),
        "config": config,
        "step": 1,
        "metrics": {},
        "tracking": SimpleNamespace(samples=lambda step, kind, records: None),
        "stopwatch": Stopwatch(),
        "display": Screen(),
        "first_step": True,
        "current": StepState(),
        "version": 0,
        "routes": None,
        "inference": None,
        "env_factory": None,
        "service": None,
        "teacher": None,
        "teacher_service": None,
        "shown_failures": set(),
        "tokenizer": SimpleNamespace(decode=lambda ids: f"prompt {list(map(int, ids))}"),
        "kl": KLController(0.0),
        "plan": SimpleNamespace(
            critic_warmup=0,
            placement={"actor": [0]},
            needs_old_log_probs=False,
            correction=RolloutCorrection(),
            loss_mode="vanilla",
            sequence_parallel={"actor": 1, "ref": 1, "critic": 1},
            prompts=2,
            samples_per_prompt=2,
            batch_size=4,
            gen_prompts=2,
            filters_groups=False,
            needs_greedy_baseline=False,
            reference_is_actor=False,
            train_dtype="float32",
            rollout_dtype="float32",
        ),
    }
    run = FakeRun(**(defaults | {"stop": Stop(embedded=True)} | fields))
    if isinstance(run.stop, Stop):
        run.stop.screen = run.display
        run.stop.tell(Machine.begins, Policy(total_steps=9, max_restarts=3))
    if not hasattr(run, "actor"):
        run.actor = local_actor(run.config, run.plan)
    return run


def rewarded_batch(statuses=("done", "done", "done"), results=None) -> DataProto:
    """Return generated rows of two tokens each. Rows that did not fail have rewards."""
    rows = [
        ([10, 11], [1, 1], [-0.5, -1.5], s) if s != "error" else ([], [], [], s) for s in statuses
    ]
    return generated_batch([[5, 6]] * len(rows), [f"u{i}" for i in range(len(rows))], rows, results)


def dense(batch, *names):
    """Return the tokens of the driver's batch and these columns, padded."""
    return fetch_padded(batch, *names)


def columns(**rows) -> DataProto:
    """Return ragged columns of [B, 2] numbers, as a worker does."""
    return DataProto.from_dict(
        {},
        {
            name: ragged(torch.tensor(values), torch.tensor([2] * len(values)))
            for name, values in rows.items()
        },
    )


GOOD = RewardResult(1.0)
BAD = RewardResult(None, error="Timeout", traceback="Traceback: it took too long")


class Updates:
    """An actor that records the steps of its updates."""

    def __init__(self):
        self.steps = []

    def update(self, batch):
        self.steps.append(batch.meta_info["step"])
        return [{}]


def test_the_actor_is_not_updated_during_critic_warmup():
    """The stage reads plan.critic_warmup, which is 0 without a critic, not the configuration."""
    for warmup, updated in ((0, [1, 2, 3]), (3, [3])):
        run = fake_run(actor=Updates())
        run.plan.critic_warmup, run.config.trainer.critic_warmup = warmup, 3
        batch = rewarded_batch().with_batch(mini_batch_index=torch.zeros(3, 1, dtype=torch.int64))
        for run.step in (1, 2, 3):
            update_actor(run, batch)
        assert run.actor.steps == updated


def test_the_ranks_tokens_are_those_of_the_whole_step_also_during_critic_warmup():
    run = fake_run(actor=Updates())
    run.plan.critic_warmup = 3
    batch = rewarded_batch().with_batch(mini_batch_index=torch.zeros(3, 1, dtype=torch.int64))
    to_ranks(run, batch.select_idxs(torch.tensor([1])).with_meta(part=1), "actor")
    assert not run.metrics
    update_actor(run, batch)
    tokens = batch.batch["prompt_length"] + batch.batch["response_length"]
    assert run.metrics["global_seqlen/mean"] == tokens.sum() == 3 * tokens[0]
    assert not run.actor.steps


def test_rows_without_a_greedy_baseline_are_excluded():
    batch = rewarded_batch(
        "done done done done error".split(), [RewardResult(0.25), GOOD, GOOD, RewardResult(0.5)]
    ).with_non_tensor(
        uid=object_array(["a", "b", "c", "a", "c"]),
        sampling=object_array([Sampling(1.0, 1.0, -1, 2)] * 3 + [Sampling(0.0, 1.0, -1, 2)] * 2),
    )
    scored = score(fake_run(), batch)
    # Prompt a has the baseline 0.5. The greedy row of c failed, and b has no greedy row.
    assert scored.batch["valid"].tolist() == [True, False, False]
    assert scored.batch["reward_baselines"].tolist() == [0.5, 0, 0]
    assert scored.batch["sampled_tokens"].tolist() == [2, 0, 0]
    assert dense(scored)["response_mask"].tolist() == [[1, 1], [0, 0], [0, 0]]
    assert [bool(error) for error in scored.non_tensor_batch["error"]] == [False, True, True]


def test_reward_time_is_that_of_the_slowest_worker():
    run, batch = fake_run(), rewarded_batch()
    score(run, batch.with_batch(reward_seconds=torch.tensor([100.0, 100.0, 250.0])))
    assert 250 <= run.stopwatch.seconds["reward"] < 260


def test_failed_rewards_exclude_their_rows_and_too_many_stop_the_run():
    run, batch = fake_run(), rewarded_batch(results=[GOOD, BAD, GOOD])
    run.config.reward.max_error_rate = 0.4
    scored = score(run, batch)
    assert scored.batch["valid"].tolist() == [True, False, True]
    assert dense(scored)["response_mask"].tolist() == [[1, 1], [0, 0], [1, 1]]
    assert (
        scored.batch["scores"].tolist() == [1, 0, 1]
        and scored.non_tensor_batch["error"][1] == "reward: Timeout"
    )
    run.config.reward.max_error_rate = 0.3
    with pytest.raises(
        RewardFailures,
        match=r"33.3% of this step's rewards failed(.|\n)*prompt \[5, 6\](.|\n)*it took too long",
    ):
        score(run, batch)


def test_each_kind_of_failed_reward_is_shown_once_with_its_sample():
    run = fake_run()
    run.config.reward.max_error_rate = 1.0
    raised = RewardResult(
        None,
        error="KeyError",
        traceback='Traceback:\n  File "reward.py", line 7, in compute_score\nKeyError: "\x1b[2Jx"',
    )
    batch = rewarded_batch(["done"] * 5, [GOOD, BAD, raised, raised, GOOD]).with_non_tensor(
        ground_truth=object_array(["41", "42", "43\n", "44", "45"]),
        text=object_array(["a", "b", "c\nd", "e", "x" * 10_000]),
    )
    score(run, batch)
    score(run, batch)
    timeout, key_error = run.display
    assert "1 of 5 samples have no reward" in timeout and "it took too long" in timeout
    assert "2 of 5 samples have no reward" in key_error
    for text in ("prompt: prompt [5, 6]", "response: c d", "ground truth: 43", "line 7, in"):
        assert text in key_error
    assert "44" not in key_error and "\x1b" not in key_error and len(key_error) < 1000
    changed = rewarded_batch(["done", "error"], [RewardResult(None, error="Died", traceback="x")])
    score(run, changed)
    assert "1 of 2 samples have no reward" in run.display[2] and len(run.display) == 3


def test_kinds_of_failures_that_a_service_invents_do_not_flood_the_console():
    run = fake_run()
    run.config.reward.max_error_rate = 1.0
    failed = [RewardResult(None, error=f"a\nstep {n}/9", traceback="x") for n in range(80)]
    score(run, rewarded_batch(["done"] * 80, failed))
    assert len(run.display) == 50
    assert all("\nstep" not in shown for shown in run.display)


@pytest.mark.parametrize(("limit", "stops"), [(0.5, False), (0.3, True)])
def test_too_many_failed_samples_stop_the_run(limit, stops):
    rows = [([10], [1], [-0.5], "done"), ([], [], [], "error"), ([11], [1], [-0.5], "length")]
    run = fake_run(
        rollout=SimpleNamespace(
            generate=lambda requests, sleep_after: rollout_output(rows, [[5]] * 3)
        )
    )
    run.config.actor_rollout_ref.rollout.max_error_rate = limit
    if not stops:
        assert generate(run, make_requests([[5]] * 3, ["a"] * 3)).batch["valid"].tolist() == [
            True,
            False,
            True,
        ]
        return
    with pytest.raises(
        RolloutFailures, match="33.3% of this step's samples.*max_error_rate=0.3.*Timeout"
    ):
        generate(run, make_requests([[5]] * 3, ["a"] * 3))


def log_probs(values):
    """Return an actor with these log-probs and an entropy of 1 per token. It measures the gap."""

    def answer(batch):
        t = dense(batch, "rollout_log_probs")
        sums = {
            "gap_sums": gap_rows(torch.tensor(values), t["rollout_log_probs"], t["response_mask"])
        }
        return columns(old_log_probs=values).with_batch(
            entropy_sums=t["sampled_tokens"].double(), **sums
        )

    return SimpleNamespace(log_probs=answer)


def run_old_log_probs(values, needed=False, bypass=False, **fields):
    """Run the stage old_log_probs with an actor that has these log-probs."""
    run = fake_run(actor=log_probs(values), **fields)
    run.plan.needs_old_log_probs, run.plan.correction = (
        needed,
        RolloutCorrection(bypass_mode=bypass),
    )
    batch = rewarded_batch().with_batch(mini_batch_index=torch.zeros(3, 1, dtype=torch.int64))
    return run, old_log_probs(run, batch)


def test_the_start_up_check_measures_the_gap_and_unneeded_log_probs_are_dropped():
    run, batch = run_old_log_probs([[-0.5, -1.5], [-0.5, -1.54], [-0.5, -1.5]])
    assert run.metrics["training/log_prob_gap"] == pytest.approx(0.04 / 6, rel=1e-4)
    assert run.metrics["actor/entropy"] == 1
    assert (
        "old_log_probs" not in batch.non_tensor_batch and "entropy_sums" not in batch.batch.keys()
    )
    run, batch = run_old_log_probs([[-0.5, -1.5]] * 3, needed=True)
    assert (
        dense(batch, "old_log_probs")["old_log_probs"].tolist() == [[-0.5, -1.5]] * 3
        and "entropy_sums" in batch.batch.keys()
    )
    run, batch = run_old_log_probs([[9.0, 9.0]] * 3, first_step=False)  # the pass is skipped
    assert run.metrics == {} and "old_log_probs" not in batch.non_tensor_batch


@pytest.mark.parametrize("first_step", [True, False])
def test_bypass_mode_uses_rollout_log_probs_and_still_checks_the_gap(first_step):
    run, batch = run_old_log_probs([[-0.5, -1.54]] * 3, bypass=True, first_step=first_step)
    assert dense(batch, "old_log_probs")["old_log_probs"].tolist() == [[-0.5, -1.5]] * 3
    assert ("training/log_prob_gap" in run.metrics) == first_step
    assert "entropy_sums" not in batch.batch.keys()  # the update measures it


SAME, OTHER = gap_rows(
    torch.tensor([[-1.0], [-2.0]]), torch.tensor([[-1.0], [-1.5]]), torch.ones(2, 1)
)


@pytest.mark.parametrize(
    ("versions", "rows", "gaps"),
    [
        ([3, 3], [SAME, OTHER], [0.25]),
        ([3, 2], [SAME, OTHER], [0.0]),
        ([2, 3], [SAME, OTHER], [0.5]),
        ([2, 2], [OTHER, OTHER], []),
        ([2, -1], [OTHER, torch.zeros_like(SAME)], []),
    ],
)
def test_samples_of_older_weights_do_not_compare_trainer_and_engine(
    versions, rows, gaps, monkeypatch
):
    """A run that resumes with trainer.mode=async may begin with samples of a checkpoint."""
    seen = []

    def record(run, batch, gap):
        seen.append(gap["training/log_prob_gap"])

    monkeypatch.setattr(log_prob_gap, "check_log_prob_gap", record)
    batch = rewarded_batch(["done"] * 2).with_batch(
        oldest_version=torch.tensor(versions), gap_sums=torch.stack(rows)
    )
    gap = gap_metrics(gap_totals(batch.batch["gap_sums"]))
    log_prob_gap.check_first_step(fake_run(groups=object(), version=3), batch, gap)
    assert seen == gaps


def test_the_start_up_check_reports_where_the_gap_is():
    with pytest.raises(
        match="2.50e-01 before the first update; .*limit=0.05.*first response token"
    ):
        run_old_log_probs([[-1.0, -1.5]] * 3)
    with pytest.raises(LogProbGap, match="on all tokens"):
        run_old_log_probs([[-0.4, -1.4]] * 3)
    with pytest.raises(LogProbGap, match="no sampled token.*: Timeout"):
        run = fake_run(actor=log_probs([[0.0]] * 2))
        old_log_probs(
            run,
            rewarded_batch(["error"] * 2).with_batch(
                mini_batch_index=torch.zeros(2, 1, dtype=torch.int64)
            ),
        )


@pytest.mark.parametrize(
    ("arch", "dtypes", "key", "limit"),
    [
        ("qwen3", ("bfloat16", "bfloat16"), None, 0.05),
        ("qwen3_moe", ("float32", "float32"), None, 0.05),
        ("qwen3_moe", ("float32", "bfloat16"), None, 0.15),
        ("mixtral", ("bfloat16", "bfloat16"), None, 0.15),
        ("deepseek_v3", ("bfloat16", "bfloat16"), None, 0.15),
        ("qwen3_moe", ("bfloat16", "bfloat16"), 0.02, 0.02),
    ],
)
def test_the_limit_of_the_gap_allows_routing_in_half_precision(tmp_path, arch, dtypes, key, limit):
    """A mean gap of 0.1: twice the limit of dense models."""
    AutoConfig.for_model(arch).save_pretrained(tmp_path)
    config = Config(data=DataConfig(train_files="x"))
    config.actor_rollout_ref.model = ModelConfig(path=str(tmp_path))
    config.actor_rollout_ref.rollout.log_prob_gap_limit = key

    def first_step():
        run = fake_run(actor=log_probs([[-0.4, -1.4]] * 3), config=config)
        run.plan.train_dtype, run.plan.rollout_dtype = dtypes
        return old_log_probs(
            run, rewarded_batch().with_batch(mini_batch_index=torch.zeros(3, 1, dtype=torch.int64))
        )

    if limit > 0.1:
        first_step()
        return
    with pytest.raises(LogProbGap, match=rf"log_prob_gap_limit={limit}\. .*raise .*gap_limit\."):
        first_step()


@pytest.mark.parametrize("balanced", [True, False])
def test_columns_of_a_row_stay_together_to_the_ranks_and_back(balanced):
    """Compute every value from its row's number, so that values of another row are detected."""
    number, lengths = list(range(12)), [3, 9, 1, 7, 2, 8, 4, 6, 5, 9, 1, 2]
    rows = [
        ([100 * i + j for j in range(n)], [1] * n, [-float(i)] * n, "done")
        for i, n in enumerate(lengths)
    ]
    batch = generated_batch([[i] for i in number], [f"u{i // 2}" for i in number], rows).with_batch(
        turns=torch.tensor(number),
        advantages=torch.tensor(number)[:, None] * 0.5,
        mini_batch_index=(torch.tensor(number) % 3)[:, None],
    )
    run = fake_run()
    run.plan.placement, run.config.trainer.balance_batch = {"actor": [0, 1, 2]}, balanced
    sent = to_ranks(run, batch, "actor", "rollout_log_probs", "values")
    assert set(sent.non_tensor_batch) == {
        "prompt_ids",
        "response_ids",
        "response_mask",
        "rollout_log_probs",
    }
    parts = split_rows(sent, 3)
    assert sorted(torch.cat([part.batch["turns"] for part in parts]).tolist()) == number
    for part in parts:
        for i, row in enumerate(part.batch["turns"].tolist()):
            t = dense(part[i : i + 1], "rollout_log_probs")
            assert t["input_ids"].tolist() == [[row, *rows[row][0]]] and t[
                "rollout_log_probs"
            ].tolist() == [rows[row][2]]
            assert t["advantages"].tolist() == [[row * 0.5] * lengths[row]] and t[
                "mini_batch_index"
            ].tolist() == [[row % 3]]
    assert balanced == (
        [part.batch["turns"].tolist() for part in parts] != [number[i : i + 4] for i in (0, 4, 8)]
    )
    answered = [
        DataProto.from_dict({}, {"values": [[2.0 * i] for i in part.batch["turns"].tolist()]})
        for part in parts
    ]
    back = batch.union(join_rows(answered, sent))
    assert back.non_tensor_batch["values"].tolist() == [[2.0 * i] for i in number]
    assert back.non_tensor_batch["uid"].tolist() == [f"u{i // 2}" for i in number]


def test_a_sequence_parallel_group_counts_as_one_rank():
    """Distribute two updates over four ranks in two groups. The first update has two long rows.

    Each group gets one long row, and each row is assigned once.
    """
    lengths = torch.tensor([9, 9, 2, 2, 2, 2, 2, 2])
    updates = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1])[:, None]
    batch = DataProto.from_dict(
        {
            "prompt_length": lengths - 1,
            "response_length": lengths * 0 + 1,
            "mini_batch_index": updates,
        },
        {"uid": object_array([str(i) for i in range(8)])},
    )
    run = fake_run()
    run.plan.placement, run.plan.sequence_parallel = {"actor": [0, 1, 2, 3]}, {"actor": 2}
    first, second, third, fourth = to_ranks(run, batch, "actor").meta_info["assignment"]
    assert sorted([*first, *second, *third, *fourth]) == list(range(8))
    assert [len({0, 1} & {*group}) for group in ((*first, *second), (*third, *fourth))] == [1, 1]
    assert [len(rows) for rows in (first, second, third, fourth)] == [2, 2, 2, 2]
    assert (
        run.metrics["global_seqlen/balanced_max"] == run.metrics["global_seqlen/balanced_min"] == 15
    )


def test_reference_log_probs_come_from_the_reference():
    run = fake_run(
        reference=SimpleNamespace(
            log_probs=lambda batch: columns(ref_log_prob=[[-7.0, -7.0]] * len(batch))
        ),
        actor=log_probs([[-0.5, -1.5]] * 3),
    )
    run.plan.placement["ref"] = [0]
    batch = rewarded_batch().with_batch(mini_batch_index=torch.zeros(3, 1, dtype=torch.int64))
    assert (dense(reference_log_probs(run, batch), "ref_log_prob")["ref_log_prob"] == -7).all()
    run.reference = None  # no KL term
    assert "ref_log_prob" not in reference_log_probs(run, batch).non_tensor_batch
    run.plan.reference_is_actor = True  # LoRA
    run.actor.reference_log_probs = lambda batch: columns(ref_log_prob=[[-3.0, -3.0]] * len(batch))
    assert (dense(reference_log_probs(run, batch), "ref_log_prob")["ref_log_prob"] == -3).all()
    run.actor.reference_log_probs = None
    run.inference = SimpleNamespace(
        reference_log_probs=lambda batch: columns(ref_log_prob=[[-4.0, -4.0]] * len(batch))
    )
    run.plan.placement["inference"], run.plan.sequence_parallel["inference"] = [1], 1
    assert (dense(reference_log_probs(run, batch), "ref_log_prob")["ref_log_prob"] == -4).all()


@pytest.mark.parametrize("role", ["actor", "inference"])
def test_reference_service_is_asked_by_the_role_of_log_probs_for_the_checked_model(role):
    asked = []

    def remote(batch, service, model):
        asked.append((service.url, service.section, model))
        return columns(ref_log_prob=[[-7.0, -7.0]] * len(batch))

    worker = SimpleNamespace(remote_log_probs=remote)
    run = fake_run(reference=None, service=SimpleNamespace(model="m"), **{role: worker})
    run.teacher_service = SimpleNamespace(model="t")
    run.config.actor_rollout_ref.ref.url = "http://a"
    run.config.distillation.teacher_models.teacher_model.url = ["http://b", "http://c"]
    run.plan.placement[role], run.plan.sequence_parallel[role] = [0], 1
    batch = rewarded_batch().with_batch(mini_batch_index=torch.zeros(3, 1, dtype=torch.int64))
    assert (dense(reference_log_probs(run, batch), "ref_log_prob")["ref_log_prob"] == -7).all()
    assert asked == [(("http://a",), "actor_rollout_ref.ref", "m")]
    found = dense(teacher_log_probs(run, batch), "teacher_log_prob")
    assert (found["teacher_log_prob"] == -7).all()
    section = "distillation.teacher_models.teacher_model"
    assert asked[1:] == [(("http://b", "http://c"), section, "t")]


def test_teacher_log_probs_come_from_the_teacher():
    def answer(batch):
        return columns(ref_log_prob=[[-5.0, -6.0]] * len(batch))

    run = fake_run(reference=None, actor=None)
    batch = rewarded_batch().with_batch(mini_batch_index=torch.zeros(3, 1, dtype=torch.int64))
    assert "teacher_log_prob" not in teacher_log_probs(run, batch).non_tensor_batch
    run.teacher = SimpleNamespace(log_probs=answer)
    run.plan.placement["teacher"], run.plan.sequence_parallel["teacher"] = [0], 1
    answered = teacher_log_probs(run, batch)
    assert "ref_log_prob" not in answered.non_tensor_batch
    found = dense(answered, "teacher_log_prob")["teacher_log_prob"]
    assert found.tolist() == [[-5.0, -6.0]] * 3


def validation_run(results, **trainer):
    """Return a run that validates one prompt per result. `trainer` sets keys of its config."""
    rows = [([10, 11], [1, 1], [-0.5, -1.5], "done")]
    data = SimpleNamespace(
        row=lambda i: PromptRow(i, [5, 6], [{"role": "user", "content": "1+1="}], "sums", "2")
    )
    sequence = iter(results)
    run = fake_run(
        val_data=type(
            "Data", (), {"__len__": lambda self: len(results), "row": staticmethod(data.row)}
        )(),
        rollout=SimpleNamespace(
            generate=lambda requests, sleep_after: rollout_output(
                rows * len(requests), results=sequence
            )
        ),
        tokenizer=SimpleNamespace(decode=lambda ids: "1+1="),
        run_dir=trainer.pop("run_dir"),
    )
    run.config.data.val_batch_size = 2  # two batches; the first failure may be in either
    for key, value in trainer.items():
        setattr(run.config.trainer, key, value)
    return run


def test_validation_reports_failures_of_any_chunk_and_prints_samples(tmp_path):
    run = validation_run(
        [GOOD, BAD, RewardResult(0.0), GOOD], run_dir=tmp_path, log_val_generations=1
    )
    metrics = validate(run)
    assert (
        metrics["val-core/sums/reward/mean@1"] == pytest.approx(2 / 3)
        and metrics["val-aux/error_rate"] == 0.25
    )
    assert metrics["val-aux/num_turns/mean"] == 2
    warned, shown = run.display
    assert (
        warned.startswith("1 of 4 validation samples could not be scored")
        and "it took too long" in warned
    )
    assert shown == "1+1=text  [score 1.0, expected 2]"
    saved = (tmp_path / "rollouts" / "val_step_1.jsonl").read_text().splitlines()
    tokens = [json.loads(line)["tokens"] for line in saved]
    assert [one["id"] for one in tokens] == [[10, 11]] * 4
    assert tokens[0]["rollout_log_prob"] == [-0.5, -1.5] and "advantage" not in tokens[0]


@pytest.mark.parametrize(
    ("val_kwargs", "temperature"),
    [
        ({}, 0),
        ({"temperature": 0.7}, 0),
        ({"temperature": 0.7, "do_sample": True}, 0.7),
        ({"do_sample": True}, 0),
    ],
)
def test_validation_sampling_parameters(tmp_path, val_kwargs, temperature):
    """Validation uses val_kwargs: n samples per prompt, and greedy decoding without do_sample."""
    run = validation_run([GOOD] * 4, run_dir=tmp_path)
    run.val_data = type(
        "Data", (), {"__len__": lambda self: 2, "row": staticmethod(run.val_data.row)}
    )()
    settings = run.config.actor_rollout_ref.rollout.val_kwargs
    generate_responses = run.rollout.generate
    sampling = []
    settings.n = 2
    settings.top_p = 0.9
    settings.top_k = 7
    for key, value in val_kwargs.items():
        setattr(settings, key, value)

    def generate_and_record(requests, sleep_after):
        sampling.extend(requests.non_tensor_batch["sampling"])
        return generate_responses(requests, sleep_after)

    run.rollout.generate = generate_and_record
    assert "val-core/sums/reward/mean@2" in validate(run)
    assert [(s.temperature, s.top_p, s.top_k) for s in sampling] == [(temperature, 0.9, 7)] * 4
    assert len({s.seed for s in sampling}) == 4


def test_actor_and_critic_have_different_mini_batches():
    """The actor has three updates of one row each, the critic one update of all three rows."""
    run = fake_run()
    batch = rewarded_batch().with_batch(
        mini_batch_index=torch.arange(3)[:, None],
        critic_mini_batch_index=torch.zeros(3, 1, dtype=torch.int64),
    )
    run.plan.placement["critic"] = [0]
    assert [to_ranks(run, batch, role).meta_info["updates"] for role in ("actor", "critic")] == [
        3,
        1,
    ]


def test_validation_without_any_score_is_an_error(tmp_path):
    with pytest.raises(
        RewardFailures, match=r"none of the 2 validation samples(.|\n)*it took too long"
    ):
        validate(validation_run([BAD, BAD], run_dir=tmp_path))


def test_scores_are_normalized_clipped_and_penalized_for_length():
    rows = [
        ([10] * n, [1] * n, [-0.5] * n, s)
        for n, s in ((2, "done"), (3, "done"), (4, "length"), (1, "done"))
    ]
    results = [RewardResult(s) for s in (1.0, 1.0, 0.0, 9.0)]
    batch = generated_batch([[5, 6]] * 4, list("abcd"), rows, results)
    run = fake_run()
    run.config.data.max_response_length = 4
    run.plan.overlong_buffer = 2
    reward = run.config.reward
    reward.mean = 0.5
    reward.std = 0.25
    reward.clip_range = [-3.0, 3.0]
    reward.overlong_buffer.enable = True
    reward.overlong_buffer.penalty_factor = 0.5
    batch = score(run, batch)
    assert batch.batch["raw_scores"].tolist() == [1, 1, 0, 9]
    # (score - 0.5) / 0.25 is 2, 2, -2, 34, and 34 is clipped to 3.
    # The penalties of lengths 2, 3, 4, 1 are 0, half of 0.5, all of 0.5, and 0.
    assert batch.batch["scores"].tolist() == [2, 1.75, -2.5, 3]
    assert batch.batch["overlong_penalty"].tolist() == [0, -0.25, -0.5, 0]
    reward.overlong_buffer.max_resp_len = 6  # the penalty starts after length 4
    assert not score(run, batch).batch["overlong_penalty"].any()


def test_rloo_token_kl_clips_after_the_baseline_and_others_before():
    for estimator, total in (("grpo", 1.0), ("rloo_token_kl", 9.0)):
        run = fake_run()
        run.config.algorithm.adv_estimator, run.config.reward.clip_range = estimator, [-1.0, 1.0]
        batch = score(
            run, rewarded_batch(["done", "done"], [RewardResult(9.0), RewardResult(0.0)])
        ).with_non_tensor(uid=object_array(["a", "a"]))
        assert batch.batch["scores"].sum().item() == total
        result = dense(advantages(run, loss_mask(run, batch)), "advantages")["advantages"]
        if estimator == "rloo_token_kl":  # 9 - 0 and 0 - 9, clipped to 1 and -1
            assert result.tolist() == [[1, 1], [-1, -1]]


def gdpo_run(keys=("correct", "format"), weights=None, **fields) -> FakeRun:
    run = fake_run(**fields)
    algorithm = run.config.algorithm
    algorithm.adv_estimator = "gdpo"
    algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights = list(keys), weights
    return run


def parts(**numbers) -> RewardResult:
    return RewardResult(0.5, parts=numbers)


def test_gdpo_trains_on_the_named_parts_of_the_reward():
    """The scores are equal, so an estimator of scores would have no signal."""
    results = [
        parts(correct=1.0, format=0.0, length=9.0),
        parts(correct=0.0, format=0.0, length=1.0),
        parts(correct=0.0, format=3.0, length=5.0),
        parts(correct=0.0, format=1.0, length=5.0),
    ]
    run = gdpo_run(weights=[2.0, 1.0])
    batch = score(run, rewarded_batch(["done"] * 4, results))
    assert batch.batch["gdpo_rewards"].tolist() == [[1, 0], [0, 0], [0, 3], [0, 1]]
    batch = batch.with_non_tensor(uid=object_array(["a", "a", "b", "b"]))
    result = dense(advantages(run, loss_mask(run, batch)), "advantages")["advantages"]
    # 2, -2, 1, -1 times 1 / sqrt(2), whitened over two tokens each.
    expected = torch.tensor([[2.0], [-2.0], [1.0], [-1.0]]) * (7 / 20) ** 0.5
    torch.testing.assert_close(result, expected.expand(4, 2), rtol=1e-5, atol=0)


def test_gdpo_knows_the_score_as_a_part_and_as_acc():
    results = [RewardResult(0.25, parts={"acc": 1.0}), RewardResult(0.75)]
    batch = score(gdpo_run(("acc", "score")), rewarded_batch(["done"] * 2, results))
    assert batch.batch["gdpo_rewards"].tolist() == [[1, 0.25], [0.75, 0.75]]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"correct": 1.0}, "format of algorithm.gdpo_reward_keys is missing or not a number"),
        ({"correct": 1.0, "format": "1.0"}, "format .* is missing or not a number"),
        ({"correct": float("nan"), "format": 1.0}, "correct .* is nan"),
        ({"correct": 1.0, "format": float("-inf")}, "format .* is -inf"),
        ({"correct": 1.0, "format": 1e39}, r"format .* is 1e\+39"),
    ],
)
def test_a_sample_without_a_number_that_gdpo_compares_has_a_failed_reward(given, words):
    good = parts(correct=1.0, format=2.0)
    run = gdpo_run()
    run.config.reward.max_error_rate = 0.4
    batch = score(
        run, rewarded_batch(["done", "done", "error", "done"], [good, parts(**given), good])
    )
    assert batch.batch["valid"].tolist() == [True, False, False, True]
    assert batch.batch["sampled_tokens"].tolist() == [2, 0, 0, 2]
    assert batch.batch["gdpo_rewards"].isfinite().all()
    assert batch.meta_info["reward_error_rate"] == pytest.approx(1 / 3)
    assert batch.non_tensor_batch["error"][1] == "reward: BadReturn"
    (shown,) = run.display
    assert re.search(words, shown) and "prompt [5, 6]" in shown
    assert "returned the numbers score, correct" in shown
    run.config.reward.max_error_rate = 0.3
    with pytest.raises(RewardFailures, match=words):
        score(run, rewarded_batch(["done", "done", "error", "done"], [good, parts(**given), good]))


class Engines:
    """Engines that return the same response to every prompt. They count calls of sleep."""

    def __init__(self):
        self.slept = 0

    def generate(self, requests, sleep_after):
        self.slept += sleep_after
        return rollout_output([([10], [1], [-0.5], "done")] * len(requests), [[5]] * len(requests))

    def sleep(self):
        self.slept += 1


def filter_generation(scores, uids, batch=None, **settings):
    """Generate four samples with these scores and filter their groups. Return run and batch."""
    run = settings.pop("run", None) or fake_run(
        train_data=range(settings.pop("data", 8)), rollout=Engines()
    )
    run.plan.filters_groups, run.current.prompts_drawn = True, run.current.prompts_drawn + 2
    for key, value in settings.items():
        setattr(run.config.algorithm.filter_groups, key, value)
    results = [RewardResult(score, parts={"acc": 1.0 - score}) for score in scores]
    more = score(run, rewarded_batch(["done"] * 4, results)).with_non_tensor(uid=object_array(uids))
    return run, filter_groups(run, DataProto() if batch is None else batch, more)


def test_dynamic_sampling_keeps_groups_that_differ_until_the_step_is_full():
    run, batch = filter_generation([1, 1, 0, 1], ["a", "a", "b", "b"])
    assert list(batch.non_tensor_batch["uid"]) == ["b", "b"]
    run, batch = filter_generation([1, 1, 0, 0], ["c", "c", "d", "d"], batch, run=run)
    assert list(batch.non_tensor_batch["uid"]) == ["b", "b"]
    run, batch = filter_generation([0, 1, 0, 1], ["e", "e", "f", "f"], batch, run=run)
    assert list(batch.non_tensor_batch["uid"]) == ["b", "b", "e", "e"]  # f is surplus
    assert batch.batch["raw_scores"].tolist() == [0, 1, 0, 1]
    assert run.metrics["train/num_gen_batches"] == 3
    assert run.metrics["filter_groups/kept_ratio"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert run.metrics["filter_groups/score/mean"] == pytest.approx((0.75 + 0.5 + 0.5) / 3)
    assert batch.meta_info["reward_error_rate"] == 0


def test_dynamic_sampling_by_a_part_of_the_reward():
    _, batch = filter_generation([1, 0, 1, 1], ["a", "a", "b", "b"], metric="acc")
    assert list(batch.non_tensor_batch["uid"]) == ["a", "a"]
    with pytest.raises(
        TooFewGroups, match="metric=accuracy: .* did not return this number.*: score, acc"
    ):
        filter_generation([1, 0, 1, 1], ["a", "a", "b", "b"], metric="accuracy")


def test_filter_metric_acc_falls_back_to_the_raw_score_per_row():
    """Mix sources whose scorers return `acc` with sources whose score is the accuracy."""
    results = [
        RewardResult(1.0, parts={"acc": 0.5}),
        RewardResult(-1.0, parts={"acc": 0.5}),
        RewardResult(1.0),
        RewardResult(0.0),
    ]
    run = fake_run(train_data=range(8), rollout=Engines())
    run.plan.filters_groups = True
    run.current.prompts_drawn = 2
    run.config.algorithm.filter_groups.metric = "acc"
    samples = score(run, rewarded_batch(["done"] * 4, results))
    samples = samples.with_non_tensor(uid=object_array(["a", "a", "b", "b"]))
    batch = filter_groups(run, DataProto(), samples)
    assert list(batch.non_tensor_batch["uid"]) == ["b", "b"]


@pytest.mark.parametrize(("limit", "data", "last"), [(2, 100, 2), (0, 6, 3)])
def test_dynamic_sampling_stops_the_run_if_the_step_cannot_be_filled(limit, data, last):
    run, batch = fake_run(train_data=range(data)), None
    for _ in range(last - 1):
        _, batch = filter_generation(
            [1, 1, 0, 0], ["a", "a", "b", "b"], batch, run=run, max_num_gen_batches=limit
        )
    with pytest.raises(
        TooFewGroups,
        match=f"after {last} generations of 2 prompts, only 0 of data.train_batch_size=2 have "
        "samples whose score differs",
    ):
        filter_generation([1, 1, 0, 0], ["c", "c", "d", "d"], batch, run=run)


def test_engines_stay_awake_until_the_last_generation_of_a_step():
    """On a GPU sleep frees the engines' weights, which the next generation needs."""
    run, batch = filter_generation([1, 1, 0, 1], ["a", "a", "b", "b"])
    generate(run, make_requests([[5]] * 4, "ccdd"))
    assert run.rollout.slept == 0
    filter_generation([0, 1, 0, 1], ["c", "c", "d", "d"], batch, run=run)
    assert run.rollout.slept == 1


def test_without_dynamic_sampling_a_step_is_one_generation():
    run, more = fake_run(rollout=Engines()), rewarded_batch()
    generate(run, make_requests([[5]], ["a"]))
    assert filter_groups(run, DataProto(), more) is more and run.rollout.slept == 1


def test_uids_and_seeds_are_unique_over_the_generations_of_a_step():
    rows = [PromptRow(i, [5, 6], [], "sums", "2") for i in range(2)]
    run = fake_run(
        train_data=SimpleNamespace(row=lambda i: rows[i]),
        sampler=SimpleNamespace(next_batch=lambda: [0, 1]),
    )
    first, second = next_prompts(run), next_prompts(run)
    assert list(first.non_tensor_batch["uid"]) == ["1-0", "1-1"] and list(
        second.non_tensor_batch["uid"]
    ) == ["1-2", "1-3"]
    seeds = [s.seed for part in (first, second) for s in part.non_tensor_batch["sampling"]]
    assert len(set(seeds)) == 4


def batch_with_loss_mask(settings, **batch):
    """Return a run and its batch after the stage loss_mask.

    The batch has three samples of one prompt with rollout log-probs -0.5 and -1.5.

    The last token of the second sample has w = exp(-3); every other token has w = 1.
    """
    run = fake_run()
    run.plan.correction, run.config.algorithm.adv_estimator = settings, "rloo"
    scored = score(
        fake_run(), rewarded_batch(results=[GOOD, RewardResult(0.0), GOOD])
    ).with_non_tensor(uid=object_array(["a"] * 3))
    return run, loss_mask(
        run, scored.union(columns(old_log_probs=[[-0.5, -1.5], [-0.5, -4.5], [-0.5, -1.5]]))
    )


def test_rollout_correction_adds_importance_weights():
    run, batch = batch_with_loss_mask(RolloutCorrection())
    assert run.metrics == {} and "rollout_is_weights" not in batch.non_tensor_batch
    run, batch = batch_with_loss_mask(RolloutCorrection("token", "0.5_2.0"))
    assert dense(batch, "rollout_is_weights")["rollout_is_weights"].tolist() == [
        [1, 1],
        [1, 0],
        [1, 1],
    ]
    assert dense(batch, "loss_mask")["loss_mask"].tolist() == [[1, 1]] * 3
    assert run.metrics["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(1 / 6)


def test_rejected_tokens_leave_loss_mask_but_not_the_baseline():
    for name, left in (
        ("token_k1", [[1, 1], [1, 0], [1, 1]]),
        ("seq_sum_k1", [[1, 1], [0, 0], [1, 1]]),
    ):
        run, batch = batch_with_loss_mask(
            RolloutCorrection(rollout_rs=name, rollout_rs_threshold="0.5_2.0")
        )
        assert "rollout_is_weights" not in batch.non_tensor_batch
        batch = advantages(run, batch)
        t = dense(batch, "loss_mask", "advantages")
        assert t["response_mask"].tolist() == [[1, 1]] * 3, "estimation uses all sampled tokens"
        assert t["loss_mask"].tolist() == left and t["trained_tokens"].tolist() == [
            sum(row) for row in left
        ]
        # Leave-one-out on 1, 0, 1. Baselines include the score of the rejected row.
        assert t["advantages"].tolist() == [[0.5, 0.5], [-1.0 * m for m in left[1]], [0.5, 0.5]]
        assert t["scores"].tolist() == [1, 0, 1]
        trained = [0.5] * 4 + [-1.0] * sum(left[1])
        assert run.metrics["critic/advantages/mean"] == pytest.approx(sum(trained) / len(trained))


def run_advantages(loss_mode="vanilla", truncated=False, credit=None, **policy_loss):
    run = fake_run()
    run.plan.loss_mode, run.config.algorithm.adv_estimator = loss_mode, "grpo"
    run.config.algorithm.norm_adv_by_std_in_grpo, run.config.algorithm.mask_truncated = (
        False,
        truncated,
    )
    for key, value in policy_loss.items():
        setattr(run.config.actor_rollout_ref.actor.policy_loss, key, value)
    scored = score(
        run, rewarded_batch(["done", "length", "done"], [RewardResult(s) for s in (1.0, 0.0, 0.5)])
    )
    old = columns(old_log_probs=[[-0.1, -3.0], [-0.1, -1.0], [-0.1, -0.2]])
    batch = scored.with_non_tensor(uid=object_array(["a"] * 3)).union(old)
    if credit is not None:
        batch = batch.union(columns(credit=credit))
    batch = advantages(run, loss_mask(run, batch))
    return run, dense(batch, "loss_mask", "advantages", "selected_tokens")


def test_truncated_responses_leave_loss_mask_but_not_the_baseline():
    run, t = run_advantages(truncated=True)
    assert t["response_mask"].tolist() == [[1, 1]] * 3
    assert t["loss_mask"].tolist() == [[1, 1], [0, 0], [1, 1]]
    assert t["advantages"].tolist() == [[0.5, 0.5], [0, 0], [0, 0]]  # minus the mean of 1, 0, 0.5
    assert (
        run.metrics["critic/advantages/min"] == 0 and run.metrics["critic/advantages/mean"] == 0.25
    )
    assert run.metrics["response_length/masked_truncated_ratio"] == pytest.approx(1 / 3)
    _, t = run_advantages()
    assert t["loss_mask"].tolist() == [[1, 1]] * 3
    assert t["advantages"][1].tolist() == [-0.5, -0.5]


def test_clip_cov_and_kl_cov_select_tokens_over_the_whole_step():
    # Advantages 0.5, -0.5 and 0 have mean 0, log-probs have mean -0.75. The products of the
    # deviations are 0.325, -1.125 in the first row, -0.325, 0.125 in the second, 0 in the third.
    _, t = run_advantages("kl_cov", kl_cov_ratio=0.4)
    assert t["selected_tokens"].tolist() == [[True, False], [False, True], [False, False]]
    assert "selected_tokens" not in run_advantages()[1].keys()
    # The first token has the largest product, and with a tenth of its advantage the fourth: 0.081
    # and 0.106, with the mean -0.075 of the advantages.
    for first, place in ((1.0, 0), (0.1, 3)):
        credit = [[first, 1.0], [1.0, 1.0], [1.0, 1.0]]
        _, t = run_advantages("kl_cov", kl_cov_ratio=0.2, credit=credit)
        assert t["selected_tokens"].flatten().nonzero().tolist() == [[place]]
    # clip_cov selects random tokens within the bounds. Seed and step determine which.
    draws = [
        run_advantages("clip_cov", clip_cov_lb=-9.0, clip_cov_ub=9.0, clip_cov_ratio=0.4)[1][
            "selected_tokens"
        ]
        for _ in range(2)
    ]
    assert torch.equal(*draws) and draws[0].sum() == 2
