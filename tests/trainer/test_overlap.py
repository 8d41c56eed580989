"""What pipelined training computes while prompts are sampled, with fake workers."""

from types import SimpleNamespace

import pytest
import torch

from tests.trainer.test_batch import make_requests, rollout_output
from tests.trainer.test_stages import fake_run
from verlite.config.plan import Micro, Updates
from verlite.control.flow import Flow
from verlite.protocol.data import DataProto, object_array
from verlite.protocol.ragged import ragged
from verlite.rewards.result import RewardResult
from verlite.trainer.groups import Groups, uid_of
from verlite.trainer.run import StepState
from verlite.trainer.stages import groups as groups_stage
from verlite.trainer.stages import overlap
from verlite.trainer.stages.update import assign_mini_batches

PROMPTS, SAMPLES = 4, 2


def finished(*numbers: int, again: bool = False) -> DataProto:
    """Return an engine's answer. A sample's first token tells its group, place and attempt."""
    rows = [
        ([100 * number + 10 * again + place, 1], [1, 1], [-0.5, -1.5], "done")
        for number in numbers
        for place in range(SAMPLES)
    ]
    rewards = [RewardResult(float(place)) for _ in numbers for place in range(SAMPLES)]
    uids = [uid_of(number, PROMPTS) for number in numbers for _ in range(SAMPLES)]
    places = torch.arange(SAMPLES).repeat(len(numbers))
    answer = rollout_output(rows, results=rewards, version=1).with_batch(sample_index=places)
    return answer.with_non_tensor(uid=object_array(uids)).with_meta(load=None)


class Actor:
    """Log-probs are minus the first token."""

    def __init__(self) -> None:
        self.added: list[int] = []
        self.parts: list[list[int]] = []

    def log_probs(self, batch: DataProto) -> DataProto:
        tokens = first_tokens(batch)
        self.parts.append(tokens)
        values = -torch.tensor(tokens, dtype=torch.float32)[:, None].expand(-1, 2)
        sums = torch.zeros(len(batch), dtype=torch.float64)
        return DataProto.from_dict(
            {"entropy_sums": sums, "gap_sums": torch.zeros(len(batch), 9, dtype=torch.float64)},
            {"old_log_probs": ragged(values, batch.batch["response_length"])},
            {"of": "this answer"},
        )

    def drop_gradients(self) -> None:
        self.added.clear()


def first_tokens(batch: DataProto) -> list[int]:
    return [int(ids[0]) for ids in batch.non_tensor_batch["response_ids"]]


@pytest.fixture
def run(monkeypatch):
    """Return a run whose engine answers what `run.script` says, one entry per call."""
    flow = Flow(PROMPTS, bound=0, depth=0, engines=2, swaps=True)
    flow.published()
    found = Groups(flow)
    for number in flow.draw(flow.wanted()):
        requests = make_requests([[5, 6]] * SAMPLES, [uid_of(number, PROMPTS)] * SAMPLES)
        found.add(number, number, requests)
    flow.assign()
    script: list[DataProto] = []
    rollout = SimpleNamespace(finished=lambda wait_s: [script.pop(0)], start=lambda batch: None)
    made = fake_run(
        groups=found, rollout=rollout, script=script, actor=Actor(), current=StepState(number=1)
    )
    made.first_step, made.reference, made.critic = False, None, None
    made.config.algorithm.adv_estimator = "grpo"
    vars(made.plan).update(
        prompts=PROMPTS,
        samples_per_prompt=SAMPLES,
        engines=2,
        needs_old_log_probs=True,
        overlaps_gradients=True,
        actor=Updates(2, 2, 1, 2, Micro(1, None), True, "token-mean"),
        critic=None,
    )

    def accumulate(run, rows):
        call = SimpleNamespace(result=lambda: made.actor.added.extend(first_tokens(rows)))
        made.sent.append(rows)
        return call

    made.sent = []
    monkeypatch.setattr(overlap, "accumulate", accumulate)
    monkeypatch.setattr(groups_stage, "keep", lambda batch, names: batch)
    return made


