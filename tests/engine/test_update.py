"""One optimizer step: its gradient equals a closed form for every arrangement of the rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engine import matrix, programs
from tests.engine.batches import P, engine, ragged_batch
from tests.engine.ranks import Ranks
from verlite.algorithms.aggregation import AGGREGATION_MODES
from verlite.engine.micro import MicroBatching
from verlite.protocol.data import DataProto

pytestmark = pytest.mark.process

ROWS = list(range(8))
SHUFFLED = [5, 2, 7, 0, 4, 6, 1, 3]
EVERY_SPLIT = ("token-mean", "seq-mean-token-mean")
CASES: list[dict[str, Any]] = [
    *(
        {"mode": mode, "rows": ROWS, "size": size}
        for mode in EVERY_SPLIT
        for size in (1, 2, 3, 5, 100)
    ),
    *({"mode": mode, "rows": SHUFFLED, "size": 3} for mode in AGGREGATION_MODES),
    *({"mode": mode, "rows": ROWS, "max_tokens": 24} for mode in AGGREGATION_MODES),
]


def closed_form(path: str, mode: str) -> tuple[float, dict[str, Tensor]]:
    """Return loss and float64 gradient by definition, over all rows, with transformers' forward."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    batch = ragged_batch()
    rows = []
    for row in ROWS:
        item = batch.batch[row]
        ids = item["input_ids"][item["attention_mask"].bool()]
        prompt = int(item["attention_mask"][:P].sum())
        mask = item["response_mask"].bool()
        log_p = torch.log_softmax(model(ids[None]).logits[0] / 0.8, -1)
        terms = [
            -log_p[prompt + j - 1, ids[prompt + j]] * item["advantages"][j].double()
            for j in mask.nonzero().flatten().tolist()
        ]
        if terms:
            rows.append(torch.stack(terms))
    loss = {
        "token-mean": lambda: torch.cat(rows).mean(),
        "token-sum": lambda: torch.cat(rows).sum(),
        "seq-mean-token-sum": lambda: torch.stack([row.sum() for row in rows]).mean(),
        "seq-mean-token-mean": lambda: torch.stack([row.mean() for row in rows]).mean(),
        "seq-mean-token-sum-norm": lambda: torch.stack(
            [row.sum() / programs.SCALE for row in rows]
        ).mean(),
    }[mode]()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(
            actual[name].double(),
            tensor.double(),
            atol=1e-5 * scale + 1e-9,
            rtol=1e-5,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def check_all_cases(path: str, cases: list[dict[str, Any]], results: list[Any]) -> None:
    for mode in AGGREGATION_MODES:
        loss, expected = closed_form(path, mode)
        for case, (metrics, actual) in zip(cases, results, strict=True):
            if case["mode"] == mode:
                assert_same(actual, expected)
                assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
                assert metrics["grad_norm"] == pytest.approx(
                    float(torch.stack([g.norm() for g in expected.values()]).norm()), rel=1e-5
                )
                assert metrics["tokens"] == 34 and metrics["share"] == pytest.approx(1)


def test_gradient_equals_closed_form_for_every_split_and_order(tiny_qwen2: str) -> None:
    check_all_cases(tiny_qwen2, CASES, programs.gradients(tiny_qwen2, CASES))


def test_gradient_on_two_ranks_equals_closed_form(
    tiny_qwen2: str, tiny_llama: str, two_ranks: Ranks
) -> None:
    for path, cases in ((tiny_qwen2, CASES), (tiny_llama, CASES[10:15])):
        first, second = two_ranks.call(programs.gradients, path, cases)
        check_all_cases(path, cases, first)
        for (metrics, mine), (their_metrics, theirs) in zip(first, second, strict=True):
            assert metrics == their_metrics
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def columns(tiny_qwen2: str) -> dict[str, Tensor]:
    return matrix.columns(tiny_qwen2)


@pytest.fixture(scope="module")
def arrangements(tiny_qwen2: str, two_ranks: Ranks, columns: dict[str, Tensor]) -> dict[str, Any]:
    return matrix.arrangements(tiny_qwen2, AGGREGATION_MODES, columns, two_ranks)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_actor_gradient_equals_closed_form_for_every_arrangement(
    tiny_qwen2: str, columns: dict[str, Tensor], arrangements: dict[str, Any], mode: str
) -> None:
    """Clipped PPO, entropy and KL: 48 equal gradients.

    The cases are split x order x packed or padded x one or two ranks.
    """
    loss, expected = matrix.closed_form(tiny_qwen2, mode, columns)
    results = arrangements[mode]
    assert len(results) == 48
    for metrics, gradients in results.values():
        assert_same(gradients, expected)
        assert matrix.difference(gradients, expected) < matrix.TOLERANCE
        assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
        assert 0 < metrics["actor/pg_clipfrac"] < 0.5, (
            "the test has no power unless some tokens are clipped, and not all"
        )


def test_first_epoch_is_on_policy_and_second_is_clipped(tiny_gpt2: str, tmp_path: Path) -> None:
    """The model's config has dropout, but the first ratio is exactly 1.

    The first gradient is -A d log-prob. The second epoch's ratios are of the changed weights.
    """
    subject = engine(
        tiny_gpt2, train=True, lr=2e-3, grad_clip=1e9, enable_gradient_checkpointing=False
    )
    caught = programs.catch_gradients(subject)
    old = subject.forward(ragged_batch(), MicroBatching(size=3), programs.TEMPERATURE)["log_probs"]
    given = {"old_log_probs": old, "ref_log_prob": old}
    for epoch, path in enumerate((tiny_gpt2, str(tmp_path))):
        subject.save_pretrained(tmp_path)
        loss, expected = matrix.closed_form(path, "token-mean", given)
        batch = ragged_batch().with_batch(**given)
        metrics = subject.update(
            batch,
            MicroBatching(size=3),
            programs.TEMPERATURE,
            programs.actors_loss("token-mean"),
            with_entropy=True,
        )
        assert matrix.difference(caught, expected) < matrix.TOLERANCE
        assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
        found = [
            metrics[f"actor/{name}"]
            for name in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "kl_loss")
        ]
        if epoch == 0:
            advantages = batch.batch["advantages"][batch.batch["response_mask"].bool()]
            assert found == [0, 0, 0, 0] and metrics["actor/pg_loss"] == pytest.approx(
                -advantages.mean().item(), rel=1e-5
            )
        else:
            assert 0.1 < found[0] < 0.9 and found[3] > 0.01


