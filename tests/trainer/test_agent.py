"""Multi-turn samples: metrics, transcripts, outages of tools.

Observations and failed samples do not influence advantages and losses.
"""

import asyncio
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.models import tiny_tokenizer
from tests.trainer.test_batch import generated_batch, make_requests, rollout_output
from tests.trainer.test_stages import dense, fake_run, validation_run
from tests.workers.test_objectives import ObjectivePlan, config, value_spec
from verlite.algorithms.kl import KLController
from verlite.config.compile import policy_loss_spec
from verlite.control import limits
from verlite.engine.fsdp import Counts
from verlite.envs.step import ToolError
from verlite.files import RetryingWriter
from verlite.protocol.data import DataProto, object_array
from verlite.rewards.remote import UNAVAILABLE
from verlite.rewards.result import RewardResult
from verlite.spec.catalog import ESTIMATORS
from verlite.trainer.errors import RewardFailures, RolloutFailures
from verlite.trainer.metrics import agent_metrics
from verlite.trainer.outage import wait_for_services
from verlite.trainer.samples import as_jsonl
from verlite.trainer.stages import advantage
from verlite.trainer.stages.advantage import advantages, loss_mask
from verlite.trainer.stages.rollout import REQUEST_FIELDS, generate, sample_responses, score
from verlite.trainer.validate import validate
from verlite.workers.actor import policy_objective
from verlite.workers.critic import value_objective

ANSWER = {"action": "answer"}
INVALID = {"action": "invalid"}


def search(**info):
    return {"action": "search", "query": "q", **info}


# Columns: source, status, error, segments, infos, invalid turns, truncated observations, engine
# seconds, tool seconds, parts of the reward.
ROWS = [
    (
        "nq",
        "done",
        None,
        [("model", 3), ("tool", 2), ("model", 2)],
        [search(called=True, seconds=0.5, retries=1, cached=False), ANSWER],
        0,
        1,
        2.0,
        0.5,
        {"format_valid": 1.0},
    ),
    (
        "hotpotqa",
        "max_turns",
        None,
        [("model", 1), ("tool", 1), ("model", 1)],
        [search(called=True, seconds=1.5, retries=2, cached=True), INVALID],
        1,
        0,
        1.0,
        1.5,
        {"format_valid": 0.0},
    ),
    (
        "nq",
        "error",
        "ToolError: down",
        [("model", 4), ("tool", 1), ("model", 1)],
        [search(called=True, seconds=99.0, retries=9, cached=True)],
        0,
        1,
        0.5,
        9.0,
        {},
    ),
    ("nq", "length", None, [("model", 2)], [], 0, 0, 0.1, 0.0, {}),
    (
        "nq",
        "done",
        None,
        [("model", 1), ("tool", 1), ("model", 1)],
        [search(error="down"), ANSWER],
        0,
        0,
        0.1,
        0.1,
        {},
    ),
]


def batch_of(rows=ROWS) -> DataProto:
    """Return a step's batch of rows with the columns of ROWS."""
    lengths = torch.tensor([sum(n for _, n in row[3]) for row in rows])
    masks = [
        [int(who == "model" and row[1] != "error") for who, n in row[3] for _ in range(n)]
        for row in rows
    ]
    return DataProto.from_dict(
        {
            "response_length": lengths,
            "trained_tokens": torch.tensor([sum(mask) for mask in masks]),
            "turns": torch.tensor([sum(who == "model" for who, _ in row[3]) for row in rows]),
            "invalid_turns": torch.tensor([row[5] for row in rows]),
            "truncated_observations": torch.tensor([row[6] for row in rows]),
            "gen_seconds": torch.tensor([row[7] for row in rows]),
            "tool_seconds": torch.tensor([row[8] for row in rows]),
        },
        {
            "data_source": object_array([row[0] for row in rows]),
            "status": object_array([row[1] for row in rows]),
            "error": object_array([row[2] for row in rows]),
            "segments": object_array([row[3] for row in rows]),
            "turn_infos": object_array([row[4] for row in rows]),
            "reward_parts": object_array([row[9] for row in rows]),
        },
    )


