"""Stages of the loop by themselves, with the workers' answers made up."""

from types import SimpleNamespace

import pytest
import torch

from tests.trainer.test_batch import answers, asked
from verlite.config.schema import Config, DataConfig, ModelConfig
from verlite.controller.dispatch import join_rows, split_rows
from verlite.protocol.data import DataProto, object_array
from verlite.rewards.result import RewardResult
from verlite.rollout.types import Sampling
from verlite.trainer import stages
from verlite.trainer.batch import assemble
from verlite.trainer.metrics import Stopwatch


class Screen(list):
    """What a display was told."""

    say = warn = list.append

    def phase(self, name):
        return Stopwatch()(name)


def a_run(**fields) -> SimpleNamespace:
    config = Config(data=DataConfig(train_files="x"), reward=Config().reward)
    config.actor_rollout_ref.model = ModelConfig(path="x")
    made = {
        "config": config, "step": 1, "metrics": {}, "stopwatch": Stopwatch(), "display": Screen(), "pad_id": 0, "first_step": True,
        "plan": SimpleNamespace(critic_warmup=0, actor=SimpleNamespace(per_step=1), placement={"actor": [0]}),
        "response_texts": lambda batch: ["text"] * len(batch),
    }  # fmt: skip
    return SimpleNamespace(**(made | fields))


def a_batch(statuses=("done", "done", "done")) -> DataProto:
    """Rows of one prompt with two tokens each."""
    rows = [([10, 11], [1, 1], [-0.5, -1.5], s) if s != "error" else ([], [], [], s) for s in statuses]
    return assemble(asked([[5, 6]] * len(rows), [f"u{i}" for i in range(len(rows))]), answers(rows), pad_id=0)


def scorer_of(results):
    return SimpleNamespace(score=lambda items: results[: len(items)])


GOOD, BAD = RewardResult(1.0), RewardResult(None, error="Timeout", traceback="Traceback: it took too long")


class Updates:
    def __init__(self):
        self.steps = []

    def update(self, batch):
        self.steps.append(batch.meta_info["step"])
        return [{}]


def test_the_policy_waits_for_the_critics_warm_up_which_only_a_critic_has():
    """`plan.critic_warmup` is 0 without a critic, whatever the configuration says."""
    for warmup, updated in ((0, [1, 2, 3]), (3, [3])):
        run = a_run(actor=Updates())
        run.plan.critic_warmup, run.config.trainer.critic_warmup = warmup, 3
        batch = a_batch().with_batch(mini_batch=torch.zeros(3, 1, dtype=torch.int64))
        for run.step in (1, 2, 3):
            stages.update_actor(run, batch)
        assert run.actor.steps == updated


def test_a_failed_greedy_answer_is_no_baseline_of_0():
    batch = a_batch("done done done done error".split())
    batch = batch.with_non_tensor(
        uid=object_array(["a", "b", "c", "a", "c"]),
        sampling=object_array([Sampling(1.0, 1.0, -1, 2)] * 3 + [Sampling(0.0, 1.0, -1, 2)] * 2),
    )
    run = a_run(scorer=scorer_of([RewardResult(0.25), GOOD, GOOD, RewardResult(0.5), BAD]))
    scored = stages.score(run, batch)
    # a has the baseline 0.5; the greedy row of c failed, and b has none.
    assert scored.batch["valid"].tolist() == [True, False, False]
    assert scored.batch["reward_baselines"].tolist() == [0.5, 0, 0]
    assert scored.batch["response_mask"].tolist() == [[1, 1], [0, 0], [0, 0]]
    assert [bool(error) for error in scored.non_tensor_batch["error"]] == [False, True, True]


def test_a_failed_reward_takes_its_row_out_and_too_many_stop_the_run():
    run = a_run(scorer=scorer_of([GOOD, BAD, GOOD]))
    run.config.reward.max_error_rate = 0.4
    scored = stages.score(run, a_batch())
    assert scored.batch["valid"].tolist() == [True, False, True]
    assert scored.batch["response_mask"].tolist() == [[1, 1], [0, 0], [1, 1]]
    assert scored.batch["token_level_scores"].tolist() == [[0, 1], [0, 0], [0, 1]]
    run.config.reward.max_error_rate = 0.3
    with pytest.raises(stages.RewardFailures, match=r"33.3% of this step's rewards failed(.|\n)*it took too long"):
        stages.score(run, a_batch())


@pytest.mark.parametrize(("limit", "stops"), [(0.5, False), (0.3, True)])
def test_too_many_failed_samples_stop_the_run(limit, stops):
    rows = [([10], [1], [-0.5], "done"), ([], [], [], "error"), ([11], [1], [-0.5], "length")]
    run = a_run(rollout=SimpleNamespace(generate=lambda requests, sleep_after: answers(rows)))
    run.config.actor_rollout_ref.rollout.max_error_rate = limit
    if not stops:
        assert stages.generate(run, asked([[5]] * 3, ["a"] * 3)).batch["valid"].tolist() == [True, False, True]
        return
    with pytest.raises(stages.RolloutFailures, match="33.3% of this step's samples.*max_error_rate=0.3.*Timeout"):
        stages.generate(run, asked([[5]] * 3, ["a"] * 3))


def log_probs(values):
    return SimpleNamespace(
        log_probs=lambda batch: DataProto.from_dict({"old_log_probs": torch.tensor(values), "entropys": torch.ones(len(values), 2)})
    )