def test_bfloat16_gradients_are_reduced_in_float32(tiny_qwen2: str, two_ranks: Ranks) -> None:
    """Gradients of one pass are bfloat16 values; most of their float32 sums are not."""
    case = {"mode": "token-mean", "rows": ROWS, "size": 8}
    _, expected = closed_form(tiny_qwen2, "token-mean")
    for results in two_ranks.call(programs.half_precision_gradients, tiny_qwen2, [case]):
        ((_, gradients),) = results
        assert (
            matrix.difference(gradients, expected) < 0.05
        )  # bfloat16 has 8 bits, and errors of a pass add up
        whole = torch.cat([g.flatten() for g in gradients.values()])
        rounded = whole == whole.bfloat16()
        assert rounded[whole != 0].float().mean() < 0.5


OTHER_PATHS: list[dict[str, Any]] = [
    {"use_remove_padding": False},
    {"enable_gradient_checkpointing": True},
    {"enable_gradient_checkpointing": "products"},
    {"reshard_after_forward": False},  # gradients stay whole until the last micro-batch
    {"fsdp_size": 1},  # replicas
]


@pytest.mark.parametrize("settings", OTHER_PATHS, ids=str)
def test_gradient_is_equal_for_every_engine_option(
    tiny_llama: str, two_ranks: Ranks, settings: dict[str, Any]
) -> None:
    case = {"mode": "seq-mean-token-mean", "rows": SHUFFLED, "size": 2}
    _, expected = closed_form(tiny_llama, case["mode"])
    for results in (
        [programs.gradients(tiny_llama, [case, case], **settings)],
        two_ranks.call(programs._gradients_again, tiny_llama, case, settings),
    ):
        for result in results:
            for _, actual in result:
                assert_same(actual, expected)


def test_clipping_is_global_and_happens_once(tiny_qwen2: str, two_ranks: Ranks) -> None:
    case = {"mode": "token-sum", "rows": ROWS, "size": 2}
    _, expected = closed_form(tiny_qwen2, "token-sum")
    norm = float(torch.stack([g.norm() for g in expected.values()]).norm())
    assert norm > 1
    clipped = {name: g / norm * 0.5 for name, g in expected.items()}
    (one,) = programs.gradients(tiny_qwen2, [case], grad_clip=0.5)
    for metrics, actual in (
        one,
        *(result[0] for result in two_ranks.call(programs._clipped, tiny_qwen2, case)),
    ):
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert_same(actual, clipped)


def test_one_optimizer_step_per_update(tiny_qwen2: str) -> None:
    subject = engine(tiny_qwen2, train=True, lr=1e-3)
    for size in (1, 3, 100):
        subject.update(
            ragged_batch(), MicroBatching(size=size), 1.0, programs.weighted_loss("token-mean")
        )
    assert {int(state["step"]) for state in subject.optimizer.state.values()} == {3}


def test_update_equals_adamw(tiny_qwen2: str) -> None:
    """Two updates equal two steps of a plain AdamW on the closed-form gradients."""
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-6}
    subject = engine(tiny_qwen2, train=True, grad_clip=1e9, **settings)
    caught = programs.catch_gradients(subject)
    plain = AutoModelForCausalLM.from_pretrained(tiny_qwen2)
    adamw = torch.optim.AdamW(
        plain.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6
    )
    for _ in range(2):
        subject.update(
            ragged_batch(), MicroBatching(size=3), 1.0, programs.weighted_loss("token-mean")
        )
        for name, parameter in plain.named_parameters():
            parameter.grad = caught[name]
        adamw.step()
    after = dict(subject.export())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(after[name], parameter.detach(), atol=1e-6, rtol=1e-6)