def test_agent_metrics_equal_hand_computed_values():
    assert agent_metrics(batch_of()) == pytest.approx(
        {
            "env/status/done": 0.4,
            "env/status/max_turns": 0.2,
            "env/status/length": 0.2,
            "env/status/error": 0.2,
            "env/tool_error_rate": 0.4,  # one ended its sample, the model received the other
            "rollout/slowest/gen_s": 0.5,
            "rollout/slowest/tool_s": 9.0,
            "rollout/slowest/tokens": 6.0,
            # The metrics below leave out the third row. The others have 2, 2, 1 and 2 turns.
            "env/number_of_actions/mean": 7 / 4,
            "env/number_of_actions/max": 2.0,
            "env/number_of_actions/min": 1.0,
            "env/number_of_valid_action": 5 / 4,  # 2, 1, 0 (truncated) and 2
            "env/ratio_of_valid_action": 2.5 / 4,
            "env/number_of_valid_search": 2 / 4,
            "env/finish_ratio": 2 / 4,
            "env/tool_latency_s/mean": 1.0,
            "env/tool_latency_s/p95": 1.45,
            "env/tool_latency_s/max": 1.5,
            "env/tool_retries": 3.0,
            "env/cache_hit": 0.5,
            "env/obs_truncated": 1 / 3,
            "env/trainable_token_frac": 11 / 15,
            "env/format_valid": 0.5,
            "env/number_of_actions/nq": 5 / 3,
            "env/number_of_valid_action/nq": 4 / 3,
            "env/ratio_of_valid_action/nq": 2 / 3,
            "env/number_of_valid_search/nq": 1 / 3,
            "env/finish_ratio/nq": 2 / 3,
            "env/number_of_actions/hotpotqa": 2.0,
            "env/number_of_valid_action/hotpotqa": 1.0,
            "env/ratio_of_valid_action/hotpotqa": 0.5,
            "env/number_of_valid_search/hotpotqa": 1.0,
            "env/finish_ratio/hotpotqa": 0.0,
        },
        rel=1e-6,
    )


def test_metrics_by_source_need_several_sources_and_ignore_failed_samples():
    alone = agent_metrics(batch_of([ROWS[0], ROWS[3]]))
    assert not any(key.endswith(("/nq", "/hotpotqa")) for key in alone)
    more = agent_metrics(batch_of([ROWS[0], ROWS[2], ROWS[3]]))
    changed = {key for key in alone if alone[key] != more[key]}
    assert all(
        key.startswith(("env/status/", "env/tool_error_rate", "rollout/slowest/"))
        for key in changed
    ), changed


def test_failed_samples_alone_give_only_failure_metrics():
    metrics = agent_metrics(batch_of([ROWS[2]]))
    assert metrics["env/status/error"] == 1 == metrics["env/tool_error_rate"]
    assert not [
        key
        for key in metrics
        if not key.startswith(("env/status/", "env/tool_error_rate", "rollout/slowest/"))
    ]


def test_single_turn_runs_have_no_agent_metrics():
    batch = batch_of()
    del batch.non_tensor_batch["segments"]
    assert agent_metrics(batch) == {}


def test_failures_other_than_tools_are_not_an_outage():
    rows = [(*ROWS[2][:2], "ValueError: data.max_obs_length=4 is too small", *ROWS[2][3:]), ROWS[0]]
    assert agent_metrics(batch_of(rows))["env/tool_error_rate"] == 0


def output_with_trajectories(rows, results=None) -> DataProto:
    """Return the output of a rollout worker for rows (status, error, infos)."""
    output = rollout_output(
        [([10, 11], [int(status != "error")] * 2, [-0.5, -0.5], status) for status, _, _ in rows],
        results=results,
    )
    numbers = {name: torch.zeros(len(rows)) for name in ("gen_seconds", "tool_seconds")}
    counts = {
        name: torch.zeros(len(rows), dtype=torch.int64)
        for name in ("invalid_turns", "truncated_observations")
    }
    return output.with_batch(**numbers, **counts).with_non_tensor(
        error=object_array([error for _, error, _ in rows]),
        turn_infos=object_array([infos for *_, infos in rows]),
        segments=object_array([[("model", 2)] for _ in rows]),
    )