def gated(values, per_step=1, **fields):
    run = a_run(actor=log_probs(values), **fields)
    run.plan.actor.per_step = per_step
    batch = a_batch().with_batch(mini_batch=torch.zeros(3, 1, dtype=torch.int64))
    return run, stages.old_log_probs(run, batch)


def test_the_start_up_gate_measures_and_where_log_probs_are_skipped_hides_them_from_the_update():
    run, batch = gated([[-0.5, -1.5], [-0.5, -1.54], [-0.5, -1.5]])
    assert run.metrics["training/log_prob_gap"] == pytest.approx(0.04 / 6, rel=1e-4)
    assert run.metrics["actor/entropy"] == 1
    assert "old_log_probs" not in batch.batch.keys()
    run, batch = gated([[-0.5, -1.5]] * 3, per_step=2)
    assert "old_log_probs" in batch.batch.keys()
    run, batch = gated([[9.0, 9.0]] * 3, first_step=False)  # nobody is asked
    assert run.metrics == {} and "old_log_probs" not in batch.batch.keys()


def test_the_start_up_gate_says_where_the_gap_is():
    with pytest.raises(stages.LogProbGap, match="2.50e-01 before the first update; .*limit=0.05.*first response token"):
        gated([[-1.0, -1.5]] * 3)
    with pytest.raises(stages.LogProbGap, match="on all tokens"):
        gated([[-0.4, -1.4]] * 3)
    with pytest.raises(stages.LogProbGap, match="no trained token.*: Timeout"):
        run = a_run(actor=log_probs([[0.0]] * 2))
        stages.old_log_probs(run, a_batch(["error"] * 2).with_batch(mini_batch=torch.zeros(2, 1, dtype=torch.int64)))


@pytest.mark.parametrize("balanced", [True, False])
def test_rows_stay_whole_on_their_way_to_the_ranks_and_back(balanced):
    """Every column of a row is a number made from the row's own, so that a row with another's reward or tokens cannot pass."""
    number = torch.arange(12)
    lengths = torch.tensor([3, 9, 1, 7, 2, 8, 4, 6, 5, 9, 1, 2])
    real = (torch.arange(9) < lengths[:, None]).long()
    batch = DataProto.from_dict(
        {"number": number, "input_ids": number[:, None] * 100 + torch.arange(9), "attention_mask": real,
         "advantages": number[:, None] * 0.5 + torch.zeros(9), "mini_batch": (number % 3)[:, None]},
        {"uid": [f"u{i // 2}" for i in range(12)]},
    )  # fmt: skip
    run = a_run()
    run.plan.placement, run.config.trainer.balance_batch = {"actor": [0, 1, 2]}, balanced
    sent = stages.to_ranks(run, batch, "actor")
    parts = split_rows(sent, 3)
    assert sorted(torch.cat([part.batch["number"] for part in parts]).tolist()) == number.tolist()
    for part in parts:
        mine = part.batch["number"]
        assert torch.equal(part.batch["input_ids"], batch.batch["input_ids"][mine])
        for name in ("attention_mask", "advantages", "mini_batch"):
            assert torch.equal(part.batch[name], batch.batch[name][mine])
    assert balanced == ([part.batch["number"].tolist() for part in parts] != [list(range(i, i + 4)) for i in (0, 4, 8)])
    answered = [part.select(["number"]).with_batch(values=part.batch["number"] * 2.0) for part in parts]
    back = batch.union(join_rows(answered, sent))
    assert torch.equal(back.batch["values"], number * 2.0) and back.non_tensor_batch["uid"].tolist() == [f"u{i // 2}" for i in range(12)]


def validated(results, **trainer):
    rows = [([10, 11], [1, 1], [-0.5, -1.5], "done")]
    data = SimpleNamespace(row=lambda i: stages.PromptRow(i, [5, 6], [{"role": "user", "content": "1+1="}], "sums", "2"))
    sequence = iter(results)
    run = a_run(
        val_data=type("Data", (), {"__len__": lambda self: len(results), "row": staticmethod(data.row)})(),
        rollout=SimpleNamespace(generate=lambda requests, sleep_after: answers(rows * len(requests))),
        scorer=SimpleNamespace(score=lambda items: [next(sequence) for _ in items]),
        tokenizer=SimpleNamespace(decode=lambda ids: "1+1="),
        run_dir=trainer.pop("run_dir"),
    )
    run.config.data.val_batch_size = 2  # chunks: the first failure may be in any of them
    for key, value in trainer.items():
        setattr(run.config.trainer, key, value)
    return run


def test_validation_tells_of_failures_in_any_chunk_and_shows_samples(tmp_path):
    run = validated([GOOD, BAD, RewardResult(0.0), GOOD], run_dir=tmp_path, log_val_generations=1)
    metrics = stages.validate(run)
    assert metrics["val-core/sums/reward/mean@1"] == pytest.approx(2 / 3) and metrics["val-aux/error_rate"] == 0.25
    assert metrics["val-aux/num_turns/mean"] == 1
    warned, shown = run.display
    assert warned.startswith("1 of 4 validation samples could not be scored") and "it took too long" in warned
    assert shown == "1+1=text  [score 1.0, expected 2]"


def test_validation_without_any_score_is_no_validation(tmp_path):
    with pytest.raises(stages.RewardFailures, match=r"none of the 2 validation samples(.|\n)*it took too long"):
        stages.validate(validated([BAD, BAD], run_dir=tmp_path))