def first_mini_batch(run, batch: DataProto) -> list[int]:
    """Return the first tokens of the rows that the first optimizer step trains on."""
    index = assign_mini_batches(run, batch).batch["mini_batch_index"][:, 0]
    return first_tokens(batch.select_idxs(index == 0))


def test_parts_have_the_rows_and_the_mini_batch_of_the_step(run):
    run.script += [finished(), finished(2), finished(3, 0), finished(), finished(1)]
    batch = overlap.overlapped_groups(run)
    assert first_tokens(batch) == [0, 1, 100, 101, 200, 201, 300, 301]
    assert run.actor.parts == [[200, 201], [300, 301, 0, 1], [100, 101]]
    found = run.current.inferred["old_log_prob"].non_tensor_batch["old_log_probs"]
    assert [-int(row[0]) for row in found] == first_tokens(batch)
    expected = first_mini_batch(run, batch)
    assert len(expected) == PROMPTS * SAMPLES / 2
    assert sorted(run.actor.added) == expected
    assert {len(one) for one in run.sent} != {SAMPLES}, "the mini-batch must divide a prompt"
    assert run.metrics["pipelined/early_prompts"] == 0.75
    for rows in run.sent:
        assert rows.batch["advantages"].flatten().abs().tolist() == pytest.approx(
            [0.5**0.5 / (1 + 2**0.5 * 1e-6)] * len(rows)
        )
        columns = rows.non_tensor_batch
        assert [-int(row[0]) for row in columns["old_log_probs"]] == first_tokens(rows)


def test_samples_that_a_service_failed_leave_no_gradients(run, monkeypatch):
    """All prompts are finished, and then sampled again. Their new samples may come at once."""
    outages = [True, False]
    monkeypatch.setattr(groups_stage, "waits_for_services", lambda run: True)
    monkeypatch.setattr(groups_stage, "wait_for_services", lambda run, batch: outages.pop(0))
    run.script += [finished(), finished(0, 1), finished(2, 3)]
    run.script += [finished(0, 1, 2, 3, again=True)]
    batch = overlap.overlapped_groups(run)
    assert first_tokens(batch) == [10, 11, 110, 111, 210, 211, 310, 311]
    assert sorted(run.actor.added) == first_mini_batch(run, batch)
    found = run.current.inferred["old_log_prob"].non_tensor_batch["old_log_probs"]
    assert [-int(row[0]) for row in found] == first_tokens(batch)


def test_gradients_of_a_step_that_was_given_up_are_dropped(run):
    run.actor.added = [7]
    run.script += [finished(), finished(0, 1, 2, 3)]
    batch = overlap.overlapped_groups(run)
    assert sorted(run.actor.added) == first_mini_batch(run, batch)


def test_without_gradients_only_inference_overlaps(run):
    run.plan.overlaps_gradients = False
    run.script += [finished(), finished(3), finished(0, 1, 2)]
    batch = overlap.overlapped_groups(run)
    assert not run.sent and len(run.actor.parts) == 2
    found = run.current.inferred["old_log_prob"].non_tensor_batch["old_log_probs"]
    assert [-int(row[0]) for row in found] == first_tokens(batch)


def test_no_gradients_are_added_during_critic_warmup(run):
    run.plan.critic_warmup = 2
    run.script += [finished(), finished(3), finished(0, 1, 2)]
    overlap.overlapped_groups(run)
    assert not run.sent and len(run.actor.parts) == 2


def test_a_part_waits_until_the_groups_of_the_step_are_known(run):
    """An engine died before it was given its groups, so the first mini-batch is not known."""
    run.groups.flow.engine_lost(1)
    run.groups.flow.engine_back(1)
    progress = overlap.Overlap()
    run.groups.finish(finished(0))
    overlap.advance(run, progress)
    assert not run.actor.parts
    run.groups.flow.assign()
    overlap.advance(run, progress)
    assert run.actor.parts == [[0, 1]]