FINE = ("done", None, [ANSWER])
DOWN = ("error", "ToolError: the retriever at x", [])
# The model received the tool's error as an observation.
OBSERVED_ERROR = ("done", None, [search(error="gone"), ANSWER])


class Tools:
    """An environment factory whose tools fail the first `failures` health checks."""

    def __init__(self, failures=0):
        self.failures = failures
        self.checks = 0

    async def check(self):
        await asyncio.sleep(0)
        self.checks += 1
        if self.checks <= self.failures:
            raise ToolError("down")


class Rollout:
    """Return the given generations in order, and repeat the last one."""

    def __init__(self, *generations, results=()):
        self.generations = list(generations)
        self.calls = []
        self.slept = 0
        self.results = iter(results)

    def generate(self, requests, sleep_after):
        self.calls.append((requests, sleep_after))
        return output_with_trajectories(
            self.generations.pop(0) if len(self.generations) > 1 else self.generations[0],
            self.results,
        )

    def sleep(self):
        self.slept += 1


def run_with_tools(env_factory, wait=5.0, limit=0.4, **fields):
    """Return a run whose two rollout workers check the tools of `env_factory`."""
    run = fake_run(
        env_factory=env_factory,
        tokenizer=tiny_tokenizer(),
        **({"rollout": SimpleNamespace()} | fields),
    )

    def tool_health():
        """Return the errors of two workers. The first worker never has one."""
        try:
            asyncio.run(env_factory.check())
        except ToolError as error:
            return [None, str(error)]
        return [None, None]

    run.rollout.tool_health = tool_health
    run.config.retriever.outage_wait_s = wait
    run.config.actor_rollout_ref.rollout.max_error_rate = limit
    return run


@pytest.fixture(autouse=True)
def short_check_interval(monkeypatch):
    monkeypatch.setattr(limits, "HEALTH_EVERY_S", 0.01)


def batch_with_trajectories(rows) -> DataProto:
    """Return the driver's batch after generation, for rows (status, error, infos)."""
    return (
        make_requests([[5]] * len(rows), ["a"] * len(rows))
        .pop(non_tensor_batch_keys=["prompt_ids"])[1]
        .union(output_with_trajectories(rows))
    )


@pytest.mark.parametrize(
    ("rows", "limit", "outage"),
    [
        ([DOWN, FINE], 0.4, True),
        ([DOWN, FINE], 0.5, False),
        ([DOWN, FINE], 0.0, True),
        ([FINE, FINE], 0.0, False),
        ([OBSERVED_ERROR, FINE], 0.4, True),
        ([("error", "ValueError: broken", []), FINE], 0.0, False),
    ],
)
def test_an_outage_is_more_tool_failures_than_the_limit(rows, limit, outage):
    run = run_with_tools(Tools(3), limit=limit)
    assert wait_for_services(run, batch_with_trajectories(rows)) == outage
    assert run.env_factory.checks == (4 if outage else 0)
    if outage:
        lost, back = run.display
        reason = "ToolError: gone" if rows[0] is OBSERVED_ERROR else "ToolError: the retriever at x"
        assert (
            lost == f"1 of 2 samples lost their tools ({reason}); waiting up to 5 s for the tools"
            and back.startswith("the tools recovered")
        )


@pytest.mark.timeout(20)
def test_waiting_for_tools_has_a_time_limit():
    run = run_with_tools(Tools(10**9), wait=0.1)
    assert not wait_for_services(run, batch_with_trajectories([DOWN]))
    assert run.env_factory.checks > 3 and len(run.display) == 1


def test_after_an_outage_the_same_samples_are_generated_again():
    run = run_with_tools(Tools(2), rollout=Rollout([DOWN, DOWN], [FINE, FINE]))
    batch = sample_responses(run, make_requests([[5], [6]], ["a", "b"]), sleep_after=True)
    assert batch.non_tensor_batch["status"].tolist() == ["done", "done"]
    first, second = (requests.non_tensor_batch for requests, _ in run.rollout.calls)
    assert (
        first["sampling"].tolist() == second["sampling"].tolist()
        and first["prompt_ids"].tolist() == second["prompt_ids"].tolist()
    )
    assert [sleeps for _, sleeps in run.rollout.calls] == [False, False]
    assert run.rollout.slept == 1, "engines sleep once, after the last generation"
    assert set(first) == set(REQUEST_FIELDS)