def test_nonfinite_loss_on_one_rank_drops_the_update_on_all(
    tiny_qwen2: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    for results in (
        [programs.nonfinite_updates(tiny_qwen2, str(tmp_path / "one"))],
        two_ranks.call(programs.nonfinite_updates, tiny_qwen2, str(tmp_path / "two")),
    ):
        for result in results:
            assert len(result["metrics"]) == 2 and all(
                m["nonfinite"] == 1 for m in result["metrics"]
            )
            assert result["after"].keys() == result["before"].keys()
            assert all(
                torch.equal(result["after"][name], tensor)
                for name, tensor in result["before"].items()
            )
            assert "3 updates in a row" in result["error"] and str(tmp_path) in result["error"]
            assert result["lr"][0] == result["lr"][1], (
                "a step without an applied update must not advance the schedule"
            )
            assert result["recovered"]["nonfinite"] == 0
    rows = [
        len(DataProto.load_from_disk(tmp_path / "two" / "2" / f"rank_{rank}")) for rank in (0, 1)
    ]
    assert rows == [5, 3]


def test_successful_update_resets_the_nonfinite_count(tiny_qwen2: str) -> None:
    subject = engine(tiny_qwen2, train=True, max_nonfinite_updates=2)
    good = programs.weighted_loss("token-mean")

    def bad(rows: Any, outputs: dict[str, Tensor], counts: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return outputs["log_probs"].sum() * float("nan"), {}

    dropped = [
        subject.update(ragged_batch(), MicroBatching(size=8), 1.0, loss)["nonfinite"]
        for loss in (bad, good, bad, good)
    ]
    assert dropped == [1, 0, 1, 0]


def test_rank_without_rows_takes_part(tiny_qwen2: str, two_ranks: Ranks) -> None:
    _, expected = closed_form(tiny_qwen2, "token-mean")
    first, second = two_ranks.call(programs.uneven_ranks, tiny_qwen2)
    alone = programs.uneven_ranks(tiny_qwen2)
    for metrics, caught, _, untrained in (first, second):
        assert_same(caught, expected)
        assert metrics == first[0] and metrics["tokens"] == 34
        counted = {"tokens_computed": 0.0, "tokens_trained": 0.0}
        assert untrained == {"grad_norm": 0.0, "lr": 0.0, "nonfinite": 0.0} | counted
    torch.testing.assert_close(first[2], alone[2], atol=2e-6, rtol=1e-5)
    assert second[2].shape == (0, 9)


def test_metrics_are_summed_or_maximized(tiny_qwen2: str, two_ranks: Ranks) -> None:
    alone, *shared = (
        programs.largest_of_rows(tiny_qwen2),
        *two_ranks.call(programs.largest_of_rows, tiny_qwen2),
    )
    run_rows = [row for row in range(8) if bool(ragged_batch().batch["response_mask"][row].any())]
    for metrics in (alone, *shared):
        assert metrics["number"] == 10 * sum(run_rows) and metrics["number_max"] == 10 * max(
            run_rows
        )


def test_frozen_engine_cannot_be_updated(tiny_qwen2: str) -> None:
    reference = engine(tiny_qwen2)
    before = reference.fingerprint()
    with pytest.raises(RuntimeError, match="without an optimizer"):
        reference.update(
            ragged_batch(), MicroBatching(size=3), 1.0, programs.weighted_loss("token-mean")
        )
    actor = engine(tiny_qwen2, train=True, lr=1e-2)
    actor.update(ragged_batch(), MicroBatching(size=3), 1.0, programs.weighted_loss("token-mean"))
    assert reference.fingerprint() == before != actor.fingerprint()


def test_value_model_trains(tiny_qwen2: str) -> None:
    subject = engine(
        tiny_qwen2, train=True, head="value", lr=3e-2, enable_gradient_checkpointing=False
    )
    batch = ragged_batch()

    losses = [
        subject.update(batch, MicroBatching(size=3), 1.0, programs.squared_error)["loss"]
        for _ in range(12)
    ]
    assert losses[-1] < 0.5 * losses[0]


def test_unsupported_engine_settings_are_rejected(tiny_qwen2: str) -> None:
    with pytest.raises(ValueError, match="float16 needs loss scaling"):
        engine(tiny_qwen2, train=True, dtype="float16")
    with pytest.raises(ValueError, match="fsdp_size=3 must divide"):
        engine(tiny_qwen2, fsdp_size=3)
    with pytest.raises(ValueError, match="model_dtype='fp32' must be one of"):
        engine(tiny_qwen2, model_dtype="fp32")