def test_without_tools_or_wait_time_there_is_one_generation():
    for env_factory, wait in ((Tools(), 0.0), (None, 5.0)):
        run = run_with_tools(env_factory, wait=wait, rollout=Rollout([DOWN]))
        sample_responses(run, make_requests([[5]], ["a"]), sleep_after=True)
        assert [sleeps for _, sleeps in run.rollout.calls] == [True] and run.rollout.slept == 0
        assert env_factory is None or env_factory.checks == 0


@pytest.mark.timeout(20)
def test_retries_after_an_outage_are_bounded():
    run = run_with_tools(Tools(0), rollout=Rollout([DOWN]))
    with pytest.raises(RolloutFailures, match="100.0% .*ToolError: the retriever at x"):
        generate(run, make_requests([[5]], ["a"]))
    assert len(run.rollout.calls) == 4
    assert run.env_factory.checks == 3, "there is no health check after the last generation"


# Outages of the reward service

NO_ANSWER = RewardResult(None, error=UNAVAILABLE, traceback="the reward service: gone")
REJECTED = RewardResult(None, error="Refused", traceback="the reward service refuses")
SCORED = RewardResult(1.0)


def run_with_service(*generations, wait=5.0, limit=0.4, failures=2):
    """Return a run whose generations have these rewards, and whose service then recovers."""
    run = fake_run(env_factory=None, tokenizer=tiny_tokenizer(), rollout=SimpleNamespace())
    left, calls = list(generations), []

    def generate_rows(requests, sleep_after):
        calls.append(requests)
        rewards = left.pop(0) if len(left) > 1 else left[0]
        return output_with_trajectories([FINE] * len(rewards), rewards).with_non_tensor(
            error=object_array([r.error and f"reward: {r.error}" for r in rewards])
        )

    checks = []

    def reward_health():
        checks.append(1)
        return [None, "down"] if len(checks) <= failures else [None, None]

    run.rollout.generate, run.rollout.reward_health = generate_rows, reward_health
    run.rollout.sleep = lambda: None
    run.config.reward.remote.url = "http://127.0.0.1:5000"
    run.config.reward.remote.outage_wait_s = wait
    run.config.reward.max_error_rate = limit
    return run, calls, checks


def test_after_an_outage_of_the_reward_service_the_step_is_sampled_again():
    run, calls, checks = run_with_service([NO_ANSWER, SCORED], [SCORED, SCORED])
    batch = sample_responses(run, make_requests([[5], [6]], ["a", "b"]), sleep_after=True)
    assert batch.batch["valid"].tolist() == [True, True]
    assert (len(calls), len(checks)) == (2, 3)
    lost, back = run.display
    assert lost == (
        "1 of 2 samples lost their rewards (the reward service: gone); "
        "waiting up to 5 s for the reward service"
    )
    assert back.startswith("the reward service recovered after")


@pytest.mark.parametrize(
    ("rewards", "limit", "wait"),
    [
        ([NO_ANSWER, SCORED], 0.5, 5.0),  # as many as the limit allows
        ([REJECTED, REJECTED], 0.0, 5.0),  # the service answers; asking again changes nothing
        ([NO_ANSWER, NO_ANSWER], 0.0, 0.0),  # reward.remote.outage_wait_s=0
    ],
)
def test_no_outage_of_the_reward_service(rewards, limit, wait):
    run, calls, checks = run_with_service(rewards, limit=limit, wait=wait)
    batch = sample_responses(run, make_requests([[5], [6]], ["a", "b"]), sleep_after=False)
    assert batch.batch["valid"].tolist() == [r.score is not None for r in rewards]
    assert (len(calls), len(checks)) == (1, 0)


def test_outage_of_the_reward_service_that_does_not_end_stops_the_run():
    run, calls, _ = run_with_service([NO_ANSWER, NO_ANSWER], wait=0.05, failures=10**9)
    with pytest.raises(RewardFailures, match="100.0% of this step's rewards failed"):
        score(run, generate(run, make_requests([[5], [6]], ["a", "b"])))
    assert len(calls) == 1


# Rows that must not influence advantages and losses

MASKS_AND_SCORES = [
    ([1, 1, 1, 0, 0, 1, 1], 1.0),
    ([1, 1, 0, 1], 0.0),
    ([1], 0.25),
    ([1, 0, 0, 0, 1, 1], 1.0),
    ([1, 1, 1], 0.5),
    ([1, 0, 1], 0.0),
]


def batch_with_estimator_inputs(rows, uids, failed=(), seed=0, observed=True):
    """Return a scored batch of rows (mask, score), with the inputs of every estimator.

    observed: Whether rows contain observations, whose inputs are NaN. Inputs of sampled tokens are
        the same in both cases.
    """
    generator = torch.Generator().manual_seed(seed)
    names = ("old_log_probs", "ref_log_prob", "values", "sum_pi_squared")
    drawn = [
        {name: torch.rand(sum(mask), generator=generator) for name in names} for mask, _ in rows
    ]
    baselines = torch.rand(len(rows), generator=generator)
    keep = [i for i in range(len(rows)) if i not in failed or observed is not None]
    generated = []
    columns = {name: [] for name in names}
    for i in keep:
        mask = rows[i][0] if observed else [m for m in rows[i][0] if m]
        status = "error" if i in failed else "done"
        generated.append(
            (
                [9] * len(mask),
                [0] * len(mask) if i in failed else mask,
                [-0.5 * m for m in mask],
                status,
            )
        )
        for name in names:
            values = iter(drawn[i][name].tolist())
            columns[name].append(
                [
                    (-next(values) if "log" in name else next(values)) if m else math.nan
                    for m in mask
                ]
            )
    scores = [RewardResult(rows[i][1]) for i in keep if i not in failed]
    batch = generated_batch(
        [[5, 6]] * len(keep), [uids[i] for i in keep], generated, scores
    ).with_batch(reward_baselines=baselines[keep])
    ragged = {
        name: object_array([np.array(row, dtype=np.float32) for row in values])
        for name, values in columns.items()
    }
    run = fake_run()
    run.config.reward.max_error_rate = 1.0
    parts = torch.tensor([[score, len(mask)] for mask, score in rows], dtype=torch.float64)
    return score(run, batch).with_non_tensor(**ragged).with_batch(gdpo_rewards=parts[keep])


WHITEN = [name for name, entry in ESTIMATORS.items() if entry.whitens]


def assert_same(got, want, estimator, kl):
    """Require equal bits, or equality up to rounding if padding reorders a float32 sum."""
    loose = kl or estimator in WHITEN
    torch.testing.assert_close(got, want, rtol=2e-6 * loose, atol=2e-6 * loose)


def estimated(estimator, batch, kl=False):
    """Return the padded batch with advantages, and the metrics."""
    run = fake_run(kl=KLController(0.1))
    algorithm = run.config.algorithm
    algorithm.adv_estimator = estimator
    algorithm.use_kl_in_reward = kl
    algorithm.gamma = 1.0 if estimator == "rloo_token_kl" else 0.9
    algorithm.lam = 0.8
    batch = advantages(run, loss_mask(run, batch))
    return dense(batch, "loss_mask", "advantages", "returns"), run.metrics


@pytest.mark.parametrize("kl", [False, True], ids=["", "KL in the reward"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_failed_samples_do_not_change_the_other_advantages(estimator, kl):
    """The other rows have the advantages of a step without it, even if it is the longest row."""
    uids = list("aaabba")
    for lost, longer in ((0, 0), (3, 0), (2, 30)):
        rows = [
            (mask + [1] * longer * (i == lost), score)
            for i, (mask, score) in enumerate(MASKS_AND_SCORES)
        ]
        rest = [row for i, row in enumerate(rows) if i != lost]
        batch_with = batch_with_estimator_inputs(rows, uids, failed=[lost])
        places = [i for i in range(len(rows)) if i != lost]
        kept = {
            name: batch_with.non_tensor_batch[name][places]
            for name in ("old_log_probs", "ref_log_prob", "values", "sum_pi_squared")
        }
        without = batch_with_estimator_inputs(rest, [uids[i] for i in places]).with_non_tensor(
            **kept
        )
        without = without.with_batch(reward_baselines=batch_with.batch["reward_baselines"][places])
        one, metrics_with = estimated(estimator, batch_with, kl)
        two, metrics_without = estimated(estimator, without, kl)
        width = two["responses"].shape[1]
        for name in ("advantages", "returns"):
            assert_same(one[name][places][:, :width], two[name], estimator, kl)
            assert not one[name][lost].any()
        assert_same(one["rewards"][places], two["rewards"], estimator, kl)
        assert metrics_with == pytest.approx(metrics_without, rel=1e-6, abs=2e-6)


@pytest.mark.parametrize("kl", [False, True], ids=["", "KL in the reward"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_observations_do_not_change_advantages(estimator, kl):
    """The estimator's inputs are NaN on observations."""
    uids = list("aaabba")
    one, metrics_with = estimated(
        estimator, batch_with_estimator_inputs(MASKS_AND_SCORES, uids), kl
    )
    two, metrics_without = estimated(
        estimator, batch_with_estimator_inputs(MASKS_AND_SCORES, uids, observed=False), kl
    )
    for name in ("advantages", "returns"):
        for i, (mask, _) in enumerate(MASKS_AND_SCORES):
            got, want = one[name][i][: len(mask)], two[name][i][: sum(mask)]
            assert_same(got[torch.tensor(mask).bool()], want, estimator, kl)
            assert not got[~torch.tensor(mask).bool()].any()
    assert metrics_with == pytest.approx(metrics_without, rel=1e-6, abs=2e-6)


@pytest.mark.parametrize("estimator", [name for name, entry in ESTIMATORS.items() if entry.by_row])
def test_estimation_by_row_equals_estimation_by_token(estimator, monkeypatch):
    """Advantages, returns and metrics are the same with one number per row and with all tokens."""
    batch = batch_with_estimator_inputs(
        [*MASKS_AND_SCORES, ([1, 1], 1.0), ([1], 0.5)], list("aaabbacc"), failed=[6]
    )
    by_row, row_metrics = estimated(estimator, batch)
    monkeypatch.setattr(advantage, "by_row", lambda config: False)
    by_token, token_metrics = estimated(estimator, batch)
    for name in ("advantages", "returns", "rewards", "response_mask"):
        assert torch.equal(by_row[name], by_token[name])
    assert by_row["advantages"].any()
    assert row_metrics == pytest.approx({name: token_metrics[name] for name in row_metrics})


def test_observations_do_not_change_losses_entropy_and_kl():
    generator = torch.Generator().manual_seed(0)
    full_width = max(len(mask) for mask, _ in MASKS_AND_SCORES)
    sampled_width = max(sum(mask) for mask, _ in MASKS_AND_SCORES)
    names = (
        "advantages",
        "old_log_probs",
        "rollout_log_probs",
        "ref_log_prob",
        "values",
        "returns",
        "log_probs",
        "entropy",
        "new_values",
    )

    def layout(observed, width):
        columns = {
            name: torch.full(
                (len(MASKS_AND_SCORES), width), 1e9 if observed else 0.0, dtype=torch.float64
            )
            for name in names
        }
        marks = torch.zeros(len(MASKS_AND_SCORES), width, dtype=torch.int64)
        for i, (mask, _) in enumerate(MASKS_AND_SCORES):
            marks[i, : len(mask) if observed else sum(mask)] = torch.tensor(
                mask if observed else [1] * sum(mask)
            )
        return marks, columns

    drawn = {
        name: torch.randn(
            sum(sum(mask) for mask, _ in MASKS_AND_SCORES), generator=generator
        ).double()
        for name in names
    }
    losses = []
    for observed, width in ((True, full_width), (False, sampled_width)):
        marks, columns = layout(observed, width)
        for name in names:
            columns[name][marks.bool()] = drawn[name]
        outputs = {
            name: columns.pop(name).requires_grad_()
            for name in ("log_probs", "entropy", "new_values")
        }
        outputs["values"] = outputs.pop("new_values")
        rows = TensorDict({"response_mask": marks, **columns}, batch_size=[len(MASKS_AND_SCORES)])
        counts = Counts(tokens=int(marks.sum()), sequences=len(MASKS_AND_SCORES))
        settings = config(entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2")
        numbers = []
        for objective in (
            policy_objective(policy_loss_spec(settings, ObjectivePlan())),
            value_objective(value_spec(settings, ObjectivePlan())),
        ):
            loss, metrics = objective(rows, outputs, counts)
            loss.backward()
            numbers += [
                float(loss.detach()),
                *(float(value) for _, value in sorted(metrics.items())),
            ]
        grads = [output.grad for output in outputs.values()]
        assert all(not grad[~marks.bool()].any() for grad in grads)
        losses.append((numbers, torch.cat([grad[marks.bool()] for grad in grads])))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-12) and torch.allclose(
        losses[0][1], losses[1][1], rtol=1e-12, atol=0
    )


def test_any_model_text_can_be_written_to_the_sample_log(tmp_path):
    """Write a lone surrogate, and separators at which str.splitlines splits a line."""
    from verlite.report.samples import read_samples

    records = [
        {"response": "a\u2028b\x85c", "score": 1, "turn_infos": [{"query": "\ud800"}]},
        {"response": "d", "score": None, "turn_infos": []},
    ]
    path = tmp_path / "rollouts" / "step_1.jsonl"
    RetryingWriter(pytest.fail).replace(path, as_jsonl(records))
    assert read_samples(tmp_path, None) == (path, records, 0)
    assert (
        json.loads((tmp_path / "rollouts" / "step_1.jsonl").read_text("utf-8").split("\n")[0])
        == records[0]
    )


def test_end_tokens_are_kept_if_their_id_is_also_the_padding_id():
    """The id is 0. It is in the prompt, in the middle of a response and at its end."""
    rows = [
        ([10, 0, 7, 0], [1, 1, 0, 1], [-0.5, -0.5, 0.0, -0.5], "done"),
        ([0], [1], [-0.5], "done"),
    ]
    t = dense(generated_batch([[5, 0, 6, 0], [0, 5]], ["a", "b"], rows))
    assert t["prompts"].tolist() == [[5, 0, 6, 0], [0, 0, 0, 5]] and t["responses"].tolist() == [
        [10, 0, 7, 0],
        [0, 0, 0, 0],
    ]
    assert t["attention_mask"].tolist() == [[1] * 8, [0, 0, 1, 1, 1, 0, 0, 0]]
    assert t["response_mask"].tolist() == [[1, 1, 0, 1], [1, 0, 0, 0]]


def test_validation_includes_the_last_chunk_and_excludes_failed_samples(tmp_path):
    """Validate three questions in batches of two. The tools of the last question fail."""
    run = validation_run([], run_dir=tmp_path)
    run.val_data = type(
        "Data", (), {"__len__": lambda self: 3, "row": staticmethod(run.val_data.row)}
    )()
    run.env_factory, run.tokenizer = (
        Tools(),
        SimpleNamespace(decode=lambda ids, skip_special_tokens=False: "?"),
    )
    first = [FINE, ("max_turns", None, [search(called=True), INVALID])]
    run.rollout = Rollout(first, [DOWN], results=[RewardResult(1.0), RewardResult(0.0)])
    metrics = validate(run)
    assert len(run.rollout.calls) == 2 and metrics["val-aux/error_rate"] == pytest.approx(1 / 3)
    assert metrics["val-core/sums/reward/mean@1"] == 0.5
    assert (
        metrics["val-aux/sums/number_of_valid_search/mean@1"] == 0.5
        and metrics["val-aux/sums/finish_ratio/mean@1"] == 0.5
    )
    assert any("1 of 3 validation samples" in line and "ToolError" in line for line in run.display)
